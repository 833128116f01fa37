"""Coding Exercise 6: accumulated_step. The first line of each test says what it checks."""

import pytest

from labkit.train import accumulated_step
from tests.public import checks_c6 as checks
from tests.public.checks_c6 import Case

EQUAL = ((5, 3), (8,), (1, 7), (4, 4))
UNEQUAL = ((1,), (17, 9), (3, 2, 6))


@pytest.mark.exercise("C6", points=3)
def test_update():
    """The update is that of train_step, for micro batches of the same and of different sizes."""
    for optimizer in ("SGD", "AdamW"):
        for groups in (UNEQUAL, EQUAL, ((6, 2),)):
            checks.check_update(accumulated_step, Case(groups, seed=1, optimizer=optimizer))


@pytest.mark.exercise("C6", points=2)
def test_loss():
    """The loss is the global batch's: 1 and 6 tokens with 2.014 and 2.764 have 2.657, not 2.389."""
    checks.check_known_losses(accumulated_step, (1, 2.0138), (6, 2.7642))
    checks.check_loss(accumulated_step, Case(UNEQUAL, seed=2))


@pytest.mark.exercise("C6", points=1)
def test_masked():
    """Tokens without a target weigh nothing, also where a micro batch has no other."""
    for case in (
        Case(UNEQUAL, seed=3, masked=0.4),
        Case(UNEQUAL, seed=4, masked=0.2, empty=(1,)),
        Case(UNEQUAL, seed=5, empty=(0, 1, 2)),
    ):
        checks.check_update(accumulated_step, case)
        checks.check_loss(accumulated_step, case)


@pytest.mark.exercise("C6", points=1)
def test_one_step():
    """The optimizer steps once, and no gradient is left for the next step."""
    checks.check_one_step(accumulated_step, Case(UNEQUAL, seed=6))
    checks.check_empty(accumulated_step)


@pytest.mark.exercise("C6", points=1)
def test_memory():
    """Only one micro batch's activations are alive at a time."""
    checks.check_memory(accumulated_step, Case(((40,), (40,), (40,), (40,)), seed=7))
