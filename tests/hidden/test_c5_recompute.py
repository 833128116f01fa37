"""Coding Exercise 5: recomputation. The properties of the public tests, on other models."""

import pytest

from labkit.config import ModelConfig
from labkit.model import Transformer
from tests.public import checks_c5 as checks
from tests.public.checks_c5 import Case

DEEP = ModelConfig(
    vocab_size=100, dim=24, n_layers=7, n_heads=6, n_kv_heads=2, head_dim=8, ffn_dim=40
)  # fmt: skip
MIXTURE = ModelConfig(
    vocab_size=50, dim=40, n_layers=5, n_heads=4, n_kv_heads=2, head_dim=10, ffn_dim=24,
    n_experts=12, experts_per_token=3, qk_norm=True,
)  # fmt: skip
CASES = [Case(DEEP, (3, 41, 1, 1, 8), seed=501), Case(MIXTURE, (25, 2, 14), seed=502)]


def each(check):
    for case in CASES:
        check(Transformer, case)


@pytest.mark.exercise("C5", points=1)
def test_output():
    """The logits of deep and narrow models."""
    each(checks.check_output)


@pytest.mark.exercise("C5", points=4)
def test_gradients():
    """The gradients, bit for bit, of seven dense layers and of five mixtures."""
    each(checks.check_gradients)


@pytest.mark.exercise("C5", points=3)
def test_activations():
    """At most a quarter of the activations is kept."""
    each(checks.check_activations)


@pytest.mark.exercise("C5", points=2)
def test_forwards():
    """Each layer runs twice, in the right order."""
    each(checks.check_forwards)


@pytest.mark.exercise("C5", points=1)
def test_only_layers():
    """Embedding and head run once."""
    each(checks.check_only_layers)


@pytest.mark.exercise("C5", points=1)
def test_inference():
    """Each layer runs once without gradients."""
    each(checks.check_inference)
