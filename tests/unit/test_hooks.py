"""Ranges: the right names, and as many closed as opened, whatever happens in between."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit import hooks
from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.hooks import annotate, in_backward
from labkit.model import Transformer
from labkit.train import lm_loss


class Recorder(hooks.Ranges):
    """Ranges that keep a log: +name when one opens, -name when it closes."""

    log: list

    def __init__(self):
        super().__init__()
        Recorder.log, self.names = [], []

    def push(self, name):
        super().push(name)
        self.names.append(name)
        Recorder.log.append(f"+{name}")

    def pop(self):
        super().pop()
        Recorder.log.append(f"-{self.names.pop()}")


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    monkeypatch.setattr(hooks, "Ranges", Recorder)


def balanced():
    open_names = []
    for entry in Recorder.log:
        if entry[0] == "+":
            open_names.append(entry[1:])
        elif open_names.pop() != entry[1:]:
            return False
    return not open_names


class Block(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.first, self.second, self.fails = nn.Linear(4, 4), nn.Linear(4, 4), fails

    def forward(self, x):
        x = self.first(x).relu()
        if self.fails:
            raise RuntimeError("half-way")
        return self.second(x)


class Net(nn.Module):
    def __init__(self, fails=False, recompute=False):
        super().__init__()
        self.block, self.recompute = Block(fails), recompute

    def forward(self, x):
        if self.recompute:
            return checkpoint(self.block, x, use_reentrant=False)
        return self.block(x)


def test_ranges_nest_by_path():
    net = Net()
    annotate(net)
    net(torch.randn(2, 4))
    names = ["+block", "+block.first", "-block.first", "+block.second", "-block.second", "-block"]
    assert Recorder.log == names


def test_a_recomputation_is_named_and_closed():
    """PyTorch ends it by an exception; hooks without always_call leave two ranges open."""
    net = Net(recompute=True)
    annotate(net)
    net(torch.randn(2, 4, requires_grad=True)).sum().backward()
    pushes = [entry for entry in Recorder.log if entry[0] == "+"]
    again = [entry for entry in pushes if entry.startswith("+recompute.")]
    assert again[:2] == ["+recompute.block", "+recompute.block.first"]
    assert balanced() and len(pushes) * 2 == len(Recorder.log), Recorder.log


def test_naive_hooks_would_leave_ranges_open():
    """What always_call is for: the test above must be able to fail."""
    net, opened, closed = Net(recompute=True), [], []
    for module in net.block.modules():
        module.register_forward_pre_hook(lambda *_: opened.append(1))
        module.register_forward_hook(lambda *_: closed.append(1))
    net(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert len(opened) > len(closed), (len(opened), len(closed))


def test_an_exception_closes_every_range_and_comes_through():
    net = Net(fails=True)
    annotate(net)
    with pytest.raises(RuntimeError, match="half-way"):
        net(torch.randn(2, 4))
    assert balanced() and Recorder.log[-1] == "-block", Recorder.log
    net.block.fails = False
    net(torch.randn(2, 4))
    assert balanced()


def test_an_interrupt_is_cleaned_up_by_remove():
    net = Net()
    annotation = annotate(net)
    net.block.second.register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        net(torch.randn(2, 4))
    annotation.remove()
    assert balanced(), Recorder.log


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_module_called_twice_has_two_ranges():
    net = nn.Sequential(nn.Linear(4, 4))
    net.append(net[0])
    annotate(net)
    net(torch.randn(2, 4))
    assert Recorder.log == ["+0", "-0", "+0", "-0"]


def test_a_module_of_two_parents_has_one_range_a_call():
    shared = nn.Linear(4, 4)
    net = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    annotate(net)
    net(torch.randn(2, 4))
    assert Recorder.log.count("+0.0") == 2 and len(Recorder.log) == 8, Recorder.log


def test_removal_leaves_nothing():
    net = Net()
    with annotate(net) as annotation:
        pass
    annotation.remove()
    net(torch.randn(2, 4))
    assert Recorder.log == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_compiled_modules():
    net = nn.Sequential(torch.compile(Block(), backend="eager"), Block(), Block())
    net[2].compile(backend="eager")
    annotation = annotate(net)
    net(torch.randn(2, 4))
    assert [entry for entry in Recorder.log if entry[0] == "+"] == [
        "+0", "+1", "+1.first", "+1.second",
    ]  # fmt: skip
    assert annotation.skipped == ["2"] and balanced()


def test_in_backward_is_true_only_there():
    seen = []
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(in_backward()))
    seen.append(in_backward())
    y.sum().backward()
    assert seen == [False, True] and not in_backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_the_ranges_of_a_training_step_under_the_profiler(recompute):
    cfg = ModelConfig.preset("olmoe-tiny", n_layers=2)
    model, batch = Transformer(cfg), random_micro_batch(cfg, 1, 16)
    model.recompute = recompute
    with annotate(model), torch.profiler.profile() as profiler:
        lm_loss(model(batch.tokens, batch.seqs), batch.targets, 16).backward()
    counts = {event.key: event.count for event in profiler.key_averages()}
    for name in ("embed", "layers.0.attn", "layers.1.ffn.experts", "lm_head"):
        assert counts.get(name) == 1, f"{name}: {counts.get(name)}"
    assert counts.get("recompute.layers.1.attn", 0) == int(recompute)
    assert balanced()
