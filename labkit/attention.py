"""Causal attention over flat tokens: FlashAttention where the GPU has it, SDPA elsewhere.

Shapes: T tokens, B sequences of L tokens, H heads, G key-value heads, d head dim.
"""

from functools import cache
from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.data import Seqs

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a build without FlashAttention
    varlen_attn = None


@cache
def _has_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashAttention's variable-length kernel runs: Ampere or later, 16-bit numbers.

    Its heads are a multiple of 8 wide, and at most 256.
    """
    return (
        varlen_attn is not None
        and head_dim % 8 == 0
        and head_dim <= 256
        and device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@cache
def _varlen_options() -> dict:
    """Causal attention; from torch 2.12 on the kernel shares key-value heads by itself."""
    gqa = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    return {"window_size": (-1, 0), **gqa}


def causal_attention(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, seqs: Seqs) -> Tensor:
    """Each token attends to itself and to what precedes it in its own sequence → `[T, H, d]`."""
    if _has_varlen(q_THd.device, q_THd.dtype, q_THd.shape[-1]):
        options = _varlen_options()
        if "enable_gqa" not in options:
            k_TGd, v_TGd = _repeat_heads(q_THd, k_TGd, v_TGd)
        cu, longest = seqs.cu_seqlens, seqs.max_seqlen
        return varlen_attn(q_THd, k_TGd, v_TGd, cu, cu, longest, longest, **options)
    if len(set(seqs.lengths)) == 1:
        batched = (x.unflatten(0, (-1, seqs.lengths[0])) for x in (q_THd, k_TGd, v_TGd))
        return _attend_batch(*batched).flatten(0, 1)
    parts = zip(*(x.split(seqs.lengths) for x in (q_THd, k_TGd, v_TGd)), strict=True)
    return torch.cat([_attend_batch(*(x[None] for x in qkv))[0] for qkv in parts])


def _attend_batch(q_BLHd: Tensor, k_BLGd: Tensor, v_BLGd: Tensor) -> Tensor:
    """Causal attention within B sequences of one length L, where there is no varlen kernel."""
    k_BLHd, v_BLHd = _repeat_heads(q_BLHd, k_BLGd, v_BLGd)
    q, k, v = (x.transpose(1, 2) for x in (q_BLHd, k_BLHd, v_BLHd))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _repeat_heads(q: Tensor, *kv: Tensor) -> list[Tensor]:
    """Give every query head a key-value head of its own; heads are the last dimension but one."""
    share = q.shape[-2] // kv[0].shape[-2]
    return [x.repeat_interleave(share, dim=-2) if share > 1 else x for x in kv]
