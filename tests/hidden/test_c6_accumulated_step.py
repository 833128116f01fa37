"""Coding Exercise 6: accumulated_step. The properties of the public tests, on other batches."""

import pytest

from labkit.train import accumulated_step
from tests.public import checks_c6 as checks
from tests.public.checks_c6 import Case

SINGLE = tuple((length,) for length in (2, 31, 1, 1, 12))
MIXED = ((3, 3, 3), (20,), (1, 1), (9, 13))


@pytest.mark.exercise("C6", points=3)
def test_update():
    """The update for one sequence a micro batch, for several, and for seven micro batches."""
    for optimizer in ("SGD", "AdamW"):
        for groups in (SINGLE, MIXED, ((6, 5),) * 7):
            checks.check_update(accumulated_step, Case(groups, seed=601, optimizer=optimizer))


@pytest.mark.exercise("C6", points=2)
def test_loss():
    """The loss, also where the losses of micro batches are far apart."""
    checks.check_known_losses(accumulated_step, (9, 0.5), (2, 4.0), (1, 2.5))
    for groups in (SINGLE, MIXED):
        checks.check_loss(accumulated_step, Case(groups, seed=611))


@pytest.mark.exercise("C6", points=1)
def test_masked():
    """Most targets masked; the first and the last micro batch without any."""
    for case in (
        Case(MIXED, seed=621, masked=0.7, optimizer="AdamW"),
        Case(MIXED, seed=622, masked=0.1, empty=(0, 3)),
        Case(SINGLE, seed=623, empty=(0, 1, 2, 3, 4)),
    ):
        checks.check_update(accumulated_step, case)
        checks.check_loss(accumulated_step, case)


@pytest.mark.exercise("C6", points=1)
def test_one_step():
    """One step, twice over, with AdamW."""
    checks.check_one_step(accumulated_step, Case(MIXED, seed=631, optimizer="AdamW"))
    checks.check_empty(accumulated_step)


@pytest.mark.exercise("C6", points=1)
def test_memory():
    """The activations of seven micro batches, and of unequal ones."""
    checks.check_memory(accumulated_step, Case(((30, 10),) * 7, seed=641))
    checks.check_memory(accumulated_step, Case(((20, 20), (60,), (10,), (50,)), seed=642))
