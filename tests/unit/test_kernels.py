"""Kernels by themselves: what is counted of each, and that each runs."""

import pytest
import torch

from labkit.config import ModelConfig
from labkit.experiments import kernels
from labkit.experiments.machine import Machine
from labkit.experiments.table import KERNELS, read
from labkit.plots import kernels as figure

CFG = ModelConfig.preset("olmoe-tiny")
T, D, F, E, K = 64, CFG.dim, CFG.ffn_dim, CFG.n_experts, CFG.experts_per_token


@pytest.fixture(scope="module")
def machine():
    return Machine.here("cpu")


def work(machine, name, size=T):
    fn, *counted = kernels.KINDS[name](machine, CFG, size)
    fn()
    return counted


def test_the_work_of_each_kernel(machine):
    """FLOPs, bytes in float32, kernels; by hand."""
    q = T * CFG.n_heads * CFG.head_dim * 4
    grouped = 2 * T * K * D * F, 4 * (T * K * (D + F) + E * D * F), 2
    flops = 2 * CFG.n_heads * CFG.head_dim * (T + 1) * T
    assert work(machine, "grouped multiply") == [*grouped]
    assert work(machine, "attention") == [flops, 4 * q, 1]
    assert work(machine, "attention backward") == [2.5 * flops, 8 * q, 3]
    assert work(machine, "rotary angles") == [0, 7 * q, 3]
    assert work(machine, "dispatch") == [0, 4 * (2 * T * D + 4 * T * K * D), 3]
    assert work(machine, "softmax") == [0, 24 * T * CFG.vocab_size, 2]
    assert work(machine, "AdamW", 32) == [0, 7 * 4 * 32 * D, 1]


@pytest.mark.parametrize("name", list(kernels.CHAINS))
def test_a_chain_goes_forward_and_backward(machine, name):
    calls = []
    fn = kernels.CHAINS[name](machine, 5)
    with torch.autograd.profiler.profile() as profile:
        fn()
    calls = [event.name for event in profile.function_events]
    assert calls.count("aten::sin") == (10 if name == "launch, recomputed" else 5)
    assert calls.count("aten::cos") == 5


def test_a_run_measures_each_once_and_goes_on(tmp_path, monkeypatch):
    few = [{"kernel": name, "size": 32} for name in ("rotary angles", "AdamW")]
    few.append({"kernel": "launch, recomputed", "size": 5})
    monkeypatch.setattr(kernels, "grid", lambda machine: few[:2])
    kernels.run(tmp_path, quick=True, device="cpu", progress=False)
    monkeypatch.setattr(kernels, "grid", lambda machine: few)
    frame = kernels.run(tmp_path, quick=True, device="cpu", progress=False)
    lines = KERNELS.path(tmp_path).read_text().splitlines()
    assert len(frame) == 3 and len(lines) == 4 and (frame["ms"] > 0).all()
    assert (tmp_path / "kernels.png").stat().st_size > 10_000
    whole = frame[frame["moved_bytes"] > 0]
    assert (whole["gbs"] * whole["ms"] / whole["moved_bytes"] * 1e6 - 1).abs().max() < 1e-4


def test_a_figure_of_nothing_says_so(tmp_path):
    frame = read_empty(tmp_path)
    assert figure(frame).axes


def read_empty(folder):
    path = KERNELS.path(folder)
    path.write_text(",".join(KERNELS.columns) + "\n")
    return read(path, KERNELS)
