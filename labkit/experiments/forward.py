"""Three forward passes through the profiler: a small one, a large one, and a small naive one.

Writes forward.csv and forward.png, and for each pass NAME_ranges.csv, NAME_kernels.csv,
NAME_api.csv, NAME_summary.csv and the recording itself, NAME.trace.json.gz.
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import pandas as pd
import torch

from labkit import plots
from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.experiments import recordings
from labkit.experiments.machine import Machine
from labkit.experiments.progress import steps
from labkit.experiments.table import FORWARD, Table, save
from labkit.perfmodel import forward_floor_ms, param_count
from labkit.plots.style import nothing
from labkit.profiling.recording import Recording, profile, trace_file
from labkit.profiling.workloads import build_model

ROOM_GIB = 6.0  # of a GPU, for what is not weights: logits and the rows of one layer
BUSY = 0.7  # a GPU that works for a smaller share of an unrecorded pass is short of work


@dataclass(frozen=True)
class Pass:
    """One forward pass: `micro_batch_size` sequences of `seqlen` tokens."""

    name: str
    micro_batch_size: int
    seqlen: int
    moe_impl: str = "grouped"


def passes(on_gpu: bool) -> list[Pass]:
    """What is recorded, in sizes that suit the machine."""
    small, large = ((1, 512), (32, 512)) if on_gpu else ((1, 64), (8, 256))
    return [
        Pass("fwd_small", *small),
        Pass("fwd_large", *large),
        Pass("fwd_small_naive", *small, moe_impl="naive"),
    ]


def run(output="results", quick=False, device=None, progress=None, checkpoint=None):
    """Record the three passes; the rows of forward.csv.

    A GPU runs olmoe-1b-7b, with as many of its layers as its memory holds, and a CPU olmoe-tiny;
    with random weights, or with those of `checkpoint`, a model directory. before_ms and during_ms
    are a pass without the recorder and with it; busy_ms, idle_ms, launch_bound_ms, operations and
    synchronizations are a recorded pass. What only a GPU can tell is empty on a CPU.
    Goes on after the passes that `output` has; `quick` records fewer of each.
    Raises UserError, before it measures, for bad input and a folder that cannot be written.
    """
    machine = Machine.here(device)
    table = Table(output, FORWARD, machine.facts, quick)
    what = _what(machine, checkpoint)
    todo = [one for one in passes(machine.on_gpu) if not _done(table, one, what, output)]
    make_model = cache(partial(_make_model, machine, what, checkpoint))
    with steps("forward", len(todo), progress) as step:
        for one in todo:
            step(f"{one.name}: {one.micro_batch_size} × {one.seqlen} tokens, {one.moe_impl}")
            row = machine.attempt(
                lambda one=one: _measure(machine, make_model(), one, output, quick)
            )
            table.append({"workload": one.name, **what, **_sizes(one)} | row)
    frame = table.frame()
    save(figure(frame, output), Path(output) / "forward.png")
    return frame


def _what(machine: Machine, checkpoint) -> dict:
    """The columns that say which model it is."""
    if checkpoint is not None:
        from labkit.checkpoint import read_config

        cfg = read_config(checkpoint)
        return {"model": Path(checkpoint).name, "weights": "checkpoint", "layers": cfg.n_layers}
    name = "olmoe-1b-7b" if machine.on_gpu else "olmoe-tiny"
    cfg = ModelConfig.preset(name)
    return {"model": name, "weights": "random", "layers": fitting_layers(cfg, machine)}


def fitting_layers(cfg: ModelConfig, machine: Machine) -> int:
    """How many layers of a model the memory of a GPU holds for these passes; at least one."""
    if not machine.on_gpu:
        return cfg.n_layers
    most = (machine.spec.memory_gib - ROOM_GIB) * 2**30 / machine.dtype.itemsize
    counts = range(cfg.n_layers, 1, -1)
    return next((n for n in counts if param_count(replace(cfg, n_layers=n)) <= most), 1)


def _make_model(machine: Machine, what: dict, checkpoint):
    if checkpoint is not None:
        from labkit.checkpoint import load_hf

        return load_hf(checkpoint, machine.device)
    return build_model(ModelConfig.preset(what["model"], n_layers=what["layers"]), machine.device)


def _sizes(one: Pass) -> dict:
    return {"micro_batch_size": one.micro_batch_size, "seqlen": one.seqlen,
            "moe_impl": one.moe_impl}  # fmt: skip


def _done(table: Table, one: Pass, what: dict, output) -> bool:
    """Whether the folder has this pass of this model, with all of its files."""
    if not table.has(workload=one.name):
        return False
    row = table.frame().set_index("workload").loc[one.name]
    same = all(row[name] == value for name, value in (what | _sizes(one)).items())
    return same and (
        row["status"] != "ok" or all(path.is_file() for path in recordings.files(output, one.name))
    )


def _measure(machine: Machine, model, one: Pass, output, quick: bool) -> dict:
    """Record a pass, save its tables, and sum it up in a row."""
    floors = forward_floor_ms(model.cfg, one.micro_batch_size, one.seqlen, machine.spec)
    model.moe_impl = one.moe_impl
    batch = random_micro_batch(model.cfg, one.micro_batch_size, one.seqlen, machine.device)
    fn = torch.no_grad()(partial(model, batch.tokens, batch.seqs))
    times = 2 if quick else 4
    trace = trace_file(output, one.name)
    recording = profile(fn, steps=times, warmup=3, model=model, device=machine.device, trace=trace)
    recording.save(output, one.name)
    return {"steps": times} | summary(recording, floors)


def summary(recording: Recording, floors: tuple[float, float]) -> dict:
    """What a recorded pass comes to: the measured columns of forward.csv."""
    step = recording.ranges.set_index("range").loc["step"]
    gaps, on_gpu = recording.gaps, recording.events.on_gpu
    api = recording.api
    waits = api[(api["kind"] == "synchronize") & (api["range"] != "")]["count"].sum()
    named, how = regime(recording.before_ms, step["busy_ms"], floors, on_gpu)
    return {
        "before_ms": recording.before_ms,
        "during_ms": recording.during_ms,
        "compute_floor_ms": floors[0],
        "memory_floor_ms": floors[1],
        "busy_ms": float(step["busy_ms"]),
        "idle_ms": gaps.get("idle_ms"),
        "launch_bound_ms": gaps.get("launch_bound_ms"),
        "operations": float(step["ops"]),
        "synchronizations": float(waits) if on_gpu else None,
        "regime": named,
        "regime_by": how,
    }


def regime(before_ms: float, busy_ms: float, floors, on_gpu: bool) -> tuple[str, str]:
    """What limits a pass, and what says so.

    Overhead-bound: operations fill less than 70 % of a pass that was not recorded. Else what the
    larger floor is. A CPU runs its operators in the calls themselves, and recording stretches
    them; there, overhead-bound is a pass of which the larger floor is less than half.
    """
    kind = "compute-bound" if floors[0] >= floors[1] else "memory-bound"
    if on_gpu:
        return ("overhead-bound" if busy_ms < BUSY * before_ms else kind), "idle time"
    return ("overhead-bound" if max(floors) < before_ms / 2 else kind), "floors"


def load(output, name: str) -> Recording:
    """The recording of a pass, from its files: `load("results", "fwd_small")`.

    Raises UserError if they are not there.
    """
    return recordings.load(output, name, "forward")


def figure(frame, output):
    """Where each pass goes, with its two floors, from the tables in `output`."""
    measured = frame[frame["status"] == "ok"].set_index("workload")
    names = [one.name for one in passes(True) if one.name in measured.index]
    if not names:
        return nothing(frame)
    tables = {name: pd.read_csv(Path(output) / f"{name}_ranges.csv") for name in names}
    floors = measured[["compute_floor_ms", "memory_floor_ms"]]
    return plots.step_bar(
        tables,
        {name: tuple(floors.loc[name]) for name in names},
        measured["before_ms"].to_dict(),
    )
