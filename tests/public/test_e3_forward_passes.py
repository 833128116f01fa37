"""Experiment 3: three recorded forward passes. What each file must hold."""

import pytest

from tests.public import checks_e3 as checks
from tests.public.result_files import folder

FILE = "forward.csv"


@pytest.mark.exercise("E3", points=1)
def test_passes():
    """forward.csv has the three passes of one model, in the sizes asked for."""
    checks.check_passes(folder(FILE))


@pytest.mark.exercise("E3", points=1)
def test_floors():
    """forward.csv has the right floors, and no pass is below them."""
    checks.check_floors(folder(FILE))


@pytest.mark.exercise("E3", points=1)
def test_ranges():
    """Each pass has a range for every part of the model, and they sum to the pass."""
    checks.check_ranges(folder(FILE))


@pytest.mark.exercise("E3", points=1)
def test_kernels():
    """Each pass has its kernels, and the large pass has more to do."""
    checks.check_kernels(folder(FILE))


@pytest.mark.exercise("E3", points=1)
def test_naive():
    """The loop over the experts is there to be seen."""
    checks.check_naive(folder(FILE))
