"""Names for a profiler's timeline: a range around every submodule, and whose backward it is in."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
from torch import nn

_watchers: ContextVar[tuple[Callable[[str, bool], None], ...]] = ContextVar("watchers", default=())


def in_backward() -> bool:
    """Whether this thread is inside a backward pass, as a recomputed forward is."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def span(name: str):
    """A named range around a block of code: `with span("forward"): …`"""
    ranges, watchers = Ranges(), _watchers.get()
    ranges.push(name)
    try:
        for watcher in watchers:
            watcher(name, True)
        yield
    finally:
        ranges.close()
        for watcher in watchers:
            watcher(name, False)


@contextmanager
def watch_spans(watcher: Callable[[str, bool], None]):
    """Inside the block, `watcher(name, opens)` hears of each `span` that opens or closes."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


class Ranges:
    """Nested named ranges of one thread: NVTX where there is CUDA, torch.profiler where it records.

    A range marks the time in which Python launched kernels. A profiler can project it onto them.
    """

    def __init__(self):
        self._local = threading.local()
        self._nvtx = torch.cuda.is_available()

    @property
    def _open(self) -> list:
        return self._local.__dict__.setdefault("open", [])

    def push(self, name: str) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)
        record = None
        if torch.autograd._profiler_enabled():  # entering one costs microseconds even when unseen
            record = torch.profiler.record_function(name)
            record.__enter__()
        self._open.append(record)

    def pop(self) -> None:
        record = self._open.pop()
        if record is not None:
            record.__exit__(None, None, None)
        if self._nvtx:
            torch.cuda.nvtx.range_pop()

    def close(self, depth: int = 0) -> None:
        """Close this thread's ranges beyond `depth`: what an interrupt left open."""
        while len(self._open) > depth:
            self.pop()


class Annotation:
    """What `annotate` did to a model. `skipped`: compiled modules, which have no range."""

    def __init__(self, ranges: Ranges):
        self.ranges, self.hooks, self.skipped = ranges, [], []

    def remove(self) -> None:
        """Take every hook off, and close what is still open on this thread. May be called twice."""
        while self.hooks:
            self.hooks.pop().remove()
        self.ranges.close()

    def __enter__(self) -> "Annotation":
        return self

    def __exit__(self, *exception) -> None:
        self.remove()


def annotate(model: nn.Module) -> Annotation:
    """Put a range around every submodule's forward, named by its path (`layers.3.attn`).

    Uses forward hooks, so the model's code stays as it is. A range that opens during a backward
    pass belongs to a recomputation, and its name starts with `recompute.`. Each is closed however
    the forward ends: also when it raises, as a recomputed forward does once it has rebuilt what it
    needs. A module that is called twice has two ranges. Inside a module that torch.compile has
    compiled there are no calls to hook: `torch.compile(module)` gets one range for all of it,
    `module.compile()` none (`skipped` names it). The result takes its hooks off by `remove()` or at
    the end of a `with` block.
    """
    ranges = Ranges()
    annotation = Annotation(ranges)
    ### BEGIN SOLUTION

    def open_range(path, module, args):
        ranges.push(f"recompute.{path}" if in_backward() else path)

    def close_range(module, args, output):
        ranges.pop()

    for path, module in callable_modules(model, annotation.skipped):
        annotation.hooks += [
            module.register_forward_pre_hook(partial(open_range, path)),
            module.register_forward_hook(close_range, always_call=True),
        ]
    ### END SOLUTION
    return annotation


def callable_modules(model: nn.Module, skipped: list[str], path: str = "", seen=None):
    """Yield (path, module) of each submodule whose calls go through its hooks, each once."""
    seen = set() if seen is None else seen
    for name, child in model.named_children():
        if child in seen:
            continue
        seen.add(child)
        below = f"{path}.{name}" if path else name
        if child._compiled_call_impl is not None:
            skipped.append(below)
            continue
        yield below, child
        if not isinstance(child, torch._dynamo.OptimizedModule):
            yield from callable_modules(child, skipped, below, seen)
