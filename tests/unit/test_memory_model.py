"""The arithmetic of memory against what is allocated, and on a GPU all of `labkit.memory`."""

from functools import partial

import pytest
import torch

from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.errors import UserError
from labkit.memory import (
    MemoryTracker,
    read_snapshot,
    record_timeline,
    save_snapshot,
)
from labkit.memory_model import activation_bytes, step_bytes
from labkit.model import Transformer
from labkit.perfmodel import param_count
from labkit.train import accumulated_step, make_optimizer, train_step
from tests.unit.memory_steps import DENSE, GIB, MIB, MOE, step_timeline


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("cfg", "changes"),
    [
        (MOE, {}),
        (MOE, {"n_layers": 1, "experts_per_token": 1, "n_kv_heads": 2}),
        (MOE, {"qk_norm": False, "vocab_size": 32, "ffn_dim": 128}),
        (DENSE, {}),
        (DENSE, {"n_kv_heads": 4, "qk_norm": True, "head_dim": 8}),
        (DENSE, {"vocab_size": 32, "dim": 128, "n_layers": 2}),
    ],
)
def test_the_memory_model_is_what_a_forward_keeps(cfg, changes, recompute):
    cfg = ModelConfig(**cfg.to_dict() | changes)
    lived = step_timeline(cfg, recompute)
    found = lived.categories("forward")["activations"]
    expected = sum(activation_bytes(cfg, 4, 64, recompute, bytes_per_element=4).values())
    assert found == pytest.approx(expected, rel=0.02), f"{expected} estimated, {found} kept"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("vocab_size", [64, 4096])
def test_the_estimate_of_the_peak(vocab_size, recompute):
    cfg = ModelConfig(**MOE.to_dict() | {"vocab_size": vocab_size})
    lived = step_timeline(cfg, recompute, sizes=(8, 8), seqlen=64)
    found = lived.peak_gib * GIB - lived.categories()["other"]
    expected = sum(step_bytes(cfg, 8, 64, recompute, bytes_per_element=4).values())
    assert found == pytest.approx(expected, rel=0.1), f"{expected} estimated, {found} allocated"


def test_the_memory_model_agrees_with_a_measured_gpu():
    """20.03 GiB on an H200 (torch 2.11, bfloat16), for a step that keeps no name for its logits."""
    cfg = ModelConfig.preset("olmoe-1b-7b", n_layers=4)
    parts = step_bytes(cfg, 4, 2048)
    peak = (sum(parts.values()) - parts["gradients"]) / GIB  # the first micro batch has none yet
    assert peak == pytest.approx(20.03, rel=0.01), f"{peak} GiB"


@pytest.mark.parametrize(("size", "seqlen"), [(0, 8), (2, -1), (True, 8), (1.5, 8)])
def test_sizes_that_are_none_are_named(size, seqlen):
    with pytest.raises(UserError, match="whole number"):
        activation_bytes(MOE, size, seqlen)


# -------------------------------------------------------------------------------------------- GPU


@pytest.fixture
def on_gpu():
    cfg = ModelConfig.preset("olmoe-1b-7b", n_layers=1, n_experts=8)
    model = Transformer(cfg).to("cuda", torch.bfloat16)
    optimizer = make_optimizer(model)
    batch = random_micro_batch(cfg, 2, 1024, "cuda")
    train_step(model, optimizer, batch)
    return cfg, model, optimizer, batch


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_a_gpu_timeline_is_what_the_allocator_counts(on_gpu, recompute):
    cfg, model, optimizer, batch = on_gpu
    model.recompute = recompute
    torch.cuda.reset_peak_memory_stats()
    lived = record_timeline(lambda: train_step(model, optimizer, batch), model, optimizer)
    peak = torch.cuda.max_memory_allocated() / GIB
    assert lived.peak_gib == pytest.approx(peak, rel=0.01), f"{lived.peak_gib} of {peak} GiB"
    end = torch.cuda.memory_allocated() / GIB
    assert lived.frame["allocated_gib"].iloc[-1] == pytest.approx(end, rel=0.01)
    for at in ("start", "forward", "peak", "end"):
        total = lived.frame["allocated_gib"][lived._event(at)] * GIB
        assert sum(lived.categories(at).values()) == round(total)
    n_bytes = 2 * param_count(cfg)
    after = lived.categories("backward")
    assert after["weights"] == pytest.approx(n_bytes, rel=0.02), after
    assert after["gradients"] == pytest.approx(n_bytes, rel=0.02), after
    assert after["moments"] == pytest.approx(2 * n_bytes, rel=0.02), after
    assert not torch._C._cuda_isHistoryEnabled()


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_the_memory_model_on_a_gpu(on_gpu, recompute):
    cfg, model, optimizer, batch = on_gpu
    model.recompute = recompute
    lived = record_timeline(lambda: accumulated_step(model, optimizer, [batch]), model, optimizer)
    found = lived.categories("forward")["activations"]
    expected = sum(activation_bytes(cfg, 2, 1024, recompute).values())
    assert found == pytest.approx(expected, rel=0.02), f"{expected} estimated, {found} kept"


@pytest.mark.gpu
def test_a_gpu_snapshot_is_written_and_read_back(on_gpu, tmp_path):
    _, model, optimizer, batch = on_gpu
    path = save_snapshot(tmp_path / "step.pickle", lambda: train_step(model, optimizer, batch))
    torch.cuda.reset_peak_memory_stats()
    train_step(model, optimizer, batch)
    peak = torch.cuda.max_memory_allocated() / GIB
    assert read_snapshot(path).peak_gib == pytest.approx(peak, rel=0.02)
    assert [file.name for file in tmp_path.iterdir()] == ["step.pickle"]
    with pytest.raises(UserError, match="allocated nothing"):
        save_snapshot(path, lambda: None)
    with pytest.raises(RuntimeError, match="the weather"):
        save_snapshot(path, lambda: (_ for _ in ()).throw(RuntimeError("the weather")))
    assert not torch._C._cuda_isHistoryEnabled()


@pytest.mark.gpu
def test_the_tracker_on_a_gpu():
    tracker = MemoryTracker("cuda")
    tracker.snapshot("a")
    x = torch.zeros(16 * MIB, device="cuda")
    tracker.snapshot("b")
    assert tracker.delta("a", "b") == pytest.approx(x.nbytes / GIB, rel=0.05)
    last = tracker.report().iloc[-1]
    assert last["allocated_gib"] <= last["reserved_gib"] <= last["device_used_gib"], last


def test_a_step_keeps_no_tensor_by_name():
    """train_step and accumulated_step peak alike on one micro batch: neither names its logits."""
    peaks = []
    for step in (train_step, accumulated_step):
        torch.manual_seed(0)
        model = Transformer(ModelConfig.preset("olmoe-tiny", n_layers=1))
        optimizer = make_optimizer(model)
        batch = random_micro_batch(model.cfg, 2, 64)
        batch = batch if step is train_step else [batch]
        step(model, optimizer, batch)
        lived = record_timeline(partial(step, model, optimizer, batch), model, optimizer)
        peaks.append(lived.peak_gib * 2**20)
    assert abs(peaks[0] - peaks[1]) < 4, f"peaks of {peaks[0]:.1f} and {peaks[1]:.1f} KiB"
