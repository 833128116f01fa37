"""The peak memory of a training step, from what is alive at each moment: plain arithmetic.

Follows labkit/model.py, labkit/train.py and PyTorch's autograd, which frees what an operation
kept as soon as its backward has run. Letters as in `steptime`.
"""

from labkit.config import ModelConfig
from labkit.memory_model import activation_bytes, layer_bytes
from labkit.perfmodel import param_count
from labkit.predictor.prediction import Prediction, Term

GIB = 2**30
F32 = 4
MIB = 2**20
CAPACITY = "memory capacity"


def peak_memory(
    cfg: ModelConfig,
    micro_batch_size: int,
    seqlen: int,
    recompute: bool,
    *,
    bytes_per_element: int = 2,
    micro_batches: int = 1,
    state_bytes: tuple[float, float, float] | None = None,
    workspace_mib: float = 0.0,
    on_gpu: bool | None = None,
    shares_kv_heads: bool | None = None,
) -> Prediction:
    """The most that tensors need at one time in a step, in GiB; its terms are what is alive then.

    `state_bytes` are a parameter's bytes of weight, gradient and both moments; None keeps all in
    `bytes_per_element`. `workspace_mib` is what the device's matrix multiplies keep for themselves.
    `on_gpu`, `shares_kv_heads`: see `memory_model.activation_bytes`. The note names the moment.
    """
    ### BEGIN SOLUTION
    b, n = bytes_per_element, param_count(cfg)
    on_gpu = b == 2 if on_gpu is None else on_gpu
    a_weight, a_gradient, both_moments = state_bytes or (b, b, 2 * b)
    how = (b, on_gpu, shares_kv_heads)
    best = None
    for moment, gradients, newest, others in _moments(
        cfg, micro_batch_size, seqlen, recompute, how
    ):
        # From the second micro batch on all are there, and the newest is added to its own.
        there = n + newest if micro_batches > 1 else gradients
        alive = a_gradient * there + sum(others.values())
        if best is None or alive > best[0]:
            best = alive, moment, there, others
    _, moment, gradients, others = best
    state = {"weights": a_weight, "gradients": a_gradient * gradients / n, "moments": both_moments}
    alive = {
        **{(name, "state"): size * n for name, size in state.items()},
        **{(name, "activations"): size for name, size in others.items()},
        ("matrix multiplies", "workspaces"): workspace_mib * MIB,
        ("rounding", "allocator"): on_gpu * sum(state.values()) * n * _lost(cfg, a_weight),
    }
    terms = [Term(*key, size / GIB, CAPACITY) for key, size in alive.items() if size]
    return Prediction(terms, "GiB", note=f"at {moment}")
    ### END SOLUTION


def _moments(cfg, micro_batch_size: int, seqlen: int, recompute: bool, how: tuple):
    """When memory may peak: (name, gradients there, the newest of them, bytes beside the state).

    Gradients are counted in elements.
    """
    T, (b, on_gpu, shares) = micro_batch_size * seqlen, how
    n, edge, layer = _parameters(cfg)
    kept = activation_bytes(cfg, micro_batch_size, seqlen, recompute, b, on_gpu, shares)
    log_softmax = kept.pop("log_softmax")
    ours = layer_bytes(cfg, T, b, on_gpu, shares)
    own, out, whole = sum(ours.values()), T * cfg.dim * b, sum(kept.values())
    logits = T * cfg.vocab_size * b
    yield "the backward of the loss", 0, 0, {"kept": whole, "logits": 3 * log_softmax}
    yield "the backward of lm_head", edge, edge, {"kept": whole + out, "logits": logits}
    yield "the end of the backward", n, edge, {"temporaries": out}
    steps = _expert_steps(cfg, T, b, ours) if cfg.is_moe else _dense_steps(cfg, T, b, ours)
    for i in {0, cfg.n_layers - 1}:
        gradients = edge + cfg.dim + (cfg.n_layers - 1 - i) * layer
        held = kept["embed"] + kept["rope"] + i * (out if recompute else own) + own - out
        for name, weights, a_weight, freed, temporaries in steps:
            alive = {"kept": held - freed, "temporaries": out + temporaries}
            yield f"{name}, layer {i}", gradients + weights * a_weight, a_weight, alive


def _expert_steps(cfg, T: int, b: int, ours: dict) -> list[tuple]:
    """In a mixture's backward: (name, weights with gradients, their size, freed, temporaries)."""
    rows, a_weight = T * cfg.experts_per_token, cfg.n_experts * cfg.ffn_dim * cfg.dim
    wide, narrow = rows * cfg.dim * b, rows * cfg.ffn_dim * b
    inner = sum(ours[name] for name in ("gate", "silu(gate)", "up", "silu(gate)·up", "weighted"))
    return [
        ("the backward of down_proj", 1, a_weight, 0, wide + narrow),
        ("the backward of the routing weights", 1, a_weight, ours["weighted"], 3 * narrow),
        ("the backward of the last expert multiply", 3, a_weight, inner, 2 * wide + narrow),
    ]


def _dense_steps(cfg, T: int, b: int, ours: dict) -> list[tuple]:
    """As `_expert_steps`, of a dense FFN."""
    a_weight, wide, narrow = cfg.ffn_dim * cfg.dim, T * cfg.dim * b, T * cfg.ffn_dim * b
    inner = sum(ours[name] for name in ("gate", "silu(gate)", "up", "silu(gate)·up"))
    return [
        ("the backward of silu(gate)·up", 1, a_weight, ours["silu(gate)·up"], 3 * narrow),
        ("the backward of the last FFN multiply", 3, a_weight, inner, 2 * wide + narrow),
    ]


def _lost(cfg: ModelConfig, b: float) -> float:
    """The share of memory that CUDA's caching allocator loses to rounding.

    Tensors of 1 to 10 MiB share segments of 20 MiB. Unless all are whole MiB, on average half a MiB
    is left of a segment that is too small to split off.
    """
    sizes = _tensor_sizes(cfg)
    shared = [size for size in sizes if MIB < size * b < 10 * MIB]
    if not any(size * b % MIB for size in shared):
        return 0.0
    return sum(size * sizes[size] for size in shared) / sum(s * n for s, n in sizes.items()) / 40


def _tensor_sizes(cfg: ModelConfig) -> dict[int, int]:
    """Elements of each weight → how many such weights there are."""
    q_dim, kv_dim = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    ffn = max(cfg.n_experts, 1) * cfg.dim * cfg.ffn_dim
    sizes = {cfg.vocab_size * cfg.dim: 2}
    for size, count in ((cfg.dim * q_dim, 2), (cfg.dim * kv_dim, 2), (ffn, 3)):
        sizes[size] = sizes.get(size, 0) + count * cfg.n_layers
    return sizes


def _parameters(cfg: ModelConfig) -> tuple[int, int, int]:
    """Parameters of the model, of the embedding or of lm_head, and of a layer."""
    n, edge = param_count(cfg), cfg.vocab_size * cfg.dim
    return n, edge, (n - 2 * edge - cfg.dim) // cfg.n_layers
