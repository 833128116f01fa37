"""What the tests of Coding Exercise 1 look for, as functions of an implementation.

Each check runs `cuda_time` on a simulated machine whose every kernel time is known, and raises
an AssertionError that names the mistake.
"""

import random
from dataclasses import dataclass, field
from numbers import Real
from statistics import mean

from tests.public.judging import require
from tests.public.simulated_cuda import SimulatedCuda

WAITS = {"torch.cuda.synchronize()", "stream.synchronize()", "event.synchronize()", "query"}


@dataclass(frozen=True)
class Work:
    """The function to be timed: `kernels` kernels a call, their times drawn from `seed`.

    The first `cold_calls` calls take `cold_factor` times longer. On a CPU the host does the work.
    """

    seed: int
    warmup: int
    repeat: int
    kernels: int = 3
    low_ms: float = 0.5
    high_ms: float = 3.0
    python_ms: float = 0.02
    cold_calls: int = 0
    cold_factor: float = 15.0
    gpu: bool = True

    @property
    def total(self) -> int:
        return self.warmup + self.repeat

    def kernel_ms(self, call: int) -> list[float]:
        draw = random.Random(self.seed * 100_003 + call)
        factor = self.cold_factor if call < self.cold_calls else 1.0
        return [factor * draw.uniform(self.low_ms, self.high_ms) for _ in range(self.kernels)]

    def call_ms(self, call: int) -> float:
        return sum(self.kernel_ms(call)) + (0.0 if self.gpu else self.python_ms)

    @property
    def expected_ms(self) -> list[float]:
        return [self.call_ms(call) for call in range(self.warmup, self.total)]


@dataclass
class Run:
    """What one call of `cuda_time` did and returned."""

    work: Work
    cuda: SimulatedCuda
    times: object = None
    calls: list[int] = field(default_factory=list)  # where in the log each call of fn began

    def count(self, kind: str) -> int:
        return sum(entry.kind == kind for entry in self.cuda.log)

    def between_timed_calls(self) -> list[str]:
        """Kinds of log entries from the first timed call to the end of the last."""
        first = self.calls[self.work.warmup]
        last = max(i for i, entry in enumerate(self.cuda.log) if entry.kind == "return")
        return [entry.kind for entry in self.cuda.log[first:last]]


def observe(cuda_time, work: Work, **arguments) -> Run:
    """Run `cuda_time` on the simulated machine; name the misuse if CUDA refused something."""
    run = Run(work, SimulatedCuda(available=work.gpu))

    def fn():
        call = len(run.calls)
        run.calls.append(len(run.cuda.log))
        run.cuda.note("call", call)
        run.cuda.run_python(work.python_ms)
        for ms in work.kernel_ms(call):
            (run.cuda.launch if work.gpu else run.cuda.run_python)(ms)
        run.cuda.note("return", call)

    arguments = arguments or {"warmup": work.warmup, "repeat": work.repeat}
    with run.cuda.installed(cuda_time):
        try:
            run.times = cuda_time(fn, **arguments)
        except NotImplementedError:
            raise
        except Exception as error:
            raise AssertionError(_misuse(run, error)) from error
    require(run.calls, "fn was never called: the times must be measured")
    return run


def _misuse(run: Run, error: Exception) -> str:
    if run.count("cuda without a GPU"):
        return (
            "CUDA was used on a machine without a GPU: where torch.cuda.is_available() is False, "
            "read time.perf_counter() around each call"
        )
    if run.count("not ready") and len(run.calls) < run.work.total:
        return (
            f"elapsed_time was read inside the loop, after call {len(run.calls)} of "
            f"{run.work.total}, while the GPU was still working: record all events, synchronize "
            "once after the last call, then read"
        )
    if run.count("not ready"):
        return (
            "elapsed_time was read before the GPU had reached the event: nothing waited for the "
            "GPU after the last call (torch.cuda.synchronize())"
        )
    if run.count("not recorded"):
        return "elapsed_time was read from an event that was never recorded"
    if run.count("no timing"):
        return "an event cannot tell the time unless made with Event(enable_timing=True)"
    return f"cuda_time raised {type(error).__name__}: {error}"


def check_list(cuda_time, work: Work):
    """A list of `repeat` positive floats."""
    _require_list(observe(cuda_time, work))


def _require_list(run: Run):
    work, times, repeat = run.work, run.times, run.work.repeat
    require(times is not None, "cuda_time returned None: is the return missing?")
    require(
        not isinstance(times, Real),
        f"cuda_time returned one number, {times}, not a list: no mean, no sum; one time a call",
    )
    require(isinstance(times, list), f"cuda_time returned a {type(times).__name__}, not a list")
    require(
        len(times) != work.total or not work.warmup,
        f"the list has {len(times)} times for warmup={work.warmup}, repeat={repeat}: "
        "the warm-up calls are in it",
    )
    require(len(times) == repeat, f"the list has {len(times)} times for repeat={repeat}")
    odd = [ms for ms in times if not isinstance(ms, float) or not ms > 0]
    require(not odd, f"the list must hold positive floats, and holds {odd[:3]}")


def check_calls(cuda_time, work: Work, **arguments):
    """`fn` runs `warmup + repeat` times; `arguments` are passed in place of the work's own."""
    _require_calls(observe(cuda_time, work, **arguments), given=not arguments)


def _require_calls(run: Run, given: bool = True):
    work, calls, warmup, repeat = run.work, len(run.calls), run.work.warmup, run.work.repeat
    asked = f"for warmup={warmup}, repeat={repeat}"
    if given:
        require(calls != 30 or work.total == 30, f"fn ran 30 times {asked}: are they ignored?")
    require(
        calls != warmup + 2 * repeat, f"fn ran {calls} times {asked}: twice for each timed call"
    )
    require(
        calls != repeat or not warmup,
        f"fn ran {calls} times {asked}: the warm-up calls are missing",
    )
    few_or_many = "too few" if calls < work.total else "too many"
    require(calls == work.total, f"fn ran {calls} times {asked}: {few_or_many}, not {work.total}")


def check_times(cuda_time, work: Work):
    """Each time is that of its own call, in ms."""
    _require_times(observe(cuda_time, work))


def _require_times(run: Run):
    _require_list(run)
    expected = run.work.expected_ms
    if not _close(run.times, expected):
        raise AssertionError(_wrong_times(run, run.times, expected))


def _close(times, expected) -> bool:
    pairs = zip(times, expected, strict=True)
    return all(abs(found - right) <= 0.05 + 0.01 * right for found, right in pairs)


def _wrong_times(run: Run, times: list[float], expected: list[float]) -> str:
    work, repeat = run.work, len(times)
    scaled = [1e3 * ms for ms in times]
    if _close(scaled, expected):
        return f"the times are in seconds ({times[0]:.3g} for {expected[0]:.3g} ms): return ms"
    if _close([ms / 1e3 for ms in times], expected):
        return f"the times are in µs ({times[0]:.4g} for {expected[0]:.3g} ms): return ms"
    if work.warmup and _close(times, [work.call_ms(call) for call in range(repeat)]):
        return "these are the times of the first calls: the warm-up calls were timed"
    launching = work.python_ms + work.kernels * run.cuda.launch_ms
    if work.gpu and all(0.5 < ms / launching < 2 for ms in times):
        return (
            f"a call takes {expected[0]:.3g} ms on the GPU, and the list says {times[0]:.2g} ms: "
            "that is what Python needs to launch it. The CPU's clock does not see the GPU; "
            "use CUDA events"
        )
    if max(times) - min(times) <= 1e-6 * max(times) and repeat > 1:
        return _all_the_same(run, times[0], expected)
    if repeat > 1 and abs(times[-1] - sum(expected)) < 0.02 * sum(expected):
        return "the times add up from call to call: each call needs a start event of its own"
    worst = max(range(repeat), key=lambda i: abs(times[i] - expected[i]))
    return (
        f"timed call {worst + 1} of {repeat} took {expected[worst]:.4g} ms, "
        f"and the list says {times[worst]:.4g} ms"
    )


def _all_the_same(run: Run, ms: float, expected: list[float]) -> str:
    same = f"all {len(expected)} times are {ms:.4g} ms, but the calls took "
    took = f"{min(expected):.4g} to {max(expected):.4g} ms"
    if run.work.gpu and abs(ms - expected[-1]) <= 0.05:
        return (
            same + took + ": one pair of events was recorded again for every call, and an "
            "event keeps only its last time. Make a pair for each call"
        )
    if abs(ms - mean(expected)) <= 0.02 * ms:
        return same + took + ": that is their mean. Time every call, not the loop as a whole"
    return same + took + ": were they measured?"


def check_warm_up(cuda_time, work: Work):
    """The slow first calls are not in the list."""
    run = observe(cuda_time, work)
    _require_list(run)
    slow = [ms for ms in run.times if ms > 2 * work.kernels * work.high_ms]
    require(
        not slow,
        f"{len(slow)} of {len(run.times)} times are those of slow first calls (up to "
        f"{max(slow, default=0):.3g} ms): run fn {work.warmup} times before the first timed call",
    )
    _require_times(run)


def check_no_waiting(cuda_time, work: Work):
    """Nothing waits for the GPU from the first timed call to the last."""
    run = observe(cuda_time, work)
    _require_calls(run)
    during = run.between_timed_calls()
    waits = [kind for kind in during if kind in WAITS]
    clock = " and reads the CPU's clock" if "clock" in during else ""
    require(
        not waits,
        f"between the timed calls cuda_time waits for the GPU {len(waits)} times "
        f"({', '.join(sorted(set(waits)))}){clock}: the GPU runs dry. Record an event before and "
        "after each call, and synchronize once, after the last",
    )
    # The first call's start event comes before that call, and so is not among these.
    records = during.count("record")
    require(
        records >= 2 * work.repeat - 2,
        f"{records} events were recorded between {work.repeat} timed calls: each call needs one "
        "before and one after it",
    )


def check_cpu(cuda_time, work: Work):
    """Without a GPU: the same list, from the CPU's clock."""
    run = observe(cuda_time, work)
    _require_calls(run)
    _require_times(run)
