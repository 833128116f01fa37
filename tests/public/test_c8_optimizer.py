"""Coding Exercise 8: the optimizer's memory and its floor. Each test says what it checks."""

import pytest

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec
from labkit.perfmodel import optimizer_floor_ms, state_bytes
from tests.public import checks_c8 as checks

OLMOE = ModelConfig.preset("olmoe-1b-7b")
FOUR = ModelConfig.preset("olmoe-1b-7b", n_layers=4)
MIXTURE = ModelConfig.preset("olmoe-tiny")
DENSE = ModelConfig.preset("tiny")
BF16 = DeviceSpec("a round device", peak_tflops=100, bandwidth_gbs=2000, memory_gib=10)
FP32 = DeviceSpec("a slow device", 0.5, 40, memory_gib=10, dtype="float32")


@pytest.mark.exercise("C8", points=1)
def test_state():
    """state_bytes is 8 bytes a parameter in bfloat16: 51.6 GiB for all of OLMoE."""
    checks.check_state(state_bytes, (MIXTURE, None), (DENSE, None), (FOUR, None), (OLMOE, 2))


@pytest.mark.exercise("C8", points=1)
def test_element():
    """state_bytes counts elements of any size."""
    checks.check_state(state_bytes, (MIXTURE, 4), (DENSE, 4), (FOUR, 2), (DENSE, 1))


@pytest.mark.exercise("C8", points=1)
def test_floor():
    """optimizer_floor_ms moves 7 elements a parameter, at the device's bandwidth, in ms."""
    checks.check_floor(optimizer_floor_ms, (MIXTURE, BF16), (DENSE, BF16), (FOUR, BF16))
    checks.check_floor(optimizer_floor_ms, (MIXTURE, FP32), (DENSE, FP32))


@pytest.mark.exercise("C8", points=1)
def test_device():
    """The device is a DeviceSpec, a name, or None for the one in use."""
    for device in ("L40", "NVIDIA H200", None):
        checks.check_floor(optimizer_floor_ms, (FOUR, device), (DENSE, device))
