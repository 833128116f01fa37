"""Coding Exercise 4: annotate. The first line of each test says what it checks."""

import pytest
import torch
from torch import nn

from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.hooks import annotate
from labkit.model import Transformer
from labkit.train import lm_loss
from tests.public import checks_c4 as checks
from tests.public.recorded_ranges import Block, Recomputed

OLMOE = ModelConfig.preset("olmoe-tiny", n_layers=2, dim=32, ffn_dim=16, vocab_size=64)
SEEN = ["embed", "layers.0", "layers.0.attn", "layers.0.attn.q_proj", "layers.1.ffn.experts"]


def step(model: Transformer):
    batch = random_micro_batch(model.cfg, 1, 8)
    lm_loss(model(batch.tokens, batch.seqs), batch.targets, 8).backward()


def backward(model: Block):
    model(torch.randn(2, 4, requires_grad=True)).sum().backward()


@pytest.mark.exercise("C4", points=1)
def test_names():
    """Each submodule that is called has one range, named by its path; the model has none."""
    model = Transformer(OLMOE)
    called = [path for path, _ in model.named_modules() if path not in ("", "layers")]
    checks.check_names(annotate, model, step, called)


@pytest.mark.exercise("C4", points=1)
def test_nesting():
    """A range is open while its module runs, inside its parent's; two calls have two."""
    checks.check_nesting(annotate, Block("a", ("b", Block("c", "d"))), {"b": 1, "b.c": 1})
    layer = nn.Linear(4, 4)
    checks.check_nesting(
        annotate, Block(("inner", nn.Sequential(layer, layer, nn.Tanh()))), {"inner.0": 2}
    )


@pytest.mark.exercise("C4", points=2)
def test_exception():
    """When a forward raises, the exception comes through and every range is closed."""
    checks.check_exception(annotate, Block("a", ("b", Block("c", "d", fails_after="c"))))


@pytest.mark.exercise("C4", points=2)
def test_recomputation():
    """A recomputed forward has ranges called `recompute.…`, and every one is closed."""
    model = Recomputed(("block", Block("a", "b", "c")))
    checks.check_recomputation(annotate, model, ["block", "block.a", "block.b", "block.c"])
    model = Block("first", ("block", Recomputed("a", "b")), "last")
    checks.check_recomputation(annotate, model, ["block.a", "block.b"])


@pytest.mark.exercise("C4", points=1)
def test_unchanged():
    """The model's output and gradients stay the same."""
    checks.check_unchanged(annotate, Block("a", ("b", Block("c", "d"))))


@pytest.mark.exercise("C4", points=1)
def test_removal():
    """remove() takes everything off again."""
    checks.check_removal(annotate, Block("a", ("b", Block("c", "d"))))


@pytest.mark.exercise("C4", points=0)
def test_real_profiler():
    """torch.profiler shows the ranges of a training step, and those of a recomputation."""
    checks.check_profiler(annotate, Transformer(OLMOE), step, dict.fromkeys(SEEN, 1))
    model = Recomputed(("block", Block("a", "b")))
    expected = {"block.a": 1, "recompute.block": 1, "recompute.block.a": 1}
    checks.check_profiler(annotate, model, backward, expected)
