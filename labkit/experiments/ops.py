"""The bandwidth that operations with almost no arithmetic reach, over the size of their tensors.

Writes ops.csv and ops.png.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from labkit import plots
from labkit.experiments.machine import Machine
from labkit.experiments.progress import steps
from labkit.experiments.table import OPS, Table, save

DIM = 2048  # of a row that RMSNorm normalises
SMALLEST = 2**17  # bytes of a tensor
LARGEST = 2**32
LARGEST_ON_CPU = 2**26
LIVE_TENSORS = 5  # inputs, output and what silu(x)·y leaves in between, with some room

# Tensors that an ideal single kernel reads and writes. Eager silu(x)·y is two kernels that move
# five, and an RMSNorm that is not fused moves more still: both then show as fewer GB/s.
MOVED_TENSORS = {"copy": 2, "add": 3, "silu(x)·y": 3, "RMSNorm": 2}


def run(output="results", quick=False, device=None, progress=None):
    """Measure four operations on tensors from 0.1 MB to 4 GiB; the rows of ops.csv.

    `gbs` is the bytes that the operation must move (MOVED_TENSORS) over its time: what its caller
    gets, whatever its kernels move. On a GPU each size is measured with the L2 cache flushed
    before each call ("cold"), and without ("warm"); a CPU has warm ones only, and up to 64 MiB.
    Goes on after the rows that `output` has; `quick` takes every other size and less time.
    Raises UserError, before it measures, for bad input and a folder that cannot be written.
    """
    machine = Machine.here(device)
    table = Table(output, OPS, machine.facts, quick)
    todo = [key for key in grid(machine, quick) if not table.has(**key)]
    with steps("ops", len(todo), progress) as step:
        for key in todo:
            step(f"{key['op']} {key['tensor_bytes'] / 1e6:.4g} MB, {key['cache']}")
            table.append(key | machine.attempt(lambda key=key: _measure(machine, key, quick)))
    frame = table.frame()
    save(plots.bandwidth(frame, machine.spec), Path(output) / "ops.png")
    return frame


def grid(machine: Machine, quick: bool = False) -> list[dict]:
    """The keys of the rows to measure: powers of two, as far as memory goes."""
    largest = LARGEST if machine.on_gpu else LARGEST_ON_CPU
    most = min(largest, machine.free_bytes() // LIVE_TENSORS)
    sizes = range(SMALLEST.bit_length() - 1, most.bit_length(), 2 if quick else 1)
    return [
        {"op": op, "tensor_bytes": 2**power, "cache": cache}
        for op in MOVED_TENSORS
        for cache in (("cold", "warm") if machine.on_gpu else ("warm",))
        for power in sizes
    ]


def _measure(machine: Machine, key: dict, quick: bool) -> dict:
    fn = _operation(machine, key["op"], key["tensor_bytes"] // machine.dtype.itemsize)
    timed = machine.time(fn, budget_s=0.1 if quick else 0.3, flush_l2=key["cache"] == "cold")
    moved = MOVED_TENSORS[key["op"]] * key["tensor_bytes"]
    return timed | {"moved_bytes": moved, "gbs": moved / timed["ms"] / 1e6}


def _operation(machine: Machine, op: str, n: int) -> Callable[[], object]:
    """A function that runs `op` on tensors of n elements, a multiple of DIM."""
    x = machine.random(n // DIM, DIM)
    if op == "RMSNorm":
        weight = machine.random(DIM)
        return lambda: F.rms_norm(x, (DIM,), weight, 1e-5)
    out = machine.empty(n // DIM, DIM)
    if op == "copy":
        return lambda: out.copy_(x)
    y = machine.random(n // DIM, DIM)
    if op == "add":
        return lambda: torch.add(x, y, out=out)
    return lambda: torch.mul(F.silu(x), y, out=out)
