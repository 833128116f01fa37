"""Training steps over a grid of configurations: time, its four kinds of work, and memory.

Writes sweep.csv and sweep.png. This is what a performance model is calibrated on and judged by.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median, quantiles

from labkit import plots
from labkit.benchmark import median_spread
from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.errors import UserError, whole_number
from labkit.experiments.machine import Machine
from labkit.experiments.micro_batches import split
from labkit.experiments.progress import steps
from labkit.experiments.table import COUNTERS, SWEEP, Table, save
from labkit.monitor import Monitor
from labkit.perfmodel import mfu
from labkit.profiling.workloads import build_model
from labkit.timers import stage_times
from labkit.train import accumulated_step, make_optimizer, train_step

WORDS = {"step_ms": "{:.4g} ms", "tokens_per_s": "{:,.0f} tokens/s", "mfu_pct": "MFU {:.1f} %",
         "peak_gib": "{:.3g} GiB", "kernel_pct": "kernel {:.0f} %", "cpu_pct": "CPU {:.0f} %",
         "memory_busy_pct": "memory {:.0f} %", "sm_clock_mhz": "{:.0f} MHz"}  # fmt: skip
KEYS = ("model", "layers", "micro_batch_size", "seqlen", "recompute", "micro_batches", "repeat")
NOTHING = (None, None, None)  # no (preset, layers), no model, no optimizer


@dataclass(frozen=True)
class Grid:
    """The configurations of a sweep: every combination, `repeats` times each.

    `micro_batches` is how many of them an optimizer step accumulates. `max_tokens` leaves out
    combinations with more tokens in a micro batch. UserError: a value that no step can have, and
    sequences beyond the model's positions.
    """

    model: str
    layers: tuple[int, ...]
    micro_batch_sizes: tuple[int, ...]
    seqlens: tuple[int, ...]
    recompute: tuple[str, ...] = ("no", "yes")
    micro_batches: tuple[int, ...] = (1,)
    repeats: int = 1
    max_tokens: int | None = None
    seed: int = 0

    def __post_init__(self):
        positions = ModelConfig.preset(self.model).max_seqlen
        for name in ("layers", "micro_batch_sizes", "seqlens", "micro_batches"):
            if not getattr(self, name):
                raise UserError(f"{name}: give at least one")
            for value in getattr(self, name):
                whole_number(name, value)
        whole_number("repeats", self.repeats)
        if bad := set(self.recompute) - {"no", "yes"} or not self.recompute:
            raise UserError(f"recompute={bad!r}: it is 'no', 'yes' or both")
        if (longest := max(self.seqlens)) > positions:
            raise UserError(f"seqlens={longest}: {self.model} has {positions} positions")
        if self.max_tokens is not None:
            whole_number("max_tokens", self.max_tokens)
            if not self.shapes():
                smallest = min(self.micro_batch_sizes) * min(self.seqlens)
                raise UserError(
                    f"max_tokens={self.max_tokens} leaves nothing to measure: the smallest micro "
                    f"batch has {smallest} tokens"
                )

    def keys(self) -> list[dict]:
        """The rows to measure, in the order of `shuffled`."""
        return shuffled(self.shapes(), self.repeats, self.seed)

    def shapes(self) -> list[tuple]:
        """Every combination once: the values of KEYS without the last, which is the repeat."""
        every = product(
            (self.model,), self.layers, self.micro_batch_sizes, self.seqlens, self.recompute,
            self.micro_batches,
        )  # fmt: skip
        most = float("inf") if self.max_tokens is None else self.max_tokens
        return list(dict.fromkeys(shape for shape in every if shape[2] * shape[3] <= most))


def shuffled(shapes: list[tuple], repeats: int, seed: int = 0) -> list[dict]:
    """A row's key for each shape and repeat, in random order, the same for the same seed.

    Repeat by repeat, so that drift shows. Within a repeat the shapes of one model and number of
    layers keep together, because others need another model.
    """
    shuffle = random.Random(seed).shuffle
    keys = []
    for repeat in range(repeats):
        models = list(dict.fromkeys(shape[:2] for shape in shapes))
        shuffle(models)
        for model in models:
            mine = [shape for shape in shapes if shape[:2] == model]
            shuffle(mine)
            keys += [dict(zip(KEYS, (*shape, repeat), strict=True)) for shape in mine]
    return keys


def default_grid(machine: Machine, quick: bool = False) -> Grid:
    """Two minutes' worth: four layers on a GPU, two of olmoe-tiny on a CPU."""
    if machine.on_gpu:
        seqlens = (512, 2048) if quick else (512, 1024, 2048)
        return Grid("olmoe-1b-7b", (4,), (1, 4) if quick else (1, 2, 4, 8), seqlens)
    seqlens = (64, 256) if quick else (64, 128, 256, 512)
    return Grid("olmoe-tiny", (2,), (1, 4) if quick else (1, 2, 4, 8), seqlens)


def truth_grid(machine: Machine, seed: int = 0) -> list[dict]:
    """The rows that a predictor is judged by, at most a quarter of an hour's, in random order.

    Each number of layers has shapes of its own, drawn from all of them; the smallest and the
    largest are always there. Everything is measured three times.
    """
    if machine.on_gpu:
        presets, layers, fewest, most, count = ("olmoe-1b-7b",), (1, 2, 3, 4, 6, 8), 256, 16384, 10
        seqlens = (256, 512, 768, 1000, 1024, 1536, 2048, 3072, 4096)
    else:
        presets, layers, fewest, most, count = ("olmoe-tiny", "tiny"), (1, 2, 3, 4), 64, 2048, 4
        seqlens = (32, 64, 100, 128, 192, 256, 384, 500, 512)
    every = product((1, 2, 4, 8, 16, 32, 64), seqlens)
    pool = sorted((b * s, s, b) for b, s in every if fewest <= b * s <= most)
    draw, shapes = random.Random(seed), []
    for preset, n in product(presets, layers):
        chosen = [pool[0], *draw.sample(pool[1:-1], count - 2), pool[-1]]
        for (_, seqlen, size), recompute in product(chosen, ("no", "yes")):
            shapes.append((preset, n, size, seqlen, recompute, 1))
    return shuffled(shapes, repeats=3, seed=seed)


def run(
    output="results", quick=False, device=None, progress=None, *,
    grid: Grid | list[dict] | None = None, on_row: Callable[[int, int, dict], None] | None = None,
):  # fmt: skip
    """Measure a training step for each configuration of a grid; the rows of sweep.csv.

    `grid` may be a list of keys, in the order to measure them; None is `default_grid`. `position`
    is a row's place in that order, and `step_ms` the median of steps that run back to back, as in
    training; `forward_ms`, `backward_ms`, `recompute_ms` and `optimizer_ms` are means of
    `stage_times` (of a step of one micro batch), and `head_…` is the head's part of the first two.
    `host_ms` is what Python needs to launch a step; `peak_gib` is what tensors had at most,
    `reserved_gib`, on a GPU, what PyTorch held. What does not fit is a row that says so. `quick`
    takes less time for each. Goes on after the rows that `output` has. `on_row` is called with each
    row when it is written, after how many there are by then and will be.
    Raises UserError, before it measures, for bad input and a folder that cannot be written.
    """
    machine = Machine.here(device)
    keys = grid if isinstance(grid, list) else (grid or default_grid(machine, quick)).keys()
    table = Table(output, SWEEP, machine.facts, quick)
    todo = [(place, key) for place, key in enumerate(keys) if not table.has(**key)]
    bench = Bench(machine)
    with steps("sweep", len(todo), progress) as step:
        for place, key in todo:
            step(label(key))
            row = key | {"position": place}
            row |= machine.attempt(partial(bench.measure, key, quick))
            table.append(row)
            if on_row:
                on_row(place + 1, len(keys), row)
    frame = table.frame()
    save(plots.sweep(frame), Path(output) / "sweep.png")
    return frame


def label(key: dict) -> str:
    """A configuration in a few words."""
    recompute = ", recomputing" if key["recompute"] == "yes" else ""
    times = f"{key['micro_batches']} × " if key["micro_batches"] > 1 else ""
    shape = f"{times}{key['micro_batch_size']} × {key['seqlen']}"
    return f"{key['model']}, layers: {key['layers']}, {shape}{recompute}"


def in_words(row: dict) -> str:
    """What a row found, in a line: time, throughput, MFU, memory, and the counters that there are.

    A row that found nothing says why.
    """
    if row["status"] != "ok":
        return f"{label(row)}: {row['status']}"
    found = [form.format(row[name]) for name, form in WORDS.items() if row.get(name) is not None]
    return f"{label(row)}: {', '.join(found)}"


@dataclass
class Bench:
    """Measures configurations on one machine, with a model that it builds when they need another.

    Only one model is there at a time.
    """

    machine: Machine
    _built: tuple = field(default=NOTHING, repr=False)

    def measure(self, key: dict, quick: bool = False) -> dict:
        """The measured columns of a key's row. What a step raises comes through."""
        try:
            return self._measure(key, quick)
        except RuntimeError:
            self._built = NOTHING  # its gradients take room, and AdamW may have half its moments
            raise

    def _measure(self, key: dict, quick: bool) -> dict:
        model, optimizer = self._model(key["model"], key["layers"])
        model.recompute = key["recompute"] == "yes"
        sequences = key["micro_batch_size"] * key["micro_batches"]
        batch = random_micro_batch(model.cfg, sequences, key["seqlen"], self.machine.device)
        if key["micro_batches"] == 1:
            step = partial(train_step, model, optimizer, batch)
        else:
            parts = split(batch, key["micro_batch_size"])
            step = partial(accumulated_step, model, optimizer, parts)
        row = self._steps(step, quick)
        if key["micro_batches"] == 1:
            row |= self._kinds(model, optimizer, batch, quick)
        tokens = batch.seqs.n_tokens
        return row | {
            "tokens": tokens,
            "tokens_per_s": 1e3 * tokens / row["step_ms"],
            "mfu_pct": 100
            * mfu(model.cfg, tokens, key["seqlen"], row["step_ms"], self.machine.spec),
        }

    def _model(self, preset: str, layers: int) -> tuple:
        if self._built[0] != (preset, layers):
            self._built = NOTHING  # two would not fit at once
            model = build_model(ModelConfig.preset(preset, n_layers=layers), self.machine.device)
            self._built = ((preset, layers), model, make_optimizer(model))
        return self._built[1:]

    def _steps(self, step, quick: bool) -> dict:
        """Steps back to back: quantiles, memory and counters."""
        machine = self.machine
        for _ in range(2 if machine.on_gpu else 1):  # AdamW makes its moments
            step()
        if machine.on_gpu:
            machine.forget_peak()
            step()  # takes its memory from the driver again
            machine.synchronize()
        began = time.perf_counter()
        step()
        host_ms = (time.perf_counter() - began) * 1e3
        seconds = (0.5 if quick else 1.0) if machine.on_gpu else (0.3 if quick else 1.0)
        times = []
        with Monitor(machine.device) as monitor:
            while len(times) < 3:
                ends_s = [0.0, *machine.steadily(step, seconds, 1)]
                times += [1e3 * (end - start) for start, end in pairwise(ends_s)]
        times = times[1:] if len(times) > 3 else times  # the first had no step before it
        tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
        seen = monitor.summary(settle_s=seconds / 2)
        return {
            "step_ms": median(times),
            "p10_ms": tenths[0],
            "p90_ms": tenths[-1],
            "spread": median_spread(times),
            "steps": len(times),
            "host_ms": host_ms if machine.on_gpu else None,
            **machine.peak(step),
            **{name: seen[name] for name in COUNTERS},
        }

    def _kinds(self, model, optimizer, batch, quick: bool) -> dict:
        """The kinds of work in a step, and the head's part in two of them."""
        times = stage_times(
            model, optimizer, batch, warmup=1, steps=2 if quick else 4, device=self.machine.device
        )
        forward, backward, recompute = map(sum, zip(*times.stages.values(), strict=True))
        head_forward, head_backward, _ = times.stages["head"]
        return {
            "forward_ms": forward,
            "backward_ms": backward,
            "recompute_ms": recompute,
            "optimizer_ms": times.optimizer_ms,
            "head_forward_ms": head_forward,
            "head_backward_ms": head_backward,
        }
