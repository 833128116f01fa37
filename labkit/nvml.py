"""NVML, the library behind nvidia-smi: find the GPU in use, read its counters one by one.

Every function takes the `nvml` module (pynvml), so that a test can pass another. A counter that the
driver or the permissions do not give is None.
"""

import time
from dataclasses import dataclass

GPM_GAP_S = 0.1  # NVML documents this as the least time between two GPM samples

THROTTLES = {  # bits of nvmlClocksEventReasons; an idle GPU (bit 0) is not held back
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal (software)",
    0x040: "thermal (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
}

NVML_FIELDS = {
    "kernel_pct": lambda n, gpu: n.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory_busy_pct": lambda n, gpu: n.nvmlDeviceGetUtilizationRates(gpu).memory,
    "sm_clock_mhz": lambda n, gpu: n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_SM),
    "mem_clock_mhz": lambda n, gpu: n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_MEM),
    "power_w": lambda n, gpu: n.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "temperature_c": lambda n, gpu: n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU),
    "throttle": lambda n, gpu: throttle_text(n.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
}
GPM_METRICS = {"sm_active_pct": "SM_UTIL", "tensor_active_pct": "ANY_TENSOR_UTIL",
               "dram_pct": "DRAM_BW_UTIL"}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """How to find a CUDA device in NVML, whose order differs under CUDA_VISIBLE_DEVICES."""

    name: str
    uuid: str
    pci: str | None = None


class NvmlSampler:
    """One GPU's NVML counters, each read by itself, so that one missing costs one."""

    def __init__(self, gpu: Gpu, nvml=None):
        if nvml is None:
            import pynvml as nvml
        self._nvml, self.notes, self._gpm = nvml, [], None
        nvml.nvmlInit()
        try:
            handle, self.is_mig = find(nvml, gpu)
            self._handle = handle
            if self.is_mig:
                self._handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
                self.notes.append("a MIG slice: power, temperature and clocks are the whole GPU's")
            self._open_gpm(handle)
        except BaseException:
            self.close()
            raise

    def _open_gpm(self, handle) -> None:
        try:
            slice_id = self._nvml.nvmlDeviceGetGpuInstanceId(handle) if self.is_mig else None
            self._gpm = GpmSampler(self._nvml, self._handle, slice_id)
        except Exception as error:
            self.notes.append(f"no GPM counters (SM, tensor, DRAM activity): {reason(error)}")

    @property
    def has_gpm(self) -> bool:
        return self._gpm is not None

    def driver(self) -> str | None:
        return attempt(self._nvml.nvmlSystemGetDriverVersion)

    def read(self) -> dict:
        row = {name: attempt(get, self._nvml, self._handle) for name, get in NVML_FIELDS.items()}
        return row | (self._gpm.read() if self._gpm else {})

    def close(self) -> None:
        if self._gpm:
            self._gpm.close()
        attempt(self._nvml.nvmlShutdown)


class GpmSampler:
    """NVML's performance-monitoring counters (Hopper and later): two samples make a reading."""

    def __init__(self, nvml, handle, slice_id: int | None = None):
        self._nvml, self._handle, self._slice_id = nvml, handle, slice_id
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise RuntimeError("this GPU has none; Hopper and later do")
        self._samples = []
        try:
            for _ in range(2):
                self._samples.append(nvml.nvmlGpmSampleAlloc())
            self._take(self._samples[0])
        except BaseException:
            self.close()
            raise
        self._taken_s = time.perf_counter()

    def _take(self, sample) -> None:
        if self._slice_id is None:
            self._nvml.nvmlGpmSampleGet(self._handle, sample)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._handle, self._slice_id, sample)

    def read(self) -> dict:
        """Percentages since the last reading; nothing if that was less than GPM_GAP_S ago."""
        if time.perf_counter() - self._taken_s < GPM_GAP_S:
            return {}
        return attempt(self._read) or {}

    def _read(self) -> dict:
        before, after = self._samples
        self._take(after)
        query = self._nvml.c_nvmlGpmMetricsGet_t()
        query.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(GPM_METRICS)
        query.sample1, query.sample2 = before, after
        for slot, metric in zip(query.metrics, GPM_METRICS.values(), strict=False):
            slot.metricId = getattr(self._nvml, f"NVML_GPM_METRIC_{metric}")
        self._nvml.nvmlGpmMetricsGet(query)
        self._samples, self._taken_s = [after, before], time.perf_counter()
        return {
            column: slot.value if slot.nvmlReturn == 0 else None
            for column, slot in zip(GPM_METRICS, query.metrics, strict=False)
        }

    def close(self) -> None:
        while self._samples:
            attempt(self._nvml.nvmlGpmSampleFree, self._samples.pop())


def find(nvml, gpu: Gpu):
    """(handle, True if a MIG slice) of a GPU: by its UUID, its PCI address, or as the only one."""
    handle = None
    for uuid in (f"GPU-{gpu.uuid}", f"MIG-{gpu.uuid}"):
        handle = handle or attempt(nvml.nvmlDeviceGetHandleByUUID, uuid)
    if gpu.pci:
        handle = handle or attempt(nvml.nvmlDeviceGetHandleByPciBusId, gpu.pci)
    if not handle and nvml.nvmlDeviceGetCount() == 1:
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
    if not handle:
        raise RuntimeError(f"NVML does not list {gpu.name} (UUID {gpu.uuid})")
    if _is_mig(nvml, handle):
        return handle, True
    if " MIG " in gpu.name:
        return _only_slice(nvml, handle), True
    return handle, False


def _is_mig(nvml, handle) -> bool:
    flag = attempt(nvml.nvmlDeviceIsMigDeviceHandle, handle)
    return bool(getattr(flag, "value", flag))  # pynvml returns a ctypes integer


def _only_slice(nvml, whole):
    """The slice behind a name with MIG in it, where torch reports the UUID of the whole GPU."""
    count = attempt(nvml.nvmlDeviceGetMaxMigDeviceCount, whole) or 0
    slices = [attempt(nvml.nvmlDeviceGetMigDeviceHandleByIndex, whole, i) for i in range(count)]
    slices = [found for found in slices if found]
    if len(slices) != 1:
        raise RuntimeError(f"{len(slices)} MIG slices are visible, so which is in use is not known")
    return slices[0]


def throttle_text(bits: int) -> str:
    """Why the driver holds the clock down, in words; "none" if it does not."""
    return ", ".join(text for bit, text in THROTTLES.items() if bits & bit) or "none"


def attempt(fn, *args):
    """fn(*args), or None if it raises: counters must never break the workload that they watch."""
    try:
        return fn(*args)
    except Exception:
        return None


def reason(error: Exception) -> str:
    """What an error says, or its kind if it says nothing."""
    return str(error) or type(error).__name__
