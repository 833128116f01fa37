"""Questions to `perfmodel`'s predictions: what fits, what is fastest, what more GPUs would bring.

They ask the functions of Coding Exercise 9, so a student's answers are the student's model's.
"""

from dataclasses import dataclass, replace

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec, resolve
from labkit.errors import UserError, positive_number, whole_number
from labkit.perfmodel import (
    bytes_per_element,
    mfu,
    param_count,
    predict_peak_gib,
    predict_step_ms,
)
from labkit.predictor.prediction import Prediction, Term

CONTEXT_GIB = 1.0  # of a GPU's memory that CUDA's context and what lies between blocks take
MOST_SEQUENCES = 4096
HIDDEN = 0.5  # of an all-reduce beside a backward: both want memory. Measured on two H200


@dataclass(frozen=True)
class Room:
    """A device, and how much of its memory a step may have. None: all but CONTEXT_GIB."""

    device: DeviceSpec
    gib: float

    @classmethod
    def of(cls, device, memory_gib: float | None) -> "Room":
        device = resolve(device)
        whole = device.memory_gib - CONTEXT_GIB * (device.dtype != "float32")
        return cls(
            device, whole if memory_gib is None else positive_number("memory_gib", memory_gib)
        )

    def takes(self, cfg, micro_batch_size, seqlen, recompute, micro_batches=1) -> bool:
        need = predict_peak_gib(
            cfg, micro_batch_size, seqlen, recompute, self.device, micro_batches=micro_batches
        )
        return need <= self.gib


def largest_micro_batch(
    cfg: ModelConfig, seqlen: int, recompute: bool = False, device=None, memory_gib=None
) -> int:
    """The most sequences of `seqlen` tokens that fit into a micro batch; 0 if not even one does."""
    room = Room.of(device, memory_gib)
    low, high = 0, 1
    while high <= MOST_SEQUENCES and room.takes(cfg, high, seqlen, recompute):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = room.takes(cfg, middle, seqlen, recompute)
        low, high = (middle, high) if fits else (low, middle)
    return low


def most_layers(
    cfg: ModelConfig, micro_batch_size: int, seqlen: int, recompute=False, device=None,
    memory_gib=None,
) -> int:  # fmt: skip
    """How many of the model's layers can be trained; 0 if not even one can."""
    room = Room.of(device, memory_gib)
    counts = range(cfg.n_layers, 0, -1)
    takes = (
        n for n in counts
        if room.takes(replace(cfg, n_layers=n), micro_batch_size, seqlen, recompute)
    )  # fmt: skip
    return next(takes, 0)


def what_fits(cfg: ModelConfig, seqlen: int, device=None, memory_gib: float | None = None):
    """A DataFrame: with activations kept and recomputed, the largest micro batch and what it does.

    `memory_gib` is what a step may have; None leaves 1 GiB of a GPU's memory to CUDA.
    """
    room = Room.of(device, memory_gib)
    rows = []
    for recompute in (False, True):
        size = largest_micro_batch(cfg, seqlen, recompute, room.device, room.gib)
        rows.append(_row(cfg, size, seqlen, recompute, 1, room) if size else _nothing(recompute))
    return _frame(rows)


def fastest(
    cfg: ModelConfig,
    seqlen: int,
    global_batch_size: int,
    device=None,
    memory_gib: float | None = None,
):
    """A DataFrame of the ways through a global batch that fit, the fastest first.

    Micro batch sizes that divide the global batch, with activations kept and recomputed.
    UserError: none fits, with the number that the smallest needs.
    """
    whole_number("global_batch_size", global_batch_size)
    room = Room.of(device, memory_gib)
    sizes = [n for n in range(1, global_batch_size + 1) if global_batch_size % n == 0]
    rows = [
        _row(cfg, size, seqlen, recompute, global_batch_size // size, room)
        for size in sizes
        for recompute in (False, True)
        if room.takes(cfg, size, seqlen, recompute, global_batch_size // size)
    ]
    if not rows:
        least = float(
            predict_peak_gib(cfg, 1, seqlen, True, room.device, micro_batches=global_batch_size)
        )
        raise UserError(
            f"nothing fits into {room.gib:.3g} GiB: a micro batch of one sequence of {seqlen} "
            f"tokens, recomputing, needs {least:.3g}; take fewer layers (most_layers says how many)"
        )
    return _frame(rows).sort_values("step_ms", ignore_index=True)


def data_parallel(
    cfg: ModelConfig,
    micro_batch_size: int,
    seqlen: int,
    recompute: bool = False,
    device=None,
    *,
    gpus: int,
    link_gbs: float,
    hidden: float = HIDDEN,
    micro_batches: int = 1,
) -> Prediction:
    """The time in ms of a step on `gpus` GPUs, each with its own micro batches of that size.

    Gradients are added up by a ring all-reduce, 2(n − 1)/n of their bytes over each link
    (Patarasuk, Yuan 2009), while the backward of the last micro batch runs. `link_gbs` is the bus
    bandwidth as NCCL's tests count it, for tensors of the gradients' sizes. `hidden` is the share
    of the overlap that is gained: 1 if neither slowed the other.
    """
    whole_number("gpus", gpus)
    positive_number("link_gbs", link_gbs)
    device = resolve(device)
    alone = predict_step_ms(
        cfg, micro_batch_size, seqlen, recompute, device, micro_batches=micro_batches
    )
    if not isinstance(alone, Prediction):
        raise UserError(
            "predict_step_ms gave a plain number: return a Prediction, whose terms say how long "
            "the backward takes that an all-reduce can hide behind"
        )
    gradients = param_count(cfg) * bytes_per_element(device)
    reduce_ms = 2 * (gpus - 1) / gpus * gradients / link_gbs / 1e6
    kinds = alone.by("group")
    behind = (kinds["backward"] + kinds.get("recompute", 0.0)) / micro_batches
    exposed = reduce_ms - hidden * min(reduce_ms, behind)
    terms = [*alone.terms]
    if exposed:
        terms.append(Term("all-reduce", "communication", exposed, "network"))
    return Prediction(terms, "ms", alone.source)


def _row(cfg, size: int, seqlen: int, recompute: bool, micro_batches: int, room: Room) -> dict:
    ms = predict_step_ms(cfg, size, seqlen, recompute, room.device, micro_batches=micro_batches)
    tokens = size * seqlen * micro_batches
    peak = predict_peak_gib(cfg, size, seqlen, recompute, room.device, micro_batches=micro_batches)
    return {
        "micro_batch_size": size,
        "micro_batches": micro_batches,
        "recompute": recompute,
        "peak_gib": float(peak),
        "step_ms": float(ms),
        "tokens_per_s": 1e3 * tokens / ms,
        "mfu_pct": 100 * mfu(cfg, tokens, seqlen, float(ms), room.device),
    }


def _nothing(recompute: bool) -> dict:
    return {"micro_batch_size": 0, "recompute": recompute}


def _frame(rows: list[dict]):
    import pandas as pd

    return pd.DataFrame(rows)
