"""Coding Exercise 7: stage_times. The first line of each test says what it checks."""

import time

import pytest

from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.devices import pick
from labkit.profiling.workloads import build_model
from labkit.timers import stage_times
from labkit.train import make_optimizer
from tests.public import checks_c7 as checks
from tests.public.checks_c7 import Case

FORWARD, BACKWARD = (2.0, 3.0, 9.0, 4.0, 6.0), (5.0, 8.0, 21.0, 11.0, 14.0)
ALL = {"forward": FORWARD, "backward": BACKWARD}


@pytest.mark.exercise("C7", points=2)
def test_stages():
    """Every stage is there, in order, with three times; and the optimizer has one."""
    checks.check_stages(stage_times, Case(**ALL))
    checks.check_stages(stage_times, Case(**ALL, recompute=True))


@pytest.mark.exercise("C7", points=5)
def test_delay():
    """30 ms more forward and 50 ms more backward are found in the layer that takes them."""
    for layer in (0, 1, 2):
        checks.check_times(stage_times, Case.slow_layer(layer, 3))
    checks.check_times(stage_times, Case(**ALL))


@pytest.mark.exercise("C7", points=5)
def test_recomputed_delay():
    """With recomputation it is 30 ms forward, 50 ms backward and 30 ms recompute."""
    for layer in (0, 1, 2):
        checks.check_times(stage_times, Case.slow_layer(layer, 3, recompute=True))
    checks.check_times(stage_times, Case(**ALL, recompute=True))


@pytest.mark.exercise("C7", points=2)
def test_ends():
    """The embedding's time and the head's are their own, and the loss is in the head."""
    checks.check_times(stage_times, Case((20.0, 0, 0, 0), (35.0, 0, 0, 0)))
    checks.check_times(stage_times, Case((0, 0, 0, 20.0), (0, 0, 0, 35.0), recompute=True))
    checks.check_loss_in_head(stage_times, Case(**ALL))


@pytest.mark.exercise("C7", points=1)
def test_sum():
    """The parts and the optimizer sum to the step; nothing between two stages is lost."""
    checks.check_sum(stage_times, Case(**ALL, between_ms=13.0, recompute=True))
    checks.check_times(stage_times, Case(FORWARD, BACKWARD, optimizer_ms=40.0))


@pytest.mark.exercise("C7", points=2)
def test_no_waiting():
    """Nothing waits for the GPU between stages or steps."""
    checks.check_no_waiting(stage_times, Case(**ALL, steps=4))
    checks.check_no_waiting(stage_times, Case(**ALL, steps=3, recompute=True))


@pytest.mark.exercise("C7", points=1)
def test_counts():
    """It makes warmup + steps steps, and returns the mean of the timed ones."""
    checks.check_counts(stage_times, Case(**ALL, warmup=3, steps=2))
    checks.check_counts(stage_times, Case(**ALL, warmup=0, steps=1))
    checks.check_counts(stage_times, Case(**ALL), steps=3)
    checks.check_times(stage_times, Case(**ALL, warmup=2, steps=4, cold=12, scatter=0.5))


@pytest.mark.exercise("C7", points=1)
def test_nothing_stays():
    """No hook stays on the model, also after an error; and the steps train as they would anyway."""
    checks.check_hooks_gone(stage_times, Case(**ALL))
    checks.check_hooks_gone(stage_times, Case(**ALL, recompute=True))
    checks.check_unchanged(stage_times, Case(**ALL, recompute=True))


@pytest.mark.exercise("C7", points=1)
def test_cpu():
    """On a machine without a GPU it reads the CPU's clock."""
    checks.check_times(stage_times, Case(**ALL, gpu=False))
    checks.check_times(stage_times, Case.slow_layer(1, 3, recompute=True, gpu=False))


@pytest.mark.exercise("C7", points=0)
def test_real_step():
    """On this machine: the stages of a small Transformer sum to no more than the call took."""
    cfg = ModelConfig.preset("olmoe-tiny", n_layers=2)
    model = build_model(cfg, device := pick())
    optimizer, batch = make_optimizer(model), random_micro_batch(cfg, 2, 32, device)
    began = time.perf_counter()
    found = stage_times(model, optimizer, batch, warmup=0, steps=3)
    wall_ms = 1e3 * (time.perf_counter() - began)
    times = [ms for stage in found.stages.values() for ms in stage]
    checks.require(min(times) >= 0, f"a time is below zero: {found.stages}")
    checks.require(
        0 < 3 * found.step_ms <= wall_ms,
        f"three steps of {found.step_ms:.4g} ms were made in {wall_ms:.4g} ms",
    )
