"""Record a few calls of a function with torch.profiler, and keep what they did as tables."""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pandas as pd
import torch

from labkit.devices import pick
from labkit.errors import UserError, whole_number
from labkit.hooks import annotate, span
from labkit.profiling import tables
from labkit.profiling.events import Events
from labkit.profiling.trace import read_trace
from labkit.provenance import machine_facts

# Kineto tells stderr of every start and stop, which a notebook shows in red.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


class ProfileError(UserError):
    """The function raised while it was recorded. `recording` is what there was until then, or None;
    `__cause__` is the function's own exception."""

    recording = None


@dataclass(frozen=True, eq=False)
class Recording:
    """A few steps as tables; all figures are a step.

    before_ms, during_ms: a step before the recorder ran, and while it did: its own cost.
    skipped: compiled modules that have no range of their own.
    """

    events: Events
    steps: int
    before_ms: float
    during_ms: float
    facts: dict = field(default_factory=dict)
    skipped: tuple[str, ...] = ()

    @cached_property
    def ranges(self) -> pd.DataFrame:
        return tables.ranges_table(self.events, self.steps)

    @cached_property
    def kernels(self) -> pd.DataFrame:
        return tables.kernels_table(self.events, self.steps)

    @cached_property
    def api(self) -> pd.DataFrame:
        return tables.api_table(self.events, self.steps)

    @cached_property
    def gaps(self) -> dict[str, float]:
        return tables.gaps(self.events, self.steps)

    def save(self, folder: str | Path, name: str) -> list[Path]:
        """Write NAME_{ranges,kernels,api,summary}.csv into the folder → their paths."""
        folder = Path(folder)
        summary = {"steps": self.steps, "before_ms": self.before_ms, "during_ms": self.during_ms}
        summary |= self.gaps | self.facts
        frames = {
            "ranges": self.ranges, "kernels": self.kernels, "api": self.api,
            "summary": pd.Series(summary, name="value").rename_axis("what").reset_index(),
        }  # fmt: skip
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths = [folder / f"{name}_{table}.csv" for table in frames]
            for path, frame in zip(paths, frames.values(), strict=True):
                frame.to_csv(path, index=False, float_format="%.6g")
        except OSError as error:
            raise UserError(f"{folder} cannot be written to ({error.strerror})") from None
        return paths


def trace_file(folder: str | Path, name: str) -> Path:
    """Where a recording of this name is kept, as torch.profiler writes it."""
    return Path(folder) / f"{name}.trace.json.gz"


def profile(
    fn: Callable[[], object],
    *,
    steps: int = 2,
    warmup: int = 2,
    model: torch.nn.Module | None = None,
    device=None,
    trace: str | Path | None = None,
) -> Recording:
    """Call `fn` `warmup` times, `steps` times under a clock, and `steps` times recorded.

    model: each of its submodules gets a range for the recorded calls (`hooks.annotate`).
    device: where `fn` works, as in `devices.pick`. trace: where to keep the Chrome trace
    (`.json` or `.json.gz`; https://ui.perfetto.dev shows it).
    Raises ProfileError if fn raises while it is recorded (hooks and profiler are off by then, and
    the trace is kept), UserError if it launches nothing on a GPU that it should work on.
    """
    whole_number("steps", steps)
    whole_number("warmup", warmup, 0)
    device = pick(device)
    for _ in range(warmup):
        fn()
    before_ms = step_ms(fn, steps, device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(trace or Path(folder) / "trace.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        during_ms, skipped, failure = _record(fn, steps, device, model, path)
        events = read_trace(path)
    facts = machine_facts(device)
    recording = Recording(events, steps, before_ms, during_ms, facts, skipped)
    if failure is not None:
        error = ProfileError(f"the recorded function raised {type(failure).__name__}: {failure}")
        error.recording = recording
        raise error from failure
    if device.type == "cuda" and not events.on_gpu:
        raise UserError(
            f"fn launched no GPU work in {steps} steps; if it works on the CPU, say device='cpu'"
        )
    return recording


def _record(fn, steps: int, device: torch.device, model, path: Path):
    """→ (ms a step while recording, skipped modules, fn's exception or None)."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities):  # the first start loads the recorder
            torch.cuda.synchronize()
    failure, during_ms = None, float("nan")
    profiler = torch.profiler.profile(activities=activities)
    with annotated(model) as skipped:
        profiler.start()
        try:
            during_ms = step_ms(in_range(fn), steps, device)
        except Exception as error:
            failure = error
        finally:
            profiler.stop()
    profiler.export_chrome_trace(str(path))
    return during_ms, tuple(skipped), failure


@contextmanager
def annotated(model: torch.nn.Module | None):
    """Ranges for a model's submodules inside the block, if there is one → those without a range."""
    if model is None:
        yield []
        return
    with annotate(model) as annotation:
        yield annotation.skipped


def in_range(fn: Callable[[], object]) -> Callable[[], None]:
    """A call of `fn` in the range that the tables know as "step"."""

    def step():
        with span("step"):
            fn()

    return step


def step_ms(fn, steps: int, device: torch.device) -> float:
    """Mean time of a call when nothing waits in between: CUDA events, or a clock on a CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            fn()
        return 1e3 * (time.perf_counter() - start) / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    for _ in range(steps):
        fn()
    end.record(stream)
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / steps
