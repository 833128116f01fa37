"""The performance model: FLOPs, bytes and the bounds that follow. Plain arithmetic, no torch.

FLOPs count a multiply-add as two. TFLOP/s are 1e12 FLOPs a second.
"""

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec, resolve
from labkit.errors import UserError, whole_number

Device = DeviceSpec | str | None  # a spec, the name of one, or None for the device in use


def gemm_flops(M: int, k: int, n: int) -> int:
    """FLOPs of the matrix multiply [M, k] @ [k, n] → [M, n]; a multiply-add is two.

    Raises UserError for a size that is not a whole number above 0.
    """
    M, k, n = _sizes(M=M, k=k, n=n)
    ### BEGIN SOLUTION
    return 2 * M * k * n
    ### END SOLUTION


def gemm_bytes(M: int, k: int, n: int, bytes_per_element: float = 2) -> float:
    """Bytes that [M, k] @ [k, n] → [M, n] must move: inputs read once, the output written once.

    `bytes_per_element` is 2 for bfloat16 and 4 for float32; it may be 0.5 for packed int4.
    Raises UserError for a size that is not a whole number above 0 and for an element of no bytes.
    """
    M, k, n = _sizes(M=M, k=k, n=n)
    _check_number(bytes_per_element=bytes_per_element)
    if not bytes_per_element:
        raise UserError("bytes_per_element=0: bfloat16 has 2, float32 has 4")
    ### BEGIN SOLUTION
    return bytes_per_element * (M * k + k * n + M * n)
    ### END SOLUTION


def roofline_tflops(intensity: float, device: Device = None) -> float:
    """The most TFLOP/s that an operation of `intensity` FLOPs a byte can reach on a device.

    The roofline (Williams, Waterman, Patterson 2009): bound by the device's dense peak in the dtype
    that it trains in, `device.peak_tflops`, or by its bandwidth, `device.bandwidth_gbs`, whichever
    is lower. `device` is a DeviceSpec or the name of one; None is the device in use.
    Raises UserError for an intensity below 0 and for a device that is not in the table.
    """
    _check_number(intensity=intensity)
    device = resolve(device)
    ### BEGIN SOLUTION
    return min(device.peak_tflops, intensity * device.bandwidth_gbs * 1e9 / 1e12)
    ### END SOLUTION


def param_count(cfg: ModelConfig) -> int:
    """All parameters of a model: embedding, head, every expert, router and norm."""
    ### BEGIN SOLUTION
    norms = 2 * cfg.dim + cfg.qk_norm * (cfg.n_heads + cfg.n_kv_heads) * cfg.head_dim
    layer = _attention_weights(cfg) + _router_weights(cfg) + norms
    layer += max(cfg.n_experts, 1) * _ffn_weights(cfg)
    return cfg.n_layers * layer + 2 * cfg.vocab_size * cfg.dim + cfg.dim
    ### END SOLUTION


def active_params(cfg: ModelConfig) -> int:
    """The weights that one token is multiplied by in matrix multiplies.

    Projections, router, the `experts_per_token` experts that it is sent to (or the dense FFN) and
    lm_head are in; the embedding (a look-up) and the norms (element-wise) are not.
    """
    ### BEGIN SOLUTION
    layer = _attention_weights(cfg) + _router_weights(cfg)
    layer += max(cfg.experts_per_token, 1) * _ffn_weights(cfg)
    return cfg.n_layers * layer + cfg.vocab_size * cfg.dim
    ### END SOLUTION


def flops_per_token(cfg: ModelConfig, seqlen: int) -> float:
    """FLOPs of the forward pass, per token of a sequence of `seqlen` tokens.

    2 × `active_params`, and exact causal attention: a sequence of S tokens has S(S + 1)/2 pairs of
    a query and a key, each 4 × head_dim FLOPs (scores, and weighted values) a query head a layer.
    Key-value heads do not enter. Training is three times that; recomputation counts in HFU only.
    """
    (seqlen,) = _sizes(seqlen=seqlen)
    ### BEGIN SOLUTION
    attention = 2 * cfg.n_layers * cfg.n_heads * cfg.head_dim * (seqlen + 1)
    return 2 * active_params(cfg) + attention
    ### END SOLUTION


def rows_per_expert(cfg: ModelConfig, n_tokens: int) -> float:
    """Mean number of rows in each expert's multiply, for `n_tokens` tokens in the micro batch.

    A dense model is its own only expert. Raises UserError for a size below 1.
    """
    (n_tokens,) = _sizes(n_tokens=n_tokens)
    ### BEGIN SOLUTION
    return n_tokens * cfg.experts_per_token / cfg.n_experts if cfg.is_moe else float(n_tokens)
    ### END SOLUTION


def forward_floor_ms(
    cfg: ModelConfig, micro_batch_size: int, seqlen: int, device: Device = None
) -> tuple[float, float]:
    """Two lower bounds on a forward pass: (compute_ms, memory_ms).

    Its FLOPs at the device's dense peak, and reading every weight once at the device's bandwidth,
    in the dtype that the device trains in (`device.dtype`).
    """
    micro_batch_size, seqlen = _sizes(micro_batch_size=micro_batch_size, seqlen=seqlen)
    device = resolve(device)
    ### BEGIN SOLUTION
    flops = micro_batch_size * seqlen * flops_per_token(cfg, seqlen)
    n_bytes = param_count(cfg) * bytes_per_element(device)
    return flops / (device.peak_tflops * 1e9), n_bytes / (device.bandwidth_gbs * 1e6)
    ### END SOLUTION


def flops_breakdown(cfg: ModelConfig, seqlen: int, micro_batch_size: int = 1) -> dict[str, float]:
    """FLOPs of one forward pass by part; they sum to tokens × `flops_per_token`."""
    seqlen, micro_batch_size = _sizes(seqlen=seqlen, micro_batch_size=micro_batch_size)
    tokens = micro_batch_size * seqlen
    per_layer = {
        "projections": 2 * _attention_weights(cfg),
        "attention": 2 * cfg.n_heads * cfg.head_dim * (seqlen + 1),
        "router": 2 * _router_weights(cfg),
        "experts" if cfg.is_moe else "ffn": 2 * max(cfg.experts_per_token, 1) * _ffn_weights(cfg),
    }
    parts = {name: tokens * cfg.n_layers * flops for name, flops in per_layer.items() if flops}
    return {**parts, "lm_head": tokens * 2 * cfg.vocab_size * cfg.dim}


def mfu(cfg: ModelConfig, tokens: int, seqlen: int, step_ms: float, device: Device = None) -> float:
    """Model FLOPs utilization of a training step, 0…1 (Chowdhery et al. 2022, appendix B).

    The FLOPs that the model needs for `tokens` tokens in sequences of `seqlen`, forward and
    backward, over what the device's dense peak could do in `step_ms`. Recomputing does not count.
    """
    tokens, seqlen = _sizes(tokens=tokens, seqlen=seqlen)
    _check_number(step_ms=step_ms)
    if not step_ms:
        raise UserError("step_ms=0: a step takes time")
    return 3 * tokens * flops_per_token(cfg, seqlen) / (resolve(device).peak_tflops * 1e9 * step_ms)


def state_bytes(cfg: ModelConfig, bytes_per_element: int = 2) -> int:
    """Bytes of a training state: each parameter's weight, gradient and AdamW's two moments.

    `bytes_per_element` is 2 where all four are bfloat16, as labkit trains on a GPU.
    """
    _check_number(bytes_per_element=bytes_per_element)
    ### BEGIN SOLUTION
    return 4 * bytes_per_element * param_count(cfg)
    ### END SOLUTION


def optimizer_floor_ms(cfg: ModelConfig, device: Device = None) -> float:
    """The least time of an AdamW step: its bytes at the device's bandwidth.

    It reads weight, gradient and both moments of every parameter, and writes all but the gradient:
    7 elements a parameter, in the dtype that the device trains in (14 bytes in bfloat16).
    """
    device = resolve(device)
    ### BEGIN SOLUTION
    return 7 * bytes_per_element(device) * param_count(cfg) / (device.bandwidth_gbs * 1e6)
    ### END SOLUTION


def predict_step_ms(
    cfg: ModelConfig,
    micro_batch_size: int,
    seqlen: int,
    recompute: bool = False,
    device: Device = None,
    *,
    micro_batches: int = 1,
) -> float:
    """The time of a training step in ms, as `labkit experiment sweep` measures it.

    The global batch is `micro_batches` micro batches of `micro_batch_size` sequences of `seqlen`
    tokens; `recompute` runs each layer's forward again in the backward. Plain arithmetic: no torch,
    no GPU, no file. A plain float will do; a `predictor.Prediction` says what it is made of.
    Raises UserError for a size below 1, and for a step that does not fit into the device's memory.
    """
    micro_batch_size, seqlen, micro_batches = _sizes(
        micro_batch_size=micro_batch_size, seqlen=seqlen, micro_batches=micro_batches
    )
    device = resolve(device)
    ### BEGIN SOLUTION
    from labkit.predictor.predict import step_ms

    return step_ms(
        cfg, micro_batch_size, seqlen, bool(recompute), device, micro_batches=micro_batches
    )
    ### END SOLUTION


def predict_peak_gib(
    cfg: ModelConfig,
    micro_batch_size: int,
    seqlen: int,
    recompute: bool = False,
    device: Device = None,
    *,
    micro_batches: int = 1,
) -> float:
    """The most memory that tensors have at one time in a training step, in GiB.

    As `torch.cuda.max_memory_allocated` counts it over a step that is not the first. Arguments as
    in `predict_step_ms`; the device decides the dtype. Raises UserError for a size below 1.
    """
    micro_batch_size, seqlen, micro_batches = _sizes(
        micro_batch_size=micro_batch_size, seqlen=seqlen, micro_batches=micro_batches
    )
    device = resolve(device)
    ### BEGIN SOLUTION
    from labkit.predictor.predict import peak_gib

    return peak_gib(
        cfg, micro_batch_size, seqlen, bool(recompute), device, micro_batches=micro_batches
    )
    ### END SOLUTION


def bytes_per_element(device: DeviceSpec) -> int:
    """Bytes of a number in the dtype that the device trains in. UserError: nobody trains in it."""
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    if device.dtype not in sizes:
        raise UserError(f"{device.name}: dtype={device.dtype!r}; one trains in {', '.join(sizes)}")
    return sizes[device.dtype]


def _attention_weights(cfg: ModelConfig) -> int:
    """Of the four projections of one layer; queries and outputs have more heads than keys."""
    return 2 * cfg.dim * (cfg.n_heads + cfg.n_kv_heads) * cfg.head_dim


def _router_weights(cfg: ModelConfig) -> int:
    return cfg.dim * cfg.n_experts


def _ffn_weights(cfg: ModelConfig) -> int:
    """Of one expert, or of the dense FFN: gate, up and down."""
    return 3 * cfg.dim * cfg.ffn_dim


def _sizes(**sizes) -> list[int]:
    """The sizes as Python's integers, which do not overflow as numpy's do."""
    return [whole_number(name, size) for name, size in sizes.items()]


def _check_number(**numbers) -> None:
    for name, value in numbers.items():
        try:
            bad = isinstance(value, (bool, str)) or not float(value) >= 0  # refuses NaN as well
        except (TypeError, ValueError):
            bad = True
        if bad:
            raise UserError(f"{name}={value!r} must be a number of at least 0")
