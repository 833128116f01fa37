"""A benchmark that knows when to stop, and says what may be wrong with its figure."""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from labkit import devices
from labkit.errors import UserError, positive_number, whole_number
from labkit.samplers import CpuSampler, GpuSampler, nvml_reader


def benchmark(
    fn: Callable[[], object],
    *,
    budget_s: float = 2.0,
    rel_spread: float = 0.005,
    flush_l2: bool = False,
    min_samples: int = 10,
    max_samples: int = 5000,
    warmup_s: float = 0.2,
    device: torch.device | str | None = None,
) -> "Benchmark":
    """Time `fn()` until its median is known well enough, and say what may be wrong with it.

    Warms up for `warmup_s` seconds and three calls, then samples until the 95 % confidence
    interval of the median reaches no further than `rel_spread` (a fraction) from it
    ("spread"), `budget_s` seconds are spent ("budget") or `max_samples` are taken ("samples").
    On a GPU the calls wait in the queue behind a spinning kernel, so Python is ahead of the GPU;
    `flush_l2` overwrites the L2 cache before each call, outside the timed window. `device` is
    the one that `fn` works on; None is the GPU in use, or the CPU.

    An exception of `fn` comes through. UserError: a bad argument. NotThisMachine: no such GPU.
    """
    check_callable(fn)
    whole_number("min_samples", min_samples)
    whole_number("max_samples", max_samples, min_samples)
    positive_number("budget_s", budget_s)
    positive_number("rel_spread", rel_spread)
    if warmup_s:
        positive_number("warmup_s", warmup_s)
    device = devices.pick(device)
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device) if on_gpu else nullcontext(), nvml_reader(on_gpu) as read:
        deadline = time.perf_counter() + budget_s
        call_s = _warm_up(fn, on_gpu, warmup_s, budget_s / 2)
        sampler = GpuSampler(fn, read, flush_l2) if on_gpu else CpuSampler(fn)
        stopped_by = None
        while stopped_by is None:
            most = min(max_samples - len(sampler.samples), max(1, int(budget_s / 8 / call_s)))
            sampler.batch(most, deadline)
            spread = median_spread(sampler.samples)
            if len(sampler.samples) >= min_samples and spread is not None and spread <= rel_spread:
                stopped_by = "spread"
            elif len(sampler.samples) >= max_samples:
                stopped_by = "samples"
            elif sampler.samples and time.perf_counter() >= deadline:
                stopped_by = "budget"
    return _summary(sampler, spread, stopped_by, device)


@dataclass(frozen=True, repr=False)
class Benchmark:
    """Times of one function, and the conditions under which they were taken. None: not known.

    `spread` is the half-width of the median's 95 % confidence interval over the median.
    `host_ms` is what Python needs to hand one call to the GPU. `host_bound`: the GPU ran out of
    work while it was timed, so the times include waiting for Python. `throttle_reasons` are the
    driver's words for what held the clock down.
    """

    samples_ms: tuple[float, ...]
    median_ms: float
    p10_ms: float
    p90_ms: float
    spread: float | None
    host_ms: float | None
    host_bound: bool
    l2_flushed: bool
    stopped_by: str
    sm_clock_start_mhz: int | None
    sm_clock_end_mhz: int | None
    throttle_reasons: tuple[str, ...] | None
    device: str

    @property
    def n(self) -> int:
        return len(self.samples_ms)

    @property
    def throttled(self) -> bool | None:
        return None if self.throttle_reasons is None else bool(self.throttle_reasons)

    def __str__(self) -> str:
        known = "n/a" if self.spread is None else f"±{self.spread:.1%}"
        parts = [
            f"{self.median_ms:.4g} ms ({known}; p10 {self.p10_ms:.4g}, p90 {self.p90_ms:.4g}; "
            f"{self.n} calls on {self.device}{_STOPPED[self.stopped_by]})"
        ]
        if self.l2_flushed:
            parts.append("L2 flushed before each call")
        if self.sm_clock_end_mhz is not None:
            parts.append(f"SM clock {self.sm_clock_start_mhz} → {self.sm_clock_end_mhz} MHz")
        if self.throttled:
            parts.append(f"throttled: {', '.join(self.throttle_reasons)}")
        if self.host_bound:
            parts.append("host-bound: the GPU waited for Python inside the timed window")
        elif self.host_ms is not None and self.host_ms > self.median_ms:
            parts.append(f"a plain loop of it is host-bound: {self.host_ms:.4g} ms to launch")
        return " · ".join(parts)

    __repr__ = __str__


_STOPPED = {
    "spread": "",
    "budget": ", stopped by the time budget",
    "samples": ", as many as allowed",
}


def _summary(sampler, spread, stopped_by, device) -> Benchmark:
    samples = sorted(sampler.samples)
    last = len(samples) - 1
    clocks = [clock for clock, _ in sampler.readings if clock is not None]
    throttles = [text for _, text in sampler.readings if text is not None]
    reasons = {reason for text in throttles for reason in text.split(", ")} - {"none"}
    return Benchmark(
        samples_ms=tuple(sampler.samples),
        median_ms=statistics.median(samples),
        p10_ms=samples[round(0.1 * last)],
        p90_ms=samples[round(0.9 * last)],
        spread=spread,
        host_ms=statistics.median(sampler.hosts) if sampler.hosts else None,
        host_bound=sampler.dry > 0.1 * len(samples),
        l2_flushed=sampler.flush is not None,
        stopped_by=stopped_by,
        sm_clock_start_mhz=clocks[0] if clocks else None,
        sm_clock_end_mhz=clocks[-1] if clocks else None,
        throttle_reasons=tuple(sorted(reasons)) if throttles else None,
        device=str(device),
    )


def median_spread(samples) -> float | None:
    """Half-width of the median's 95 % confidence interval, over the median.

    The interval lies between two order statistics (the binomial's normal approximation), so it
    assumes nothing about how the times are distributed. None for fewer than six samples.
    """
    n, ordered = len(samples), sorted(samples)
    if n < 6:
        return None
    low = math.floor((n - 1.96 * math.sqrt(n)) / 2)
    median = statistics.median(ordered)
    return (ordered[n - 1 - low] - ordered[low]) / 2 / median if median > 0 else None


def _warm_up(fn, on_gpu, seconds, limit_s, calls=3) -> float:
    """By count, for what is loaded at a first call, and by time, for a clock out of idle.

    Never longer than `limit_s` and a call. Returns the seconds that the last call took.
    """
    began = time.perf_counter()
    for done in itertools.count(1):
        called = time.perf_counter()
        fn()
        if on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if now - began >= limit_s or (done >= calls and now - began >= seconds):
            return max(now - called, 1e-9)


def check_callable(fn) -> None:
    """UserError: `fn` cannot be called."""
    if not callable(fn):
        raise UserError(
            f"fn={fn!r} cannot be called; pass a function of no arguments, "
            "as in `lambda: torch.matmul(a, b)`"
        )
