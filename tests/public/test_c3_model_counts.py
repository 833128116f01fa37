"""Coding Exercise 3: a model's counts. The first line of each test says what it checks."""

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

OLMOE = ModelConfig.preset("olmoe-1b-7b")
TINY = ModelConfig.preset("tiny")  # dense, and two query heads share a key-value head
MIXTURE = ModelConfig.preset("olmoe-tiny")
SHARED = ModelConfig.preset(
    "olmoe-tiny", n_layers=3, n_kv_heads=2, head_dim=48, ffn_dim=200, experts_per_token=6
)  # fmt: skip
SMALL = (TINY, MIXTURE, SHARED)
BF16 = DeviceSpec("a round device", peak_tflops=100, bandwidth_gbs=2000, memory_gib=10)
FP32 = DeviceSpec("a slow device", 0.5, 40, memory_gib=10, dtype="float32")


@pytest.mark.exercise("C3", points=2)
def test_params():
    """param_count counts every parameter of a model: 6,919,161,856 of OLMoE."""
    checks.check_params(param_count, *SMALL)
    checks.check_params(param_count, OLMOE, *map(ModelConfig.preset, ("small", "medium")))


@pytest.mark.exercise("C3", points=2)
def test_active_params():
    """active_params counts the weights that a token is multiplied by: 1,178,861,568 of OLMoE."""
    checks.check_active(active_params, *SMALL)
    checks.check_active(active_params, OLMOE, ModelConfig.preset("small"))


@pytest.mark.exercise("C3", points=3)
def test_flops():
    """flops_per_token is the forward pass of one token, with exact causal attention."""
    cases = [(cfg, seqlen) for cfg in SMALL for seqlen in (37, 1, 512)]
    checks.check_flops(flops_per_token, *cases, (OLMOE, 512), (OLMOE, 4096))


@pytest.mark.exercise("C3", points=1)
def test_rows():
    """rows_per_expert is a mean over the experts; a dense model is its own only expert."""
    checks.check_rows(rows_per_expert, (OLMOE, 512), (MIXTURE, 7), (SHARED, 1), (TINY, 100))


@pytest.mark.exercise("C3", points=2)
def test_floors():
    """forward_floor_ms returns the floors of compute and of memory, in this order and in ms."""
    cases = [(cfg, 3, seqlen) for cfg in SMALL for seqlen in (37, 256)]
    checks.check_floors(forward_floor_ms, *[(*c, device) for device in (BF16, FP32) for c in cases])


@pytest.mark.exercise("C3", points=1)
def test_devices():
    """OLMoE's floors for 1 and 32 sequences of 512, on devices given by name or in use."""
    cases = [(OLMOE, size, 512, name) for name in ("L40", "NVIDIA H200", None) for size in (1, 32)]
    checks.check_floors(forward_floor_ms, *cases)
