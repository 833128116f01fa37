"""What a training step keeps in memory, tensor by tensor: plain arithmetic, no torch.

Follows labkit/model.py and labkit/train.py line by line; what autograd keeps of each operation is
in PyTorch's derivatives.yaml.

Shapes: T tokens, D model dim, H heads, G key-value heads, d head dim, F inner dim of an FFN,
E experts, K experts a token, R = T·K rows that are sent to experts, V vocabulary.
"""

from labkit.config import ModelConfig
from labkit.errors import UserError
from labkit.perfmodel import param_count

F32, I32, I64 = 4, 4, 8


def activation_bytes(
    cfg: ModelConfig,
    micro_batch_size: int,
    seqlen: int,
    recompute: bool = False,
    bytes_per_element: int = 2,
    on_gpu: bool | None = None,
    shares_kv_heads: bool | None = None,
) -> dict[str, int]:
    """Bytes that a forward pass with its loss leaves for the backward pass, by name of the tensor.

    A layer's tensors are summed over the layers. `recompute` keeps only what a layer puts out.
    `bytes_per_element` is 2 for bfloat16, 4 for float32. `on_gpu`: RMSNorm is one kernel; None
    says so for bfloat16, in which labkit trains on a GPU only. `shares_kv_heads`: attention needs
    no copy of keys and values for each query head, as FlashAttention from torch 2.12 on; None: as
    `on_gpu`. Router probabilities, statistics and the loss are float32 everywhere.
    Logits that the caller still has a name for are its own, and not in it.
    """
    tokens = _tokens(micro_batch_size, seqlen)
    b, on_gpu = bytes_per_element, (bytes_per_element == 2 if on_gpu is None else on_gpu)
    kept = {
        "embed": tokens * cfg.dim * b,
        "rope": 2 * tokens * cfg.head_dim * b,
        **_norm("norm", tokens, cfg.dim, b, on_gpu),
        "norm.out": tokens * cfg.dim * b,
        "log_softmax": tokens * cfg.vocab_size * F32,
    }
    layer = {"out": tokens * cfg.dim * b}
    if not recompute:
        layer = layer_bytes(cfg, tokens, b, on_gpu, shares_kv_heads)
    return kept | {f"layers.*.{name}": cfg.n_layers * size for name, size in layer.items()}


def layer_bytes(
    cfg: ModelConfig, tokens: int, b: int, on_gpu: bool, shares_kv_heads: bool | None = None
) -> dict[str, int]:
    """Bytes that one layer's forward keeps beside its input, which the layer before put out."""
    ffn = _experts(cfg, tokens, b) if cfg.is_moe else _feed_forward(cfg, tokens, b)
    return {
        **_norm("attn_norm", tokens, cfg.dim, b, on_gpu),
        "attn_norm.out": tokens * cfg.dim * b,
        **_attention(cfg, tokens, b, on_gpu, shares_kv_heads),
        "residual": tokens * cfg.dim * b,
        **_norm("ffn_norm", tokens, cfg.dim, b, on_gpu),
        "ffn_norm.out": tokens * cfg.dim * b,
        **ffn,
        "out": tokens * cfg.dim * b,
    }


def step_bytes(
    cfg: ModelConfig,
    micro_batch_size: int,
    seqlen: int,
    recompute: bool = False,
    bytes_per_element: int = 2,
    state_bytes: tuple[float, float, float] | None = None,
    on_gpu: bool | None = None,
) -> dict[str, float]:
    """An estimate of the peak of a step with gradient accumulation, by category.

    The moment is the backward of the loss in any micro batch but the first, when gradients,
    activations and the head's tensors are all there; or, if that is larger, the recomputation of
    one layer. `state_bytes`: of a parameter's weight, gradient and two moments, (2, 2, 4) where all
    are bfloat16; None keeps them all in `bytes_per_element`. What a layer's backward allocates for
    itself is not in it.
    """
    b, tokens = bytes_per_element, _tokens(micro_batch_size, seqlen)
    on_gpu = b == 2 if on_gpu is None else on_gpu
    weights, gradients, moments = state_bytes or (b, b, 2 * b)
    n = param_count(cfg)
    kept = activation_bytes(cfg, micro_batch_size, seqlen, recompute, b, on_gpu)
    logits = 3 * kept.pop("log_softmax")  # and, in float32 too, the gradients on both its sides
    activations = sum(kept.values())
    if recompute:
        rebuilt = sum(layer_bytes(cfg, tokens, b, on_gpu).values())
        if rebuilt > logits:
            activations, logits = activations + rebuilt, 0
    state = {"weights": weights * n, "gradients": gradients * n, "moments": moments * n}
    return state | {"activations": activations, "logits": logits}


def _tokens(micro_batch_size: int, seqlen: int) -> int:
    for name, size in {"micro_batch_size": micro_batch_size, "seqlen": seqlen}.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UserError(f"{name}={size!r} must be a whole number of at least 1")
    return micro_batch_size * seqlen


def _norm(name: str, tokens: int, dim: int, b: int, on_gpu: bool) -> dict[str, int]:
    """RMSNorm beside its input: 1/RMS of each row; in pieces, the normalised input as well."""
    pieces = {} if on_gpu else {f"{name}.normed": tokens * dim * b}
    return {f"{name}.rstd": tokens * F32} | pieces


def _attention(cfg: ModelConfig, tokens: int, b: int, on_gpu: bool, shares) -> dict[str, int]:
    q_dim, kv_dim = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    kept = {}
    if cfg.qk_norm:
        kept |= {"q_proj": tokens * q_dim * b, **_norm("q_norm", tokens, q_dim, b, on_gpu)}
        kept |= {"k_proj": tokens * kv_dim * b, **_norm("k_norm", tokens, kv_dim, b, on_gpu)}
    shares = on_gpu if shares is None else shares
    given = kv_dim if shares else q_dim  # of keys and values, as attention gets them
    return kept | {
        "q": tokens * q_dim * b,
        "k": tokens * given * b,
        "v": tokens * given * b,
        "attend": tokens * q_dim * b,
        "attend.logsumexp": tokens * cfg.n_heads * F32,
    }


def _feed_forward(cfg: ModelConfig, tokens: int, b: int) -> dict[str, int]:
    size = tokens * cfg.ffn_dim * b
    return {"gate": size, "silu(gate)": size, "up": size, "silu(gate)·up": size}


def _experts(cfg: ModelConfig, tokens: int, b: int) -> dict[str, int]:
    rows = tokens * cfg.experts_per_token
    size = rows * cfg.ffn_dim * b
    return {
        "router.probs": tokens * cfg.n_experts * F32,
        "router.experts": rows * I64,
        "experts.order": 3 * rows * I64,  # order, token_of_row, rows_of_token
        "experts.ends": cfg.n_experts * I32,
        "experts.x": rows * cfg.dim * b,
        "experts.weights": rows * b,
        "gate": size,
        "silu(gate)": size,
        "up": size,
        "silu(gate)·up": size,
        "weighted": size,
    }
