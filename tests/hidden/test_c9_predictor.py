"""Coding Exercise 9: predict time and memory of a step. The public properties, on other steps."""

from pathlib import Path

import pytest

from labkit.course.leaderboard import TRUTH
from labkit.perfmodel import predict_peak_gib, predict_step_ms
from tests.public import checks_c9 as checks
from tests.public.checks_c9 import olmoe

STEPS = checks.truth(Path(__file__).parent / "truth/h200.csv")


def check_close(function, column: str, within: float):
    """As in public; a table of the public times earns nothing, however it fills its gaps."""
    checks.check_model(predict_step_ms, checks.truth(TRUTH))
    checks.check_close(function, column, STEPS, within)


@pytest.mark.exercise("C9", points=6)
def test_time_roughly():
    """Four of five step times are within 30 %."""
    check_close(predict_step_ms, "step_ms", within=0.30)


@pytest.mark.exercise("C9", points=6)
def test_time():
    """Four of five step times are within 15 %."""
    check_close(predict_step_ms, "step_ms", within=0.15)


@pytest.mark.exercise("C9", points=4)
def test_memory_roughly():
    """Four of five peaks are within 20 %."""
    check_close(predict_peak_gib, "peak_gib", within=0.20)


@pytest.mark.exercise("C9", points=4)
def test_memory():
    """Four of five peaks are within 8 %."""
    check_close(predict_peak_gib, "peak_gib", within=0.08)


@pytest.mark.exercise("C9", points=0)
def test_number():
    """Numbers above 0, in ms and GiB, and the same each time."""
    for function, column in ((predict_step_ms, "step_ms"), (predict_peak_gib, "peak_gib")):
        checks.check_number(function, olmoe(1, 1, 16), olmoe(5, 3, 1000, True), olmoe(7, 1, 3500))
        checks.check_unit(function, column, STEPS)


@pytest.mark.exercise("C9", points=0)
def test_model():
    """It is a model, and no table of what was measured."""
    checks.check_model(predict_step_ms, checks.truth(TRUTH))


@pytest.mark.exercise("C9", points=0)
def test_growth():
    """More tokens and more layers cost more."""
    tokens = [olmoe(3, size, 768, True) for size in (1, 3, 7, 13, 21)]
    longer = [olmoe(6, 3, seqlen) for seqlen in (300, 700, 1500, 4000)]
    layers = [olmoe(n, 3, 1200, True) for n in (2, 3, 5, 7)]
    for function in (predict_step_ms, predict_peak_gib):
        checks.check_growth(function, tokens, longer, layers)


@pytest.mark.exercise("C9", points=0)
def test_recompute():
    """Recomputing costs time, and saves memory where there are many tokens."""
    shapes = olmoe(3, 5, 3000), olmoe(6, 15, 1024)
    checks.check_recompute_time(predict_step_ms, olmoe(5, 4, 1500), *shapes)
    checks.check_recompute_memory(predict_peak_gib, *shapes)


@pytest.mark.exercise("C9", points=0)
def test_real_process():
    """Plain arithmetic, without torch."""
    checks.check_alone()
