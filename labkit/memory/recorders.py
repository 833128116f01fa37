"""Record the allocation timeline of a call: CUDA's own history, or a CPU's storages."""

import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from labkit.devices import pick
from labkit.hooks import watch_spans
from labkit.memory.snapshots import block_sizes, check_complete, history, trace_events
from labkit.memory.storages import StorageTracker, storage_of
from labkit.memory.timeline import Claim, Timeline, replay


def record_timeline(fn: Callable[[], object], model=None, optimizer=None, device=None) -> Timeline:
    """The allocation timeline of one call of `fn`, starting from what was allocated before.

    On CUDA the allocator's own record of the device, whichever thread allocates; sizes are rounded
    up to its 512 bytes. On a CPU the storages of tensors (see `StorageTracker`). Phases are the
    spans that `fn` opens: `labkit.hooks.span`, as in `train_step`. `model` and `optimizer` tell
    weights, gradients and moments apart, by the addresses of their tensors at the start, at the end
    of each span, before each optimizer step and at the end. `device`: None is the model's, else the
    GPU in use, or the CPU.
    An exception of `fn` comes through, and nothing is left recording. UserError: a bad device, or
    a history that somebody else is recording.
    """
    if device is None and model is not None:
        device = next((p.device for p in model.parameters()), None)
    device = pick(device)
    recorder = _CudaRecorder(device) if device.type == "cuda" else _CpuRecorder()
    with ExitStack() as stack:
        stack.enter_context(recorder.recording())
        ledger = _Ledger(recorder, model, optimizer)
        stack.enter_context(watch_spans(ledger.hear))
        if optimizer is not None:
            hook = optimizer.register_step_pre_hook(lambda *_: ledger.claim())
            stack.callback(hook.remove)
        ledger.claim()
        fn()
        ledger.claim()
        base, events = recorder.read()
    return replay(base, events, ledger.claims, ledger.phases)


class _Ledger:
    """Notes which blocks belong to whom, and where phases begin and end."""

    def __init__(self, recorder, model, optimizer):
        self.recorder, self.model, self.optimizer = recorder, model, optimizer
        self.claims: list[Claim] = []
        self.phases: list[tuple] = []
        self._open: list[tuple[int, float]] = []

    def hear(self, name: str, opens: bool) -> None:
        position, now_ms = self.recorder.position(), self.recorder.now_ms()
        if opens:
            self._open.append((position + 1, now_ms))
        else:
            first, start_ms = self._open.pop()
            self.phases.append((name, first, position, start_ms, now_ms))
            self.claim()

    def claim(self) -> None:
        position = self.recorder.position()
        for category, tensors in self._owned().items():
            addresses = [self.recorder.address(tensor) for tensor in tensors]
            self.claims.append((position, category, [a for a in addresses if a is not None]))

    def _owned(self) -> dict[str, list[Tensor]]:
        owned = {}
        if self.model is not None:
            parameters = list(self.model.parameters())
            owned["weights"] = [*parameters, *self.model.buffers()]
            owned["gradients"] = [p.grad for p in parameters if p.grad is not None]
        if self.optimizer is not None:
            states = self.optimizer.state.values()
            values = (value for state in states for value in state.values())
            # Without the step counters, which are scalars.
            owned["moments"] = [v for v in values if isinstance(v, Tensor) and v.ndim]
        return owned


class _CpuRecorder:
    def __init__(self):
        self._tracker = StorageTracker()

    @contextmanager
    def recording(self):
        self._tracker.start()
        self._base, self._began = self._tracker.sizes(), time.perf_counter()
        try:
            yield
        finally:
            self._tracker.stop()

    def now_ms(self) -> float:
        return 1e3 * (time.perf_counter() - self._began)

    def position(self) -> int:
        """How many events there were."""
        return len(self._tracker.events)

    @staticmethod
    def address(tensor: Tensor) -> int | None:
        storage = storage_of(tensor)
        return None if storage is None else storage._cdata

    def read(self) -> tuple[dict, list]:
        events = [(1e3 * (t - self._began), a, size) for t, a, size in self._tracker.events]
        return self._base, events


class _CudaRecorder:
    def __init__(self, device: torch.device):
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)

    @contextmanager
    def recording(self):
        with history(stacks=None):
            self._base = block_sizes(torch.cuda.memory._snapshot(), self._device.index)
            self._first, self._began_us = self._changes(), time.time_ns() / 1e3
            yield

    def now_ms(self) -> float:
        return (time.time_ns() / 1e3 - self._began_us) / 1e3

    def position(self) -> int:
        """How many events there were, by the allocator's count: exact, whatever the clocks say."""
        return self._changes() - self._first

    def _changes(self) -> int:
        count = torch.cuda.memory_stats_as_nested_dict(self._device)["allocation"]["all"]
        return count["allocated"] + count["freed"]

    def address(self, tensor: Tensor) -> int | None:
        on_device = tensor.device == self._device and tensor.layout == torch.strided
        return tensor.untyped_storage().data_ptr() if on_device else None

    def read(self) -> tuple[dict, list]:
        trace = torch.cuda.memory._snapshot()["device_traces"][self._device.index]
        check_complete(trace)
        return self._base, trace_events(trace, self._began_us)
