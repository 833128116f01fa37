"""The usual slips in a predictor, and which of them explains how wrong it is.

How long a step and its kinds of work take, and what it needs, is not known here: the measured
steps say it. `found` are predictions of these steps, in their order.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec
from tests.public.checks_c8 import floor_ms
from tests.public.slips_c3 import bytes_of, floors, rows, weights

GIB = 2**30
MOST = 0.8  # of the steps: what a slip must explain
CLOSE = 0.15  # the error of a time that is explained
FACTORS = {
    "step_ms": {
        1e-3: "that is in seconds; the function returns ms",
        1e3: "that is in µs; the function returns ms",
        0.5: "something is counted once that is there twice",
        2.0: "something is counted twice",
    },
    "peak_gib": {
        GIB / 1e9: "that is in GB, of 1e9 bytes; the function returns GiB, of 2**30",
        1e9 / GIB: "that takes a GiB, of 2**30 bytes, for a GB, of 1e9",
        1024.0: "that is in MiB; the function returns GiB",
        float(GIB): "that is in bytes; the function returns GiB",
        2.0: "four bytes a number; in bfloat16 it has two",
        0.5: "one byte a number; in bfloat16 it has two",
    },
}
STATE = {  # bytes a parameter → what they are
    2: "the weights alone; gradients and AdamW's two moments are there as well",
    4: "two tensors; there are weights, gradients and AdamW's two moments",
    6: "three tensors; there are weights, gradients and AdamW's two moments",
    10: "five tensors, or a moment in float32; there are four, all of them in bfloat16",
    12: "moments in float32; here they have the weights' dtype",
    16: "mixed precision's; here weights, gradients and moments are all in bfloat16",
}


def config(step) -> ModelConfig:
    return ModelConfig.preset(step.model, n_layers=int(step.layers))


def factor_slip(column: str, steps: pd.DataFrame, found: np.ndarray) -> str | None:
    """A usual factor that most predictions are off by, and by nearly nothing else."""
    ratios = found / steps[column].to_numpy()
    for factor, words in FACTORS[column].items():
        near = abs(ratios / factor - 1) < min(0.15, abs(factor - 1) / 5)
        if near.mean() >= MOST:
            return f"most are about {factor:.4g} times what was measured: {words}"
    return None


def time_slip(steps: pd.DataFrame, found: np.ndarray, device: DeviceSpec) -> str | None:
    """The part of a step whose absence, or presence, explains the most times."""
    if words := _floors_alone(steps, found, device):
        return words
    measured = steps["step_ms"].to_numpy()
    best = min(0.05, 0.5 * np.median(abs(found / measured - 1))), None
    for words, part, (least, most) in _parts(steps, device):
        much = abs(part) > 0.05 * measured
        share = np.median((measured - found)[much] / part[much]) if much.any() else 0.0
        off = abs((found + share * part) / measured - 1)
        explains = least <= share <= most and (off <= CLOSE).mean() >= MOST
        if explains and np.median(off) < best[0]:
            best = np.median(off), words
    return best[1]


def _floors_alone(steps: pd.DataFrame, found: np.ndarray, device: DeviceSpec) -> str | None:
    both = np.array([
        floors(config(s), s.micro_batch_size, s.seqlen, device) for s in steps.itertuples()
    ])  # fmt: skip
    optimizer = np.array([floor_ms(config(s), device) for s in steps.itertuples()])
    passes = 3 + steps["recompute"].to_numpy()
    for forward in (both.max(axis=1), both.sum(axis=1), both[:, 0]):
        for times in (passes, 3, 2):
            floor = times * forward + optimizer
            if (abs(found / floor - 1) < 0.05).mean() >= MOST:
                return (
                    "that is the roofline alone: the floors of Coding Exercises 3 and 8, which no "
                    "step reaches. Parts 1 to 3 measured what is reached, and what else a step does"
                )
    return None


def _parts(steps: pd.DataFrame, device: DeviceSpec) -> Iterator[tuple]:
    """(slip, ms by which it makes a step too short, of which share it may be at least, at most).

    ms at the peak: what is reached is some times as long. Too long is below 0.
    """
    usual, at_peak = (0.5, 1.5), (1, 8)
    yield "the optimizer's time is missing", steps["optimizer_ms"].to_numpy(), usual
    yield (
        "the backward pass is taken to be as long as the forward; it has two multiplies for each",
        (steps["backward_ms"] - steps["forward_ms"]).to_numpy(), usual,
    )  # fmt: skip
    yield "the backward pass is missing", steps["backward_ms"].to_numpy(), usual
    yield (
        "recompute is ignored: it runs each layer's forward again",
        steps["recompute_ms"].to_numpy(), usual,
    )  # fmt: skip
    yield (
        "the head and its loss are missing",
        (steps["head_forward_ms"] + steps["head_backward_ms"]).to_numpy(), usual,
    )  # fmt: skip
    passes, to_ms = 3 + steps["recompute"].to_numpy(), 1 / (device.peak_tflops * 1e9)
    tokens = (steps["micro_batch_size"] * steps["seqlen"]).to_numpy()
    cfgs = [config(step) for step in steps.itertuples()]
    idle = np.array([weights(cfg)["ffn"] * (1 - rows(cfg, 1)) for cfg in cfgs])
    yield (
        "that counts the arithmetic of all experts; a token is sent to experts_per_token of them",
        -2 * passes * tokens * idle * to_ms, at_peak,
    )  # fmt: skip
    width = np.array([cfg.n_layers * cfg.n_heads * cfg.head_dim for cfg in cfgs])
    yield (
        "attention is taken over all tokens of the micro batch; it stays within a sequence",
        -2 * passes * tokens * (tokens - steps["seqlen"].to_numpy()) * width * to_ms, at_peak,
    )  # fmt: skip


def memory_slip(steps: pd.DataFrame, found: np.ndarray, device: DeviceSpec) -> str | None:
    """What is missing, or too much, where the state, the logits or a layer's activations rule."""
    tokens = (steps["micro_batch_size"] * steps["seqlen"]).to_numpy()
    measured, layers = steps["peak_gib"].to_numpy(), steps["layers"].to_numpy()
    missing = (measured - found) * GIB
    cfg = config(steps.iloc[0])
    few = tokens <= np.quantile(tokens, 0.2)
    each = 4 * bytes_of(device) * np.median((found / measured)[few])
    for size, words in STATE.items():
        if abs(each - size) < 0.4:
            return f"steps of few tokens have about {size} bytes a parameter: {words}"
    many = tokens >= np.quantile(tokens, 0.7)
    again, shallow = steps["recompute"].to_numpy(), layers <= layers.min() + 1
    vector = cfg.dim * bytes_of(device)  # of one token
    a_layer = missing / (tokens * layers * vector)
    for where, a_part, words in (
        (many & again & ~shallow, -a_layer / 15,
         "with recompute a layer keeps only its output; the activations of all layers are counted"),
        (many & again & shallow, missing / (tokens * cfg.vocab_size) / 3,
         "the logits are missing, or small: for each token and word there are float32 numbers, "
         "several at a time in the backward of the loss"),
        (many & ~again & ~shallow, a_layer / 10,
         "the activations that layers keep for the backward are missing"),
    ):  # fmt: skip
        if where.any() and np.median(a_part[where]) >= 1:
            return words
    return None


def where_off(steps: pd.DataFrame, off: np.ndarray) -> str | None:
    """The kind of steps that most of those that are off belong to, if others are better."""
    tokens = (steps["micro_batch_size"] * steps["seqlen"]).to_numpy()
    again, usual = steps["recompute"].to_numpy(), int(np.median(tokens))
    for words, mine in {
        "recompute": again,
        "keep activations": ~again,
        f"have at most {usual} tokens": tokens <= usual,
        f"have more than {usual} tokens": tokens > usual,
    }.items():
        if mine.all() or not mine.any():
            continue
        if off[mine].sum() >= MOST * off.sum() and off[mine].mean() > 2 * off[~mine].mean():
            return f"{off[mine].sum()} of the {off.sum()} that are off {words}"
    return None
