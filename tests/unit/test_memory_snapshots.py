"""PyTorch's record of CUDA memory: recorded, written, read, and refused when it is hostile."""

import os
import pickle
import time

import pytest
import torch

from labkit.errors import NotThisMachine, UserError
from labkit.hooks import span
from labkit.memory import (
    CATEGORIES,
    read_snapshot,
    record_timeline,
    save_snapshot,
)
from labkit.memory import snapshots as snapshots_module
from tests.unit.memory_steps import GIB


def entry(action, addr, size, time_us):
    return {"action": action, "addr": addr, "size": size, "time_us": time_us, "frames": []}


SNAPSHOT = {
    "segments": [
        {"device": 0, "address": 4096, "total_size": 8192, "blocks": [
            {"size": 2048, "requested_size": 2000, "state": "active_allocated"},
            {"size": 1024, "requested_size": 1000, "state": "active_allocated"},
            {"size": 5120, "requested_size": 0, "state": "inactive"},
        ]},
        {"device": 1, "address": 99, "total_size": 512, "blocks": [
            {"size": 512, "requested_size": 4, "state": "active_allocated"}]},
    ],
    "device_traces": [[
        entry("segment_alloc", 4096, 8192, 10_000),
        entry("free_requested", 7168, 4096, 11_000),  # there before
        entry("free_completed", 7168, 4096, 11_000),
        entry("alloc", 6144, 1000, 12_000),
        entry("alloc", 7168, 1, 13_000),
        entry("free_requested", 7168, 1, 14_000),
    ], []],
}  # fmt: skip


def written(tmp_path, content: bytes):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    return path


def test_a_snapshot_is_read_as_a_timeline(tmp_path):
    lived = read_snapshot(written(tmp_path, pickle.dumps(SNAPSHOT, protocol=4)))
    found = list((lived.frame["allocated_gib"] * GIB).astype(int))
    assert found == [6144, 2048, 3072, 3584, 3072], found
    assert list(lived.t_ms) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert lived.categories("end") == dict.fromkeys(CATEGORIES, 0) | {
        "other": 2048, "temporary": 1024,
    }  # fmt: skip


class Malicious:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("thing", "named"),
    [
        (Malicious(os.system, "touch owned"), r"(posix|nt)\.system"),
        (Malicious(eval, "open('owned', 'w')"), r"_*builtins?_*\.eval"),
        (Malicious(getattr, "", "join"), r"_*builtins?_*\.getattr"),
        ({"device_traces": [[Malicious(exec, "1")]]}, r"_*builtins?_*\.exec"),
        (torch.zeros(2), "torch"),
        (torch.zeros(2).numpy(), "numpy"),
    ],
)
def test_a_snapshot_that_asks_for_code_is_refused_by_name(tmp_path, monkeypatch, thing, named):
    monkeypatch.chdir(tmp_path)
    for protocol in (0, 2, 4, 5):
        path = written(tmp_path, pickle.dumps(thing, protocol))
        with pytest.raises(UserError, match=rf"refused.*asks for {named}"):
            read_snapshot(path)
    assert [file.name for file in tmp_path.iterdir()] == ["snapshot.pickle"]


WHOLE = pickle.dumps(SNAPSHOT, protocol=4)
NO_HISTORY = pickle.dumps(SNAPSHOT | {"device_traces": [[], []]})
BAD_SIZE = pickle.dumps(SNAPSHOT | {"device_traces": [[entry("alloc", 1, "big", 1)]]})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (WHOLE[: len(WHOLE) // 2], "cut short"),
        (b"", "cut short"),
        (b"a diary", "no pickle"),
        (b"\x80\x04r\xff\xff\xff\xff", "cut short"),  # a memo index of four thousand millions
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f", "cut short"),  # bytes of 2^63
        (b"\x80\x04)R.", "cut short"),
        (pickle.dumps([1, 2]), "no memory snapshot"),
        (pickle.dumps({"segments": []}), "no memory snapshot"),
        (BAD_SIZE, "no memory snapshot"),
        (NO_HISTORY, "no history.*save_snapshot"),
    ],
)
def test_a_file_that_is_no_snapshot_is_explained(tmp_path, content, says):
    with pytest.raises(UserError, match=rf"snapshot\.pickle.*{says}"):
        read_snapshot(written(tmp_path, content))


def test_a_file_that_is_too_large_or_not_there_is_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"no\.pickle.*save_snapshot"):
        read_snapshot(tmp_path / "no.pickle")
    monkeypatch.setattr(snapshots_module, "MAX_BYTES", 100)
    with pytest.raises(UserError, match="more than"):
        read_snapshot(written(tmp_path, WHOLE))
    monkeypatch.undo()
    with pytest.raises(UserError, match="device=7"):
        read_snapshot(written(tmp_path, WHOLE), device=7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_snapshot_needs_a_gpu(tmp_path):
    with pytest.raises(NotThisMachine, match="GPU"):
        save_snapshot(tmp_path / "x.pickle", lambda: None)


# ------------------------------------------------------------------------------- simulated CUDA


class Allocator:
    """As much of the CUDA caching allocator's bookkeeping as the recorder reads."""

    def __init__(self, monkeypatch):
        self.blocks, self.trace, self.counts, self.recording = {}, [], [0, 0], False
        fakes = {
            "torch.cuda.init": lambda: None,
            "torch.cuda.current_device": lambda: 0,
            "torch.cuda.synchronize": lambda device: None,
            "torch.cuda.memory._record_memory_history": self.record,
            "torch.cuda.memory._snapshot": self.snapshot,
            "torch.cuda.memory_stats_as_nested_dict": lambda device: {
                "allocation": {"all": dict(zip(("allocated", "freed"), self.counts, strict=True))}
            },
            "torch._C._cuda_isHistoryEnabled": lambda: self.recording,
            "labkit.memory.recorders.pick": lambda device: torch.device("cuda"),
            "labkit.memory.snapshots.pick": lambda device: torch.device("cuda"),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(name, fake, raising=False)

    def record(self, enabled="all", **options):
        self.recording, self.trace = enabled is not None, []

    def alloc(self, address, size):
        self.blocks[address] = size
        self._note(0, "alloc", address, size)

    def free(self, address):
        self._note(1, "free_requested", address, self.blocks.pop(address))
        self.trace.append(entry("free_completed", address, 0, 0))

    def _note(self, index, action, address, size):
        self.counts[index] += 1
        if self.recording:
            self.trace.append(entry(action, address, size, time.time_ns() // 1000))

    def snapshot(self):
        segments = [
            {"device": 0, "address": address, "blocks": [
                {"state": "active_allocated", "size": -(-size // 512) * 512}]}
            for address, size in self.blocks.items()
        ]  # fmt: skip
        return {"segments": segments, "device_traces": [list(self.trace)]}


@pytest.fixture
def allocator(monkeypatch):
    return Allocator(monkeypatch)


def test_a_cuda_timeline_follows_the_allocators_own_record(allocator):
    allocator.alloc(1, 5000)

    def step():
        with span("forward"):
            allocator.alloc(2, 512)
            allocator.alloc(3, 1024)
            allocator.free(3)
        with span("backward"):
            allocator.alloc(3, 100)
            allocator.free(2)
            allocator.free(1)

    lived = record_timeline(step)
    found = (lived.frame["allocated_gib"] * GIB).astype(int).tolist()
    assert found == [5120, 5632, 6656, 5632, 6144, 5632, 512], found
    assert lived.phases[["name", "first", "last"]].values.tolist() == [
        ["forward", 1, 3], ["backward", 4, 6],
    ]  # fmt: skip
    assert {n: size for n, size in lived.categories("forward").items() if size} == {
        "activations": 512, "other": 5120,
    }  # fmt: skip
    assert lived.categories("end")["temporary"] == 512
    assert not allocator.recording


def test_a_history_of_somebody_else_is_left_alone(allocator):
    allocator.recording = True
    with pytest.raises(UserError, match="recorded already"):
        record_timeline(lambda: None)
    assert allocator.recording


def test_a_cuda_history_ends_whatever_happens(allocator, tmp_path, monkeypatch):
    def fails(error):
        allocator.alloc(9, 512)
        raise error

    path = tmp_path / "step.pickle"
    for call in (record_timeline, lambda fn: save_snapshot(path, fn)):
        with pytest.raises(KeyboardInterrupt):
            call(lambda: fails(KeyboardInterrupt))
        assert not allocator.recording
    with pytest.raises(UserError, match="allocated nothing"):
        save_snapshot(path, lambda: None)
    assert not path.exists()
    with pytest.raises(torch.OutOfMemoryError):
        save_snapshot(path, lambda: fails(torch.OutOfMemoryError("no room")))
    assert read_snapshot(path).categories("end")["temporary"] == 512, "what led to it is kept"
    monkeypatch.setattr(snapshots_module, "MAX_ENTRIES", 3)
    with pytest.raises(UserError, match="shorter call"):
        record_timeline(lambda: [allocator.alloc(i, 1) for i in range(5)])
    with pytest.raises(UserError, match="cannot be written"):
        save_snapshot(path / "x.pickle", lambda: allocator.alloc(20, 1))
    assert save_snapshot(tmp_path / "new" / "x.pickle", lambda: allocator.alloc(20, 1)).exists()
