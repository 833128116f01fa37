"""cuda_time and benchmark: on a simulated GPU, on this CPU, and on a real GPU if there is one."""

import random
import time

import pytest
import torch

from labkit.benchmark import median_spread
from labkit.errors import NotThisMachine, UserError
from labkit.timers import benchmark, cuda_time
from tests.public.simulated_cuda import SimulatedCuda


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"fn": 3}, "fn=3"),
        ({"warmup": -1}, "warmup=-1"),
        ({"warmup": 1.5}, "warmup=1.5"),
        ({"repeat": 0}, "repeat=0"),
        ({"repeat": True}, "repeat=True"),
    ],
)
def test_cuda_time_refuses(arguments, says):
    with pytest.raises(UserError, match=says):
        cuda_time(**{"fn": lambda: None} | arguments)


@pytest.mark.parametrize("timer", [cuda_time, benchmark])
def test_an_error_of_the_function_comes_through(timer):
    def breaks():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        timer(breaks)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"fn": None}, "fn=None"),
        ({"budget_s": 0}, "budget_s=0"),
        ({"budget_s": float("inf")}, "budget_s=inf"),
        ({"warmup_s": float("nan")}, "warmup_s=nan"),
        ({"rel_spread": "1%"}, "rel_spread='1%'"),
        ({"min_samples": 0}, "min_samples=0"),
        ({"max_samples": 9}, "max_samples=9"),
        ({"device": "abacus"}, "abacus"),
        ({"device": "meta"}, "meta"),
        ({"device": "cuda:99"}, "cuda:99"),
    ],
)
def test_benchmark_refuses(arguments, says):
    with pytest.raises(UserError, match=says):
        benchmark(**{"fn": lambda: None} | arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_benchmark_needs_the_gpu_that_it_is_told_to_use():
    with pytest.raises(NotThisMachine, match="cuda"):
        benchmark(lambda: None, device="cuda")


def simulated_benchmark(cuda, fn, **arguments):
    with cuda.installed(benchmark):
        return benchmark(fn, **arguments)


def test_benchmark_stops_when_the_median_is_known():
    cuda = SimulatedCuda(available=False)
    result = simulated_benchmark(cuda, lambda: cuda.run_python(random.uniform(1.9, 2.1)))
    assert result.stopped_by == "spread", f"stopped by {result.stopped_by}"
    assert result.spread <= 0.005, f"spread {result.spread:.4f}"
    assert abs(result.median_ms - 2) < 0.03, f"median {result.median_ms:.4f} of 1.9 to 2.1 ms"
    assert result.p10_ms < result.median_ms < result.p90_ms


def test_benchmark_stops_when_the_budget_is_spent():
    cuda = SimulatedCuda(available=False)
    began = cuda.host_ms
    result = simulated_benchmark(cuda, lambda: cuda.run_python(random.uniform(1, 9)), budget_s=3)
    spent = cuda.host_ms - began
    assert result.stopped_by == "budget", f"stopped by {result.stopped_by}"
    assert 3000 <= spent < 3100, f"a budget of 3 s, and {spent:.0f} ms were spent"


def test_benchmark_stops_at_the_most_samples():
    cuda = SimulatedCuda(available=False)
    result = simulated_benchmark(
        cuda, lambda: cuda.run_python(random.uniform(1, 9)), max_samples=50
    )
    assert (result.stopped_by, result.n) == ("samples", 50)


def test_a_call_longer_than_the_budget_is_measured_all_the_same():
    cuda = SimulatedCuda(available=False)
    result = simulated_benchmark(cuda, lambda: cuda.run_python(5000), budget_s=1)
    assert result.n == 1 and result.spread is None, f"{result.n} samples, spread {result.spread}"
    assert "n/a" in str(result)


def test_what_is_not_known_on_a_cpu_is_none():
    result = benchmark(lambda: sum(range(1000)), budget_s=0.2, flush_l2=True, device="cpu")
    assert result.throttled is result.sm_clock_end_mhz is result.host_ms is None
    assert not result.l2_flushed, "there is no L2 to flush through torch on a CPU"


def test_launches_slower_than_the_kernel_do_not_reach_the_times():
    cuda = SimulatedCuda()

    def fn():
        cuda.run_python(0.3)
        cuda.launch(0.04)

    result = simulated_benchmark(cuda, fn)
    assert abs(result.median_ms - 0.04) < 0.002, f"a kernel of 0.04 ms: {result}"
    assert not result.host_bound and 0.3 < result.host_ms < 0.4, f"host {result.host_ms} ms"
    assert "a plain loop of it is host-bound" in str(result)


def test_a_function_that_synchronises_is_host_bound():
    cuda = SimulatedCuda()

    def fn():
        cuda.run_python(0.1)
        cuda.launch(random.uniform(0.1, 1.9))
        torch.cuda.synchronize()

    result = simulated_benchmark(cuda, fn)
    assert result.host_bound, f"each call waits for the GPU: {result}"
    assert result.n > 50, f"no spin can hold, so none is paid for: only {result.n} samples"
    assert "the GPU waited for Python" in str(result)


def test_a_busy_gpu_is_not_host_bound():
    cuda = SimulatedCuda()
    result = simulated_benchmark(cuda, lambda: [cuda.launch(0.5) for _ in range(40)])
    assert not result.host_bound and abs(result.median_ms - 20) < 0.1, f"40 × 0.5 ms: {result}"


def test_the_medians_interval_covers_it_95_times_of_100():
    """An exponential distribution: skewed, as times are. Its median is log 2."""
    true, trials, n = 0.6931, 2000, 40
    covered = 0
    for _ in range(trials):
        samples = sorted(random.expovariate(1) for _ in range(n))
        low = int((n - 1.96 * n**0.5) / 2)
        covered += samples[low] <= true <= samples[n - 1 - low]
        width = (samples[n - 1 - low] - samples[low]) / 2
        median = (samples[n // 2 - 1] + samples[n // 2]) / 2
        assert abs(median_spread(samples) - width / median) < 1e-9
    assert 0.93 < covered / trials < 0.99, f"covered in {covered / trials:.1%} of {trials} trials"


@pytest.mark.gpu
def test_benchmark_agrees_with_cuda_time():
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    result = benchmark(lambda: a @ b)
    times = sorted(cuda_time(lambda: a @ b))
    middle = times[len(times) // 2]
    assert abs(result.median_ms / middle - 1) < 0.2, f"cuda_time {middle:.4f} ms; {result}"
    assert not result.host_bound and result.sm_clock_end_mhz, f"{result}"


@pytest.mark.gpu
def test_a_flushed_l2_is_slower():
    x = torch.randn(2**21, device="cuda")  # 8 MiB: it fits
    y = torch.empty_like(x)
    warm = benchmark(lambda: y.copy_(x))
    cold = benchmark(lambda: y.copy_(x), flush_l2=True)
    assert cold.l2_flushed and not cold.host_bound
    assert cold.median_ms > 1.1 * warm.median_ms, f"cold: {cold}; warm: {warm}"


@pytest.mark.gpu
def test_a_tiny_kernel_is_not_timed_by_its_launch():
    x = torch.randn(64, device="cuda")
    result = benchmark(lambda: x.add_(1).mul_(0.5).add_(1).mul_(0.5))
    assert result.median_ms < result.host_ms, f"{result}"
    assert not result.host_bound, f"{result}"


@pytest.mark.gpu
def test_reading_a_value_is_host_bound_on_a_gpu():
    x = torch.randn(1024, device="cuda")
    result = benchmark(lambda: (x * 2).sum().item())
    assert result.host_bound, f"{result}"


@pytest.mark.gpu
def test_a_function_of_more_kernels_than_the_queue_holds():
    x = torch.randn(2**24, device="cuda")

    def fn():
        for _ in range(1500):
            x.mul_(1.0)

    result = benchmark(fn, budget_s=1.5)
    assert not result.host_bound, f"64 MiB a kernel keeps the GPU busy: {result}"


def test_a_real_sleep_is_timed():
    times = cuda_time(lambda: time.sleep(0.002), warmup=0, repeat=3)
    if not torch.cuda.is_available():
        assert min(times) >= 1.99, f"sleeps of 2 ms took {times}"
    assert len(times) == 3
