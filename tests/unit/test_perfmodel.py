"""Exercise C2's functions against the definition, by exact numbers and by properties."""

import random
import subprocess
import sys

import pytest

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec, spec
from labkit.errors import UserError
from labkit.perfmodel import (
    flops_breakdown,
    forward_floor_ms,
    gemm_bytes,
    gemm_flops,
    roofline_tflops,
)

L40 = spec("L40")


def test_the_worked_example_is_exact():
    flops, moved = gemm_flops(16, 2048, 2048), gemm_bytes(16, 2048, 2048)
    assert (flops, moved) == (134_217_728, 8_519_680)
    assert round(flops / moved, 2) == 15.75, f"found {flops / moved} FLOPs a byte"
    bound = roofline_tflops(flops / moved, L40)
    assert bound == pytest.approx(15.7538 * 0.864, rel=1e-4), f"found {bound} TFLOP/s"


def test_flops_and_bytes_count_what_a_plain_multiply_does():
    M, k, n = (random.randint(1, 9) for _ in range(3))
    multiply_adds = sum(1 for _ in range(M) for _ in range(k) for _ in range(n))
    assert gemm_flops(M, k, n) == 2 * multiply_adds, f"{M=} {k=} {n=}: {gemm_flops(M, k, n)}"
    elements = sum(rows * columns for rows, columns in ((M, k), (k, n), (M, n)))
    for size in (1, 2, 4):
        found = gemm_bytes(M, k, n, size)
        assert found == size * elements, f"{M=} {k=} {n=}, {size} bytes each: {found}"


def test_transposing_the_product_changes_nothing():
    M, k, n = (random.randint(1, 5000) for _ in range(3))
    assert gemm_flops(M, k, n) == gemm_flops(n, k, M), f"{M=} {k=} {n=}"
    assert gemm_bytes(M, k, n) == gemm_bytes(n, k, M), f"{M=} {k=} {n=}"


def test_the_roofline_rises_to_the_ridge_and_stays_at_the_peak():
    below = roofline_tflops(L40.ridge / 2, L40)
    assert below == pytest.approx(L40.peak_tflops / 2), f"half the ridge gives {below} TFLOP/s"
    for factor in (1.001, 10, float("inf")):
        above = roofline_tflops(L40.ridge * factor, L40)
        assert above == L40.peak_tflops, f"{factor} ridges give {above}, not the peak"
    assert roofline_tflops(0, L40) == 0, "no FLOPs, no FLOP/s"


def test_the_device_may_be_a_spec_a_name_or_nothing(monkeypatch):
    own = DeviceSpec("own", peak_tflops=10, bandwidth_gbs=1000, memory_gib=8)
    assert roofline_tflops(1, own) == 1
    assert roofline_tflops(1, "NVIDIA L40") == 0.864
    monkeypatch.setattr("labkit.perfmodel.resolve", lambda device: own if device is None else L40)
    assert roofline_tflops(1) == 1, "None is the device in use"


@pytest.mark.parametrize("bad", [0, -1, 2.0, 2.5, True, "8", None])
def test_a_size_that_is_no_whole_number_is_refused_by_name(bad):
    for function in (gemm_flops, gemm_bytes):
        with pytest.raises(UserError, match=f"k={bad!r}"):
            function(16, bad, 16)


def test_other_bad_input_is_refused_by_name():
    with pytest.raises(UserError, match="bytes_per_element=0"):
        gemm_bytes(1, 1, 1, 0)
    for bad in (-1, float("nan"), "many", None):
        with pytest.raises(UserError, match=f"intensity={bad!r}"):
            roofline_tflops(bad, L40)
    with pytest.raises(UserError, match="L400"):
        roofline_tflops(1, "L400")


def test_the_performance_model_does_not_load_torch():
    code = "import sys; from labkit.perfmodel import roofline_tflops as r; r(1, 'L40');"
    code += "print([m for m in ('torch', 'numpy', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", f"it loaded {done.stdout}"


def test_small_numpy_integers_do_not_overflow():
    np = pytest.importorskip("numpy")
    sizes = [np.int32(size) for size in (32768, 2048, 50304)]
    assert gemm_flops(*sizes) == 2 * 32768 * 2048 * 50304


def test_a_breakdown_refuses_what_the_other_counts_refuse():
    cfg = ModelConfig.preset("tiny")
    for sizes, words in (((0,), "seqlen=0"), ((8, -1), "micro_batch_size=-1")):
        with pytest.raises(UserError, match=words):
            flops_breakdown(cfg, *sizes)


def test_a_dtype_that_nobody_trains_in_is_named():
    device = DeviceSpec("own", peak_tflops=10, bandwidth_gbs=1000, memory_gib=8, dtype="tf32")
    with pytest.raises(UserError, match="own: dtype='tf32'"):
        forward_floor_ms(ModelConfig.preset("tiny"), 1, 8, device)
