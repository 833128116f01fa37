"""Coding Exercise 3: a model's counts. The properties of the public tests, on other sizes."""

import random

import pytest

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec
from labkit.perfmodel import (
    active_params,
    flops_per_token,
    forward_floor_ms,
    param_count,
    rows_per_expert,
)
from tests.public import checks_c3 as checks

ODD = DeviceSpec("an odd device", peak_tflops=37.5, bandwidth_gbs=613.7, memory_gib=24)
ODD_FP32 = DeviceSpec("another", 1.25, 71.3, memory_gib=24, dtype="float32")


def config(seed: int) -> ModelConfig:
    """A small model of odd sizes: a mixture if the seed is odd."""
    draw = random.Random(seed)
    experts = draw.randint(5, 20) if seed % 2 else 0
    kv_heads = draw.randint(1, 4)
    return ModelConfig(
        vocab_size=draw.randint(50, 5000),
        dim=8 * draw.randint(5, 40),
        n_layers=draw.randint(2, 6),
        n_heads=kv_heads * draw.randint(2, 4),
        n_kv_heads=kv_heads,
        head_dim=2 * draw.randint(5, 30),
        ffn_dim=8 * draw.randint(3, 60),
        n_experts=experts,
        experts_per_token=draw.randint(2, experts - 2) if experts else 0,
        qk_norm=draw.random() < 0.5 or seed % 4 == 1,
    )


CONFIGS = [config(seed) for seed in range(301, 309)]
DEEP = ModelConfig.preset("olmoe-1b-7b", n_layers=4, n_kv_heads=4)


@pytest.mark.exercise("C3", points=2)
def test_params():
    """Every parameter of dense and mixture models of odd sizes."""
    checks.check_params(param_count, *CONFIGS, DEEP)


@pytest.mark.exercise("C3", points=2)
def test_active_params():
    """The weights that a token meets in models of odd sizes."""
    checks.check_active(active_params, *CONFIGS, DEEP)


@pytest.mark.exercise("C3", points=3)
def test_flops():
    """FLOPs of a token in sequences of 1 to 3000 tokens."""
    seqlens = [random.Random(310).randint(2, 3000) for _ in range(3)]
    cases = [(cfg, seqlen) for cfg in CONFIGS for seqlen in (*seqlens, 1)]
    checks.check_flops(flops_per_token, *cases, (DEEP, 2048))


@pytest.mark.exercise("C3", points=1)
def test_rows():
    """Rows of an expert, below one and above a thousand."""
    checks.check_rows(rows_per_expert, *[(cfg, n) for cfg in CONFIGS for n in (1, 13, 40_001)])


@pytest.mark.exercise("C3", points=3)
def test_floors():
    """Both floors on devices of either dtype, by spec and by name."""
    cases = []
    for device in (ODD, ODD_FP32, "A100 SXM 80GB", "NVIDIA GeForce RTX 5090", None):
        cases += [(cfg, size, 91 * size, device) for cfg in CONFIGS[:4] for size in (2, 5)]
        cases += [(DEEP, 7, 1111, device)]
    checks.check_floors(forward_floor_ms, *cases)
