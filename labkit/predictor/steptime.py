"""The time of a training step as a sum of terms: plain arithmetic, no torch, no files.

Follows labkit/model.py and labkit/train.py line by line. A kernel's time is its work over a rate,
and `kernel_us`; its work is FLOPs, or the bytes of the tensors that it reads and writes.

Letters: T tokens, S tokens of a sequence, D model dim, Q = H·d query dim, G = kv heads·d, F inner
dim of an FFN, E experts, K experts a token, R = T·K rows that are sent to experts, V vocabulary;
b bytes of a number.
"""

import math
from typing import NamedTuple

from labkit.config import ModelConfig
from labkit.perfmodel import param_count
from labkit.predictor.constants import COMPUTE, MEMORY, OVERHEAD, Constants
from labkit.predictor.prediction import Prediction, Term

BOUNDS = {
    "projections": COMPUTE, "attention": COMPUTE, "experts": COMPUTE, "ffn": COMPUTE,
    "lm_head": COMPUTE, "element-wise": MEMORY, "dispatch": MEMORY, "routing": OVERHEAD,
    "loss": MEMORY, "embedding": MEMORY, "optimizer": MEMORY, "accumulation": MEMORY,
    "kernel starts": OVERHEAD, "waiting for Python": OVERHEAD,
}  # fmt: skip

# Of a layer, and of the embedding with the head: (forward, backward). Kernels were counted in a
# profile, operations (what Python hands to PyTorch, views too) by a TorchDispatchMode.
MOE_KERNELS, DENSE_KERNELS, EDGE_KERNELS = (68, 107), (23, 44), (25, 38)
MOE_OPERATIONS, DENSE_OPERATIONS, EDGE_OPERATIONS = (93, 181), (64, 127), (33, 38)
POWER_TOKENS = 4096  # in a micro batch, from which a GPU at its power cap lowers its clock: to four
# times as many, where the clock has settled
SHARPNESS = 24  # of the larger of two times: Python and the GPU do not overlap perfectly


def step_time(
    cfg: ModelConfig,
    micro_batch_size: int,
    seqlen: int,
    recompute: bool,
    c: Constants,
    *,
    bytes_per_element: int = 2,
    micro_batches: int = 1,
    state_bytes: tuple[float, float, float] | None = None,
) -> Prediction:
    """The time of an optimizer step on so many micro batches, in ms, by term and kind of work.

    `state_bytes` are a parameter's bytes of weight, gradient and both moments; None keeps all in
    `bytes_per_element`. The step is as long as the GPU's work or Python's, whichever is longer.
    """
    ### BEGIN SOLUTION
    tokens, b = micro_batch_size * seqlen, bytes_per_element
    cost = _costs(c, tokens, b)
    forward, backward = _layer(cfg, tokens, seqlen, c, cost)
    head, head_back = _edges(cfg, tokens, cost)
    n, again = cfg.n_layers * micro_batches, cfg.n_layers * micro_batches * recompute
    terms = _terms("forward", forward, n) + _terms("forward", head, micro_batches)
    terms += _terms("backward", backward, n) + _terms("backward", head_back, micro_batches)
    terms += _terms("recompute", forward, again) if recompute else []
    terms += _update(cfg, c, b, tokens, micro_batches, state_bytes)
    waiting = _waiting_ms(cfg, c, sum(term.value for term in terms), micro_batches, recompute)
    if waiting:
        terms.append(Term("waiting for Python", "host", waiting, OVERHEAD))
    return Prediction(terms, "ms", c.source)
    ### END SOLUTION


def host_ms(cfg: ModelConfig, c: Constants, micro_batches: int, recompute: bool) -> float:
    """What Python needs to launch a step, in ms."""
    forward, backward = MOE_OPERATIONS if cfg.is_moe else DENSE_OPERATIONS
    launched = cfg.n_layers * (forward + backward) + sum(EDGE_OPERATIONS)
    again = cfg.n_layers * forward * recompute
    return micro_batches * (launched * c.launch_us + again * c.relaunch_us) / 1e3


def _waiting_ms(cfg, c, device_ms: float, micro_batches: int, recompute: bool) -> float:
    """How much longer the step is than the device's work."""
    python_ms = host_ms(cfg, c, micro_batches, recompute)
    if python_ms < device_ms / 2:
        return 0.0
    longer, shorter = max(python_ms, device_ms), min(python_ms, device_ms)
    return longer * (1 + (shorter / longer) ** SHARPNESS) ** (1 / SHARPNESS) - device_ms


class Costs(NamedTuple):
    """ms of a FLOP, of a byte and of a kernel; `b` bytes are a number."""

    gemm: float
    grouped: float
    stream: float
    strided: float
    gather: float
    loss: float
    kernel: float
    b: int


def _costs(c: Constants, tokens: int, b: int) -> Costs:
    doublings = min(2.0, max(0.0, math.log2(tokens / POWER_TOKENS)))
    slower = 1 + c.power_loss * doublings
    flop = (slower / c.gemm_tflops / 1e9, slower / c.grouped_tflops / 1e9)
    moved = (1 / gbs / 1e6 for gbs in (c.stream_gbs, c.strided_gbs, c.gather_gbs, c.loss_gbs))
    return Costs(*flop, *moved, c.kernel_us / 1e3, b)


def _layer(cfg: ModelConfig, T: int, S: int, c: Constants, cost: Costs) -> tuple[dict, dict]:
    """ms of one layer's forward and backward, by term."""
    there, back = _attention(cfg, T, S, c, cost)
    ffn_there, ffn_back = (_experts if cfg.is_moe else _ffn)(cfg, T, cost)
    return _sum(there, ffn_there), _sum(back, ffn_back)


def _sum(some: dict, others: dict) -> dict:
    return {name: some.get(name, 0.0) + others.get(name, 0.0) for name in {**some, **others}}


def _attention(cfg: ModelConfig, T: int, S: int, c: Constants, cost: Costs) -> tuple[dict, dict]:
    """The attention block, and all that is element-wise outside of the FFN."""
    D, Q, G = cfg.dim, cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    stream, strided, weights = cost.b * cost.stream, cost.b * cost.strided, 2 * D * (Q + G)
    projections = 2 * T * weights * cost.gemm + weights * stream
    scores = 2 * Q * (S + 1) * T / 1e9
    normed = 2 * T * D + cfg.qk_norm * T * (Q + G)  # elements that the norms of a layer read
    # Norms, two residual sums; rotary angles: flip, multiply, multiply and add.
    there = (2 * normed + 6 * T * D) * stream + 7 * T * (Q + G) * strided
    # Gradients of norms, of what several branches read, and of the rotary angles.
    back = (3 * normed + 15 * T * D + 3 * T * (Q + G)) * stream
    back += (2 * normed + 6 * T * (Q + G)) * strided
    return {
        "projections": projections,
        "attention": scores / c.attention_tflops + 4 * T * Q * strided,
        "element-wise": there,
    }, {
        "projections": 2 * projections,
        "attention": 2.5 * scores / c.attention_backward_tflops + 8 * T * Q * strided,
        "element-wise": back,
    }


def _ffn(cfg: ModelConfig, T: int, cost: Costs) -> tuple[dict, dict]:
    D, F, stream = cfg.dim, cfg.ffn_dim, cost.b * cost.stream
    ffn = 3 * D * F * (2 * T * cost.gemm + stream)
    starts = _starts(DENSE_KERNELS, DENSE_OPERATIONS, cost)
    return (
        {"ffn": ffn, "element-wise": 5 * T * F * stream, "kernel starts": starts[0]},
        {"ffn": 2 * ffn, "element-wise": 8 * T * F * stream, "kernel starts": starts[1]},
    )


def _experts(cfg: ModelConfig, T: int, cost: Costs) -> tuple[dict, dict]:
    D, F, E, R = cfg.dim, cfg.ffn_dim, cfg.n_experts, T * cfg.experts_per_token
    stream, strided, gather = (cost.b * each for each in (cost.stream, cost.strided, cost.gather))
    experts = 3 * D * F * (2 * R * cost.grouped + E * stream)
    moved = (2 * T * D + 4 * R * D) * gather  # to the experts, back, and summed
    # top-K looks at the scores 16 times, two bits each; a radix sort goes over its keys 8 times.
    chosen = (32 * T * E + 128 * R) * cost.strided
    # A CPU multiplies for one expert after the other.
    operations = MOE_OPERATIONS[0] + 3 * E, MOE_OPERATIONS[1] + 6 * E
    starts = _starts(MOE_KERNELS, operations, cost)
    there = {
        "experts": experts,
        "dispatch": moved,
        "routing": chosen,
        "element-wise": 5 * R * F * stream + 2 * R * F * strided,
        "kernel starts": starts[0],
    }
    back = {
        "experts": 2 * experts,
        "dispatch": moved + R * F * gather,
        "routing": chosen / 4,
        "element-wise": (12 * R * F + 3 * R * D) * stream + 2 * R * F * strided,
        "kernel starts": starts[1],
    }
    return there, back


def _edges(cfg: ModelConfig, T: int, cost: Costs) -> tuple[dict, dict]:
    """ms of the embedding and of the head with its loss, forward and backward, by term."""
    D, V, b, stream, strided = cfg.dim, cfg.vocab_size, cost.b, cost.stream, cost.strided
    lm_head = 2 * T * D * V * cost.gemm + D * V * b * stream
    softmax = 12 * T * V * cost.loss  # two floats read, one written
    cast = (4 + b) * T * V * (b < 4)  # bytes, from bfloat16 to float32 or back
    starts = _starts(EDGE_KERNELS, EDGE_OPERATIONS, cost)
    there = {
        "embedding": 2 * T * D * b * stream,
        "lm_head": lm_head,
        "loss": softmax + cast * strided,
        "element-wise": 2 * T * D * b * stream,
        "kernel starts": starts[0],
    }
    back = {
        "embedding": V * D * b * stream + T * D * (3 * b + 8) * strided,
        "lm_head": 2 * lm_head,
        "loss": softmax + (cast + 4 * T * V) * stream,
        "element-wise": (3 * stream + 2 * strided) * T * D * b,
        "kernel starts": starts[1],
    }
    return there, back


def _starts(kernels, operations, cost: Costs) -> tuple[float, float]:
    """The fixed cost of a part's kernels; on a CPU, which trains in float32, of its operations."""
    there, back = kernels if cost.b < 4 else operations
    return there * cost.kernel, back * cost.kernel


def _update(cfg, c: Constants, b: int, tokens: int, micro_batches: int, state_bytes) -> list[Term]:
    """AdamW, and the sums of gradients over micro batches."""
    weight, gradient, moments = state_bytes or (b, b, 2 * b)
    moved = 2 * weight + gradient + 2 * moments
    # Where no gradient ever was, 0/ε takes the division's slow path: 1.6 times the time.
    drawn = tokens * micro_batches / cfg.vocab_size  # how often a token of the vocabulary is
    untouched = cfg.vocab_size * cfg.dim * math.exp(-drawn)  # of the embedding
    parameters = param_count(cfg) + (b < 4) * 0.6 * untouched
    terms = [Term("optimizer", "optimizer", moved * parameters / c.optimizer_gbs / 1e6, MEMORY)]
    if micro_batches > 1:
        added = 3 * gradient * param_count(cfg) * (micro_batches - 1) / c.stream_gbs / 1e6
        terms.append(Term("accumulation", "backward", added, MEMORY))
    return terms


def _terms(group: str, ms: dict[str, float], times: int) -> list[Term]:
    return [Term(name, group, value * times, BOUNDS[name]) for name, value in ms.items()]
