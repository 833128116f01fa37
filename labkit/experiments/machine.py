"""What the experiments of Part 1 share: the machine that they measure, and how they measure it."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from labkit import devices
from labkit.benchmark import benchmark
from labkit.ceilings import host_memory_gib
from labkit.devices import DeviceSpec
from labkit.errors import NotThisMachine, out_of_memory
from labkit.memory import record_timeline
from labkit.provenance import machine_facts


@dataclass(frozen=True)
class Machine:
    """A device to measure, with its ceilings and the dtype that labkit trains in on it."""

    device: torch.device
    dtype: torch.dtype
    spec: DeviceSpec
    facts: dict

    @classmethod
    def here(cls, device=None) -> "Machine":
        """None and "auto": the GPU if there is one. Raises UserError for what is no device here."""
        device = devices.pick(device)
        dtype = devices.training_dtype(device)
        facts = machine_facts(device)
        del facts["sm_clock_mhz"]  # of an idle GPU: each row has the clock that it was measured at
        facts["dtype"] = str(dtype).removeprefix("torch.")
        return cls(device, dtype, devices.current(device), facts)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def random(self, *shape: int) -> torch.Tensor:
        """Uniform in -1 to 1: zeros draw less power, and run faster, than any real work."""
        return self.empty(*shape).uniform_(-1, 1)

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, device=self.device, dtype=self.dtype)

    def free_bytes(self) -> int:
        """Memory that new tensors can have."""
        if self.on_gpu:
            return torch.cuda.mem_get_info(self.device)[0]
        import psutil

        return min(psutil.virtual_memory().available, int(host_memory_gib() * 2**30))

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def time(self, fn: Callable, budget_s: float, flush_l2: bool) -> dict:
        """The timed columns of a row: see `labkit.timers.benchmark`."""
        taken = benchmark(
            fn, budget_s=budget_s, rel_spread=0.01, flush_l2=flush_l2, device=self.device
        )
        reasons = taken.throttle_reasons
        return {
            "ms": taken.median_ms,
            "spread": taken.spread,
            "calls": taken.n,
            "host_ms": taken.host_ms,
            "host_bound": "yes" if taken.host_bound else "no",
            "sm_clock_mhz": taken.sm_clock_end_mhz,
            "throttle": None if reasons is None else ", ".join(reasons) or "none",
        }

    def forget_peak(self) -> None:
        """Let `peak` count from here, with nothing kept that no tensor has."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self, step: Callable) -> dict:
        """The columns of memory: what tensors had at most and, on a GPU, what PyTorch held.

        On a GPU since `forget_peak`; a CPU keeps no count, so it makes one more step.
        """
        if not self.on_gpu:
            return {
                "peak_gib": record_timeline(step, device=self.device).peak_gib,
                "reserved_gib": None,
            }
        return {
            "peak_gib": torch.cuda.max_memory_allocated(self.device) / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved(self.device) / 2**30,
        }

    def attempt(self, measure: Callable[[], dict]) -> dict:
        """The row that `measure` gives, or one whose status says why there is none.

        What the measurement allocated is free again afterwards. Raises NotThisMachine when the
        GPU answers no more, because then nothing after it can be measured by this process, and
        lets through what an exercise that is still open raises.
        """
        try:
            row = {"status": "ok", **measure()}
        except NotImplementedError:
            raise
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            row = {"status": _failure(error)}
        if self.on_gpu:
            try:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
            except RuntimeError as error:
                first = str(error).partition("\n")[0]
                raise NotThisMachine(
                    f"{self.spec.name} answers no more ({first}); restart the kernel or the "
                    "command, and it goes on after what it has written"
                ) from None
        return row

    def steadily(self, fn: Callable, seconds: float, calls: int) -> list[float]:
        """Call `fn` back to back for some seconds; when each interval of `calls` ended, in s.

        On a GPU the ends are CUDA events, and one interval is always queued behind the one that is
        waited for, so the GPU is never short of work unless `fn` itself is slow to launch.
        """
        if not self.on_gpu:
            return _steadily_on_cpu(fn, seconds, calls)
        with torch.cuda.device(self.device):
            return _steadily_on_gpu(fn, seconds, calls)

    def calls_in(self, fn: Callable, seconds: float) -> int:
        """How many calls of `fn` take so long, at least 1; found by trying, which warms up."""
        fn()
        calls, took_s = 1, 0.0
        while took_s < min(0.01, seconds):
            calls *= 4
            self.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                fn()
            self.synchronize()
            took_s = time.perf_counter() - began
        return max(1, round(calls * seconds / took_s))


def _steadily_on_gpu(fn, seconds: float, calls: int) -> list[float]:
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(calls):
            fn()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        events[-2].synchronize()
    torch.cuda.synchronize()
    return [events[0].elapsed_time(end) / 1e3 for end in events[1:]]


def _steadily_on_cpu(fn, seconds: float, calls: int) -> list[float]:
    began, ends_s = time.perf_counter(), [0.0]
    while ends_s[-1] < seconds:
        for _ in range(calls):
            fn()
        ends_s.append(time.perf_counter() - began)
    return ends_s[1:]


def with_reached(spec: DeviceSpec, reached) -> DeviceSpec:
    """The spec with what is known of the ceilings that were reached."""
    known = {name: value for name, value in asdict(reached).items() if value}
    return spec.with_measured(**known) if known else spec


def _failure(error: RuntimeError) -> str:
    text = str(error).partition("\n")[0]
    return "out of memory" if out_of_memory(error) else f"failed: {text[:200]}"
