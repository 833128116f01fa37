"""Three training steps through the profiler: activations kept, recomputed, and the naive mixture.

Writes train.csv and train.png, and for each step NAME_ranges.csv, NAME_kernels.csv, NAME_api.csv,
NAME_summary.csv and the recording itself, NAME.trace.json.gz; on a GPU also NAME.pickle of the
first two, the allocations of one more step, for https://pytorch.org/memory_viz.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from labkit import plots
from labkit.experiments import recordings
from labkit.experiments.machine import Machine
from labkit.experiments.progress import steps
from labkit.experiments.table import TRAIN, Table, save
from labkit.memory import save_snapshot
from labkit.plots.style import nothing
from labkit.profiling.recording import Recording, profile, trace_file
from labkit.profiling.workloads import labkit_step


@dataclass(frozen=True)
class Step:
    """One training step; `snapshot`: keep its allocations as well."""

    name: str
    recompute: bool = False
    moe_impl: str = "grouped"
    snapshot: bool = True


STEPS = (
    Step("train"),
    Step("train_rc", recompute=True),
    Step("train_naive", moe_impl="naive", snapshot=False),
)


def shape(on_gpu: bool) -> dict:
    """The model and the micro batch that are recorded, in sizes that suit the machine."""
    if on_gpu:
        return {"model": "olmoe-1b-7b", "layers": 4, "micro_batch_size": 4, "seqlen": 2048}
    return {"model": "olmoe-tiny", "layers": 2, "micro_batch_size": 2, "seqlen": 64}


def run(output="results", quick=False, device=None, progress=None):
    """Record the three steps; the rows of train.csv.

    before_ms and during_ms are a step without the recorder and with it. busy_ms is the time of a
    recorded step's operations, and forward_ms, backward_ms, recompute_ms and optimizer_ms share it.
    What only a GPU can tell is empty on a CPU. Goes on after the steps that `output` has; `quick`
    records fewer of each. Raises UserError, before it measures, for bad input and a folder that
    cannot be written.
    """
    machine = Machine.here(device)
    table, sizes = Table(output, TRAIN, machine.facts, quick), shape(machine.on_gpu)
    todo = [one for one in STEPS if not _done(table, one, sizes, output, machine.on_gpu)]
    with steps("train", len(todo), progress) as step:
        for one in todo:
            step(f"{one.name}: recompute: {_yes(one.recompute)}, {one.moe_impl}")
            row = machine.attempt(lambda one=one: _measure(machine, one, sizes, output, quick))
            table.append({"workload": one.name, **sizes, **_how(one)} | row)
    frame = table.frame()
    save(figure(frame, output), Path(output) / "train.png")
    return frame


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _how(one: Step) -> dict:
    return {"recompute": _yes(one.recompute), "moe_impl": one.moe_impl}


def _files(output, one: Step, on_gpu: bool) -> list[Path]:
    pickles = [Path(output) / f"{one.name}.pickle"] if on_gpu and one.snapshot else []
    return [*recordings.files(output, one.name), *pickles]


def _done(table: Table, one: Step, sizes: dict, output, on_gpu: bool) -> bool:
    """Whether the folder has this step of this model, with all of its files."""
    if not table.has(workload=one.name):
        return False
    row = table.frame().set_index("workload").loc[one.name]
    if any(row[name] != value for name, value in (sizes | _how(one)).items()):
        return False
    return row["status"] != "ok" or all(p.is_file() for p in _files(output, one, on_gpu))


def _measure(machine: Machine, one: Step, sizes: dict, output, quick: bool) -> dict:
    """Record a step, save its tables, and sum it up in a row."""
    preset, rest = sizes["model"], {k: v for k, v in sizes.items() if k != "model"}
    work = labkit_step(
        preset, "train", **rest, moe_impl=one.moe_impl, recompute=one.recompute,
        device=machine.device,
    )  # fmt: skip
    # A naive step has so many operations that one of them is enough.
    times = 1 if one.moe_impl == "naive" else 2 if quick or not machine.on_gpu else 4
    recording = profile(
        work.fn, steps=times, warmup=2, model=work.model, device=machine.device,
        trace=trace_file(output, one.name),
    )  # fmt: skip
    recording.save(output, one.name)
    if machine.on_gpu and one.snapshot:
        save_snapshot(Path(output) / f"{one.name}.pickle", work.fn, machine.device)
    return {"steps": times} | summary(recording)


def summary(recording: Recording) -> dict:
    """What a recorded step comes to: the measured columns of train.csv."""
    busy = recording.ranges.set_index("range")["busy_ms"]
    operations = recording.ranges.set_index("range")["ops"]
    gaps = recording.gaps
    phases = {"forward_ms": "forward", "backward_ms": "(backward)",
              "recompute_ms": "recompute.layers.*", "optimizer_ms": "optimizer"}  # fmt: skip
    return {
        "before_ms": recording.before_ms,
        "during_ms": recording.during_ms,
        "busy_ms": float(busy["step"]),
        "idle_ms": gaps.get("idle_ms"),
        "launch_bound_ms": gaps.get("launch_bound_ms"),
        **{column: float(busy.get(name, 0.0)) for column, name in phases.items()},
        "operations": float(operations["step"]),
    }


def load(output, name: str) -> Recording:
    """The recording of a step, from its files: `load("results", "train_rc")`.

    Raises UserError if they are not there.
    """
    return recordings.load(output, name, "train")


def figure(frame, output):
    """Where each step goes, from the tables in `output`."""
    measured = frame[frame["status"] == "ok"].set_index("workload")
    names = [one.name for one in STEPS if one.name in measured.index]
    if not names:
        return nothing(frame)
    tables = {name: pd.read_csv(Path(output) / f"{name}_ranges.csv") for name in names}
    return plots.step_bar(tables, step_ms=measured["before_ms"].to_dict())
