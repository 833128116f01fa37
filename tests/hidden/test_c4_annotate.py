"""Coding Exercise 4: annotate. The properties of the public tests, on other models."""

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

DENSE = ModelConfig.preset("tiny", n_layers=3, dim=32, vocab_size=100, ffn_dim=40)


def step(model: Transformer):
    batch = random_micro_batch(model.cfg, 2, 5)
    lm_loss(model(batch.tokens, batch.seqs), batch.targets, 10).backward()


def deep(depth: int, kind=Block) -> Block:
    """Blocks in Blocks, with a Linear before and after each."""
    if not depth:
        return kind("only")
    return kind("before", (f"level{depth}", deep(depth - 1)), "after")


@pytest.mark.exercise("C4", points=1)
def test_names():
    """Paths of a dense model, and of a Sequential whose children have numbers."""
    model = Transformer(DENSE)
    called = [path for path, _ in model.named_modules() if path not in ("", "layers")]
    checks.check_names(annotate, model, step, called)
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
    expected = ["0", "1", "1.0", "1.1"]
    checks.check_names(annotate, net, lambda net: net(torch.randn(2, 4)), expected)


@pytest.mark.exercise("C4", points=1)
def test_nesting():
    """Five levels; a module that is called three times."""
    checks.check_nesting(annotate, deep(4), {"before": 1, "level4.level3.level2.level1.only": 1})
    inner = Block("up", "down")
    model = Block(("inner", nn.Sequential(nn.ReLU(), nn.ReLU())), ("last", inner))
    model.inner.append(model.inner[0])
    checks.check_nesting(annotate, model, {"inner": 1, "inner.0": 2, "last.down": 1})


@pytest.mark.exercise("C4", points=2)
def test_exception():
    """An exception three levels down."""
    model = deep(3)
    model.level3.level2.fails_after = "before"
    checks.check_exception(annotate, model)


@pytest.mark.exercise("C4", points=2)
def test_recomputation():
    """Recomputation of deep blocks, and of one of two blocks."""
    names = ["level2", "level2.before", "level2.level1", "level2.level1.only", "level2.after"]
    checks.check_recomputation(annotate, deep(2, Recomputed), ["before", *names, "after"])
    model = Block(("kept", Block("a", "b")), ("again", Recomputed("c", ("d", Block("e", "f")))))
    again = ["again.c", "again.d", "again.d.e", "again.d.f"]
    checks.check_recomputation(annotate, model, again)


@pytest.mark.exercise("C4", points=1)
def test_unchanged():
    """Outputs and gradients, also under recomputation."""
    checks.check_unchanged(annotate, deep(3))
    checks.check_unchanged(annotate, deep(2, Recomputed))


@pytest.mark.exercise("C4", points=1)
def test_removal():
    """remove() leaves deep models as they were."""
    checks.check_removal(annotate, deep(4))
