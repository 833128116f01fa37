"""Experiment 2: GEMMs, regimes and memory-bound operations. What each file must hold."""

import pytest

from tests.public import checks_e2 as checks
from tests.public.result_files import folder


@pytest.mark.exercise("E2", points=1)
def test_gemm():
    """gemm.csv has every shape at every M, with plausible times."""
    checks.check_gemm(folder())


@pytest.mark.exercise("E2", points=1)
def test_sustained():
    """gemm_sustained.csv has a multiply that was held for seconds."""
    checks.check_sustained(folder())


@pytest.mark.exercise("E2", points=1)
def test_ops():
    """ops.csv has four operations from small tensors to large ones."""
    checks.check_ops(folder())


@pytest.mark.exercise("E2", points=1)
def test_regimes():
    """regimes.csv has the launch and the three regimes, and counters that fit."""
    checks.check_regimes(folder())


@pytest.mark.exercise("E2", points=1)
def test_one_machine():
    """The four files were measured on one machine, and agree."""
    checks.check_one_machine(folder())
