"""Coding Exercise 2: the roofline. The properties of the public tests, on other sizes."""

import random

import pytest

from labkit.devices import DeviceSpec
from labkit.perfmodel import gemm_bytes, gemm_flops, roofline_tflops
from tests.public import checks_c2 as checks

ODD = DeviceSpec("an odd device", peak_tflops=37.5, bandwidth_gbs=613.7, memory_gib=24)


def sizes(seed: int, count: int, most: int) -> list[tuple[int, int, int]]:
    """Shapes (M, k, n) of three different numbers each."""
    draw = random.Random(seed)
    return [tuple(draw.sample(range(2, most), 3)) for _ in range(count)]


@pytest.mark.exercise("C2", points=1)
def test_flops():
    """2·M·k·n for small, model-sized and very large shapes."""
    checks.check_flops(gemm_flops, *sizes(201, 5, 50), *sizes(202, 5, 60_000))
    checks.check_flops(gemm_flops, *sizes(203, 5, 20_000_003), (1, 1, 1))


@pytest.mark.exercise("C2", points=1)
def test_bytes():
    """Each matrix once, for every element size that a dtype has."""
    checks.check_bytes(gemm_bytes, *[(*shape, None) for shape in sizes(211, 5, 10_000)])
    for size in (0.5, 1, 2, 4, 8):
        checks.check_bytes(gemm_bytes, *[(*shape, size) for shape in sizes(212, 4, 10_000)])
    checks.check_bytes(gemm_bytes, (1, 3, 5, 0.5))


@pytest.mark.exercise("C2", points=1)
def test_roofline():
    """Both bounds of devices whose ridges lie between 25 and 250 FLOPs a byte."""
    for device in ("A100 SXM 80GB", "RTX 5090", "T4", ODD):
        checks.check_roofline(roofline_tflops, device, 0, 0.001, 0.11, 0.97, 1.03, 9, 2500)


@pytest.mark.exercise("C2", points=1)
def test_device():
    """A DeviceSpec, names as drivers and as people write them, and None."""
    for device in (ODD, "NVIDIA A100-SXM4-80GB", "h100 sxm", "NVIDIA GeForce RTX 5090", None):
        checks.check_roofline(roofline_tflops, device, 0.02, 0.6, 2)
