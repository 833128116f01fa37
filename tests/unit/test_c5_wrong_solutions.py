"""The checks of C5 fail each usual mistake, in words that name it, and no honest variant."""

from functools import partial

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from labkit.attention import causal_attention
from labkit.model import Transformer, rope_angles
from tests.hidden import test_c5_recompute as hidden
from tests.public import test_c5_recompute as public
from tests.unit.wrong_solutions import WrongSolutions, assert_named, assert_passes

wrong = WrongSolutions()
again = partial(checkpoint, use_reentrant=False)


class Variant(Transformer):
    """A Transformer whose recomputation branch is `branch`."""

    def hidden(self, tokens, seqs, cache=None):
        x = self.embed(tokens)
        rope = rope_angles(self.cfg, seqs.positions, x.dtype)
        attend = partial(causal_attention, seqs=seqs)
        for layer in self.layers:
            self.here = [layer]  # in a list: it is no submodule
            if self.recompute and torch.is_grad_enabled():
                x = self.branch(layer, x, rope, attend)
            else:
                x = layer(x, rope, attend)
        return self.norm(x)

    def branch(self, layer, x, rope, attend):
        return again(layer, x, rope, attend)


@wrong("Transformer", "none again in the backward pass")
class NothingRecomputed(Variant):
    def branch(self, layer, x, rope, attend):
        return layer(x, rope, attend)


@wrong("Transformer", r"keeps \d+ kB of activations.*: 100%")
class EverythingKept(NothingRecomputed):
    pass


@wrong("Transformer", "none again in the backward pass")
class SavedOnTheHost(Variant):
    def branch(self, layer, x, rope, attend):
        with save_on_cpu():
            return layer(x, rope, attend)


@wrong("Transformer", "as the old, reentrant checkpoint does: pass use_reentrant=False")
class Reentrant(Variant):
    def branch(self, layer, x, rope, attend):
        return checkpoint(layer, x, rope, attend, use_reentrant=True)


@wrong("Transformer", "pass use_reentrant=False")
class ReentrantByDefault(Variant):
    def branch(self, layer, x, rope, attend):
        return checkpoint(layer, x, rope, attend)


@wrong("Transformer", "outputs are dropped")
class OutputDropped(Variant):
    def branch(self, layer, x, rope, attend):
        again(layer, x, rope, attend)
        return x


@wrong("Transformer", "has no gradient: did its forward run with gradients off")
class NoGradients(Variant):
    def branch(self, layer, x, rope, attend):
        with torch.no_grad():
            return layer(x, rope, attend)


@wrong("Transformer", "has no gradient: .* detached input")
class Detached(Variant):
    def branch(self, layer, x, rope, attend):
        return again(layer, x.detach(), rope, attend)


@wrong("Transformer", r"was recomputed \d times: .* the loop's last layer")
class LastLayerAgain(Variant):
    def branch(self, layer, x, rope, attend):
        return again(lambda x: self.here[0](x, rope, attend), x)


@wrong("Transformer", "call the layer, not its forward")
class ForwardItself(Variant):
    def branch(self, layer, x, rope, attend):
        return again(layer.forward, x, rope, attend)


@wrong("Transformer", "not recomputed: layers.1")
class EveryOtherLayer(Variant):
    def branch(self, layer, x, rope, attend):
        if any(layer is other for other in self.layers[1::2]):
            return layer(x, rope, attend)
        return again(layer, x, rope, attend)


@wrong("Transformer", r"raised TypeError.*layer\(x_TD, rope, attend\)")
class ArgumentsForgotten(Variant):
    def branch(self, layer, x, rope, attend):
        return again(layer, x)


@wrong("Transformer", "the logits differ")
class RunTwiceInARow(Variant):
    def branch(self, layer, x, rope, attend):
        return again(layer, layer(x, rope, attend), rope, attend)


@wrong("Transformer", "ran twice before the backward pass began")
class RunTwiceForNothing(Variant):
    def branch(self, layer, x, rope, attend):
        layer(x, rope, attend)
        return again(layer, x, rope, attend)


@wrong("Transformer", "the same input as the first")
class ChangedInBetween(Variant):
    """The function that is checkpointed reads something that the next layer changes."""

    def branch(self, layer, x, rope, attend):
        self.scale = 1.0 if layer is self.layers[0] else 1.5
        return again(lambda x: layer(x, rope, attend) * self.scale, x)


@wrong("Transformer", "Checkpoint each layer by itself")
class AllLayersAtOnce(Variant):
    def hidden(self, tokens, seqs, cache=None):
        x = self.embed(tokens)
        rope = rope_angles(self.cfg, seqs.positions, x.dtype)

        def stack(x):
            for layer in self.layers:
                x = layer(x, rope, partial(causal_attention, seqs=seqs))
            return x

        recompute = self.recompute and torch.is_grad_enabled()
        return self.norm(again(stack, x) if recompute else stack(x))


@wrong("Transformer", "embed ran 2 times in a step")
class EmbeddingAsWell(Variant):
    def hidden(self, tokens, seqs, cache=None):
        if self.recompute and torch.is_grad_enabled():
            return again(super().hidden, tokens, seqs)
        return super().hidden(tokens, seqs)

    def branch(self, layer, x, rope, attend):
        return layer(x, rope, attend)


class InTheForward(Variant):
    """A closure that binds its own layer."""

    def branch(self, layer, x, rope, attend):
        def run(x, layer=layer):
            return layer(x, rope, attend)

        return again(run, x)


class KeywordArguments(Variant):
    def branch(self, layer, x, rope, attend):
        return again(layer, x, rope=rope, attend=attend, preserve_rng_state=False)


class ToTheEnd(Variant):
    """A recomputation that does not stop early."""

    def branch(self, layer, x, rope, attend):
        return again(layer, x, rope, attend, early_stop=False)


HONEST = [Transformer, Variant, InTheForward, KeywordArguments, ToTheEnd]


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant parameter")
@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("name", wrong)
def test_wrong_solution_is_named(name, module, monkeypatch):
    assert_named(module, wrong[name], monkeypatch)


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("solution", HONEST, ids=lambda one: one.__name__)
def test_honest_variant_passes(solution, module, monkeypatch):
    assert_passes(module, "Transformer", solution, monkeypatch)


@pytest.mark.parametrize("name", [name for name in vars(public) if name.startswith("test_")])
def test_an_open_exercise_stays_open(name, monkeypatch):
    class Open(Variant):
        def branch(self, layer, x, rope, attend):
            raise NotImplementedError("Coding Exercise 5: labkit/model.py, Transformer.hidden")

    monkeypatch.setattr(public, "Transformer", Open)
    with pytest.raises(NotImplementedError):
        getattr(public, name)()
