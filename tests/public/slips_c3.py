"""A model's counts, taken from the model itself, and the usual slips in a formula for them.

Each table of slips says what is wrong → the number that it gives.
"""

from collections import Counter
from functools import cache

import torch

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec, spec
from labkit.model import Transformer


@cache
def weights(cfg: ModelConfig) -> Counter:
    """Parameters of a model, by part; a model on the "meta" device takes no memory."""
    with torch.device("meta"):
        model = Transformer(cfg)
    sizes = Counter()
    for name, parameter in model.named_parameters():
        sizes[part(name)] += parameter.numel()
    return sizes


def part(name: str) -> str:
    """ "layers.0.attn.k_proj.weight" → "k_proj"; all FFN matrices are "ffn"."""
    if "router" in name:
        return "router"
    if ".ffn." in name:
        return "ffn"
    if name == "norm.weight":
        return "final_norm"
    return name.removesuffix(".weight").rpartition(".")[2]


def params(cfg: ModelConfig) -> int:
    return weights(cfg).total()


def norms(cfg: ModelConfig) -> int:
    return sum(size for name, size in weights(cfg).items() if "norm" in name)


def active_weights(cfg: ModelConfig) -> int:
    w, E = weights(cfg), max(cfg.n_experts, 1)
    idle = w["ffn"] * (E - max(cfg.experts_per_token, 1)) // E
    return w.total() - w["embed"] - norms(cfg) - idle


def attention_flops(cfg: ModelConfig, seqlen: int) -> int:
    """Per token: 4 × head_dim for each of (S + 1)/2 keys, in each query head of each layer."""
    return 2 * cfg.n_layers * cfg.n_heads * cfg.head_dim * (seqlen + 1)


def flops(cfg: ModelConfig, seqlen: int) -> int:
    return 2 * active_weights(cfg) + attention_flops(cfg, seqlen)


def rows(cfg: ModelConfig, n_tokens: int) -> float:
    return n_tokens * cfg.experts_per_token / cfg.n_experts if cfg.is_moe else n_tokens


def bytes_of(device: DeviceSpec) -> int:
    return {"float32": 4}.get(device.dtype, 2)


def floors(
    cfg: ModelConfig, micro_batch_size: int, seqlen: int, device: DeviceSpec
) -> tuple[float, float]:
    """(compute_ms, memory_ms) of a forward pass."""
    compute = micro_batch_size * seqlen * flops(cfg, seqlen) / (device.peak_tflops * 1e9)
    return compute, weights(cfg).total() * bytes_of(device) / (device.bandwidth_gbs * 1e6)


# ------------------------------------------------------------------------------------------ slips


def projection_slips(cfg: ModelConfig) -> dict[str, int]:
    """What is wrong in the projections → the weights that it adds."""
    w = weights(cfg)
    q, k, square = w["q_proj"], w["k_proj"], cfg.n_layers * cfg.dim**2
    return {
        "k_proj and v_proj have n_kv_heads heads, not n_heads": 2 * (q - k),
        "q_proj and o_proj have n_heads heads, not n_kv_heads": 2 * (k - q),
        "o_proj has n_heads heads, as q_proj has": k - q,
        "v_proj has n_kv_heads heads, as k_proj has": q - k,
        "a projection is dim × (heads · head_dim); here that is not dim × dim":
            4 * square - 2 * (q + k),
        "q_proj is dim × (n_heads · head_dim); here that is not dim × dim": 2 * (square - q),
        "o_proj is missing": -q,
        "attention's projections are missing": -2 * (q + k),
    }  # fmt: skip


def param_slips(cfg: ModelConfig) -> dict[str, float]:
    w, right, E = weights(cfg), weights(cfg).total(), max(cfg.n_experts, 1)
    qk_norms, layer_norms = w["q_norm"] + w["k_norm"], w["attn_norm"] + w["ffn_norm"]
    added = {
        "the norms are missing; each has a weight": -norms(cfg),
        "the norms of queries and keys (qk_norm) are missing": -qk_norms,
        "a norm of queries or keys covers all heads, not one":
            2 * cfg.n_layers * cfg.head_dim * cfg.qk_norm - qk_norms,
        "the norm of the keys has n_kv_heads · head_dim weights": w["q_norm"] - w["k_norm"],
        "this model has no norms of queries and keys: qk_norm is False":
            0 if cfg.qk_norm else w["q_proj"] // cfg.dim + w["k_proj"] // cfg.dim,
        "the last norm, before lm_head, is missing": -w["final_norm"],
        "a layer has two norms, before attention and before the FFN": -w["attn_norm"],
        "the layers' norms are missing": -layer_norms,
        "the router is missing": -w["router"],
        "embedding and lm_head are two matrices of vocab_size × dim; one is missing": -w["embed"],
        "embedding and lm_head are missing": -2 * w["embed"],
        "one expert was counted; a layer has n_experts": w["ffn"] // E - w["ffn"],
        "that counts the experts that a token uses; all n_experts have parameters":
            max(cfg.experts_per_token, 1) * w["ffn"] // E - w["ffn"],
        "an FFN or expert has three matrices: gate, up and down": -w["ffn"] // 3,
        "a dense model has an FFN too, although n_experts is 0": 0 if cfg.is_moe else -w["ffn"],
        **projection_slips(cfg),
    }  # fmt: skip
    return {
        **{words: right + more for words, more in added.items() if more},
        "that is active_params, what one token uses": active_weights(cfg),
        "that is in bytes of bfloat16; the function returns a number of parameters": 2 * right,
        "that is in bytes of float32; the function returns a number of parameters": 4 * right,
        "that is in billions; the function returns a number of parameters": right / 1e9,
    }


def active_slips(cfg: ModelConfig) -> dict[str, float]:
    w, right, E = weights(cfg), active_weights(cfg), max(cfg.n_experts, 1)
    share = max(cfg.experts_per_token, 1) / E
    added = {
        "all experts are counted; a token is multiplied by experts_per_token of them":
            w["ffn"] * (1 - share),
        "one expert is counted; a token is multiplied by experts_per_token of them":
            w["ffn"] / E - w["ffn"] * share,
        "the experts are missing": -w["ffn"] * share,
        "the FFN of a dense model is missing: experts_per_token is 0 there":
            0 if cfg.is_moe else -w["ffn"],
        "the embedding is counted; it is a look-up, not a multiply": w["embed"],
        "lm_head is missing; every token is multiplied by it": -w["lm_head"],
        "the norms are counted; they are element-wise, not a matrix multiply": norms(cfg),
        "the norms of queries and keys are counted; they are element-wise":
            w["q_norm"] + w["k_norm"],
        "embedding and norms are counted; neither is a matrix multiply": w["embed"] + norms(cfg),
        "the router is missing; it is a matrix multiply as well": -w["router"],
        "a router has n_experts columns, whichever are chosen": w["router"] * (share - 1),
        "an FFN or expert has three matrices: gate, up and down": -w["ffn"] * share / 3,
        **projection_slips(cfg),
    }  # fmt: skip
    return {
        **{words: right + more for words, more in added.items() if more},
        "that is every parameter of the model": w.total(),
        "only the experts are used in part; the rest is used by every token": w.total() * share,
        "that counts FLOPs; the function returns a number of weights": 2 * right,
    }


def flops_slips(cfg: ModelConfig, seqlen: int) -> dict[str, float]:
    w, right = weights(cfg), flops(cfg, seqlen)
    weights_flops, attention = 2 * active_weights(cfg), attention_flops(cfg, seqlen)
    per_key = 4 * cfg.n_layers * cfg.n_heads * cfg.head_dim  # scores, and weighted values
    share = cfg.n_kv_heads / cfg.n_heads
    return {
        "that counts multiply-adds, and each of them is two FLOPs": right / 2,
        "a weight costs a multiply-add, which is two FLOPs": weights_flops / 2 + attention,
        "attention's multiply-adds are two FLOPs each": weights_flops + attention / 2,
        "attention is missing": weights_flops,
        "the multiplies by weights are missing": attention,
        "attention is causal: not all S² pairs, but S(S + 1)/2": weights_flops + per_key * seqlen,
        "a sequence has S(S + 1)/2 pairs, not S²/2: a token attends to itself as well":
            weights_flops + per_key * seqlen / 2,
        "a sequence has S(S + 1)/2 pairs; a token attends to itself as well":
            weights_flops + per_key * (seqlen - 1) / 2,
        "key-value heads do not enter: each query head has its own scores":
            weights_flops + attention * share,
        "every layer has attention; one was counted": weights_flops + attention / cfg.n_layers,
        "attention works on n_heads · head_dim numbers; here that is not dim":
            weights_flops + 2 * cfg.n_layers * cfg.dim * (seqlen + 1),
        "head_dim is missing in attention":
            weights_flops + 2 * cfg.n_layers * cfg.n_heads * (seqlen + 1),
        "n_heads is missing in attention": weights_flops + attention / cfg.n_heads,
        "attention of the whole sequence was counted for every token":
            weights_flops + attention * seqlen,
        "that is a training step, three times a forward pass": 3 * right,
        "that is a training step with recomputation; this is the forward pass": 4 * right,
        "that is training by 6 · weights + 12 · L · H · d · S; this is an exact forward pass":
            3 * (weights_flops + per_key * seqlen),
        "that is the whole sequence; the function returns FLOPs per token": right * seqlen,
        "all parameters are multiplied, also those of idle experts and of the embedding":
            2 * w.total() + attention,
        **{words: 2 * found + attention for words, found in active_slips(cfg).items()},
    }  # fmt: skip


def rows_slips(cfg: ModelConfig, n_tokens: int) -> dict[str, float]:
    E, K, right = max(cfg.n_experts, 1), max(cfg.experts_per_token, 1), rows(cfg, n_tokens)
    return {
        "each token goes to experts_per_token experts, not to one": n_tokens / E,
        "that is the rows of all experts together; divide by n_experts": n_tokens * K,
        "that is the number of tokens": n_tokens,
        "the tokens are divided among n_experts, not among experts_per_token": n_tokens / K,
        "a dense model is its own only expert: every token is a row": 0,
        "a mean is not rounded": n_tokens * K // E,
        "a mean is not rounded up": -(-n_tokens * K // E),
        "that is upside down": E / (n_tokens * K),
    } | ({"an expert has no fewer than one row": max(1, right)} if right < 1 else {})


def compute_slips(cfg: ModelConfig, micro_batch_size: int, seqlen: int, device) -> dict[str, float]:
    tokens, work = micro_batch_size * seqlen, flops(cfg, seqlen)
    right, _ = floors(cfg, micro_batch_size, seqlen, device)
    fp32 = device.peaks.get("float32", device.peak_tflops)
    wrong = {
        "the FLOPs of one token were taken": 1 / tokens,
        "the FLOPs of one sequence were taken; there are micro_batch_size": 1 / micro_batch_size,
        "the sequences' tokens are missing: one a sequence was taken": 1 / seqlen,
        "it is in s; the function returns ms": 1e-3,
        "it is in µs; the function returns ms": 1e3,
        "the FLOPs were divided by TFLOP/s as they stand; one is 1e12 FLOPs a second": 1e9,
        "that is a training step, three times a forward pass": 3,
        "the peak is twice the dense one: a rate for sparse matrices": 0.5,
        f"the peak is that of float32; this device trains in {device.dtype}":
            device.peak_tflops / fp32,
        "one sequence of all tokens was taken; there are micro_batch_size of seqlen":
            flops(cfg, tokens) / work,
        **{words: found / work for words, found in flops_slips(cfg, seqlen).items()},
    }  # fmt: skip
    return {words: right * factor for words, factor in wrong.items() if factor != 1}


def memory_slips(cfg: ModelConfig, micro_batch_size: int, seqlen: int, device) -> dict[str, float]:
    count, size = weights(cfg).total(), bytes_of(device)
    _, right = floors(cfg, micro_batch_size, seqlen, device)
    wrong = {
        "the weights that one token uses are counted; the tokens together use all experts":
            active_weights(cfg) / count,
        f"float32 has four bytes; this device trains in {device.dtype}, with {size}": 4 / size,
        f"bfloat16 has two bytes; this device trains in {device.dtype}, with {size}": 2 / size,
        "the bytes of a weight are missing: elements were counted": 1 / size,
        "the weights are read once, not once a sequence": micro_batch_size,
        "the weights are read once, not once a token": micro_batch_size * seqlen,
        "it is in s; the function returns ms": 1e-3,
        "it is in µs; the function returns ms": 1e3,
        "the bytes were divided by GB/s as they stand; one is 1e9 bytes a second": 1e6,
        "bandwidths are in 1e9 bytes a second, not in GiB": 1 / 1.024**3,
        "the weights are read once, not read and written": 2,
        "by this convention every weight is read, the embedding too":
            1 - weights(cfg)["embed"] / count,
        "the bytes were divided by the peak of compute, not by the bandwidth":
            device.bandwidth_gbs / device.peak_tflops,
        **{words: found / count for words, found in param_slips(cfg).items()},
    }  # fmt: skip
    return {words: right * factor for words, factor in wrong.items() if factor != 1}


def floors_elsewhere(*arguments, which: int) -> dict[str, float]:
    """One of the two floors on devices that were not asked for."""
    return {
        f"that is the floor on the {name}: is `device` ignored?":
            floors(*arguments, spec(name))[which]
        for name in ("L40", "H100 SXM", "H200", "A100 SXM 80GB")
    }  # fmt: skip
