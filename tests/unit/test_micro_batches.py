"""Experiment 4: one update in micro batches of several sizes, and its figure."""

import gc

import pytest
import torch

from labkit.config import ModelConfig
from labkit.data import MicroBatch
from labkit.errors import UserError
from labkit.experiments import micro_batches
from labkit.experiments.micro_batches import Work, grid, panels, split
from labkit.model import Transformer
from labkit.train import accumulated_step

SMALL = {"layers": 1, "global_batch_size": 4, "seqlen": 16, "device": "cpu", "quick": True}
CFG = ModelConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=16,
    n_experts=4, experts_per_token=2, qk_norm=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices are no work for several threads, which would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(tmp_path, **changes):
    return micro_batches.run(tmp_path, progress=False, **SMALL | changes)


def test_a_row_for_each_size_and_a_figure(tmp_path):
    gc.collect()
    frame = run(tmp_path, seqlen=128)
    assert list(frame["micro_batch_size"]) == [4, 2, 1] * 2
    assert list(frame["micro_batches"]) == [1, 2, 4] * 2
    assert set(frame["status"]) == {"ok"}, frame["status"].tolist()
    assert (frame["step_ms"] > 0).all() and frame["reserved_gib"].isna().all()
    speed = 1e3 * 4 * 128 / frame["step_ms"]
    assert frame["tokens_per_s"].tolist() == pytest.approx(speed.tolist(), rel=1e-4)
    # Differences: tensors of other tests that are alive in this process count in every row.
    whole, half, single = frame["peak_gib"][frame["recompute"] == "no"]
    assert single < half < whole, f"peaks of {whole}, {half} and {single} GiB"
    assert whole - single > 0.008, f"only {whole - single:.4f} GiB less in micro batches of 1"
    assert (tmp_path / "micro_batches.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_run_measures_nothing(tmp_path, monkeypatch):
    run(tmp_path, micro_batch_sizes=(4,))
    drawn = (tmp_path / "micro_batches.png").stat().st_mtime_ns
    frame = run(tmp_path, micro_batch_sizes=(4,))
    assert len(frame) == 2
    assert (tmp_path / "micro_batches.png").stat().st_mtime_ns == drawn
    (tmp_path / "micro_batches.png").unlink()
    monkeypatch.setattr(Work, "measure", lambda *args, **kwargs: pytest.fail("measured again"))
    run(tmp_path, micro_batch_sizes=(4,))
    assert (tmp_path / "micro_batches.png").exists()


def test_what_does_not_fit_is_a_row_and_a_panel_that_say_so(tmp_path, monkeypatch):
    measure, record = Work.measure, Work._timeline

    def limited(self, micro_batch_size, recompute, quick=False):
        if micro_batch_size == 4 and recompute == "no":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(self, micro_batch_size, recompute, quick)

    def full(self, step):
        if not self._built[0].recompute:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return record(self, step)

    monkeypatch.setattr(Work, "measure", limited)
    monkeypatch.setattr(Work, "_timeline", full)
    shown = {}
    draw = micro_batches.plots.memory_timeline
    monkeypatch.setattr(
        micro_batches.plots, "memory_timeline",
        lambda timelines, *rest, **over: shown.update(timelines) or draw(timelines, *rest, **over),
    )  # fmt: skip
    frame = run(tmp_path, micro_batch_sizes=(4, 1))
    assert frame["status"].tolist() == ["out of memory", "ok", "ok", "ok"]
    assert [panel for panel in shown.values() if isinstance(panel, str)] == ["out of memory"] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_update_does_not_depend_on_the_micro_batch_size(size):
    ids = [torch.randint(64, (n + 1,)).tolist() for n in (5, 9, 2, 7)]
    batch = MicroBatch.from_sequences(ids)
    weights = []
    for parts in ([batch], split(batch, size)):
        torch.manual_seed(0)
        model = Transformer(CFG)
        accumulated_step(model, torch.optim.SGD(model.parameters(), lr=1e-2), parts)
        weights.append([p.detach() for p in model.parameters()])
    off = max((a - b).abs().max().item() for a, b in zip(*weights, strict=True))
    assert off < 1e-7, f"weights differ by {off:.1e} in micro batches of {size}"


def test_the_parts_are_the_whole():
    batch = MicroBatch.from_sequences([[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    parts = split(batch, 2)
    assert [part.seqs.lengths for part in parts] == [(2, 1), (3,)]
    assert torch.cat([part.tokens for part in parts]).tolist() == batch.tokens.tolist()
    assert torch.cat([part.targets for part in parts]).tolist() == batch.targets.tolist()


def test_the_figure_has_four_panels_of_half_the_batch():
    assert [(n, k["micro_batch_size"]) for n, k in panels(16)] == [(1, 8), (1, 8), (4, 2), (4, 2)]
    assert [(n, k["micro_batch_size"]) for n, k in panels(1)] == [(1, 1), (1, 1)]


@pytest.mark.parametrize("sizes", [(0,), (5,), (2, -1)])
def test_a_size_that_the_global_batch_does_not_have_is_named(tmp_path, sizes):
    with pytest.raises(UserError, match="micro batches of 1 to 4"):
        run(tmp_path, micro_batch_sizes=sizes)
    assert len(grid(4)) == 6
