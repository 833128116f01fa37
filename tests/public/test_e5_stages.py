"""Experiment 5: the stages of a step, without and with recomputation. What the files must hold."""

import pytest

from tests.public import checks_e5 as checks
from tests.public.result_files import folder

FILE = "stages.csv"


@pytest.mark.exercise("E5", points=1)
def test_rows():
    """stages.csv has every stage, and stages_steps.csv the step, kept and recomputed."""
    checks.check_rows(folder(FILE))


@pytest.mark.exercise("E5", points=1)
def test_sums():
    """The stages and the optimizer sum to the step."""
    checks.check_sums(folder(FILE))


@pytest.mark.exercise("E5", points=1)
def test_recompute():
    """Only layers are recomputed, and it takes about as long as their forward."""
    checks.check_recompute(folder(FILE))


@pytest.mark.exercise("E5", points=1)
def test_plausible():
    """Floor, throughput and MFU are right, and backward takes longer than forward."""
    checks.check_plausible(folder(FILE))


@pytest.mark.exercise("E5", points=1)
def test_memory():
    """The training state is right, and the peak is above it."""
    checks.check_memory(folder(FILE))
