"""One Transformer, dense or a mixture of experts, over flat tokens. Read it top to bottom.

Shapes: T tokens, D model dim, H heads, G key-value heads, d head dim, F inner dim of an FFN,
E experts, K experts a token, R = T·K rows that are sent to experts, V vocabulary.
A suffix names a tensor's shape: x_TD is [T, D].

The mixture is OLMoE's (Muennighoff et al., 2024, arXiv:2409.02060): RMSNorm before each block and
over the whole projections of queries and keys, rotary positions, dropless top-K routing.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit.attention import causal_attention
from labkit.config import ModelConfig
from labkit.data import Seqs
from labkit.errors import UserError

# ------------------------------------------------------------------------------------ attention


def rope_angles(cfg: ModelConfig, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of the rotary angles, each `[T, 1, d]`; computed in float32."""
    evens = torch.arange(0, cfg.head_dim, 2, device=positions_T.device, dtype=torch.float32)
    frequencies = cfg.rope_theta ** (-evens / cfg.head_dim)
    angles = positions_T[:, None, None] * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021): the two halves of a head are the pairs."""
    swapped_THd = x_THd.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return torch.addcmul(x_THd * cos, swapped_THd, sin)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, and RMSNorm of queries and keys if asked."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.head_dim = cfg.head_dim
        q_dim, kv_dim = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
        self.q_proj = nn.Linear(cfg.dim, q_dim, bias=False)
        self.k_proj = nn.Linear(cfg.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(cfg.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(q_dim, cfg.dim, bias=False)
        # Over the whole projection, before it is cut into heads: OLMoE's choice.
        self.q_norm = nn.RMSNorm(q_dim, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(kv_dim, cfg.norm_eps) if cfg.qk_norm else nn.Identity()

    def forward(self, x_TD: Tensor, rope: tuple[Tensor, Tensor], attend: Callable) -> Tensor:
        heads = (-1, self.head_dim)
        q_THd = self.q_norm(self.q_proj(x_TD)).unflatten(-1, heads)
        k_TGd = self.k_norm(self.k_proj(x_TD)).unflatten(-1, heads)
        v_TGd = self.v_proj(x_TD).unflatten(-1, heads)
        y_THd = attend(rotate(q_THd, *rope), rotate(k_TGd, *rope), v_TGd)
        return self.o_proj(y_THd.flatten(1))


# ------------------------------------------------------------------------- feed-forward networks


class FeedForward(nn.Module):
    """Dense SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.dim, cfg.ffn_dim, bias=False)
        self.up_proj = nn.Linear(cfg.dim, cfg.ffn_dim, bias=False)
        self.down_proj = nn.Linear(cfg.ffn_dim, cfg.dim, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class Router(nn.Module):
    """Chooses K of E experts for each token.

    Returns their probabilities `[T, K]`, which do not sum to one, and their numbers `[T, K]`.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.experts_per_token = cfg.experts_per_token
        self.gate = nn.Linear(cfg.dim, cfg.n_experts, bias=False)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        probs_TE = self.gate(x_TD).softmax(dim=-1, dtype=torch.float32)
        weights_TK, experts_TK = probs_TE.topk(self.experts_per_token)
        return weights_TK.to(x_TD.dtype), experts_TK


class _Dispatch(torch.autograd.Function):
    """Copy each token to its K rows. The gradient adds the K rows up: `_Collect`."""

    @staticmethod
    def forward(ctx, x_TD, token_of_row_R, rows_of_token_TK):
        ctx.save_for_backward(rows_of_token_TK)
        return x_TD.index_select(0, token_of_row_R)

    @staticmethod
    def backward(ctx, grad_RD):
        (rows_of_token_TK,) = ctx.saved_tensors
        return _sum_rows(grad_RD, rows_of_token_TK), None, None


class _Collect(torch.autograd.Function):
    """Add each token's K rows up. The gradient copies: `_Dispatch`.

    PyTorch's own gradients of these two would sort the indices, or add with atomics.
    """

    @staticmethod
    def forward(ctx, y_RD, token_of_row_R, rows_of_token_TK):
        ctx.save_for_backward(token_of_row_R)
        return _sum_rows(y_RD, rows_of_token_TK)

    @staticmethod
    def backward(ctx, grad_TD):
        (token_of_row_R,) = ctx.saved_tensors
        return grad_TD.index_select(0, token_of_row_R), None, None


def _sum_rows(y_RD: Tensor, rows_of_token_TK: Tensor) -> Tensor:
    """The sum of each token's rows → `[T, D]`."""
    y_TKD = y_RD.index_select(0, rows_of_token_TK.flatten()).view(*rows_of_token_TK.shape, -1)
    return y_TKD.sum(1)


class Experts(nn.Module):
    """E SwiGLU networks, each applied to the tokens that chose it."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.impl = "grouped"
        self.gate_proj = nn.Parameter(torch.empty(cfg.n_experts, cfg.ffn_dim, cfg.dim))
        self.up_proj = nn.Parameter(torch.empty(cfg.n_experts, cfg.ffn_dim, cfg.dim))
        self.down_proj = nn.Parameter(torch.empty(cfg.n_experts, cfg.dim, cfg.ffn_dim))
        self.reset_parameters()

    def reset_parameters(self):
        """The same distribution as `nn.Linear`: uniform within 1/√fan_in."""
        for weight in self.parameters():
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        run = self._grouped if self.impl == "grouped" else self._naive
        return run(x_TD, weights_TK, experts_TK)

    def _grouped(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Sort the rows by expert, then one multiply for all experts; nothing waits for the GPU."""
        n_experts, n_choices = len(self.gate_proj), experts_TK.shape[1]
        expert_of_row_R, order_R = experts_TK.flatten().sort(stable=True)
        rows_of_token_TK = torch.empty_like(order_R).scatter_(
            0, order_R, torch.arange(len(order_R), device=order_R.device)
        ).view_as(experts_TK)  # fmt: skip
        token_of_row_R = order_R // n_choices
        ends_E = torch.searchsorted(
            expert_of_row_R, torch.arange(1, n_experts + 1, device=order_R.device), out_int32=True
        )
        x_RD = _Dispatch.apply(x_TD, token_of_row_R, rows_of_token_TK)
        gate_RF = F.grouped_mm(x_RD, self.gate_proj.mT, offs=ends_E)
        up_RF = F.grouped_mm(x_RD, self.up_proj.mT, offs=ends_E)
        # down_proj is linear, so the routing weight may come before it, where rows are narrower.
        weight_R1 = weights_TK.flatten()[order_R, None]
        y_RD = F.grouped_mm(F.silu(gate_RF) * up_RF * weight_R1, self.down_proj.mT, offs=ends_E)
        return _Collect.apply(y_RD, token_of_row_R, rows_of_token_TK)

    def _naive(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """A loop over the experts, as one would write it first. A case to profile, not to use."""
        out_TD = torch.zeros_like(x_TD)
        for expert in range(len(self.gate_proj)):
            tokens, choices = torch.where(experts_TK == expert)
            x = x_TD[tokens]
            gate, up = F.linear(x, self.gate_proj[expert]), F.linear(x, self.up_proj[expert])
            y = F.linear(F.silu(gate) * up, self.down_proj[expert])
            out_TD = out_TD.index_add(0, tokens, y * weights_TK[tokens, choices, None])
        return out_TD


class MixtureOfExperts(nn.Module):
    """A router, and the experts that it chooses from."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.router = Router(cfg)
        self.experts = Experts(cfg)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.experts(x_TD, *self.router(x_TD))


# ---------------------------------------------------------------------------------------- model


class Layer(nn.Module):
    """Attention and a feed-forward network, each normed before and added after."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.attn_norm = nn.RMSNorm(cfg.dim, cfg.norm_eps)
        self.attn = Attention(cfg)
        self.ffn_norm = nn.RMSNorm(cfg.dim, cfg.norm_eps)
        self.ffn = MixtureOfExperts(cfg) if cfg.is_moe else FeedForward(cfg)

    def forward(self, x_TD: Tensor, rope: tuple[Tensor, Tensor], attend: Callable) -> Tensor:
        x_TD = x_TD + self.attn(self.attn_norm(x_TD), rope, attend)
        return x_TD + self.ffn(self.ffn_norm(x_TD))


class Transformer(nn.Module):
    """Tokens `[T]` and their `Seqs` to logits `[T, V]`.

    recompute: keep only each layer's input, and run its forward again in the backward pass.
    moe_impl: "grouped" (one multiply for all experts) or "naive" (a loop over them).
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.recompute = False
        self.embed = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.n_layers))
        self.norm = nn.RMSNorm(cfg.dim, cfg.norm_eps)
        self.lm_head = nn.Linear(cfg.dim, cfg.vocab_size, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    @property
    def moe_impl(self) -> str:
        return next((m.impl for m in self.modules() if isinstance(m, Experts)), "grouped")

    @moe_impl.setter
    def moe_impl(self, impl: str):
        if impl not in ("grouped", "naive"):
            raise UserError(f"moe_impl={impl!r}; it is 'grouped' or 'naive'")
        for module in self.modules():
            if isinstance(module, Experts):
                module.impl = impl

    def forward(self, tokens_T: Tensor, seqs: Seqs) -> Tensor:
        return self.lm_head(self.hidden(tokens_T, seqs))

    def hidden(self, tokens_T: Tensor, seqs: Seqs, cache=None) -> Tensor:
        """What the head sees, `[T, D]`; `cache` (see `generate.KVCache`) holds earlier tokens."""
        self._check(tokens_T, seqs)
        x_TD = self.embed(tokens_T)
        positions = seqs.positions if cache is None else cache.begin(seqs)
        rope = rope_angles(self.cfg, positions, x_TD.dtype)
        for number, layer in enumerate(self.layers):
            attend = partial(causal_attention, seqs=seqs)
            if cache is not None:
                attend = partial(cache.attend, layer=number, seqs=seqs)
            if self.recompute and torch.is_grad_enabled():
                ### BEGIN SOLUTION
                x_TD = checkpoint(layer, x_TD, rope, attend, use_reentrant=False)
                ### END SOLUTION
            else:
                x_TD = layer(x_TD, rope, attend)
        return self.norm(x_TD)

    def _check(self, tokens_T: Tensor, seqs: Seqs):
        if tokens_T.shape != (seqs.n_tokens,):
            shape = list(tokens_T.shape)
            raise UserError(f"tokens have shape {shape}, but cu_seqlens end at {seqs.n_tokens}")
        if seqs.max_seqlen > self.cfg.max_seqlen:
            raise UserError(
                f"a sequence of {seqs.max_seqlen} tokens is longer than the model's "
                f"{self.cfg.max_seqlen} positions; cut it, or set max_seqlen in the ModelConfig"
            )
        if tokens_T.device.type == "cpu":  # reading a CUDA tensor here would stall every pass
            self.check_token_ids(tokens_T)

    def check_token_ids(self, tokens: Tensor):
        """Raise unless every id is in the vocabulary. On CUDA this waits for the GPU."""
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= self.cfg.vocab_size:
            bad = low if low < 0 else high
            raise UserError(f"token id {bad} is outside the vocabulary 0…{self.cfg.vocab_size - 1}")
