"""Memory at named moments of a program."""

import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch

from labkit.devices import pick
from labkit.errors import UserError
from labkit.memory.storages import StorageTracker


@dataclass(frozen=True)
class Reading:
    """Memory in GiB at one moment; None for what is not known."""

    name: str
    allocated_gib: float
    reserved_gib: float | None
    device_used_gib: float | None
    peak_gib: float


class MemoryTracker:
    """Takes named snapshots of memory, and tells what happened between two.

        tracker = MemoryTracker()
        model = Transformer(cfg)
        tracker.snapshot("model")
        logits = model(tokens, seqs)
        tracker.snapshot("forward")
        tracker.delta("model", "forward")     # GiB
        tracker.report()                      # a DataFrame

    On CUDA `allocated` is what tensors have, `reserved` what PyTorch holds of the device, and
    `device_used` what all processes hold of it, CUDA contexts included. Each snapshot resets
    PyTorch's peak counter. On a CPU `allocated` counts tensors' storages (see `StorageTracker`,
    which watches this thread until `close`, the end of a `with` block, or the tracker's own end),
    `reserved` is the resident memory of the process, and `device_used` that of all processes.
    """

    def __init__(self, device=None):
        self.device = pick(device)
        self._readings: dict[str, Reading] = {}
        self._counter = _Cuda(self.device) if self.device.type == "cuda" else _Cpu()
        self.close = weakref.finalize(self, self._counter.close)
        self.close.atexit = False

    def snapshot(self, name: str) -> None:
        """Remember memory as it is now. UserError: the name is taken, or the tracker closed."""
        if not isinstance(name, str) or not name:
            raise UserError(f"name={name!r}: a snapshot is named by a text")
        if name in self._readings:
            raise UserError(
                f"there is a snapshot {name!r} already, beside {list(self._readings)}; choose "
                "another name, or start a new MemoryTracker"
            )
        if not self.close.alive:
            raise UserError("this MemoryTracker is closed; start a new one")
        self._readings[name] = Reading(name, *self._counter.read())

    def delta(self, a: str, b: str) -> float:
        """GiB of allocated memory that snapshot `b` has more than `a`."""
        for name in (a, b):
            if name not in self._readings:
                raise UserError(f"no snapshot {name!r}; there are {list(self._readings)}")
        return self._readings[b].allocated_gib - self._readings[a].allocated_gib

    def report(self):
        """A DataFrame with a row for each snapshot: name, allocated_gib, reserved_gib,
        device_used_gib, and peak_gib, the most allocated since the snapshot before it.
        """
        import pandas as pd

        rows = [asdict(reading) for reading in self._readings.values()]
        frame = pd.DataFrame(rows, columns=list(Reading.__dataclass_fields__))
        return frame.astype({name: float for name in frame.columns if name != "name"})

    def __enter__(self) -> "MemoryTracker":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class _Cuda:
    def __init__(self, device: torch.device):
        self.device = device
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> tuple:
        used = None
        with suppress(RuntimeError):
            free, total = torch.cuda.mem_get_info(self.device)
            used = (total - free) / 2**30
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30
        torch.cuda.reset_peak_memory_stats(self.device)
        allocated = torch.cuda.memory_allocated(self.device) / 2**30
        return allocated, torch.cuda.memory_reserved(self.device) / 2**30, used, peak

    def close(self) -> None:
        """Nothing is left behind."""


class _Cpu:
    def __init__(self):
        self.storages = StorageTracker(keep_events=False)
        self.storages.start()

    def read(self) -> tuple:
        import psutil

        rss = used = None
        with suppress(psutil.Error, OSError):
            rss = psutil.Process().memory_info().rss / 2**30
            memory = psutil.virtual_memory()
            used = (memory.total - memory.available) / 2**30
        peak, self.storages.peak = self.storages.peak, self.storages.allocated
        return self.storages.allocated / 2**30, rss, used, peak / 2**30

    def close(self) -> None:
        self.storages.stop()
