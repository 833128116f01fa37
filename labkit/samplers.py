"""How samples of a function's time are taken: by a clock on a CPU, in a full queue on a GPU."""

import time
from contextlib import contextmanager

import torch

from labkit.monitor import identify
from labkit.nvml import NVML_FIELDS, attempt, find

MAX_SPIN_MS = 60.0


class CpuSampler:
    """Samples of a function whose work is done when it returns."""

    def __init__(self, fn):
        self.fn, self.samples = fn, []
        self.hosts, self.readings, self.dry, self.flush = (), (), 0, None

    def batch(self, most: int, deadline: float):
        """Take `most` samples, fewer if the deadline (of `time.perf_counter`) comes first."""
        for _ in range(most):
            self.samples.append(clock_ms(self.fn))
            if time.perf_counter() >= deadline:
                return


class GpuSampler:
    """Batches of calls queued behind a spinning kernel, so that Python is ahead of the GPU.

    Was the GPU ever short of work? If the spin is still running when the last call of a batch
    has been queued, it cannot have been: all work was there before the first call began. Spin
    and batch are adapted until that holds. It cannot hold for a function that synchronises, or
    that launches more kernels than the queue takes (about a thousand). Then a call counts as dry
    if the stream is empty the moment the function returns: the GPU had caught up with Python.

    `samples` and `hosts` are ms on the GPU and in Python, `readings` what `read` said meanwhile.
    """

    def __init__(self, fn, read, flush_l2: bool):
        self.fn, self.read = fn, read
        self.samples, self.hosts, self.readings, self.dry = [], [], [], 0
        self.flush = l2_buffer() if flush_l2 else None
        self.spin_ms, self.size, self.max_size, self.adapting = 2.0, 4, 64, True
        # Found by trying: the clock that the spin counts need not be the nominal one.
        self.cycles_per_ms = 1e6 / min(spin_takes_ms(1_000_000) for _ in range(3))

    def batch(self, most: int, deadline: float):
        """Take up to `most` samples; none if the queue ran short and the next can do better."""
        pairs, opened = [event_pair() for _ in range(min(self.size, most))], torch.cuda.Event()
        stream, hosts, dry = torch.cuda.current_stream(), [], 0
        torch.cuda._sleep(int(self.spin_ms * self.cycles_per_ms))
        opened.record()
        began = time.perf_counter()
        for start, end in pairs:
            if self.flush is not None:
                self.flush.zero_()
            start.record()
            hosts.append(clock_ms(self.fn))
            dry += stream.query()
            end.record()
        queueing_ms = (time.perf_counter() - began) * 1e3
        ahead = not opened.query()
        self.readings.append(self.read())  # now: an idle GPU would report an idle clock
        torch.cuda.synchronize()
        if not self._adapt(ahead, queueing_ms) or time.perf_counter() >= deadline:
            self.samples += [start.elapsed_time(end) for start, end in pairs]
            self.hosts += hosts
            self.dry += 0 if ahead else dry

    def _adapt(self, ahead: bool, queueing_ms: float) -> bool:
        """Choose spin and size of the next batch; True if this one fell behind and need not."""
        if ahead and 4 * queueing_ms < self.spin_ms:
            self.size = min(self.max_size, 2 * self.size)
        if ahead or not self.adapting:
            return False
        if self.spin_ms < MAX_SPIN_MS:
            self.spin_ms = min(MAX_SPIN_MS, 2 * max(self.spin_ms, queueing_ms))
        elif self.size > 1:
            self.size = self.max_size = self.size // 2
        else:  # no spin is long enough: stop paying for one
            self.adapting, self.spin_ms = False, 2.0
        return True


def clock_ms(fn) -> float:
    """The time of one call by the CPU's clock, in ms."""
    began = time.perf_counter()
    fn()
    return (time.perf_counter() - began) * 1e3


def event_pair():
    """Two CUDA events that keep the time."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def spin_takes_ms(cycles: int) -> float:
    """How long the GPU spins for so many cycles; waits for it."""
    start, end = event_pair()
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def l2_buffer() -> torch.Tensor:
    """Bytes on the GPU, twice as many as its L2 cache holds."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return torch.empty(2 * properties.L2_cache_size, dtype=torch.int8, device="cuda")


@contextmanager
def nvml_reader(on_gpu: bool):
    """A function that reads the GPU in use: SM clock in MHz, what throttles it. None: not known."""
    nvml = attempt(_open_nvml) if on_gpu else None
    if nvml is None:
        yield lambda: (None, None)
        return
    try:
        handle = attempt(_find_in_nvml, nvml)
        wanted = [NVML_FIELDS["sm_clock_mhz"], NVML_FIELDS["throttle"]]
        yield lambda: tuple(attempt(field, nvml, handle) for field in wanted)
    finally:
        attempt(nvml.nvmlShutdown)


def _open_nvml():
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def _find_in_nvml(nvml):
    """The handle that has clocks: a MIG slice has none, but its whole GPU does."""
    handle, is_mig = find(nvml, identify("cuda"))
    return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_mig else handle
