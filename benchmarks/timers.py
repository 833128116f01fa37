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
    return triton.testing.do_bench(fn, warmup=200, rep=400, return_mode="median")


def compare(name: str, fn, calls: int) -> dict:
    for _ in range(3):  # all of them out of a warmed-up GPU
        benchmark(fn, budget_s=0.5)
    taken = benchmark(fn)
    cold = benchmark(fn, flush_l2=True)
    row = {
        "kernel": name,
        "cuda_time_ms": statistics.median(cuda_time(fn, repeat=50)),
        "benchmark_ms": taken.median_ms,
        "benchmark_host_bound": taken.host_bound,
        "host_ms": taken.host_ms,
        "throttle": taken.throttle_reasons,
        "benchmark_cold_ms": cold.median_ms,
        "do_bench_ms": do_bench_ms(fn),
        "graph_ms": graph_ms(fn, calls),
    }
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

    def host_bound():  # Python works for longer than the GPU does
        time.sleep(2e-4)
        tiny.add_(1)

    report = {
        **machine_facts(),
        "kernels": [
            compare("GEMM 16384³, 10 ms", matmul(16384, 16384, 16384), 5),
            compare("GEMM 7168³, 1 ms", matmul(7168, 7168, 7168), 40),
            compare("add of 2 GiB, 1.5 ms", add(2 * 2**30), 40),
            compare("GEMM 64 × 2048 × 16384, 20 µs", matmul(64, 2048, 16384), 500),
        ],
        "host_bound_flag": benchmark(host_bound, budget_s=0.5).host_bound,
        "after_five_idle_seconds": {
            "add of 2 GiB": after_idling(add(2 * 2**30)),
            "GEMM 8192³": after_idling(matmul(8192, 8192, 8192)),
        },
    }
    out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
