"""What the counters say of workloads that are limited by compute, by memory, and by neither.

Writes regimes.csv and regimes.png.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from labkit import plots
from labkit.experiments.machine import Machine
from labkit.experiments.progress import steps
from labkit.experiments.table import COUNTERS, REGIMES, Table, save
from labkit.monitor import Monitor
from labkit.perfmodel import gemm_bytes, gemm_flops

LAUNCH = "launch"


@dataclass(frozen=True)
class Workload:
    """A call to repeat: `prepare(machine)` gives the function; FLOPs and bytes of a call of it."""

    name: str
    prepare: Callable[[Machine], Callable]
    flops: int
    moved_bytes: float


def run(output="results", quick=False, device=None, progress=None):
    """Run each workload steadily and read the counters meanwhile; the rows of regimes.csv.

    The smallest kernel in a Python loop, whose time a call is what a launch costs; a large
    multiply; an add of two large tensors; a small multiply in a Python loop. Each runs for three
    seconds, because NVML averages over up to one; on a CPU, and if `quick`, for less.
    Goes on after the rows that `output` has.
    Raises UserError, before it measures, for bad input and a folder that cannot be written.
    """
    machine = Machine.here(device)
    table = Table(output, REGIMES, machine.facts, quick)
    seconds = (2.0 if quick else 3.0) if machine.on_gpu else (0.7 if quick else 1.5)
    todo = [work for work in workloads(machine) if not table.has(workload=work.name)]
    with steps("regimes", len(todo), progress) as step:
        for work in todo:
            step(work.name)
            launch_ms = _launch_ms(table.frame())
            row = machine.attempt(
                lambda work=work, ms=launch_ms: _measure(machine, work, seconds, ms)
            )
            table.append({"workload": work.name} | row)
    frame = table.frame()
    save(plots.counters(frame), Path(output) / "regimes.png")
    return frame


def workloads(machine: Machine) -> list[Workload]:
    """What is run, in sizes that suit the machine. The launch comes first: others refer to it."""
    size = machine.dtype.itemsize
    large = (8192 if machine.on_gpu else 1024,) * 3
    small = (64, 2048, 1024) if machine.on_gpu else (8, 32, 32)
    added = 2**30 if machine.on_gpu else 2**26
    return [
        Workload(LAUNCH, lambda here: here.random(1).neg_, 1, 2 * size),
        _gemm("large", *large, size),
        Workload(
            f"add two {added >> 20} MiB tensors",
            lambda here: _add(here, added // size), added // size, 3 * added,
        ),
        _gemm("small", *small, size),
    ]  # fmt: skip


def _gemm(which: str, M: int, k: int, n: int, size: int) -> Workload:
    def prepare(machine: Machine):
        a, b, out = machine.random(M, k), machine.random(k, n), machine.empty(M, n)
        return lambda: torch.mm(a, b, out=out)

    name = f"{which} GEMM, {M} × {k} × {n}"
    return Workload(name, prepare, gemm_flops(M, k, n), gemm_bytes(M, k, n, size))


def _add(machine: Machine, n: int):
    a, b, out = machine.random(n), machine.random(n), machine.empty(n)
    return lambda: torch.add(a, b, out=out)


def _measure(machine: Machine, work: Workload, seconds: float, launch_ms: float | None) -> dict:
    fn = work.prepare(machine)
    calls_an_interval = machine.calls_in(fn, 0.05)
    with Monitor(machine.device) as monitor:
        ends_s = machine.steadily(fn, seconds, calls_an_interval)
    calls = calls_an_interval * len(ends_s)
    ms = ends_s[-1] * 1e3 / calls
    seen = monitor.summary(settle_s=min(1.0, seconds / 2))
    named, how = regime(seen), "counters"
    if named is None:
        named, how = predicted_regime(work, machine.spec, launch_ms or ms), "roofline"
    return {
        "calls": calls,
        "ms": ms,
        "tflops": work.flops / ms / 1e9,
        "gbs": work.moved_bytes / ms / 1e6,
        "intensity_flop_per_byte": work.flops / work.moved_bytes,
        **{name: seen[name] for name in COUNTERS},
        "regime": named,
        "regime_by": how,
    }


def regime(seen: dict) -> str | None:
    """What limits a workload, by its counters in percent; None if they do not tell.

    Memory-bound: DRAM is at 60 % of its bandwidth or more (without GPM counters, memory is busy
    that often). Else overhead-bound: less than 90 % of the time a kernel runs, or fewer than half
    of the SMs have work, because kernels are too small or too far apart. Else compute-bound.
    """
    kernel, sms = seen.get("kernel_pct"), seen.get("sm_active_pct")
    memory = seen.get("dram_pct")
    memory = seen.get("memory_busy_pct") if memory is None else memory
    if memory is not None and memory >= 60:
        return "memory-bound"
    if (kernel is not None and kernel < 90) or (sms is not None and sms < 50):
        return "overhead-bound"
    return None if memory is None or (kernel is None and sms is None) else "compute-bound"


def predicted_regime(work: Workload, spec, launch_ms: float) -> str:
    """What limits a workload, by the roofline: for a machine without counters.

    Overhead-bound if its bound is below the cost of a launch, else what the larger bound is.
    """
    compute_ms = work.flops / spec.peak_tflops / 1e9
    memory_ms = work.moved_bytes / spec.bandwidth_gbs / 1e6
    if max(compute_ms, memory_ms) < launch_ms:
        return "overhead-bound"
    return "compute-bound" if compute_ms >= memory_ms else "memory-bound"


def _launch_ms(frame) -> float | None:
    times = frame.loc[frame["workload"] == LAUNCH, "ms"].dropna()
    return float(times.iloc[-1]) if len(times) else None
