"""A training step: the loss, the optimizer, and two ways through a global batch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.data import NO_TARGET, MicroBatch
from labkit.errors import UserError
from labkit.hooks import span
from labkit.model import Transformer


def lm_loss(logits: Tensor, targets: Tensor, n_tokens: Tensor | int) -> Tensor:
    """Sum of the tokens' cross-entropies, divided by `n_tokens`. Computed in float32.

    logits `[T, V]`; targets `[T]`, −100 where there is none; n_tokens: the trainable tokens of the
    *global* batch. The losses of its micro batches then add up to the loss of the global batch.
    """
    total = F.cross_entropy(logits.float(), targets, ignore_index=NO_TARGET, reduction="sum")
    return total / n_tokens


def make_optimizer(model: Transformer, lr: float = 4e-4) -> torch.optim.AdamW:
    """AdamW with both moments in the weights' dtype; one fused kernel does each update."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)


def train_step(
    model: Transformer, optimizer: torch.optim.Optimizer, micro_batch: MicroBatch
) -> Tensor:
    """One optimizer step on one micro batch → its loss, a scalar that is still on the device."""
    n_tokens = micro_batch.n_targets().clamp(min=1)
    with span("forward"):
        # The logits have no name here: one would keep them alive through the backward.
        loss = lm_loss(model(micro_batch.tokens, micro_batch.seqs), micro_batch.targets, n_tokens)
    with span("backward"):
        loss.backward()
    with span("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def accumulated_step(
    model: Transformer, optimizer: torch.optim.Optimizer, micro_batches: Sequence[MicroBatch]
) -> Tensor:
    """One optimizer step on a global batch given as micro batches → the loss of the global batch.

    The update is that of `train_step` on the same sequences in one micro batch, up to rounding:
    every token weighs the same, however the sequences are split. Only one micro batch's
    activations are alive at a time. An empty list is an error.
    """
    micro_batches = list(micro_batches)
    if not micro_batches:
        raise UserError("no micro batches: a global batch needs at least one")
    ### BEGIN SOLUTION
    n_tokens = torch.stack([mb.n_targets() for mb in micro_batches]).sum().clamp(min=1)
    total = torch.zeros((), device=n_tokens.device)
    for mb in micro_batches:
        with span("forward"):
            loss = lm_loss(model(mb.tokens, mb.seqs), mb.targets, n_tokens)
        with span("backward"):
            loss.backward()
        total += loss.detach()
        del loss  # it holds the graph, and with it the logits, into the next forward
    with span("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    return total
    ### END SOLUTION
