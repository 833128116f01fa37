"""What the tests of Coding Exercise 5 look for, as functions of a Transformer class.

Each check makes a small model with and without recomputation, watches which modules run when, and
raises an AssertionError that names the mistake.
"""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.data import MicroBatch
from labkit.hooks import in_backward
from labkit.model import Transformer
from labkit.train import lm_loss
from tests.public.judging import require
from tests.public.watched_steps import SavedActivations, one_thread, random_sequences

HOW = (
    "checkpoint(layer, …, use_reentrant=False) runs a layer, and runs it again in the backward pass"
)


@dataclass(frozen=True)
class Case:
    """A model, and sequences of random tokens of these lengths."""

    cfg: ModelConfig
    lengths: tuple[int, ...]
    seed: int

    def batch(self) -> MicroBatch:
        return MicroBatch.from_sequences(random_sequences(self.cfg, self.lengths, self.seed))


@dataclass(frozen=True)
class Call:
    """A module's forward: its name, whether in a backward pass, and whether gradients were on."""

    name: str
    backward: bool
    grad: bool


@dataclass
class Run:
    """What one pass of a model did."""

    model: Transformer
    calls: list[Call] = field(default_factory=list)
    logits: Tensor | None = None
    saved_bytes: int = 0

    def names(self, backward: bool) -> list[str]:
        return [call.name for call in self.calls if call.backward == backward]

    @property
    def layers(self) -> list[str]:
        return [f"layers.{number}" for number in range(self.model.cfg.n_layers)]


@cache  # the checks look at the same few runs, and none changes them
@one_thread()
def observe(transformer: type[Transformer], case: Case, recompute: bool, train: bool = True) -> Run:
    """A forward pass and, if `train`, a backward pass, of a model that is always the same."""
    torch.manual_seed(case.seed)
    model = transformer(case.cfg)
    model.recompute = recompute
    run, batch = Run(model), case.batch()

    def note(name):
        run.calls.append(Call(name, in_backward(), torch.is_grad_enabled()))

    for name, module in model.named_modules():
        if name in ("embed", "norm", "lm_head", *run.layers):
            module.register_forward_pre_hook(lambda module, args, name=name: note(name))
    try:
        with torch.set_grad_enabled(train), SavedActivations(model).watched() as saved:
            run.logits = model(batch.tokens, batch.seqs)
            run.saved_bytes = saved.alive
        if train:
            lm_loss(run.logits, batch.targets, batch.n_targets()).backward()
    except NotImplementedError:
        raise
    except Exception as error:
        raise AssertionError(misuse(run, error)) from error
    return run


def misuse(run: Run, error: Exception) -> str:
    said = f"with recompute = {run.model.recompute} the step raised {type(error).__name__}: "
    said += str(error).strip().partition("\n")[0]
    again = run.names(backward=True)
    if again and len(set(again)) < len(again):
        return f"{said} (recomputed: {', '.join(again)}). {late_binding(again)}"
    if "use_reentrant" in said:
        return f"{said} (pass use_reentrant=False)"
    if run.logits is None:
        return f"{said}. A layer is called as layer(x_TD, rope, attend)"
    return said


def late_binding(again: list[str]) -> str:
    twice = max(again, key=again.count)
    return (
        f"{twice} was recomputed {again.count(twice)} times: a function made in the loop sees the "
        "loop's last layer. Give checkpoint the layer itself, and its arguments"
    )


def require_own_layers(again: list[str]):
    if len(set(again)) < len(again):
        raise AssertionError(late_binding(again))


# ------------------------------------------------------------------------------------------ checks


def check_output(transformer, case: Case):
    """The same logits, bit for bit, with and without recomputation."""
    plain, again = (observe(transformer, case, recompute) for recompute in (False, True))
    if torch.equal(plain.logits, again.logits):
        return
    with torch.no_grad():
        model = again.model
        bare = model.lm_head(model.norm(model.embed(case.batch().tokens)))
    require(
        not torch.equal(bare, again.logits),
        "with recomputation the layers' outputs are dropped: x_TD must become what checkpoint "
        "returns",
    )
    differ = (plain.logits - again.logits).abs().max().item()
    raise AssertionError(f"with recomputation the logits differ, by up to {differ:.2g}")


def check_gradients(transformer, case: Case):
    """The same gradients, bit for bit, with and without recomputation."""
    plain, again = (observe(transformer, case, recompute) for recompute in (False, True))
    late = again.names(backward=True)
    pairs = zip(plain.model.named_parameters(), again.model.parameters(), strict=True)
    for (name, kept), recomputed in pairs:
        require(
            recomputed.grad is not None,
            f"with recomputation {name} has no gradient: did its forward run with gradients off, "
            f"or on a detached input? {HOW}",
        )
        if not torch.equal(kept.grad, recomputed.grad):
            require_own_layers(late)
            differ = (kept.grad - recomputed.grad).abs().max().item()
            raise AssertionError(
                f"with recomputation the gradient of {name} differs by up to {differ:.2g}: the "
                "recomputed forward must see the same input as the first"
            )


def check_activations(transformer, case: Case):
    """At most a quarter of the bytes that are kept without recomputation."""
    plain, again = (observe(transformer, case, recompute) for recompute in (False, True))
    share = again.saved_bytes / plain.saved_bytes
    require(
        share <= 0.25,
        f"with recomputation the forward keeps {again.saved_bytes / 1e3:.0f} kB of activations, "
        f"without it {plain.saved_bytes / 1e3:.0f} kB: {share:.0%}. Of a layer only its input is "
        f"to be kept, which would be a quarter at most. {HOW}",
    )


def check_forwards(transformer, case: Case):
    """Each layer runs twice in a step, the second time just before its own backward."""
    run = observe(transformer, case, recompute=True)
    first, again = run.names(backward=False), run.names(backward=True)
    missing = [name for name in run.layers if name not in first]
    require(
        not missing,
        f"no hook of {', '.join(missing)} was called: call the layer, not its forward, or ranges "
        "and timers do not see it",
    )
    twice = sorted({name for name in first if first.count(name) > 1})
    require(not twice, f"{', '.join(twice)} ran twice before the backward pass began")
    require(again, f"each layer ran once, and none again in the backward pass. {HOW}")
    off = [call.name for call in run.calls if not call.backward and not call.grad]
    require(
        not off,
        f"the first forward of {', '.join(off)} ran with gradients off, as the old, reentrant "
        "checkpoint does: pass use_reentrant=False",
    )
    _require_order(run, again)


def _require_order(run: Run, again: list[str]):
    others = [name for name in again if name not in run.layers]
    require(not others, f"{', '.join(others)} ran again as well: only layers are recomputed")
    missing = [name for name in run.layers if name not in again]
    require_own_layers(again)
    require(not missing, f"not recomputed: {', '.join(missing)}; every layer should be")
    require(
        again == run.layers[::-1],
        f"the layers were recomputed in the order {', '.join(again)}: that rebuilds the "
        "activations of several layers at once. Checkpoint each layer by itself",
    )


def check_only_layers(transformer, case: Case):
    """Embedding, last norm and lm_head run once, whatever is recomputed."""
    for recompute in (False, True):
        run = observe(transformer, case, recompute)
        for name in ("embed", "norm", "lm_head"):
            found = sum(call.name == name for call in run.calls)
            require(
                found == 1,
                f"with recompute = {recompute}, {name} ran {found} times in a step; it should run "
                "once: only layers are recomputed",
            )
    require(run.names(backward=True), f"no layer was recomputed. {HOW}")


def check_inference(transformer, case: Case):
    """Without gradients, and without recomputation, each layer runs once."""
    plain, again = (observe(transformer, case, one, train=False) for one in (False, True))
    require(torch.equal(plain.logits, again.logits), "without gradients the logits differ")
    for what, run in {
        "without gradients": again,
        "with recompute = False": observe(transformer, case, recompute=False),
    }.items():
        for name in run.layers:
            found = sum(call.name == name for call in run.calls)
            require(found == 1, f"{what}, {name} ran {found} times; it should run once")
    observe(transformer, case, recompute=True)  # so that an open exercise stays open
