"""Coding Exercise 9: predict time and memory of a step. Each test says what it checks."""

import pytest

from labkit.course.leaderboard import TRUTH
from labkit.perfmodel import predict_peak_gib, predict_step_ms
from tests.public import checks_c9 as checks
from tests.public.checks_c9 import olmoe

STEPS = checks.truth(TRUTH)


@pytest.mark.exercise("C9", points=6)
def test_time_roughly():
    """Four of five step times are within 30 % of what an H200 took."""
    checks.check_close(predict_step_ms, "step_ms", STEPS, within=0.30)


@pytest.mark.exercise("C9", points=6)
def test_time():
    """Four of five step times are within 15 %."""
    checks.check_close(predict_step_ms, "step_ms", STEPS, within=0.15)


@pytest.mark.exercise("C9", points=4)
def test_memory_roughly():
    """Four of five peaks are within 20 % of what an H200 needed."""
    checks.check_close(predict_peak_gib, "peak_gib", STEPS, within=0.20)


@pytest.mark.exercise("C9", points=4)
def test_memory():
    """Four of five peaks are within 8 %."""
    checks.check_close(predict_peak_gib, "peak_gib", STEPS, within=0.08)


@pytest.mark.exercise("C9", points=0)
def test_number():
    """Both are numbers above 0, in ms and GiB, and the same each time."""
    for function, column in ((predict_step_ms, "step_ms"), (predict_peak_gib, "peak_gib")):
        checks.check_number(function, olmoe(1, 1, 64), olmoe(4, 4, 1024, True), olmoe(8, 2, 4096))
        checks.check_unit(function, column, STEPS)


@pytest.mark.exercise("C9", points=0)
def test_model():
    """It is a model, and no table of what was measured."""
    checks.check_model(predict_step_ms, STEPS)


@pytest.mark.exercise("C9", points=0)
def test_growth():
    """More tokens and more layers cost more."""
    tokens = [olmoe(4, size, 1024) for size in (1, 2, 4, 8, 16)]
    longer = [olmoe(2, 2, seqlen, True) for seqlen in (256, 512, 1024, 2048, 4096)]
    layers = [olmoe(n, 2, 1024) for n in (1, 2, 4, 8)]
    for function in (predict_step_ms, predict_peak_gib):
        checks.check_growth(function, tokens, longer, layers)


@pytest.mark.exercise("C9", points=0)
def test_recompute():
    """Recomputing costs time, and saves memory where there are many tokens."""
    shapes = olmoe(4, 8, 2048), olmoe(8, 4, 4096)
    checks.check_recompute_time(predict_step_ms, olmoe(2, 1, 2048), *shapes)
    checks.check_recompute_memory(predict_peak_gib, *shapes)


@pytest.mark.exercise("C9", points=0)
def test_real_process():
    """labkit.perfmodel is plain arithmetic: it needs no torch and reads no file."""
    checks.check_alone()
