"""Experiment 4: one global batch in micro batches of several sizes. What the files must hold."""

import pytest

from tests.public import checks_e4 as checks
from tests.public.result_files import folder

FILE = "micro_batches.csv"


@pytest.mark.exercise("E4", points=1)
def test_rows():
    """micro_batches.csv has every size, with activations kept and recomputed."""
    checks.check_rows(folder(FILE))


@pytest.mark.exercise("E4", points=1)
def test_rates():
    """Throughput follows from the step's time, and the times are plausible."""
    checks.check_rates(folder(FILE))


@pytest.mark.exercise("E4", points=1)
def test_memory():
    """The peak falls with the micro batch size and with recomputation."""
    checks.check_memory(folder(FILE))


@pytest.mark.exercise("E4", points=1)
def test_fit():
    """What fits and what does not makes sense."""
    checks.check_fit(folder(FILE))


@pytest.mark.exercise("E4", points=1)
def test_costs():
    """Recomputation costs time, and micro_batches.png is there."""
    checks.check_costs(folder(FILE))
