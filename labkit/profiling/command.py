"""`labkit profile`: record a workload with one of two recorders, and write what it did."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from labkit.devices import pick
from labkit.errors import NotThisMachine, UserError
from labkit.files import writable_folder
from labkit.memory.snapshots import save_snapshot
from labkit.profiling import nsys
from labkit.profiling.recording import (
    ProfileError,
    Recording,
    annotated,
    in_range,
    profile,
    step_ms,
    trace_file,
)
from labkit.profiling.workloads import Workload, labkit_step, load_target
from labkit.provenance import machine_facts

BACKENDS = ("auto", "torch", "nsys")


@dataclass(frozen=True)
class Request:
    """What to record. Either `target`, or a preset and what `workloads.labkit_step` takes."""

    name: str
    preset: str = "olmoe-tiny"
    mode: str = "forward"
    layers: int | None = None
    micro_batch_size: int = 1
    seqlen: int = 512
    moe_impl: str = "grouped"
    recompute: bool = False
    target: str | None = None
    checkpoint: str | None = None
    device: str = "auto"
    steps: int = 2
    warmup: int = 2
    backend: str = "auto"
    memory_snapshot: bool = False
    output: str = "results"

    def workload(self) -> Workload:
        if self.target:
            return load_target(self.target)
        return labkit_step(
            self.preset, self.mode, self.layers, self.micro_batch_size, self.seqlen,
            self.moe_impl, self.recompute, self.device, self.checkpoint,
        )  # fmt: skip


def run(request: Request) -> tuple[Recording, list[Path], list[str]]:
    """Record → (the recording, the files written, notes for the user).

    Writes NAME_ranges.csv, NAME_kernels.csv, NAME_api.csv, NAME_summary.csv and the recording
    itself (NAME.trace.json.gz or NAME.nsys-rep) into the output folder, and with
    memory_snapshot NAME.pickle, every allocation of one more step. If the workload raises, what was
    recorded until then is written first.
    """
    device = pick(request.device)
    if not request.name.strip(".") or Path(request.name).name != request.name:
        raise UserError(f"name={request.name!r} must be a file name; --output says which folder")
    folder = writable_folder(request.output)
    if _backend(request, device) == "nsys":
        return _with_nsys(request, folder)
    work = request.workload()
    trace = trace_file(folder, request.name)
    try:
        recording = profile(work.fn, steps=request.steps, warmup=request.warmup, model=work.model,
                            device=device, trace=trace)  # fmt: skip
    except ProfileError as error:
        if error.recording is not None:
            error.recording.save(folder, request.name)
            error.args = (f"{error}; what was recorded until then is in {folder}",)
        raise
    files = [*recording.save(folder, request.name), trace]
    if request.memory_snapshot:
        files.append(save_snapshot(folder / f"{request.name}.pickle", work.fn, device))
    return recording, files, []


def _backend(request: Request, device: torch.device) -> str:
    if request.backend not in BACKENDS:
        raise UserError(f"no backend {request.backend!r}; there are {', '.join(BACKENDS)}")
    if request.backend == "nsys":
        if device.type != "cuda":
            raise NotThisMachine("Nsight Systems records GPUs; say --backend torch for a CPU")
        nsys.find_nsys()
        return "nsys"
    if request.backend == "auto" and device.type == "cuda":
        try:
            nsys.find_nsys()
            return "nsys"
        except NotThisMachine:
            pass
    return "torch"


def _with_nsys(request: Request, folder: Path) -> tuple[Recording, list[Path], list[str]]:
    """Run this module again under nsys; the child says by itself what its steps took."""
    report = folder / f"{request.name}.nsys-rep"
    times = folder / f"{request.name}.times.json"
    child = [sys.executable, "-m", "labkit.profiling.command", json.dumps(vars(request))]
    try:
        export, note = nsys.record([*child, str(times)], report)
        told, events = json.loads(times.read_text()), nsys.read_sqlite(export)
    finally:
        for file in (times, report.with_suffix(".sqlite")):  # the report holds the latter's events
            file.unlink(missing_ok=True)
    facts = machine_facts(request.device)
    recording = Recording(
        events, request.steps, told["before_ms"], told["during_ms"], facts, tuple(told["skipped"])
    )
    return recording, [*recording.save(folder, request.name), report], [note] if note else []


def child(request: Request, times: Path) -> None:
    """What runs under nsys: warm up, time, and let it record between start() and stop()."""
    work, device = request.workload(), pick(request.device)
    for _ in range(request.warmup):
        work.fn()
    told = {"before_ms": step_ms(work.fn, request.steps, device)}
    with annotated(work.model) as skipped:
        torch.cuda.profiler.start()
        told["during_ms"] = step_ms(in_range(work.fn), request.steps, device)
        torch.cuda.profiler.stop()
    told["skipped"] = skipped
    if request.memory_snapshot:
        save_snapshot(Path(request.output) / f"{request.name}.pickle", work.fn, device)
    times.write_text(json.dumps(told))


if __name__ == "__main__":
    child(Request(**json.loads(sys.argv[1])), Path(sys.argv[2]))
