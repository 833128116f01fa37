"""Coding Exercise 7: stage_times. The properties of the public tests, on other steps."""

import random

import pytest

from labkit.timers import stage_times
from tests.public import checks_c7 as checks
from tests.public.checks_c7 import Case


def drawn(seed: int, n_layers: int, **options) -> Case:
    """A case whose times all differ."""
    draw = random.Random(seed)
    times = [round(draw.uniform(1, 40), 1) for _ in range(2 * n_layers + 5)]
    forward, backward = tuple(times[: n_layers + 2]), tuple(times[n_layers + 2 : -1])
    return Case(forward, backward, optimizer_ms=times[-1], seed=seed, **options)


@pytest.mark.exercise("C7", points=2)
def test_stages():
    """Names, order and three times each, for models of 1 to 12 layers."""
    for n_layers in (1, 2, 12):
        checks.check_stages(stage_times, drawn(701, n_layers))


@pytest.mark.exercise("C7", points=5)
def test_delay():
    """A delay is found in the first layer, in the last, and in each of several."""
    for layer in (0, 3, 5):
        checks.check_times(stage_times, Case.slow_layer(layer, 6, warmup=0, steps=1))
    checks.check_times(stage_times, drawn(711, 5))


@pytest.mark.exercise("C7", points=5)
def test_recomputed_delay():
    """The same with recomputation."""
    for layer in (0, 3, 5):
        checks.check_times(stage_times, Case.slow_layer(layer, 6, recompute=True, steps=3))
    checks.check_times(stage_times, drawn(721, 5, recompute=True))


@pytest.mark.exercise("C7", points=2)
def test_ends():
    """The embedding, the head and the loss."""
    checks.check_times(stage_times, Case((0, 0, 3.0), (0, 0, 90.0)))
    checks.check_times(stage_times, Case((70.0, 0, 0), (1.0, 0, 0), recompute=True))
    checks.check_loss_in_head(stage_times, drawn(731, 2, recompute=True))


@pytest.mark.exercise("C7", points=1)
def test_sum():
    """Parts sum to the step, with work between the stages and a long optimizer."""
    checks.check_sum(stage_times, drawn(741, 3, between_ms=17.0))
    checks.check_sum(stage_times, drawn(742, 3, between_ms=5.0, recompute=True, steps=4))


@pytest.mark.exercise("C7", points=2)
def test_no_waiting():
    """Nothing waits between stages or steps."""
    checks.check_no_waiting(stage_times, drawn(751, 7, steps=6))
    checks.check_no_waiting(stage_times, drawn(752, 2, recompute=True, warmup=0))


@pytest.mark.exercise("C7", points=1)
def test_counts():
    """warmup + steps steps, also by default, and a mean without the warm-up."""
    for warmup, steps in ((0, 3), (4, 1), (1, 6)):
        checks.check_counts(stage_times, drawn(761, 2, warmup=warmup, steps=steps))
    checks.check_counts(stage_times, drawn(762, 2), warmup=1)
    checks.check_times(stage_times, drawn(763, 3, warmup=3, steps=5, cold=20, scatter=0.8))
    checks.check_times(
        stage_times, drawn(764, 3, warmup=1, steps=3, cold=4, scatter=0.3, recompute=True)
    )


@pytest.mark.exercise("C7", points=1)
def test_nothing_stays():
    """No hook stays, and the model is trained as it would be."""
    checks.check_hooks_gone(stage_times, drawn(771, 4, warmup=0))
    checks.check_hooks_gone(stage_times, drawn(772, 2, recompute=True))
    checks.check_unchanged(stage_times, drawn(773, 3, steps=4))


@pytest.mark.exercise("C7", points=1)
def test_cpu():
    """The CPU's clock, with and without recomputation, and cold first steps."""
    checks.check_times(stage_times, drawn(781, 2, gpu=False, warmup=2, cold=9, scatter=0.4))
    checks.check_times(stage_times, drawn(782, 4, gpu=False, recompute=True))
