"""Experiment 6: three recorded training steps. What each file must hold."""

import pytest

from tests.public import checks_e6 as checks
from tests.public.result_files import folder

FILE = "train.csv"


@pytest.mark.exercise("E6", points=1)
def test_steps():
    """train.csv has the three steps of one model, in the size asked for."""
    checks.check_steps(folder(FILE))


@pytest.mark.exercise("E6", points=1)
def test_phases():
    """Each step has its phases, and they sum to it."""
    checks.check_phases(folder(FILE))


@pytest.mark.exercise("E6", points=1)
def test_recompute():
    """What is recomputed has ranges of its own, in the one step that recomputes."""
    checks.check_recompute(folder(FILE))


@pytest.mark.exercise("E6", points=1)
def test_kernels():
    """Each step has its operations."""
    checks.check_kernels(folder(FILE))


@pytest.mark.exercise("E6", points=1)
def test_naive():
    """The naive backward is there to be seen."""
    checks.check_naive(folder(FILE))
