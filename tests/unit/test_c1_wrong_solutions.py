"""The checks of C1 fail each usual mistake, in words that name it, and no honest variant."""

import re
import time
from time import perf_counter

import pytest
import torch

from tests.hidden import test_c1_cuda_time as hidden
from tests.public import test_c1_cuda_time as public


def pair():
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def cpu_times(fn, repeat):
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        fn()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def solution(
    fn,
    warmup=10,
    repeat=20,
    *,
    in_loop=lambda start, end: None,
    at_end=lambda: torch.cuda.synchronize(),
    new_pair=pair,
):
    """A right solution with three places where it can be made wrong."""
    for _ in range(warmup):
        fn()
    if not torch.cuda.is_available():
        return cpu_times(fn, repeat)
    pairs = []
    for _ in range(repeat):
        start, end = new_pair()
        start.record()
        fn()
        end.record()
        in_loop(start, end)
        pairs.append((start, end))
    at_end()
    return [start.elapsed_time(end) for start, end in pairs]


WRONG = {}


def wrong(says):
    """Register a wrong solution with the words that must be in a failed check's message."""
    return lambda function: WRONG.setdefault(function.__name__, (function, says))[0]


@wrong("nothing waited for the GPU after the last call")
def no_synchronize(fn, warmup=10, repeat=20):
    return solution(fn, warmup, repeat, at_end=lambda: None)


@wrong("The CPU's clock does not see the GPU")
def wall_clock(fn, warmup=10, repeat=20):
    for _ in range(warmup):
        fn()
    return cpu_times(fn, repeat)


@wrong(r"waits for the GPU .* and reads the CPU's clock")
def wall_clock_with_synchronize(fn, warmup=10, repeat=20):
    def waited():
        fn()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return wall_clock(waited, warmup, repeat)


@wrong("Time every call, not the loop as a whole")
def one_pair_around_the_loop(fn, warmup=10, repeat=20):
    for _ in range(warmup):
        fn()
    if not torch.cuda.is_available():
        return cpu_times(fn, repeat)
    start, end = pair()
    start.record()
    for _ in range(repeat):
        fn()
    end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / repeat] * repeat


@wrong(r"waits for the GPU \d+ times")
def synchronize_every_call(fn, warmup=10, repeat=20):
    return solution(fn, warmup, repeat, in_loop=lambda start, end: torch.cuda.synchronize())


@wrong("waits for the GPU")
def synchronize_every_event(fn, warmup=10, repeat=20):
    return solution(fn, warmup, repeat, in_loop=lambda start, end: end.synchronize())


@wrong("waits for the GPU")
def poll_every_event(fn, warmup=10, repeat=20):
    def poll(start, end):
        while not end.query():
            pass

    return solution(fn, warmup, repeat, in_loop=poll)


@wrong("the warm-up calls are in it")
def warm_up_in_the_list(fn, warmup=10, repeat=20):
    return solution(fn, 0, warmup + repeat)


@wrong("slow first calls")
def first_calls_timed(fn, warmup=10, repeat=20):
    return solution(fn, 0, warmup + repeat)[:repeat]


@wrong("the warm-up calls are missing")
def no_warm_up(fn, warmup=10, repeat=20):
    return solution(fn, 0, repeat)


@wrong("are they ignored")
def arguments_ignored(fn, warmup=10, repeat=20):
    return solution(fn)


@wrong("too few")
def one_warm_up_call(fn, warmup=10, repeat=20):
    return solution(fn, min(1, warmup), repeat)


@wrong("too many")
def always_warms_up(fn, warmup=10, repeat=20):
    return solution(fn, warmup + 1, repeat)


@wrong("an event keeps only its last time")
def one_pair_for_all(fn, warmup=10, repeat=20):
    shared = pair() if torch.cuda.is_available() else None
    return solution(fn, warmup, repeat, new_pair=lambda: shared)


@wrong("each call needs a start event of its own")
def one_start_for_all(fn, warmup=10, repeat=20):
    for _ in range(warmup):
        fn()
    if not torch.cuda.is_available():
        return cpu_times(fn, repeat)
    start, ends = pair()[0], [pair()[1] for _ in range(repeat)]
    start.record()
    for end in ends:
        fn()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for end in ends]


@wrong("in seconds")
def seconds(fn, warmup=10, repeat=20):
    return [ms / 1e3 for ms in solution(fn, warmup, repeat)]


@wrong("one number")
def mean_only(fn, warmup=10, repeat=20):
    return sum(solution(fn, warmup, repeat)) / repeat


@wrong("that is their mean")
def mean_repeated(fn, warmup=10, repeat=20):
    return [mean_only(fn, warmup, repeat)] * repeat


@wrong("twice for each timed call")
def two_calls_a_time(fn, warmup=10, repeat=20):
    for _ in range(warmup):
        fn()
    return solution(lambda: (fn(), fn()), 0, repeat)


@wrong("read inside the loop")
def read_in_the_loop(fn, warmup=10, repeat=20):
    return solution(fn, warmup, repeat, in_loop=lambda start, end: start.elapsed_time(end))


@wrong("fn was never called")
def hard_coded(fn, warmup=10, repeat=20):
    return [1.0] * repeat


@wrong("were they measured")
def called_and_hard_coded(fn, warmup=10, repeat=20):
    solution(fn, warmup, repeat)
    return [1.0] * repeat


@wrong("CUDA was used on a machine without a GPU")
def cuda_always(fn, warmup=10, repeat=20):
    for _ in range(warmup):
        fn()
    pairs = [pair() for _ in range(repeat)]
    for start, end in pairs:
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


@wrong("enable_timing=True")
def no_timing(fn, warmup=10, repeat=20):
    return solution(fn, warmup, repeat, new_pair=lambda: (torch.cuda.Event(), torch.cuda.Event()))


@wrong("never recorded")
def end_not_recorded(fn, warmup=10, repeat=20):
    for _ in range(warmup + repeat):
        fn()
    if not torch.cuda.is_available():
        return cpu_times(fn, repeat)
    start, end = pair()
    start.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end)] * repeat


@wrong("is the return missing")
def no_return(fn, warmup=10, repeat=20):
    solution(fn, warmup, repeat)


def waits_for_the_last_event(fn, warmup=10, repeat=20):
    ends = []
    return solution(
        fn, warmup, repeat,
        in_loop=lambda start, end: ends.append(end), at_end=lambda: ends[-1].synchronize(),
    )  # fmt: skip


def waits_for_the_stream_and_after_warm_up(fn, warmup=10, repeat=20):
    for _ in range(warmup):
        fn()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return solution(fn, 0, repeat, at_end=lambda: torch.cuda.current_stream().synchronize())


def clock_imported_by_name(fn, warmup=10, repeat=20):
    if torch.cuda.is_available():
        return solution(fn, warmup, repeat)
    stamps = []
    for call in range(warmup + repeat):
        stamps.append([perf_counter()])
        fn()
        stamps[call].append(perf_counter())
    return [1e3 * (end - start) for start, end in stamps[warmup:]]


HONEST = [
    solution,
    waits_for_the_last_event,
    waits_for_the_stream_and_after_warm_up,
    clock_imported_by_name,
]


def failures(module, implementation, monkeypatch) -> list[str]:
    """Messages of the module's simulated checks that fail for this implementation."""
    monkeypatch.setattr(module, "cuda_time", implementation)
    messages = []
    for name, test in vars(module).items():
        if not name.startswith("test_") or "real" in name:
            continue
        for arguments in cases(test):
            try:
                test(**arguments)
            except AssertionError as error:
                messages.append(str(error))
    return messages


def cases(test) -> list[dict]:
    """The arguments that a test is parametrized with: at most one of them."""
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    return [{mark.args[0]: value} for mark in marks for value in mark.args[1]] or [{}]


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_solution_is_named(name, module, monkeypatch):
    implementation, says = WRONG[name]
    messages = failures(module, implementation, monkeypatch)
    assert any(re.search(says, message) for message in messages), (
        f"{name}: no message says {says!r}; the checks said {messages or 'nothing: it passes'}"
    )


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("implementation", HONEST, ids=lambda function: function.__name__)
def test_honest_variant_passes(implementation, module, monkeypatch):
    messages = failures(module, implementation, monkeypatch)
    assert not messages, f"{implementation.__name__} is right, and the checks said {messages}"
