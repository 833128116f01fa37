"""Coding Exercise 1: cuda_time. The properties of the public tests, on other workloads."""

import pytest

from labkit.timers import cuda_time
from tests.public import checks_c1 as checks
from tests.public.checks_c1 import Work


@pytest.mark.exercise("C1", points=1)
@pytest.mark.parametrize("gpu", [True, False])
def test_list(gpu):
    """A list of floats, one a timed call, with and without a GPU."""
    checks.check_list(cuda_time, Work(seed=101, warmup=7, repeat=13, gpu=gpu))


@pytest.mark.exercise("C1", points=2)
def test_calls():
    """It calls fn warmup + repeat times, for several of both and for the defaults."""
    for warmup, repeat in [(0, 6), (1, 1), (13, 2), (2, 31)]:
        checks.check_calls(cuda_time, Work(seed=102 + warmup, warmup=warmup, repeat=repeat))
    checks.check_calls(cuda_time, Work(seed=120, warmup=10, repeat=17), repeat=17)
    checks.check_calls(cuda_time, Work(seed=121, warmup=1, repeat=20), warmup=1)


@pytest.mark.exercise("C1", points=3)
@pytest.mark.parametrize("seed", [131, 132])
def test_times(seed):
    """Each time is that of its own call: kernels of 0.2 to 60 ms, in ms."""
    work = Work(seed=seed, warmup=seed % 7, repeat=23, kernels=1 + seed % 5, low_ms=0.2)
    checks.check_times(cuda_time, work)
    checks.check_times(cuda_time, Work(seed=seed, warmup=1, repeat=3, low_ms=8, high_ms=60))


@pytest.mark.exercise("C1", points=1)
def test_warm_up():
    """Slow first calls are not among the times."""
    checks.check_warm_up(
        cuda_time, Work(seed=141, warmup=9, repeat=4, cold_calls=9, cold_factor=40)
    )


@pytest.mark.exercise("C1", points=1)
def test_no_waiting():
    """Nothing waits for the GPU before the last timed call is in its queue."""
    checks.check_no_waiting(cuda_time, Work(seed=151, warmup=0, repeat=19, kernels=6))


@pytest.mark.exercise("C1", points=1)
def test_cpu():
    """The CPU's clock where there is no GPU, with slow first calls."""
    work = Work(seed=161, warmup=5, repeat=6, gpu=False, cold_calls=5, kernels=2)
    checks.check_cpu(cuda_time, work)
    checks.check_warm_up(cuda_time, work)
