"""One global batch in micro batches of several sizes, with activations kept and recomputed.

Every row is the same update. Writes micro_batches.csv and micro_batches.png: the memory of a step
on half that global batch, as one micro batch and as four.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from labkit import plots
from labkit.config import ModelConfig
from labkit.data import MicroBatch, Seqs, random_micro_batch
from labkit.errors import UserError
from labkit.experiments.machine import Machine
from labkit.experiments.progress import steps
from labkit.experiments.table import MICRO_BATCHES, Table, save
from labkit.memory import Timeline, record_timeline
from labkit.perfmodel import state_bytes
from labkit.profiling.workloads import build_model
from labkit.train import accumulated_step, make_optimizer

SIZES = (16, 8, 4, 2, 1)


def run(
    output="results", quick=False, device=None, progress=None, *,
    model=None, layers=None, global_batch_size=None, micro_batch_sizes=None, seqlen=None,
):  # fmt: skip
    """Measure a step for each micro batch size, activations kept and recomputed; the CSV's rows.

    On a GPU four layers of olmoe-1b-7b and 16 × 2048 tokens, on a CPU two of olmoe-tiny and
    8 × 128, unless told otherwise. None as `micro_batch_sizes`: those of SIZES that fit in.
    `peak_gib` is what tensors had at most; `reserved_gib`, on a GPU, what PyTorch held. A size that
    does not fit is a row that says so. Goes on after the rows that `output` has.
    Raises UserError, before it measures, for bad input and a folder that cannot be written.
    """
    machine = Machine.here(device)
    work = Work(
        machine,
        model or ("olmoe-1b-7b" if machine.on_gpu else "olmoe-tiny"),
        layers or (4 if machine.on_gpu else 2),
        global_batch_size or (16 if machine.on_gpu else 8),
        seqlen or (2048 if machine.on_gpu else 128),
    )
    table = Table(output, MICRO_BATCHES, machine.facts, quick)
    keys = grid(work.global_batch_size, micro_batch_sizes)
    todo = [key for key in keys if not table.has(**work.shape, **key)]
    picture = Path(output) / "micro_batches.png"
    views = panels(work.global_batch_size) if todo or not picture.exists() else []
    with steps("micro_batches", len(todo) + len(views), progress) as step:
        for key in todo:
            step(f"micro batches of {key['micro_batch_size']}, recompute: {key['recompute']}")
            row = machine.attempt(partial(work.measure, **key, quick=quick))
            table.append(work.shape | key | row)
        timelines = {}
        for n, key in views:
            step(f"memory of {n} × {key['micro_batch_size']}, recompute: {key['recompute']}")
            found = {}
            outcome = machine.attempt(lambda key=key, found=found: work.watch(found, **key))
            timelines[_title(n, **key)] = found.get("timeline", outcome["status"])
    if views:
        save(plots.memory_timeline(timelines, work.state_lines(), over="events"), picture)
    return table.frame()


def grid(global_batch_size: int, sizes=None) -> list[dict]:
    """The keys of the rows to measure. UserError: a size that the global batch does not have."""
    chosen = [size for size in SIZES if size <= global_batch_size] if sizes is None else sizes
    for size in chosen:
        if not 1 <= size <= global_batch_size:
            raise UserError(
                f"micro_batch_size={size}: a global batch of {global_batch_size} sequences has "
                f"micro batches of 1 to {global_batch_size}"
            )
    return [{"micro_batch_size": s, "recompute": r} for r in ("no", "yes") for s in chosen]


def panels(global_batch_size: int) -> list[tuple[int, dict]]:
    """(number of micro batches, key) of each panel of the figure: half of the global batch."""
    half = max(1, global_batch_size // 2)
    sizes = dict.fromkeys((half, max(1, half // 4)))
    return [
        (-(-half // size), {"micro_batch_size": size, "recompute": r})
        for size in sizes
        for r in ("no", "yes")
    ]


def split(batch: MicroBatch, micro_batch_size: int) -> list[MicroBatch]:
    """The sequences of a batch, in their order, as micro batches of so many; the last may be short.

    The lengths are on the host, so nothing waits for the GPU.
    """
    parts, start = [], 0
    for first in range(0, len(batch.seqs.lengths), micro_batch_size):
        lengths = batch.seqs.lengths[first : first + micro_batch_size]
        end = start + sum(lengths)
        seqs = Seqs.from_lengths(lengths, batch.tokens.device)
        parts.append(MicroBatch(batch.tokens[start:end], batch.targets[start:end], seqs))
        start = end
    return parts


@dataclass(frozen=True)
class Work:
    """The step that is measured, of one model on one machine."""

    machine: Machine
    model: str
    layers: int
    global_batch_size: int
    seqlen: int

    @property
    def shape(self) -> dict:
        return {"model": self.model, "layers": self.layers, "seqlen": self.seqlen,
                "global_batch_size": self.global_batch_size}  # fmt: skip

    @cached_property
    def cfg(self) -> ModelConfig:
        return ModelConfig.preset(self.model, n_layers=self.layers)

    @cached_property
    def _built(self) -> tuple:
        model = build_model(self.cfg, self.machine.device)
        return model, make_optimizer(model)

    def step(self, micro_batch_size: int, recompute: str, sequences: int):
        """A function that makes one step on so many sequences."""
        model, optimizer = self._built
        model.recompute = recompute == "yes"
        optimizer.zero_grad()  # of a step that did not fit
        batch = random_micro_batch(self.cfg, sequences, self.seqlen, self.machine.device)
        return partial(accumulated_step, model, optimizer, split(batch, micro_batch_size))

    def measure(self, micro_batch_size: int, recompute: str, quick: bool = False) -> dict:
        on_gpu = self.machine.on_gpu
        step = self.step(micro_batch_size, recompute, self.global_batch_size)
        if on_gpu:
            step()  # AdamW makes its moments
            self.machine.forget_peak()
        budget_s = (2.0 if quick else 6.0) if on_gpu else (0.3 if quick else 1.5)
        timed = self.machine.time(step, budget_s=budget_s, flush_l2=False)
        return {
            "micro_batches": -(-self.global_batch_size // micro_batch_size),
            "step_ms": timed["ms"],
            "spread": timed["spread"],
            "steps": timed["calls"],
            "tokens_per_s": 1e3 * self.global_batch_size * self.seqlen / timed["ms"],
            **self.machine.peak(step),
        }

    def watch(self, found: dict, micro_batch_size: int, recompute: str) -> dict:
        """Put the timeline of a step on half of the global batch into `found`."""
        step = self.step(micro_batch_size, recompute, max(1, self.global_batch_size // 2))
        step()
        found["timeline"] = self._timeline(step)
        return {}

    def _timeline(self, step) -> Timeline:
        model, optimizer = self._built
        return record_timeline(step, model, optimizer, self.machine.device)

    def state_lines(self) -> dict[str, float]:
        """GiB of the training state: what is there all the time, and with gradients."""
        quarter = state_bytes(self.cfg, self.machine.dtype.itemsize) / 4 / 2**30
        return {"weights + moments": 3 * quarter, "weights + moments + gradients": 4 * quarter}


def _title(n: int, micro_batch_size: int, recompute: str) -> str:
    batches = "one micro batch" if n == 1 else f"{n} micro batches"
    kept = "recomputed" if recompute == "yes" else "kept"
    return f"{batches} of {micro_batch_size}, activations {kept}"
