"""cuda_time and benchmark against two independent timers, on one GPU in one run.

    python benchmarks/timers.py OUT.json

triton's do_bench (median) and the replay of a CUDA graph of many calls; kernels of about 10 ms,
1 ms and 20 µs, then the same after five idle seconds.
"""

import json
import statistics
import time
from pathlib import Path

import torch
import triton.testing
import typer

from labkit.provenance import machine_facts
from labkit.timers import benchmark, cuda_time


def matmul(m: int, k: int, n: int):
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.mm(a, b, out=out)


def add(n_bytes: int):
    a, b = (torch.randn(n_bytes // 2, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: torch.add(a, b, out=a)


def graph_ms(fn, calls: int) -> float:
    """Time of a call when a CUDA graph replays `calls` of them: no launch by Python in between."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    return statistics.median(cuda_time(graph.replay, warmup=2, repeat=7)) / calls


def do_bench_ms(fn) -> float:
    """triton clears a large buffer between calls, so this compares with `flush_l2=True`."""
    return triton.testing.do_bench(fn, warmup=100, rep=200, return_mode="median")


def queued_cuda_time_ms(fn) -> float:
    """cuda_time behind a kernel that spins for about 20 ms, so that its queue is full."""
    torch.cuda._sleep(40_000_000)
    return statistics.median(cuda_time(fn, warmup=5, repeat=100))


def compare(name: str, fn, calls: int, rounds: int = 3) -> dict:
    """Every timer in turns, so that a clock that drifts drifts for all of them; medians."""
    timers = {
        "cuda_time_ms": lambda: statistics.median(cuda_time(fn, repeat=30)),
        "cuda_time_queued_ms": lambda: queued_cuda_time_ms(fn),
        "benchmark_ms": lambda: benchmark(fn, budget_s=0.3).median_ms,
        "benchmark_cold_ms": lambda: benchmark(fn, budget_s=0.3, flush_l2=True).median_ms,
        "do_bench_ms": lambda: do_bench_ms(fn),
        "graph_ms": lambda: graph_ms(fn, calls),
    }
    benchmark(fn, warmup_s=1.0)  # out of its first second's clock
    times = {timer: [] for timer in timers}
    for _ in range(rounds):
        for timer, run in timers.items():
            times[timer].append(run())
    taken = benchmark(fn, budget_s=0.3)
    row = {
        "kernel": name,
        **{timer: statistics.median(values) for timer, values in times.items()},
        "host_ms": taken.host_ms, "host_bound": taken.host_bound,
        "throttle": taken.throttle_reasons, "sm_clock_mhz": taken.sm_clock_end_mhz,
    }  # fmt: skip
    print(row, flush=True)
    return row


def after_idling(fn) -> dict:
    time.sleep(5)
    first, second = benchmark(fn), benchmark(fn)
    row = {
        "first_ms": first.median_ms, "second_ms": second.median_ms,
        "difference": abs(second.median_ms / first.median_ms - 1),
        "first": str(first), "second": str(second),
    }  # fmt: skip
    print(row, flush=True)
    return row


def main(out: Path):
    tiny = torch.randn(64, 64, device="cuda")

    def host_bound():  # each call waits for the GPU, so the queue cannot be kept full
        return tiny.sum().item()

    report = {
        **machine_facts(),
        "kernels": [
            compare("add of 13 GiB tensors, 10 ms", add(13 * 2**30), 5),
            compare("add of 1.4 GiB tensors, 1 ms", add(int(1.4 * 2**30)), 40),
            compare("add of 20 MiB tensors, 20 µs", add(20 * 2**20), 500),
            compare("GEMM 14336³, 10 ms", matmul(14336, 14336, 14336), 5),
            compare("GEMM 7168³, 1 ms", matmul(7168, 7168, 7168), 40),
            compare("GEMM 64 × 2048 × 16384, 20 µs", matmul(64, 2048, 16384), 500),
        ],
        "empty_event_pair_ms": queued_cuda_time_ms(lambda: None),
        "host_bound_flag": benchmark(host_bound, budget_s=0.5).host_bound,
        "after_five_idle_seconds": {
            "add of 2 GiB": after_idling(add(2 * 2**30)),
            "GEMM 8192³": after_idling(matmul(8192, 8192, 8192)),
        },
    }
    out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
