"""Coding Exercise 1: cuda_time. The first line of each test says what it checks."""

import time
from itertools import pairwise
from statistics import median

import pytest
import torch

from labkit.timers import cuda_time
from tests.public import checks_c1 as checks
from tests.public.checks_c1 import Work


@pytest.mark.exercise("C1", points=1)
def test_list():
    """It returns a list with one time for each timed call."""
    checks.check_list(cuda_time, Work(seed=1, warmup=4, repeat=9))


@pytest.mark.exercise("C1", points=2)
def test_calls():
    """It calls fn warmup + repeat times, and not once more."""
    checks.check_calls(cuda_time, Work(seed=2, warmup=3, repeat=12))
    checks.check_calls(cuda_time, Work(seed=3, warmup=0, repeat=1))
    checks.check_calls(cuda_time, Work(seed=4, warmup=10, repeat=5), repeat=5)
    checks.check_calls(cuda_time, Work(seed=5, warmup=2, repeat=20), warmup=2)


@pytest.mark.exercise("C1", points=4)
def test_times():
    """Each time is what the GPU needed for that call, in milliseconds."""
    checks.check_times(cuda_time, Work(seed=6, warmup=5, repeat=15))
    checks.check_times(cuda_time, Work(seed=7, warmup=2, repeat=7, kernels=1, high_ms=30.0))


@pytest.mark.exercise("C1", points=2)
def test_warm_up():
    """The slow first calls of a cold GPU are not among the times."""
    checks.check_warm_up(cuda_time, Work(seed=8, warmup=6, repeat=10, cold_calls=6))


@pytest.mark.exercise("C1", points=2)
def test_no_waiting():
    """The GPU is not waited for until the last timed call is in its queue."""
    checks.check_no_waiting(cuda_time, Work(seed=9, warmup=4, repeat=11))


@pytest.mark.exercise("C1", points=2)
def test_cpu():
    """On a machine without a GPU it reads the CPU's clock around each call."""
    checks.check_cpu(cuda_time, Work(seed=10, warmup=3, repeat=8, gpu=False))


@pytest.mark.exercise("C1", points=0)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_real_cpu():
    """On this machine's CPU: a call that sleeps for 3 ms takes at least that."""
    times = cuda_time(lambda: time.sleep(0.003), warmup=1, repeat=5)
    checks.require(min(times) >= 2.99, f"a sleep of 3 ms was reported as {min(times):.4g} ms")


@pytest.mark.exercise("C1", points=0)
@pytest.mark.gpu
def test_real_gpu():
    """On this machine's GPU: long and short kernels are told apart, and queued without waiting."""
    lengths, entered = [1, 4] * 6, []

    def spin():
        entered.append(time.perf_counter())
        torch.cuda._sleep(5_000_000 * lengths[len(entered) % len(lengths)])

    times = cuda_time(spin, warmup=len(lengths), repeat=len(lengths))
    short, long = sorted((median(times[::2]), median(times[1::2])))
    checks.require(
        3.6 < long / short < 4.4,
        f"kernels of one and four lengths took {short:.4g} and {long:.4g} ms: not four times",
    )
    gaps = [1e3 * (b - a) for a, b in pairwise(entered[-len(lengths) :])]
    checks.require(
        sum(gaps) < 0.5 * sum(times),
        f"the calls were queued over {sum(gaps):.4g} ms, and took {sum(times):.4g} ms: "
        "something waited for the GPU between them",
    )
