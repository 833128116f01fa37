"""Where memory goes: snapshots by name, the timeline of a call, and PyTorch's own record of it."""

from labkit.memory.recorders import record_timeline
from labkit.memory.snapshots import read_snapshot, save_snapshot
from labkit.memory.timeline import CATEGORIES, Timeline
from labkit.memory.tracker import MemoryTracker

__all__ = [
    "CATEGORIES", "MemoryTracker", "Timeline", "read_snapshot", "record_timeline", "save_snapshot",
]  # fmt: skip
