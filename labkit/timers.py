"""How long a call takes: GPU events where there is a GPU, a clock where there is none."""

import time
from collections.abc import Callable

import torch

from labkit.benchmark import Benchmark, benchmark, check_callable, check_count

__all__ = ["Benchmark", "benchmark", "cuda_time"]


def cuda_time(fn: Callable[[], object], warmup: int = 10, repeat: int = 20) -> list[float]:
    """Run `fn()` `warmup` times untimed, then `repeat` times timed; the time of each timed call.

    Returns a list of `repeat` floats in milliseconds, in the order of the calls. `fn` takes no
    arguments, its result is dropped, and it runs exactly `warmup + repeat` times.

    With a GPU (`torch.cuda.is_available()`), each time is the GPU's own, from two CUDA events:

    - Every timed call has its own pair of `torch.cuda.Event(enable_timing=True)`, one recorded
      just before the call and one just after it. Create all pairs before the first timed call.
    - From the first timed call to the last, nothing waits for the GPU and nothing is read:
      the GPU must have the next call in its queue when it finishes one.
    - After the last call, wait for the GPU once (`torch.cuda.synchronize()`). Only then has it
      reached every event, and `start.elapsed_time(end)` can say how many milliseconds apart
      the two are.

    Without a GPU a call has finished when it returns: read `time.perf_counter()`, which counts
    in seconds, just before and just after each timed call.

    An exception of `fn` comes through. UserError: `fn` cannot be called, `warmup < 0`,
    `repeat < 1`.
    """
    check_callable(fn)
    check_count("warmup", warmup, 0)
    check_count("repeat", repeat, 1)
    ### BEGIN SOLUTION
    for _ in range(warmup):
        fn()
    if not torch.cuda.is_available():
        times = []
        for _ in range(repeat):
            began = time.perf_counter()
            fn()
            times.append((time.perf_counter() - began) * 1e3)
        return times
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeat)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeat)]
    for start, end in zip(starts, ends, strict=True):
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
    ### END SOLUTION
