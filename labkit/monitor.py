"""Counters sampled while a workload runs: NVML and NVML GPM on an NVIDIA GPU, psutil everywhere.

    with Monitor() as m:
        work()
    m.samples       # a DataFrame, one row a sample
    m.summary()     # means over the window

What the driver does not give is NaN in the frame and "n/a" in print, never 0.
"""

import math
import os
import threading
import time
from contextlib import suppress

from labkit.errors import UserError
from labkit.nvml import GPM_METRICS, NVML_FIELDS, Gpu, NvmlSampler, attempt, reason

JOIN_S = 5.0  # a driver that hangs must not hang the notebook

CPU_FIELDS = ("cpu_pct", "cpu_clock_mhz", "rss_gib")
COLUMNS = ("t_s", *NVML_FIELDS, *GPM_METRICS, *CPU_FIELDS)


class Monitor:
    """Samples counters in a background thread until the `with` block ends.

    NVML's utilisation covers up to a second, so a workload should run steadily for a few seconds.
    `cpu_pct` is the share of this process's cores that it keeps busy. `notes` says in words what
    could not be read and why. On a MIG slice, power, temperature and clocks are the whole GPU's.
    `nvml` stands in for the pynvml module.
    """

    def __init__(self, device=None, interval_s: float = 0.1, nvml=None):
        if not (isinstance(interval_s, (int, float)) and 0.01 <= interval_s < math.inf):
            raise UserError(f"interval_s={interval_s!r} must be a number of at least 0.01 seconds")
        self.interval_s = interval_s
        self.notes: list[str] = []
        self._device, self._nvml = device, nvml
        self._rows: list[dict] = []
        self._thread = None

    def __enter__(self) -> "Monitor":
        if self._thread:
            raise UserError("this Monitor has run already: make a new one for each window")
        samplers = [CpuSampler()]
        if gpu := identify(self._device):
            try:
                samplers.append(NvmlSampler(gpu, self._nvml))
                self.notes += samplers[-1].notes
            except Exception as error:
                self.notes.append(f"no GPU counters: {reason(error)}")
        self._stop = threading.Event()
        self._pid, self._start_s = os.getpid(), time.perf_counter()
        self._thread = threading.Thread(
            target=self._run, args=(samplers,), daemon=True, name="labkit-monitor"
        )
        try:
            self._thread.start()
        except RuntimeError:  # the process may have no more threads
            for sampler in samplers:
                sampler.close()
            raise
        return self

    def __exit__(self, *exception) -> None:
        if os.getpid() != self._pid:
            return  # a fork has neither the thread nor a right to the parent's NVML handles
        self._stop.set()
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            self.notes.append(f"a counter did not answer within {JOIN_S:g} s; it was left behind")

    def _run(self, samplers: list) -> None:
        try:
            while not self._stop.wait(self.interval_s):
                self._sample(samplers)
            last_s = self._rows[-1]["t_s"] if self._rows else -math.inf
            if time.perf_counter() - self._start_s - last_s > self.interval_s / 2:
                self._sample(samplers)
        finally:
            for sampler in samplers:
                sampler.close()

    def _sample(self, samplers: list) -> None:
        row = {"t_s": time.perf_counter() - self._start_s}
        for sampler in samplers:
            row |= sampler.read()
        self._rows.append(row)

    @property
    def samples(self):
        """A DataFrame of the samples so far, with every column of COLUMNS."""
        import pandas as pd

        frame = pd.DataFrame(list(self._rows), columns=list(COLUMNS))
        numbers = [name for name in COLUMNS if name != "throttle"]
        return frame.astype({**dict.fromkeys(numbers, "float64"), "throttle": "object"})

    def summary(self, settle_s: float = 1.0) -> "Summary":
        """Means of the numbers, None for what was never read, and the share of each throttle.

        Samples of the first `settle_s` seconds are left out if later ones exist: NVML's averages
        still contain what ran before.
        """
        frame = self.samples
        settled = frame[frame.t_s > settle_s]
        frame = settled if len(settled) else frame
        means = frame.drop(columns=["t_s", "throttle"]).mean()
        means = {name: None if math.isnan(mean) else float(mean) for name, mean in means.items()}
        return Summary({**means, "throttle": _throttle_shares(frame.throttle.dropna())})


class Summary(dict):
    """Counter name → mean or None; prints as one readable line a counter."""

    def __str__(self) -> str:
        return "\n".join(f"{name:<18} {self._cell(name)}" for name in self)

    __repr__ = __str__

    def _cell(self, name: str) -> str:
        value = self[name]
        if value is None:
            return "n/a"
        return value if isinstance(value, str) else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def identify(device=None) -> Gpu | None:
    """The GPU behind a device as torch knows it; None for the CPU."""
    from labkit.devices import pick

    device = pick(device)
    if device.type != "cuda":
        return None
    import torch

    props = torch.cuda.get_device_properties(device)
    pci = None
    with suppress(AttributeError):
        pci = f"{props.pci_domain_id:08x}:{props.pci_bus_id:02x}:{props.pci_device_id:02x}.0"
    return Gpu(props.name, str(getattr(props, "uuid", "")), pci)


class CpuSampler:
    """This process: its share of its cores, its resident memory, and the clock of the CPU."""

    def __init__(self):
        import psutil

        from labkit.ceilings import cores

        self._psutil, self._process, self._cores = psutil, psutil.Process(), cores()
        self._last = time.perf_counter(), time.process_time()

    def read(self) -> dict:
        now = time.perf_counter(), time.process_time()
        wall_s, cpu_s = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        return {
            "cpu_pct": 100 * cpu_s / wall_s / self._cores if wall_s else None,
            "cpu_clock_mhz": attempt(lambda: self._psutil.cpu_freq().current or None),
            "rss_gib": attempt(lambda: self._process.memory_info().rss / 2**30),
        }

    def close(self) -> None:
        pass


def _throttle_shares(texts) -> str | None:
    shares = texts.value_counts(normalize=True)
    if not len(shares):
        return None
    return "; ".join(f"{text} {share:.0%}" for text, share in shares.items())
