"""Experiment 7: a sweep of your own. What the file must hold."""

import pytest

from tests.public import checks_e7 as checks
from tests.public.result_files import folder

FILE = "sweep.csv"


@pytest.mark.exercise("E7", points=1)
def test_rows():
    """sweep.csv has enough configurations to fit a model to."""
    checks.check_rows(folder(FILE))


@pytest.mark.exercise("E7", points=1)
def test_rates():
    """Throughput and MFU follow from the steps' times, and no row is a copy."""
    checks.check_rates(folder(FILE))


@pytest.mark.exercise("E7", points=1)
def test_kinds():
    """Forward, backward, recompute and optimizer sum to the step."""
    checks.check_kinds(folder(FILE))


@pytest.mark.exercise("E7", points=1)
def test_growth():
    """More tokens, more layers and recomputation take no less time."""
    checks.check_growth(folder(FILE))


@pytest.mark.exercise("E7", points=1)
def test_memory():
    """The peak grows with the step, and falls where activations are dropped."""
    checks.check_memory(folder(FILE))
