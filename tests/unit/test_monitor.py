"""The monitor against a fake pynvml: what is missing is missing, and nothing is left behind."""

import math
import os
import threading
import time
from types import SimpleNamespace

import pytest

from labkit import monitor, nvml, samplers
from labkit.errors import UserError
from labkit.monitor import COLUMNS, CPU_FIELDS, Monitor, Summary
from labkit.nvml import GPM_METRICS, NVML_FIELDS, Gpu

GPU = Gpu("NVIDIA H100 80GB HBM3", "1234", pci="00000000:41:00.0")
MIG = Gpu("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "1234")


class NVMLError(Exception):
    pass


class Counter:
    def __init__(self):
        self.metricId, self.nvmlReturn, self.value = None, 0, math.nan


class FakeNvml:
    """As much of pynvml as labkit calls. `lacks` names functions that the driver refuses."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_ANY_TENSOR_UTIL = 2, 5
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10
    NVMLError = NVMLError

    def __init__(self, lacks=(), uuids=("GPU-1234",), slices=(), gpm=True, bits=0x4):
        self.lacks, self.uuids, self.slices = set(lacks), uuids, slices
        self.gpm, self.bits = gpm, bits
        self.initialised, self.samples, self.mig_reads = 0, set(), 0

    def __getattribute__(self, name):
        if name in object.__getattribute__(self, "lacks"):
            raise (
                NVMLError("Not Supported") if name != "nvmlInit" else NVMLError("Driver Not Loaded")
            )
        return object.__getattribute__(self, name)

    def nvmlInit(self):
        self.initialised += 1

    def nvmlShutdown(self):
        assert not self.samples, "GPM samples must be freed before NVML shuts down"
        self.initialised -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.uuids:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetHandleByPciBusId(self, pci):
        if pci != GPU.pci:
            raise NVMLError("Not Found")
        return "by-pci"

    def nvmlDeviceGetCount(self):
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.uuids[index]

    def nvmlDeviceIsMigDeviceHandle(self, handle):
        return SimpleNamespace(value=int(handle.startswith("MIG-")))  # a c_uint, as in pynvml

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index >= len(self.slices):
            raise NVMLError("Not Found")
        return self.slices[index]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        assert handle.startswith("MIG-"), handle
        return "GPU-parent"

    def nvmlDeviceGetGpuInstanceId(self, handle):
        return 3

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=90, memory=0)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1980, 2: 2619}[kind]

    def nvmlDeviceGetPowerUsage(self, handle):
        return 650_000

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 61

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.bits

    def nvmlGpmQueryDeviceSupport(self, handle):
        return SimpleNamespace(isSupportedDevice=int(self.gpm))

    def nvmlGpmSampleAlloc(self):
        sample = object()
        self.samples.add(sample)
        return sample

    def nvmlGpmSampleFree(self, sample):
        self.samples.remove(sample)

    def nvmlGpmSampleGet(self, handle, sample):
        assert sample in self.samples

    def nvmlGpmMigSampleGet(self, handle, slice_id, sample):
        assert (handle, slice_id) == ("GPU-parent", 3)
        self.mig_reads += 1

    def c_nvmlGpmMetricsGet_t(self):
        return SimpleNamespace(metrics=[Counter() for _ in range(333)])

    def nvmlGpmMetricsGet(self, query):
        values = {2: 84.0, 5: 81.0, 10: 16.0}
        for counter in query.metrics[: query.numMetrics]:
            counter.value = values[counter.metricId]


@pytest.fixture(autouse=True)
def no_gap(monkeypatch):
    monkeypatch.setattr(nvml, "GPM_GAP_S", 0)


def run(monkeypatch, fake, gpu=GPU, seconds=0.08):
    monkeypatch.setattr(monitor, "identify", lambda device: gpu)
    with Monitor(interval_s=0.02, nvml=fake) as watched:
        time.sleep(seconds)
    assert_nothing_left(fake)
    return watched


def assert_nothing_left(fake):
    assert (fake.initialised, fake.samples) == (0, set()), "NVML is open or a GPM sample not freed"
    left = [thread.name for thread in threading.enumerate() if thread.name == "labkit-monitor"]
    assert not left, f"threads still run: {left}"


def test_every_counter_arrives_in_its_unit(monkeypatch):
    watched = run(monkeypatch, FakeNvml())
    assert list(watched.samples) == list(COLUMNS) and len(watched.samples) >= 2
    means = watched.summary()
    expected = {
        "kernel_pct": 90, "memory_busy_pct": 0, "sm_clock_mhz": 1980, "mem_clock_mhz": 2619,
        "power_w": 650, "temperature_c": 61, "sm_active_pct": 84, "tensor_active_pct": 81,
        "dram_pct": 16, "throttle": "power cap 100%",
    }  # fmt: skip
    found = {name: means[name] for name in expected}
    assert found == expected, f"found {found}"
    assert watched.notes == [] and watched.samples.t_s.is_monotonic_increasing


LACKING = {
    "nvmlDeviceGetUtilizationRates": {"kernel_pct", "memory_busy_pct"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "mem_clock_mhz"},
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetCurrentClocksThrottleReasons": {"throttle"},
    "nvmlGpmMetricsGet": set(GPM_METRICS),
    "nvmlGpmQueryDeviceSupport": set(GPM_METRICS),
    "nvmlGpmSampleGet": set(GPM_METRICS),
    "nvmlGpmSampleAlloc": set(GPM_METRICS),
}


@pytest.mark.parametrize("function", LACKING)
def test_a_counter_that_the_driver_lacks_is_unknown_and_the_others_stay(monkeypatch, function):
    watched = run(monkeypatch, FakeNvml(lacks=[function]))
    means = watched.summary()
    missing = {name for name in (*NVML_FIELDS, *GPM_METRICS) if means[name] is None}
    assert missing == LACKING[function], f"without {function}, unknown are {missing}"
    for name in missing:
        assert watched.samples[name].isna().all(), f"{name} must be NaN, never 0"
        line = next(line for line in str(means).splitlines() if line.startswith(name))
        assert line.endswith("n/a"), line


def test_a_gpu_without_gpm_says_so_once(monkeypatch):
    watched = run(monkeypatch, FakeNvml(gpm=False))
    assert len(watched.notes) == 1 and "GPM" in watched.notes[0], watched.notes
    assert watched.summary()["kernel_pct"] == 90


@pytest.mark.parametrize("lacks", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_without_a_driver_or_its_gpu_the_workload_still_runs(monkeypatch, lacks):
    watched = run(monkeypatch, FakeNvml(lacks=[lacks], uuids=("GPU-8", "GPU-9")), Gpu("X", "7"))
    assert len(watched.notes) == 1 and watched.notes[0].startswith("no GPU counters"), watched.notes
    means = watched.summary()
    assert means["kernel_pct"] is None and means["cpu_pct"] is not None


@pytest.mark.parametrize(
    ("fake", "gpu", "handle"),
    [
        (FakeNvml(uuids=("GPU-9", "GPU-1234")), GPU, "GPU-1234"),
        (FakeNvml(uuids=("GPU-8", "GPU-9")), GPU, "by-pci"),
        (FakeNvml(uuids=("GPU-9",)), Gpu("X", "other"), "GPU-9"),
    ],
    ids=["uuid", "pci", "only one"],
)
def test_the_gpu_is_found_whatever_cuda_visible_devices_renumbers(fake, gpu, handle):
    assert nvml.find(fake, gpu) == (handle, False)


@pytest.mark.parametrize(
    "fake",
    [FakeNvml(uuids=("MIG-1234",)), FakeNvml(slices=("MIG-a",))],
    ids=["UUID of the slice", "UUID of the GPU"],
)
def test_a_mig_slice_is_sampled_as_a_slice(monkeypatch, fake):
    watched = run(monkeypatch, fake, MIG)
    assert watched.summary()["sm_active_pct"] == 84 and fake.mig_reads >= 2, fake.mig_reads
    assert "whole GPU" in watched.notes[0], watched.notes


def test_among_several_mig_slices_none_is_guessed(monkeypatch):
    watched = run(monkeypatch, FakeNvml(slices=("MIG-a", "MIG-b")), MIG)
    assert "2 MIG slices" in watched.notes[0], watched.notes
    assert watched.summary()["power_w"] is None


def test_an_exception_in_the_workload_passes_and_leaves_nothing(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setattr(monitor, "identify", lambda device: GPU)
    with pytest.raises(KeyboardInterrupt), Monitor(interval_s=0.02, nvml=fake):
        raise KeyboardInterrupt
    assert_nothing_left(fake)


def test_a_driver_that_hangs_does_not_hang_the_program(monkeypatch):
    fake, release = FakeNvml(), threading.Event()
    fake.nvmlDeviceGetPowerUsage = lambda handle: release.wait(20)
    monkeypatch.setattr(monitor, "identify", lambda device: GPU)
    monkeypatch.setattr(monitor, "JOIN_S", 0.1)
    start = time.perf_counter()
    with Monitor(interval_s=0.01, nvml=fake) as watched:
        time.sleep(0.05)
    took = time.perf_counter() - start
    release.set()
    watched._thread.join(5)
    assert took < 2, f"leaving the block took {took:.1f} s"
    assert "did not answer" in watched.notes[-1], watched.notes
    assert_nothing_left(fake)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_leaves_the_parents_sampling_alone(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setattr(monitor, "identify", lambda device: GPU)
    with Monitor(interval_s=0.02, nvml=fake) as watched:
        pid = os.fork()
        if pid == 0:
            watched.__exit__(None, None, None)
            os._exit(0 if fake.initialised == 1 else 1)
        deadline = time.monotonic() + 10
        while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert done == (pid, 0), f"the child ended with {done}"
    assert len(watched.samples) >= 1
    assert_nothing_left(fake)


def test_a_busy_core_shows_and_an_idle_one_does_not(monkeypatch):
    monkeypatch.setattr(monitor, "identify", lambda device: None)
    monkeypatch.setattr("labkit.ceilings.cores", lambda: 1)
    shares = []
    for work in (lambda: time.sleep(0.01), lambda: sum(range(10_000))):
        with Monitor(interval_s=0.05) as watched:
            end = time.perf_counter() + 0.3
            while time.perf_counter() < end:
                work()
        shares.append(watched.summary()["cpu_pct"])
    assert 3 * shares[0] < shares[1], f"asleep {shares[0]:.0f} %, at work {shares[1]:.0f} %"
    means = watched.summary()
    assert 0.01 < means["rss_gib"] < 100, means
    assert all(means[name] is None for name in (*NVML_FIELDS, *GPM_METRICS)), means


def test_the_shortest_window_still_has_a_sample(monkeypatch):
    monkeypatch.setattr(monitor, "identify", lambda device: None)
    with Monitor(interval_s=10) as watched:
        pass
    assert len(watched.samples) == 1, f"{len(watched.samples)} samples"


def test_what_ran_before_is_left_out_of_the_means():
    watched = Monitor()
    watched._rows = [{"t_s": t, "power_w": watts} for t, watts in ((0.1, 0), (0.9, 0), (1.1, 300))]
    assert watched.summary()["power_w"] == 300
    assert watched.summary(settle_s=0)["power_w"] == 100
    assert watched.summary(settle_s=60)["power_w"] == 100, "all, if none is later"


def test_throttle_reasons_are_words_and_shares():
    assert nvml.throttle_text(0) == nvml.throttle_text(1) == "none", "idle is no throttle"
    assert nvml.throttle_text(0x4 | 0x20) == "power cap, thermal (software)"
    watched = Monitor()
    watched._rows = [{"t_s": 2, "throttle": text} for text in ("power cap",) * 3 + ("none",)]
    assert watched.summary()["throttle"] == "power cap 75%; none 25%"


def test_a_summary_prints_a_line_a_counter():
    text = str(Summary(power_w=649.6, cpu_pct=0.5, throttle="none 100%", dram_pct=None))
    assert [line.split()[1] for line in text.splitlines()] == ["650", "0.50", "none", "n/a"], text


def test_before_the_start_there_are_no_samples_and_no_means():
    watched = Monitor()
    assert len(watched.samples) == 0 and list(watched.samples) == list(COLUMNS)
    assert set(watched.summary().values()) == {None}, watched.summary()
    assert set(CPU_FIELDS) < set(watched.summary())


@pytest.mark.parametrize("bad", [0, -1, 0.001, "1", None, float("nan"), float("inf")])
def test_a_senseless_interval_is_refused(bad):
    with pytest.raises(UserError, match="interval_s="):
        Monitor(interval_s=bad)


def test_a_monitor_runs_once(monkeypatch):
    watched = run(monkeypatch, FakeNvml())
    with pytest.raises(UserError, match="make a new one"):
        watched.__enter__()


@pytest.mark.gpu
def test_a_large_multiply_keeps_the_gpu_here_busy():
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    with Monitor() as watched:
        end = time.perf_counter() + 3
        while time.perf_counter() < end:
            for _ in range(20):
                a @ a
            torch.cuda.synchronize()
    means = watched.summary()
    assert means["kernel_pct"] is None or means["kernel_pct"] > 80, str(means)
    assert means["tensor_active_pct"] is None or means["tensor_active_pct"] > 40, str(means)


def test_a_benchmark_on_a_mig_slice_reads_the_clock_of_its_gpu(monkeypatch):
    fake = FakeNvml(uuids=("MIG-1234",))
    read_by = []
    monkeypatch.setattr(fake, "nvmlDeviceGetClockInfo", lambda handle, _: read_by.append(handle))
    monkeypatch.setattr(samplers, "_open_nvml", lambda: fake)
    monkeypatch.setattr(samplers, "identify", lambda device: GPU)
    with samplers.nvml_reader(on_gpu=True) as read:
        read()
    assert read_by == ["GPU-parent"]
