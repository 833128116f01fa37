"""What the tests of Coding Exercise 6 look for, as functions of an implementation.

Each check makes a step on a small model, looks at the gradient that the optimizer steps with, and
raises an AssertionError that names the mistake: it looks for a usual slip that gives that gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import exp, isnan, log

import torch
from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.data import NO_TARGET, MicroBatch, Seqs
from labkit.errors import UserError
from labkit.model import Transformer
from labkit.train import lm_loss, train_step
from tests.public.judging import require
from tests.public.slips_c6 import explain, near, slips
from tests.public.watched_steps import SavedActivations, one_thread, random_sequences

CFG = ModelConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=16,
    n_experts=4, experts_per_token=2, qk_norm=True,
)  # fmt: skip
# A large eps: Adam must not make a large update of a gradient that is all rounding.
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
}


@dataclass(frozen=True)
class Case:
    """A global batch: `groups` has the sequences' lengths, micro batch by micro batch.

    A share `masked` of the targets is taken out, and all targets of the micro batches in `empty`.
    """

    groups: tuple[tuple[int, ...], ...]
    seed: int
    masked: float = 0.0
    empty: tuple[int, ...] = ()
    optimizer: str = "SGD"

    def micro_batches(self) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(self.seed)
        batches = []
        for number, lengths in enumerate(self.groups):
            ids = random_sequences(CFG, lengths, self.seed + number)
            batch = MicroBatch.from_sequences(ids)
            out = torch.rand(len(batch.targets), generator=generator) < self.masked
            out |= torch.tensor(number in self.empty)
            targets = batch.targets.masked_fill(out, NO_TARGET)
            batches.append(MicroBatch(batch.tokens, targets, batch.seqs))
        return batches


def together(batches: Sequence[MicroBatch]) -> MicroBatch:
    """The same sequences as one micro batch."""
    lengths = [length for batch in batches for length in batch.seqs.lengths]
    tokens, targets = (
        torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "targets")
    )
    return MicroBatch(tokens, targets, Seqs.from_lengths(lengths))


@dataclass
class Run:
    """What one or more steps did. `gradient` is flat: what the optimizer first stepped with."""

    model: nn.Module
    loss: float = 0.0
    steps: int = 0
    gradient: Tensor | None = None
    alive_before: list[int] = field(default_factory=list)  # saved bytes when a forward begins
    peak_bytes: int = 0


def new_model(seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(CFG)


@one_thread()
def observe(step, model: nn.Module, optimizer: str, data, n_steps: int = 1) -> Run:
    """Make steps on `data`: micro batches for accumulated_step, one of them for train_step."""
    run, saved = Run(model), SavedActivations(model)
    update = OPTIMIZERS[optimizer](model.parameters())

    def before_step(*_):
        run.steps += 1
        if run.gradient is None:
            run.gradient = flat_gradient(model)

    update.register_step_pre_hook(before_step)
    handle = model.register_forward_pre_hook(lambda *_: run.alive_before.append(saved.alive))
    try:
        with saved.watched():
            for _ in range(n_steps):
                run.loss = as_number(step(model, update, data))
    except (NotImplementedError, AssertionError):
        raise
    except Exception as error:
        said = f"accumulated_step raised {type(error).__name__}: {error}"
        raise AssertionError(said.partition("\n")[0]) from error
    finally:
        handle.remove()
    run.peak_bytes = saved.peak
    return run


def flat_gradient(model: nn.Module) -> Tensor:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


def as_number(loss) -> float:
    require(loss is not None, "accumulated_step returned None: is the return missing?")
    require(
        not (torch.is_tensor(loss) and loss.requires_grad),
        "the loss that is returned still holds a graph: return loss.detach(), as train_step does",
    )
    number = torch.is_tensor(loss) and loss.numel() == 1
    require(
        number or isinstance(loss, (int, float)),
        f"accumulated_step returned a {type(loss).__name__}; it returns the global batch's loss",
    )
    return float(loss)


@cache
def reference(case: Case, n_steps: int = 1) -> Run:
    """What train_step does with the same sequences in one micro batch."""
    data = together(case.micro_batches())
    return observe(train_step, new_model(case.seed), case.optimizer, data, n_steps)


@cache
@one_thread()
def sums(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Of each micro batch, the sum of the cross-entropies, `[1]`, and its gradient, flat."""
    losses, gradients = [], []
    for batch in case.micro_batches():
        model = new_model(case.seed)
        loss = lm_loss(model(batch.tokens, batch.seqs), batch.targets, 1)
        loss.backward()
        losses.append(loss.detach()[None])
        gradients.append(flat_gradient(model))
    return losses, gradients


# ------------------------------------------------------------------------------------------ checks


def check_update(accumulated_step, case: Case):
    """The gradient and the new weights are those of train_step on the same sequences."""
    batches = case.micro_batches()
    ours = observe(accumulated_step, new_model(case.seed), case.optimizer, batches)
    right = reference(case)
    require(ours.steps > 0, "the optimizer never stepped")
    require(
        not torch.isnan(ours.gradient).any(),
        "the gradient is nan: was it divided by 0 tokens? train_step counts 1 at least",
    )
    require(
        ours.gradient.any() or not right.gradient.any(),
        "the gradients were gone when the optimizer stepped: zero_grad() comes after step()",
    )
    require_one_step(ours, len(batches))
    if not near(ours.gradient, right.gradient):
        words = explain(ours.gradient, sums(case)[1], slips(batches))
        words += ". zero_grad() comes once, after the step" if "only the last" in words else ""
        raise AssertionError(f"{shown(batches)} the gradient is not the global batch's: {words}")
    for (name, a), b in zip(ours.model.named_parameters(), right.model.parameters(), strict=True):
        differ = (a - b).abs().max().item()
        require(
            differ <= 1e-5,
            f"the gradient is right, and after the step {name} differs from train_step's by up to "
            f"{differ:.2g}",
        )


def shown(batches: Sequence[MicroBatch]) -> str:
    counts = [f"{int(batch.n_targets())}" for batch in batches]
    return f"for micro batches of {', '.join(counts)} trainable tokens"


def require_one_step(run: Run, n_micro_batches: int):
    require(
        run.steps == 1,
        f"the optimizer stepped {run.steps} times for {n_micro_batches} micro batches: it steps "
        "once for a global batch, after the last",
    )


def check_loss(accumulated_step, case: Case):
    """The loss that is returned is that of the global batch."""
    batches = case.micro_batches()
    found = observe(accumulated_step, new_model(case.seed), case.optimizer, batches).loss
    right = reference(case).loss
    _require_loss(found, right, sums(case)[0], batches)


def _require_loss(found: float, right: float, sums: list[Tensor], batches: list[MicroBatch]):
    require(
        not isnan(found),
        f"{shown(batches)} the loss is nan: was it divided by 0 tokens? "
        "train_step counts 1 at least",
    )
    if not near(torch.tensor([found]), torch.tensor([right])):
        words = explain(torch.tensor([found]), sums, slips(batches))
        raise AssertionError(
            f"{shown(batches)} the loss is {found:.4g}, and {right:.4g} is right: {words}"
        )


class Table(nn.Module):
    """A model whose logits are a row for each token: every cross-entropy is known."""

    def __init__(self, losses: Sequence[float], vocabulary: int = 16):
        super().__init__()
        rows = torch.zeros(len(losses), vocabulary)
        # The target's logit a gives log(e^a + V − 1) − a; this is that solved for a.
        rows[:, 0] = torch.tensor([log((vocabulary - 1) / (exp(loss) - 1)) for loss in losses])
        self.rows = nn.Parameter(rows)

    def forward(self, tokens: Tensor, seqs: Seqs) -> Tensor:
        return self.rows[tokens]


def check_known_losses(accumulated_step, *groups: tuple[int, float]):
    """Micro batches of n tokens that each have the same, known loss."""
    batches = [
        MicroBatch(torch.full((n,), i), torch.zeros(n, dtype=torch.int64), Seqs.from_lengths([n]))
        for i, (n, _) in enumerate(groups)
    ]
    model = Table([loss for _, loss in groups])
    found = observe(accumulated_step, model, "SGD", batches).loss
    right = sum(n * loss for n, loss in groups) / sum(n for n, _ in groups)
    _require_loss(found, right, [torch.tensor([n * loss]) for n, loss in groups], batches)


def check_one_step(accumulated_step, case: Case):
    """One step for a global batch, and no gradient left for the next one."""
    batches = case.micro_batches()
    run = observe(accumulated_step, new_model(case.seed), case.optimizer, batches)
    require_one_step(run, len(batches))
    left = [p for p in run.model.parameters() if p.grad is not None and p.grad.any()]
    require(
        not left,
        f"after the step {len(left)} parameters still have a gradient: without zero_grad() the "
        "next step adds to it",
    )
    twice = observe(accumulated_step, new_model(case.seed), case.optimizer, batches, n_steps=2)
    right = reference(case, n_steps=2)
    require(
        abs(twice.loss - right.loss) <= 1e-4 * right.loss,
        f"the second of two steps has a loss of {twice.loss:.5g}, and train_step {right.loss:.5g}",
    )


def check_memory(accumulated_step, case: Case):
    """Only one micro batch's activations are alive at a time."""
    batches = case.micro_batches()
    ours = observe(accumulated_step, new_model(case.seed), case.optimizer, batches)
    whole = reference(case)
    require(
        len(ours.alive_before) == len(batches),
        f"the model ran {len(ours.alive_before)} times for {len(batches)} micro batches",
    )
    held = [(i + 1, alive) for i, alive in enumerate(ours.alive_before) if alive]
    if held:
        number, alive = held[0]
        raise AssertionError(
            f"when micro batch {number} begins, {alive / 1e3:.0f} kB of activations of those "
            "before it are still alive: call backward() on each loss, without retain_graph, "
            "before the next forward"
        )
    share = ours.peak_bytes / whole.peak_bytes
    largest = max(len(batch.tokens) for batch in batches) / len(together(batches).tokens)
    require(
        share <= 1.3 * largest,
        f"the step keeps {share:.0%} of the activations that one large micro batch keeps, and its "
        f"largest micro batch has {largest:.0%} of the tokens",
    )


def check_empty(accumulated_step):
    """A global batch without micro batches is an error that says so."""
    model = new_model(0)
    try:
        accumulated_step(model, OPTIMIZERS["SGD"](model.parameters()), [])
    except UserError:
        return
    except NotImplementedError:
        raise
    except Exception as error:
        raise AssertionError(
            f"an empty list raised {type(error).__name__}; a UserError should say what is missing"
        ) from error
    raise AssertionError("an empty list of micro batches was taken; a UserError should be raised")
