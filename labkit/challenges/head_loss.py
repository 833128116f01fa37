"""The head's loss in chunks: the same number and gradients, without all of the logits at once.

Shapes: T tokens, D model dim, V vocabulary, C tokens of a chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from labkit.data import NO_TARGET, MicroBatch
from labkit.errors import UserError
from labkit.hooks import span
from labkit.model import Transformer


def chunked_lm_loss(
    hidden: Tensor, lm_head_weight: Tensor, targets: Tensor, n_tokens: Tensor | int, chunks: int = 8
) -> Tensor:
    """`lm_loss` of the head's logits, of which only one chunk's `[C, V]` exist at a time.

    hidden `[T, D]`, as `Transformer.hidden` gives it; lm_head_weight `[V, D]`; targets `[T]`, −100
    where there is none; n_tokens as in `lm_loss`. The forward keeps the chunk's input only; the
    backward makes its logits again, one more head multiply for each token. In bfloat16 the gradient
    of the weight is summed over the chunks in bfloat16. UserError for fewer than one chunk.
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise UserError(f"chunks={chunks!r} must be a whole number of at least 1")
    if len(hidden) != len(targets):
        raise UserError(f"hidden has {len(hidden)} tokens, and there are {len(targets)} targets")
    total = torch.zeros((), device=hidden.device)
    for hidden_CD, targets_C in zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True):
        # Nothing here is random, so there is no random state to keep for the second time.
        total = total + checkpoint(
            _sum_of_losses, hidden_CD, lm_head_weight, targets_C,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
    return total / n_tokens


def _sum_of_losses(hidden_CD: Tensor, lm_head_weight: Tensor, targets_C: Tensor) -> Tensor:
    logits_CV = F.linear(hidden_CD, lm_head_weight).float()
    return F.cross_entropy(logits_CV, targets_C, ignore_index=NO_TARGET, reduction="sum")


def chunked_step(
    model: Transformer, optimizer: torch.optim.Optimizer, micro_batch: MicroBatch, chunks: int = 8
) -> Tensor:
    """`train_step` with the chunked loss."""
    n_tokens = micro_batch.n_targets().clamp(min=1)
    with span("forward"):
        hidden = model.hidden(micro_batch.tokens, micro_batch.seqs)
        loss = chunked_lm_loss(hidden, model.lm_head.weight, micro_batch.targets, n_tokens, chunks)
    with span("backward"):
        loss.backward()
    with span("optimizer"):
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()
