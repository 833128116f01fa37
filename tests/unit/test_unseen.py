"""Machines that never ran a step: what is promised of their predictions, on measured ones."""

import re
from pathlib import Path

import pytest

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec, known_devices, spec
from labkit.errors import UserError
from labkit.experiments.table import GEMM, KERNELS, OPS, REGIMES, SWEEP, read
from labkit.predictor.calibrate import configurations, errors
from labkit.predictor.predict import peak_gib, step_ms
from labkit.predictor.unseen import Readings, from_part1, from_spec

ROOT = Path(__file__).parents[2]
PART1 = ROOT / "benchmarks/results/part1_h200"
# What the L40's and the RTX 5090's Part 1 said: the fastest multiply, and an add of two GiB.
L40 = Readings(gemm_tflops=123.36, add_gbs=3 * 2**30 / 4.8808 / 1e6, launch_us=15.3)
RTX_5090 = Readings(gemm_tflops=2 * 8192**3 / 4.9836 / 1e9, add_gbs=3 * 2**30 / 2.0478 / 1e6)


@pytest.fixture(scope="module")
def steps():
    """Every measured configuration of the H200."""
    return configurations(read(ROOT / "labkit/assets/truth/h200.csv", SWEEP))


def only(folder, *schemas):
    for schema in schemas:
        schema.path(folder).write_bytes(schema.path(PART1).read_bytes())
    return folder


@pytest.mark.parametrize("schemas", [(GEMM, OPS, REGIMES), (GEMM, OPS, REGIMES, KERNELS)])
def test_an_h200_from_its_part_1_alone(steps, tmp_path, schemas):
    constants = from_part1(only(tmp_path, *schemas), spec("H200"))
    error = errors(steps, constants)["error"].abs().median()
    assert error < 0.08, f"median error {error:.1%}"


def test_an_h200_from_its_datasheet_alone(steps):
    error = errors(steps, from_spec(spec("H200")))["error"].abs().median()
    assert error < 0.15, f"median error {error:.1%}"


def test_an_l40_from_a_few_readings():
    """Two layers, 8 × 2048 tokens, recomputing: measured on an L40."""
    cfg, device = ModelConfig.preset("olmoe-1b-7b", n_layers=2), spec("L40")
    found = step_ms(cfg, 8, 2048, True, device, constants=from_spec(device, L40))
    assert abs(found / 417.9 - 1) < 0.10, f"{found} against 417.9 ms"
    measured = {"forward": 111.40, "backward": 212.66, "recompute": 70.62, "optimizer": 23.24}
    for kind, ms in measured.items():
        assert abs(found.by("group")[kind] / ms - 1) < 0.15, (
            f"{kind}: {found.by('group')[kind]:.4g}"
        )
    peak = peak_gib(cfg, 8, 2048, True, device)
    assert abs(peak / 15.45 - 1) < 0.02, f"{peak} against 15.45 GiB"


def test_an_rtx_5090_is_half_as_fast_again_as_an_l40_and_has_less_memory():
    cfg = ModelConfig.preset("olmoe-1b-7b", n_layers=2)
    slow, fast = (
        step_ms(cfg, 4, 2048, False, spec(name), constants=from_spec(spec(name), readings))
        for name, readings in (("L40", L40), ("RTX 5090", RTX_5090))
    )
    assert 1.5 < slow / fast < 2.5
    with pytest.raises(UserError, match=r"needs 48.3 GiB and RTX 5090 has 31.8"):
        step_ms(ModelConfig.preset("olmoe-1b-7b", n_layers=8), 8, 2048, False, spec("RTX 5090"))


def test_every_gpu_of_the_table_can_be_predicted():
    cfg = ModelConfig.preset("small")
    for name in known_devices():
        device = spec(name)
        if device.dtype != "float32" and "float32" in device.peaks:
            found = step_ms(cfg, 1, 512, False, device)
            assert 0.1 < found < 1000, f"{name}: {found}"


def test_more_bandwidth_helps_what_memory_bounds_and_nothing_else():
    cfg, device = ModelConfig.preset("olmoe-1b-7b", n_layers=2), spec("L40")
    one = step_ms(cfg, 4, 2048, False, device, constants=from_spec(device, L40))
    twice = Readings(L40.gemm_tflops, 2 * L40.add_gbs, L40.kernel_us, L40.launch_us)
    two = step_ms(cfg, 4, 2048, False, device, constants=from_spec(device, twice))
    assert abs(two.by()["optimizer"] / one.by()["optimizer"] - 0.5) < 1e-9
    assert two.by()["kernel starts"] == one.by()["kernel starts"]


def test_a_cpu_without_constants_says_what_to_run():
    cpu = DeviceSpec("Some CPU, 4 cores", 0.3, 30, 16, dtype="float32")
    with pytest.raises(UserError, match=r"Some CPU, 4 cores.*labkit sweep --truth.*calibrate"):
        step_ms(ModelConfig.preset("tiny"), 1, 128, False, cpu)


def test_a_cpu_from_its_part_1(tmp_path):
    folder = ROOT / "benchmarks/results/part1_cpu"
    cpu = DeviceSpec("AMD EPYC, 2 cores", 0.2, 20, 24, dtype="float32")
    constants = from_part1(folder, cpu)
    assert constants.launch_us == 0 and 0.05 < constants.gemm_tflops < 1
    for schema in (GEMM, OPS):
        schema.path(tmp_path).write_bytes(schema.path(folder).read_bytes())
    with pytest.raises(UserError, match="measure gemm, ops and kernels"):
        from_part1(tmp_path, cpu)


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(UserError, match=r"has none of gemm\.csv"):
        from_part1(tmp_path, spec("H200"))
    only(tmp_path, GEMM, OPS)
    text = OPS.path(tmp_path).read_text()
    OPS.path(tmp_path).write_text(text.replace("NVIDIA H200", "NVIDIA L40"))
    with pytest.raises(UserError, match=r"come from \['NVIDIA H200', 'NVIDIA L40'\]"):
        from_part1(tmp_path, spec("H200"))
    OPS.path(tmp_path).write_text(re.sub(r"(\ncopy,131072,cold,262144,[\d.]+,)", r"\1-", text))
    with pytest.raises(UserError, match=r"a time of -0\.\d+ ms"):
        from_part1(tmp_path, spec("H200"))


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
@pytest.mark.parametrize("shape", [(8, 4, 4096), (8, 16, 2048), (16, 1, 512)])
def test_a_way_out_that_is_named_does_fit(shape, micro_batches):
    (layers, size, seqlen), device = shape, spec("L40")
    cfg, more = ModelConfig.preset("olmoe-1b-7b", n_layers=layers), {"micro_batches": micro_batches}
    with pytest.raises(UserError) as caught:
        step_ms(cfg, size, seqlen, False, device, **more)
    said = str(caught.value)
    if "recompute=True needs" in said:
        step_ms(cfg, size, seqlen, True, device, **more)
    if found := re.search(r"micro_batch_size=(\d+)", said):
        step_ms(cfg, int(found[1]), seqlen, False, device, **more)
    if found := re.search(r"n_layers=(\d+)", said):
        fewer = ModelConfig.preset("olmoe-1b-7b", n_layers=int(found[1]))
        step_ms(fewer, size, seqlen, False, device, **more)
    assert re.search(r"needs \d+(\.\d+)? GiB and L40 has 45 \(\w", said)
