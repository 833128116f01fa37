"""Coding Exercise 2: the roofline. The first line of each test says what it checks."""

import pytest

from labkit.devices import DeviceSpec
from labkit.perfmodel import gemm_bytes, gemm_flops, roofline_tflops
from tests.public import checks_c2 as checks

ROUND = DeviceSpec("a round device", peak_tflops=100, bandwidth_gbs=2000, memory_gib=10)


@pytest.mark.exercise("C2", points=1)
def test_flops():
    """gemm_flops counts two FLOPs for each multiply-add, exactly."""
    checks.check_flops(gemm_flops, (2, 3, 5), (16, 2048, 2048), (32768, 2048, 50304))
    checks.check_flops(gemm_flops, (1_000_003, 65_537, 262_147), (2**21 + 1, 2**21, 2**23))


@pytest.mark.exercise("C2", points=1)
def test_bytes():
    """gemm_bytes counts each matrix once, in elements of any size."""
    checks.check_bytes(gemm_bytes, (2, 3, 5, 2), (16, 2048, 2048, None), (7, 11, 13, None))
    checks.check_bytes(gemm_bytes, (7, 11, 13, 4), (64, 2048, 1024, 1), (3, 5, 7, 0.5))


@pytest.mark.exercise("C2", points=1)
def test_roofline():
    """roofline_tflops rises with the intensity up to the ridge, and stays at the peak."""
    checks.check_roofline(roofline_tflops, "L40", 0.0004, 0.0752, 3.91)
    checks.check_roofline(roofline_tflops, "H200", 0.0004, 0.9, 1500)
    checks.check_roofline(roofline_tflops, ROUND, 0, 0.5, 1, 1.001)


@pytest.mark.exercise("C2", points=1)
def test_device():
    """The device may be a DeviceSpec, a name in the table, or None for the one in use."""
    for device in (ROUND, "L40", "NVIDIA H200", None):
        checks.check_roofline(roofline_tflops, device, 0.0004, 0.3, 30)
