"""PyTorch's record of every CUDA allocation: write one, and read one that nobody vouches for."""

import io
import pickle
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from labkit.devices import pick
from labkit.errors import NotThisMachine, UserError
from labkit.files import whole_file
from labkit.memory.timeline import Timeline, replay

MAX_ENTRIES = 1_000_000  # that the allocator keeps; a training step has some ten thousand
MAX_BYTES = 2**30  # of a file
ROUND = 512  # bytes: the allocator rounds a request up to a multiple (c10/cuda, kMinBlockSize)
RECORD = "record one with labkit.memory.save_snapshot(path, fn)"


def save_snapshot(path, fn: Callable[[], object], device=None) -> Path:
    """Record every allocation of one call of `fn` in a file for https://pytorch.org/memory_viz.

    With the Python stack of each. If `fn` runs out of memory, what led to it is written before the
    error comes through. UserError: `fn` allocates nothing there, a history that somebody else is
    recording, or a path that cannot be written. NotThisMachine: no CUDA GPU.
    """
    device = pick(device)
    if device.type != "cuda":
        raise NotThisMachine("a memory snapshot needs a CUDA GPU: its allocator keeps the record")
    index = torch.cuda.current_device() if device.index is None else device.index
    with history(stacks="python"):
        try:
            fn()
            torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            _write(torch.cuda.memory._snapshot(), Path(path))
            raise
        snapshot = torch.cuda.memory._snapshot()
    if not any(entry["action"] == "alloc" for entry in snapshot["device_traces"][index]):
        raise UserError(f"the call allocated nothing on cuda:{index}: does it run there?")
    return _write(snapshot, Path(path))


def read_snapshot(path, device: int | None = None) -> Timeline:
    """The Timeline of a snapshot that PyTorch wrote (`save_snapshot`, or `_dump_snapshot`).

    `device` is the number of the GPU; None takes the one with the most events. A pickle can run
    any code when it is loaded. This reader builds nothing but lists, tuples, dicts, sets, texts,
    bytes, numbers, True, False and None, and refuses a file that asks for more. A snapshot does not
    say whose a block is: what was there before is "other", the rest "temporary".
    UserError: no such file, not a snapshot, or one without a history.
    """
    snapshot = _load(Path(path))
    try:
        traces = snapshot["device_traces"]
        if not any(traces):
            raise UserError(f"{path} holds no history of allocations; {RECORD}")
        if device is None:
            device = max(range(len(traces)), key=lambda i: len(traces[i]))
        elif isinstance(device, bool) or not 0 <= device < len(traces):
            raise UserError(f"device={device!r}: {path} has devices 0 to {len(traces) - 1}")
        first = min((entry.get("time_us", 0) for entry in traces[device]), default=0)
        events = trace_events(traces[device], first)
        return replay(_sizes_before(block_sizes(snapshot, device), events), events)
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is no memory snapshot of PyTorch ({what}); {RECORD}") from None


@contextmanager
def history(stacks: str | None):
    """Let the CUDA allocator record its history; with Python's stacks, or without (None)."""
    torch.cuda.init()
    if torch._C._cuda_isHistoryEnabled():
        raise UserError(
            "the CUDA allocator's history is being recorded already; save what you need of it, and "
            "end it with torch.cuda.memory._record_memory_history(enabled=None)"
        )
    torch.cuda.memory._record_memory_history(
        enabled="all", context="all" if stacks else None, stacks=stacks or "python",
        max_entries=MAX_ENTRIES,
    )  # fmt: skip
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def check_complete(trace: list) -> None:
    """Raise UserError if the allocator had to forget the beginning of its history."""
    if len(trace) >= MAX_ENTRIES:
        raise UserError(f"over {MAX_ENTRIES:,} allocations and frees; record a shorter call")


def trace_events(trace: list[dict], began_us: float) -> list[tuple[float, int, int]]:
    """(t_ms, address, signed bytes) of each allocation and free of one device, in their order."""
    signs = {"alloc": 1, "free_requested": -1}  # what memory_allocated counts
    return [
        (
            max(0.0, (entry["time_us"] - began_us) / 1e3) if "time_us" in entry else float("nan"),
            entry["addr"],
            signs[entry["action"]] * rounded(entry["size"]),
        )
        for entry in trace
        if entry["action"] in signs
    ]


def block_sizes(snapshot: dict, index: int) -> dict[int, int]:
    """Address → bytes of the blocks in use when a snapshot was taken."""
    sizes = {}
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            if segment["device"] == index and block["state"] == "active_allocated":
                sizes[address] = block["size"]
            address += block["size"]
    return sizes


def rounded(size: int) -> int:
    """Bytes that the allocator gives for a request of `size`."""
    return max(ROUND, -(-size // ROUND) * ROUND)


def _sizes_before(at_end: dict[int, int], events: list) -> dict[int, int]:
    """What was allocated before the events, by what is there after them."""
    before, seen = {}, set()
    for _, address, size in events:
        if size < 0 and address not in seen:
            before[address] = -size
        seen.add(address)
    return before | {address: size for address, size in at_end.items() if address not in seen}


def _write(snapshot: dict, path: Path) -> Path:
    try:
        with whole_file(path) as draft, draft.open("wb") as file:
            pickle.dump(snapshot, file, protocol=4)  # as torch's own, which the page can read
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from None
    return path


class _Refusing(pickle._Unpickler):
    """Builds containers and scalars only. In Python: the C one believes a file's memo indices."""

    def find_class(self, module: str, name: str):
        raise UserError(f"it asks for {module}.{name}, and a memory snapshot needs no code")

    def persistent_load(self, pid):
        raise UserError("it refers to something outside itself, and a memory snapshot does not")


def _load(path: Path):
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UserError(f"{path} has {size / 2**30:.1f} GiB, more than the 1 GiB that is read")
        return _Refusing(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {RECORD}") from None
    except UserError as error:
        raise UserError(f"{path} is refused: {error}") from None
    except (
        EOFError,
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        MemoryError,
        OverflowError,
        NameError,
        AssertionError,
    ) as error:
        what = str(error) or type(error).__name__
        raise UserError(f"{path} is cut short, or no pickle at all ({what}); {RECORD}") from None
