"""The table of devices, how names find it, what is measured instead, and which device to use."""

import json
import pickle
from types import SimpleNamespace

import pytest
import torch

from labkit import ceilings, devices
from labkit.ceilings import Ceilings
from labkit.devices import DeviceSpec, spec
from labkit.errors import NotThisMachine, UserError

DRIVER_NAMES = {
    "Tesla V100-SXM2-16GB": "V100 SXM2 16GB",
    "Tesla V100-PCIE-32GB": "V100 PCIe 32GB",
    "Tesla T4": "T4",
    "NVIDIA A100-SXM4-40GB": "A100 SXM 40GB",
    "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB",
    "A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "nvidia l40s": "L40S",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA GH200 480GB": "GH200 96GB",
    "NVIDIA B200": "B200",
    "AMD Instinct MI300X": "MI300X",
}
UNKNOWN = ["A100", "V100", "L400", "NVIDIA H10", "", "Quadro RTX 6000", "RTX 3090 Ti", None]
OTHER_PARTS = [
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA RTX A6000 with Max-Q Design",
    "NVIDIA H100 NVL 64GB",
]


@pytest.fixture
def no_home(tmp_path, monkeypatch):
    """A home and a working directory without anything of the user's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    ceilings._measured.cache_clear()
    yield tmp_path
    ceilings._measured.cache_clear()


@pytest.mark.parametrize("reported", DRIVER_NAMES)
def test_every_spelling_of_a_driver_finds_its_device(reported):
    assert spec(reported).name == DRIVER_NAMES[reported]


@pytest.mark.parametrize("name", [*UNKNOWN, *OTHER_PARTS])
def test_a_name_that_is_not_in_the_table_never_passes_for_another(name):
    with pytest.raises(UserError, match=r"labkit-devices\.toml"):
        spec(name)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError) as error:
        spec("A100")
    for variant in ("A100 SXM 40GB", "A100 SXM 80GB", "A100 PCIe 40GB", "A100 PCIe 80GB"):
        assert variant in str(error.value), f"{variant} missing from: {error.value}"
    with pytest.raises(UserError, match="laptop"):
        spec("RTX 4090 Laptop GPU")


def test_no_two_devices_share_a_spelling():
    seen = {}
    for name, entry in devices.known_devices().items():
        for spelling in {devices._plain(other) for other in (name, *entry["match"])}:
            assert spelling not in seen, f"{spelling!r} is both {name} and {seen[spelling]}"
            seen[spelling] = name


def test_rates_are_dense_and_hold_together():
    for name, entry in devices.known_devices().items():
        device = spec(name)
        rates = device.peaks
        assert device.peak_tflops == rates[device.dtype], name
        assert entry["source"], f"{name} names no document"
        assert 10 < device.ridge < 500, f"{name}: ridge at {device.ridge:.0f} FLOPs a byte"
        if "bfloat16" in rates:
            assert rates["bfloat16"] == rates["float16"], name
            assert 1.9 < rates["bfloat16"] / rates["tf32"] < 2.1, f"{name}: one of them is sparse"
        if "float8" in rates:
            assert 1.9 < rates["float8"] / rates["bfloat16"] < 2.1, f"{name}: one is sparse"
    assert (spec("H100").peak_tflops, spec("H200").peak_tflops) == (989, 989)
    assert (spec("L40").peak_tflops, spec("L40").bandwidth_gbs) == (181.05, 864)
    assert round(spec("L40").ridge, 1) == 209.5, f"found {spec('L40').ridge}"


def test_a_peak_is_asked_for_by_dtype():
    l40 = spec("L40")
    assert l40.peak() == l40.peak("bf16") == l40.peak(torch.bfloat16) == 181.05
    assert l40.peak(torch.float32) == 90.5 and l40.peak(torch.float8_e4m3fn) == 362
    assert spec("T4").peak_tflops == 8.1, "a T4 trains in float32"
    with pytest.raises(UserError, match=r"T4 has no known bfloat16 rate.*float16 \(65\)"):
        spec("T4").peak("bfloat16")


@pytest.mark.parametrize("mig", ["MIG", "mig"])
def test_a_mig_slice_is_its_gpu_by_name_and_says_so(mig):
    found = spec(f"NVIDIA A100-SXM4-80GB {mig} 3g.40gb")
    assert found.peak_tflops == 312 and "whole GPU of MIG 3g.40gb" in found.name, found.name


def test_measured_ceilings_stay_beside_the_documents():
    h200 = spec("H200").with_measured(copy_gbs=4180).with_measured(gemm_tflops=790)
    assert h200.measured == Ceilings(copy_gbs=4180, gemm_tflops=790, launch_us=None)
    assert (h200.bandwidth_gbs, h200.peak_tflops) == (4800, 989)
    with pytest.raises(UserError, match="copy_gbs, gemm_tflops, launch_us"):
        h200.with_measured(speed=1)


def test_a_spec_can_be_a_key_and_travel_to_another_process():
    l40 = spec("L40")
    assert {l40: 1}[pickle.loads(pickle.dumps(l40))] == 1


@pytest.mark.parametrize("field", ["peak_tflops", "bandwidth_gbs", "memory_gib"])
@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "fast", None, True])
def test_a_spec_without_real_ceilings_is_refused(field, bad):
    good = {"peak_tflops": 1, "bandwidth_gbs": 1, "memory_gib": 1}
    with pytest.raises(UserError, match=f"{field}={bad!r}"):
        DeviceSpec("mine", **(good | {field: bad}))


def test_a_device_of_ones_own_comes_from_a_file(no_home):
    own = '[{}]\nmatch = ["Big"]\ntflops = {{ fp32 = {} }}\nbandwidth_gbs=1\nmemory_gib=1\n'
    config = no_home / ".config/labkit"
    config.mkdir(parents=True)
    (config / "devices.toml").write_text(own.format("L40", 5) + own.format('"Chip B"', 7))
    (no_home / "labkit-devices.toml").write_text(own.format("L40", 6))
    assert spec("L40").peak_tflops == 6, "the working directory wins over the home directory"
    assert spec("chip-b").peak_tflops == 7
    assert spec("L40S").peak_tflops == 362.05, "the others stay"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[L40", "cannot be read as TOML"),
        ("L40 = 3", "a device is a table"),
        ("[X]\nbandwidth_gbs = 1", "tflops=None"),
        ("[X]\ntflops = { fp32 = 1 }\nmemory_gib = 1", "bandwidth_gbs=None"),
        ("[X]\ntflops = { fp32 = -1 }\nmemory_gib = 1\nbandwidth_gbs = 1", "fp32=-1"),
        ("[X]\nspeed = 1", r"unknown \['speed'\]"),
        ("[X]\nmatch = 'X'\ntflops = { fp32 = 1 }", "match='X' must be a list"),
    ],
)
def test_a_broken_file_of_ones_own_is_named(no_home, text, says):
    (no_home / "labkit-devices.toml").write_text(text)
    with pytest.raises(UserError, match=rf"labkit-devices\.toml.*{says}"):
        spec("L40")


def test_resolve_takes_what_people_have(monkeypatch):
    here = DeviceSpec("here", 1, 1, 1)
    monkeypatch.setattr(devices, "current", lambda device=None: here)
    assert devices.resolve(here) is here
    assert devices.resolve("L40").name == "L40"
    for value in (None, "cpu", "cuda", "cuda:1", torch.device("cpu")):
        assert devices.resolve(value) is here, value


@pytest.fixture
def quick(monkeypatch):
    """Measurements that are counted instead of made."""
    made = []
    monkeypatch.setattr(ceilings, "_copy_gbs", lambda device: made.append("copy") or 20.0)
    monkeypatch.setattr(ceilings, "_gemm_tflops", lambda device, dtype: made.append("gemm") or 0.1)
    return made


def cache_files(home):
    return list((home / "cache").rglob("*"))


def test_a_cpu_is_measured_once_and_kept(no_home, quick):
    first = devices.current("cpu")
    ceilings._measured.cache_clear()  # as a new process
    again = devices.current("cpu")
    assert quick == ["copy", "gemm"], f"measured {quick}"
    assert first == again and first.peak_tflops == 0.1 and first.bandwidth_gbs == 20
    assert first.dtype == "float32" and first.measured.gemm_tflops == 0.1
    assert "cores" in first.name and "measured" in first.source and first.memory_gib > 0
    names = [path.suffix for path in cache_files(no_home) if path.is_file()]
    assert names == [".json"], f"left {names}"


DAMAGED = ["", "{", "[]", '{"ceilings": 3}', '{"ceilings": {"copy_gbs": -1, "gemm_tflops": 1}}']


@pytest.mark.parametrize("damage", [*DAMAGED, '{"ceilings": {"copy_gbs": 1}}', "\udcff"])
def test_a_damaged_cache_is_measured_anew(no_home, quick, damage):
    devices.current("cpu")
    (kept,) = (path for path in cache_files(no_home) if path.is_file())
    kept.write_bytes(damage.encode(errors="surrogateescape"))
    ceilings._measured.cache_clear()
    assert devices.current("cpu").bandwidth_gbs == 20
    assert len(quick) == 4, f"measured {quick}"
    assert json.loads(kept.read_text())["ceilings"]["copy_gbs"] == 20, "and written anew"


def test_a_cache_that_cannot_be_written_is_done_without(no_home, quick):
    (no_home / "cache").write_text("a file where the folder should be")
    assert devices.current("cpu").bandwidth_gbs == 20
    assert devices.current("cpu").bandwidth_gbs == 20 and len(quick) == 2, "kept in the process"


def test_the_ceilings_of_a_cpu_are_those_of_a_computer(monkeypatch):
    monkeypatch.setattr(ceilings, "BUDGET_S", 0)
    copy = ceilings._copy_gbs(torch.device("cpu"))
    gemm = ceilings._gemm_tflops(torch.device("cpu"), torch.float32)
    assert 0.5 < copy < 5000, f"{copy} GB/s"
    assert 1e-3 < gemm < 100, f"{gemm} TFLOP/s"


def fake_gpu(monkeypatch, name, gib=80, sms=108, capability=(8, 0), count=1):
    props = SimpleNamespace(name=name, total_memory=gib * 2**30, multi_processor_count=sms)
    for attribute, value in {
        "is_available": lambda: count > 0,
        "device_count": lambda: count,
        "get_device_properties": lambda device: props,
        "get_device_name": lambda device=None: name,
        "get_device_capability": lambda device=None: capability,
    }.items():
        monkeypatch.setattr(torch.cuda, attribute, value)


def test_a_gpu_of_the_table_keeps_its_rates_and_takes_its_own_memory(monkeypatch):
    fake_gpu(monkeypatch, "NVIDIA A100-SXM4-80GB", gib=79)
    found = devices.current()
    assert (found.peak_tflops, found.bandwidth_gbs, found.memory_gib) == (312, 2039, 79)


def test_a_mig_slice_in_use_gets_its_share(monkeypatch):
    fake_gpu(monkeypatch, "NVIDIA A100-SXM4-80GB MIG 3g.40gb", gib=40, sms=42)
    found = devices.current()
    assert found.peak_tflops == pytest.approx(312 * 42 / 108), found.peak_tflops
    assert found.bandwidth_gbs == pytest.approx(2039 / 2), found.bandwidth_gbs
    assert found.peak("float32") == pytest.approx(19.5 * 42 / 108)


def test_a_gpu_that_the_table_lacks_is_measured(monkeypatch, no_home, quick):
    fake_gpu(monkeypatch, "NVIDIA GeForce RTX 4060 Laptop GPU", gib=8, sms=24, capability=(8, 9))
    found = devices.current()
    assert (found.peak_tflops, found.bandwidth_gbs, found.dtype) == (0.1, 20, "bfloat16")
    assert found.name.endswith("Laptop GPU") and "measured" in found.source and found.sms == 24


def test_a_broken_file_is_not_taken_for_an_unknown_gpu(monkeypatch, no_home):
    fake_gpu(monkeypatch, "NVIDIA L40")
    (no_home / "labkit-devices.toml").write_text("[")
    with pytest.raises(UserError, match=r"labkit-devices\.toml"):
        devices.current()


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float32"), ((9, 0), "bfloat16")])
def test_bfloat16_only_where_the_hardware_has_it(monkeypatch, capability, dtype):
    fake_gpu(monkeypatch, "GPU", capability=capability)
    assert devices.training_dtype() == getattr(torch, dtype)
    assert devices.training_dtype("cpu") == torch.float32


def test_pick_prefers_a_gpu_and_knows_its_indices(monkeypatch):
    fake_gpu(monkeypatch, "GPU", count=2)
    assert devices.pick() == devices.pick("auto") == devices.pick("gpu") == torch.device("cuda")
    assert devices.pick("cuda:1") == devices.pick(torch.device("cuda", 1))
    assert devices.pick("CPU") == torch.device("cpu")
    with pytest.raises(NotThisMachine, match=r"'cuda:2'.*cuda:0, cuda:1"):
        devices.pick("cuda:2")


def test_pick_without_a_gpu_says_why_and_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.pick() == torch.device("cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NotThisMachine, match=r'build for CPUs only.*say "cpu"'):
        devices.pick("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(NotThisMachine, match=r"CUDA 13\.0, but finds no GPU"):
        devices.pick("gpu")


@pytest.mark.parametrize("garbage", ["tpu", "cuda:-1", "cuda:x", "", 0, 1.5, [], "mps"])
def test_pick_refuses_what_is_no_device(garbage):
    with pytest.raises(UserError, match='"auto", "cpu", "cuda"'):
        devices.pick(garbage)


@pytest.mark.gpu
def test_the_gpu_here_has_a_spec_and_believable_ceilings():
    here = devices.current()
    reached = ceilings.measured(devices.pick(), devices.training_dtype())
    assert 0.3 < reached.copy_gbs / here.bandwidth_gbs <= 1.02, f"{reached} on {here}"
    assert 0.3 < reached.gemm_tflops / here.peak_tflops <= 1.02, f"{reached} on {here}"


def test_the_memory_limit_of_a_job_is_found_in_its_own_control_group(tmp_path):
    (tmp_path / "self").write_text("0::/system.slice/job_7/step_0\n3:cpu,memory:/slurm/job_7\n")
    root = tmp_path / "cgroup"
    files = ceilings._memory_limits(tmp_path / "self", root)
    for name in (
        "memory.max", "system.slice/job_7/memory.max", "system.slice/job_7/step_0/memory.max",
        "memory/memory.limit_in_bytes", "memory/slurm/job_7/memory.limit_in_bytes",
    ):  # fmt: skip
        assert root / name in files, f"{name} is not among {files}"
    assert ceilings._memory_limits(tmp_path / "absent", root) == []
