"""A GPU with one stream in virtual time, for checking timing code anywhere and exactly.

Two clocks run: the host's, which Python reads, and the device's, which is the moment at which
the GPU will have finished all that it was given. A launch costs the host `launch_ms` and returns;
its kernel begins when the device is free. Everything that happens goes into `log`.

    cuda = SimulatedCuda()
    with cuda.installed(function_under_test):
        function_under_test(lambda: cuda.launch(2.5))
"""

import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch


@dataclass(frozen=True)
class Entry:
    """One thing that happened: what, when on the host's clock, and to which event or call."""

    kind: str
    host_ms: float
    subject: object = None


class SimulatedCuda:
    """`available=False` is a machine without a GPU: time passes, and CUDA raises."""

    EVENT_MS = 0.001
    QUERY_MS = 0.05  # slower than a real one, so that code which polls is quick to simulate
    CLOCK_MS = 0.0001

    def __init__(self, available: bool = True, launch_ms: float = 0.01):
        self.available, self.launch_ms = available, launch_ms
        self.host_ms, self.device_ms = 5000.0, 0.0
        self.log: list[Entry] = []
        self.stream = Stream(self)
        self.Event = type("Event", (Event,), {"cuda": self})

    def note(self, kind: str, subject=None):
        self.log.append(Entry(kind, self.host_ms, subject))

    def run_python(self, ms: float):
        """The host is busy for so long."""
        self.host_ms += ms

    def launch(self, ms: float):
        """Queue a kernel that keeps the GPU busy for `ms`."""
        self.host_ms += self.launch_ms
        self.device_ms = max(self.device_ms, self.host_ms) + ms
        self.note("launch", ms)

    def wait(self, kind: str, until_ms: float, subject=None):
        self._need_gpu()
        self.note(kind, subject)
        self.host_ms = max(self.host_ms, until_ms)

    def synchronize(self, device=None):
        self.wait("torch.cuda.synchronize()", self.device_ms)

    def read_clock_ms(self) -> float:
        self.host_ms += self.CLOCK_MS
        self.note("clock")
        return self.host_ms

    def _need_gpu(self):
        if not self.available:
            self.note("cuda without a GPU")
            raise RuntimeError("Found no NVIDIA driver on your system.")

    @contextmanager
    def installed(self, *functions):
        """Stand in for `torch.cuda` and `time` while the block runs.

        `functions` are those under test: names that their modules imported from the two, as in
        `from time import perf_counter`, are replaced as well.
        """
        swaps = {**self._torch_names(), **self._time_names()}
        with ExitStack() as stack:
            originals = {}
            for (owner, name), stand_in in swaps.items():
                originals[id(getattr(owner, name))] = stand_in
                stack.enter_context(patch.object(owner, name, stand_in))
            for function in functions:
                module = getattr(function, "__globals__", {})
                found = {n: originals[id(v)] for n, v in module.items() if id(v) in originals}
                stack.enter_context(patch.dict(module, found))
            yield self

    def _torch_names(self) -> dict:
        names = {
            "is_available": lambda: self.available,
            "synchronize": self.synchronize,
            "current_stream": lambda device=None: self.stream,
            "default_stream": lambda device=None: self.stream,
            "current_device": lambda: 0,
            "device_count": lambda: int(self.available),
            "device": type("device", (nullcontext,), {}),
            "_sleep": lambda cycles: self.launch(cycles / 1e6),
            "Event": self.Event,
        }
        return {(torch.cuda, name): stand_in for name, stand_in in names.items()}

    def _time_names(self) -> dict:
        seconds = ("time", "perf_counter", "monotonic", "process_time")
        names = {name: lambda: self.read_clock_ms() / 1e3 for name in seconds}
        names |= {f"{name}_ns": lambda: round(self.read_clock_ms() * 1e6) for name in seconds}
        names["sleep"] = lambda seconds: self.run_python(seconds * 1e3)
        return {(time, name): stand_in for name, stand_in in names.items()}


class Event:
    """A CUDA event: stamped with the device's time at its place in the queue."""

    cuda: SimulatedCuda

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self.cuda._need_gpu()
        self.timing, self.stamp_ms = enable_timing, None
        self.cuda.note("create", self)

    def record(self, stream=None):
        self.cuda.host_ms += self.cuda.EVENT_MS
        self.stamp_ms = self.cuda.device_ms = max(self.cuda.device_ms, self.cuda.host_ms)
        self.cuda.note("record", self)

    def query(self) -> bool:
        self.cuda.host_ms += self.cuda.QUERY_MS
        self.cuda.note("query", self)
        return self.done

    def synchronize(self):
        self.cuda.wait("event.synchronize()", self.stamp_ms or 0.0, self)

    def wait(self, stream=None):
        """Nothing to do: there is one stream, and it is in order."""

    def elapsed_time(self, end_event) -> float:
        self.cuda.note("elapsed", (self, end_event))
        if not (self.timing and end_event.timing):
            self._refuse("no timing", ValueError, "created with argument 'enable_timing=True'.")
        if self.stamp_ms is None or end_event.stamp_ms is None:
            self._refuse("not recorded", ValueError, "recorded before calculating elapsed time.")
        if not (self.done and end_event.done):
            self._refuse("not ready", RuntimeError, "reached: CUDA error: device not ready")
        return end_event.stamp_ms - self.stamp_ms

    @property
    def done(self) -> bool:
        return self.stamp_ms is None or self.stamp_ms <= self.cuda.host_ms

    def _refuse(self, misuse: str, error, message: str):
        self.cuda.note(misuse, self)
        raise error(f"Both events must be {message}")


class Stream:
    """The only stream."""

    def __init__(self, cuda):
        self.cuda = cuda

    def synchronize(self):
        self.cuda.wait("stream.synchronize()", self.cuda.device_ms)

    def query(self) -> bool:
        self.cuda.host_ms += self.cuda.QUERY_MS
        self.cuda.note("query", self)
        return self.cuda.device_ms <= self.cuda.host_ms

    def record_event(self, event=None):
        event = event if event is not None else self.cuda.Event()
        event.record(self)
        return event

    def wait_event(self, event):
        """Nothing to do: it is in order."""
