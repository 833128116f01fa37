"""Coding Exercise 8: the optimizer's memory and floor. The public properties, on other models."""

import pytest

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec
from labkit.perfmodel import optimizer_floor_ms, state_bytes
from tests.public import checks_c8 as checks

MODELS = [
    ModelConfig.preset("olmoe-1b-7b", n_layers=7),
    ModelConfig.preset("olmoe-tiny", n_layers=3, n_kv_heads=2, head_dim=48, experts_per_token=6),
    ModelConfig.preset("small"),
    ModelConfig(vocab_size=97, dim=40, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=56),
]
ODD = DeviceSpec("an odd device", peak_tflops=37.5, bandwidth_gbs=613.7, memory_gib=24)
SLOW = DeviceSpec("a slower device", 1.3, 57.9, memory_gib=10, dtype="float32")


@pytest.mark.exercise("C8", points=1)
def test_state():
    """Four tensors a parameter."""
    checks.check_state(state_bytes, *[(cfg, None) for cfg in MODELS])


@pytest.mark.exercise("C8", points=1)
def test_element():
    """Elements of one to eight bytes."""
    checks.check_state(state_bytes, *[(cfg, size) for cfg in MODELS for size in (1, 4, 8)])


@pytest.mark.exercise("C8", points=1)
def test_floor():
    """Seven elements a parameter."""
    checks.check_floor(optimizer_floor_ms, *[(cfg, ODD) for cfg in MODELS])
    checks.check_floor(optimizer_floor_ms, *[(cfg, SLOW) for cfg in MODELS])


@pytest.mark.exercise("C8", points=1)
def test_device():
    """Devices by name, and the one in use."""
    for device in ("A100 SXM 80GB", "NVIDIA GeForce RTX 5090", "h100 sxm", None):
        checks.check_floor(optimizer_floor_ms, *[(cfg, device) for cfg in MODELS])
