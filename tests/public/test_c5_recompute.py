"""Coding Exercise 5: recomputation. The first line of each test says what it checks."""

import pytest

from labkit.config import ModelConfig
from labkit.model import Transformer
from tests.public import checks_c5 as checks
from tests.public.checks_c5 import Case

DENSE = ModelConfig(vocab_size=64, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=48)
MIXTURE = ModelConfig(
    vocab_size=64, dim=32, n_layers=3, n_heads=4, n_kv_heads=4, ffn_dim=16,
    n_experts=8, experts_per_token=2, qk_norm=True,
)  # fmt: skip
CASES = [Case(DENSE, (5, 1, 30, 12), seed=1), Case(MIXTURE, (16, 16, 7), seed=2)]


def each(check):
    for case in CASES:
        check(Transformer, case)


@pytest.mark.exercise("C5", points=1)
def test_output():
    """The logits are the same with recomputation."""
    each(checks.check_output)


@pytest.mark.exercise("C5", points=4)
def test_gradients():
    """The gradients are the same, bit for bit, of a dense model and of a mixture."""
    each(checks.check_gradients)


@pytest.mark.exercise("C5", points=3)
def test_activations():
    """At most a quarter of the activations is kept for the backward pass."""
    each(checks.check_activations)


@pytest.mark.exercise("C5", points=2)
def test_forwards():
    """Each layer runs twice in a step, the second time just before its own backward pass."""
    each(checks.check_forwards)


@pytest.mark.exercise("C5", points=1)
def test_only_layers():
    """Embedding and head are not recomputed."""
    each(checks.check_only_layers)


@pytest.mark.exercise("C5", points=1)
def test_inference():
    """Without gradients each layer runs once."""
    each(checks.check_inference)
