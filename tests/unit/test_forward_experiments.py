"""Part 2's experiments: recorded forward passes, and where tokens are routed."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from labkit.config import ModelConfig
from labkit.devices import spec
from labkit.errors import UserError
from labkit.experiments import forward, routing, run_experiment
from labkit.experiments.table import ROUTED, read
from labkit.perfmodel import forward_floor_ms
from labkit.plots import routing as routing_figure

SHORT = [
    forward.Pass("fwd_small", 1, 16),
    forward.Pass("fwd_large", 8, 64),
    forward.Pass("fwd_small_naive", 1, 16, "naive"),
]


@pytest.fixture(scope="module", autouse=True)
def quickly():
    """Short passes on one thread: two wait for each other while other tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "passes", lambda on_gpu: SHORT)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forward")
    return folder, run_experiment("forward", folder, quick=True, device="cpu", progress=False)


def test_three_passes_with_floors_and_all_of_their_files(recorded):
    folder, frame = recorded
    assert list(frame["workload"]) == ["fwd_small", "fwd_large", "fwd_small_naive"]
    assert (frame["status"] == "ok").all(), frame["status"]
    assert frame["compute_floor_ms"].iloc[1] / frame["compute_floor_ms"].iloc[0] > 30
    assert frame["memory_floor_ms"].nunique() == 1, "the weights are read once, however many tokens"
    for name in frame["workload"]:
        for file in ("ranges.csv", "kernels.csv", "api.csv", "summary.csv"):
            assert (folder / f"{name}_{file}").is_file(), (name, file)
    assert (folder / "forward.png").stat().st_size > 10_000


def test_what_only_a_gpu_can_tell_is_not_known_on_a_cpu(recorded):
    unknown = recorded[1][["idle_ms", "launch_bound_ms", "synchronizations"]]
    assert unknown.isna().all(axis=None), unknown
    assert set(recorded[1]["regime_by"]) == {"floors"}


def test_a_saved_pass_is_read_back_as_it_was_recorded(recorded):
    folder, frame = recorded
    recording = forward.load(folder, "fwd_small")
    row = frame.iloc[0]
    assert recording.before_ms == pytest.approx(row["before_ms"], rel=1e-4)
    step = recording.ranges.set_index("range").loc["step"]
    assert step["busy_ms"] == pytest.approx(row["busy_ms"], rel=1e-4)
    assert recording.facts["device"] == row["device"]
    with pytest.raises(UserError, match="labkit experiment forward"):
        forward.load(folder, "fwd_huge")


def test_a_second_run_records_nothing_that_is_there(recorded, monkeypatch, tmp_path):
    folder, _ = recorded
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    done = []
    measure = forward._measure
    monkeypatch.setattr(
        forward, "_measure", lambda *given: done.append(given[2].name) or measure(*given)
    )
    options = {"quick": True, "device": "cpu", "progress": False}
    forward.run(tmp_path, **options)
    assert done == []
    (tmp_path / "fwd_small_naive_ranges.csv").unlink()
    forward.run(tmp_path, **options)
    assert done == ["fwd_small_naive"], "a pass whose file is lost is recorded again"


def test_a_pass_that_fails_is_a_row_and_the_others_go_on(monkeypatch, tmp_path):
    measure = forward._measure

    def fail(machine, model, one, *rest):
        if one.name == "fwd_large":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(machine, model, one, *rest)

    monkeypatch.setattr(forward, "_measure", fail)
    frame = forward.run(tmp_path, quick=True, device="cpu", progress=False)
    assert list(frame["status"]) == ["ok", "out of memory", "ok"]


@pytest.mark.parametrize(
    ("before_ms", "busy_ms", "floors", "on_gpu", "named"),
    [  # the first three are an H200's
        (19.2, 7.7, (1.24, 2.88), True, "overhead-bound"),
        (101.2, 99.2, (39.6, 2.88), True, "compute-bound"),
        (270.3, 28.1, (1.24, 2.88), True, "overhead-bound"),
        (4.0, 3.9, (1.24, 2.88), True, "memory-bound"),
        (18.9, 18.2, (4.69, 1.17), False, "overhead-bound"),
        (192.5, 212.7, (157.8, 1.17), False, "compute-bound"),
    ],
)
def test_regimes(before_ms, busy_ms, floors, on_gpu, named):
    assert forward.regime(before_ms, busy_ms, floors, on_gpu)[0] == named


def test_a_small_gpu_gets_the_layers_that_fit():
    cfg = ModelConfig.preset("olmoe-1b-7b")

    def layers(gib):
        machine = SimpleNamespace(
            on_gpu=True, dtype=torch.bfloat16, spec=SimpleNamespace(memory_gib=gib)
        )
        return forward.fitting_layers(cfg, machine)

    assert [layers(gib) for gib in (141, 44, 24, 16, 2)] == [16, 16, 16, 12, 1]


def test_the_h200s_floors_are_those_of_the_course():
    cfg = ModelConfig.preset("olmoe-1b-7b")
    assert forward_floor_ms(cfg, 1, 512, spec("H200")) == pytest.approx((1.238, 2.883), rel=1e-3)
    assert forward_floor_ms(cfg, 32, 512, spec("H200")) == pytest.approx((39.62, 2.883), rel=1e-3)


# ----------------------------------------------------------------------------------------- routing


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routing")
    return folder, routing.run(folder, quick=True, device="cpu", progress=False)


def test_every_token_goes_to_its_experts(routed):
    folder, frame = routed
    experts = read(folder / "routing_experts.csv", ROUTED)
    assert set(frame["tokens"]) == {routing.TOKENS_QUICK}
    assert (experts.groupby("layer")["rows"].sum() == 4 * routing.TOKENS_QUICK).all()
    assert experts.groupby("layer")["over_mean"].mean().to_numpy() == pytest.approx(1)
    assert (folder / "routing.png").is_file()


def test_a_trained_router_is_uneven_and_more_gpus_feel_it_more(routed):
    frame = routed[1]
    assert (frame["busiest_over_mean"] > 1.3).all(), frame["busiest_over_mean"].tolist()
    gpus = frame[["gpus2_over_mean", "gpus4_over_mean", "gpus8_over_mean", "busiest_over_mean"]]
    assert (gpus.diff(axis=1).iloc[:, 1:] >= -1e-9).all(axis=None), gpus


def test_counts_of_a_second_run_are_read_not_measured(routed, monkeypatch):
    folder, frame = routed
    monkeypatch.setattr(routing, "count", None)
    again = routing.run(folder, quick=True, device="cpu", progress=False)
    pd.testing.assert_frame_equal(again, frame)


@pytest.mark.parametrize(
    ("rows", "gpus", "expected"),
    [
        ([10, 10, 10, 10], 2, 1.0),
        ([40, 0, 0, 0], 2, 2.0),
        ([40, 0, 0, 0], 4, 4.0),
        ([30, 10, 0, 0], 2, 2.0),
        ([30, 0, 10, 0], 2, 1.5),
        ([1, 2], 4, None),
    ],
)
def test_imbalance_of_contiguous_blocks(rows, gpus, expected):
    assert routing.over_mean(np.array(rows), gpus) == expected


def test_an_expert_without_a_token_is_counted():
    (row,) = routing.by_layer(np.array([[8, 0, 4, 0]]), experts_per_token=2)
    assert row["empty_experts"] == 2 and row["tokens"] == 6
    assert row["busiest_over_mean"] == pytest.approx(8 / 3)
    assert row["gpus8_over_mean"] is None


def test_the_map_has_a_cell_an_expert(routed):
    folder, frame = routed
    figure = routing_figure(read(folder / "routing_experts.csv", ROUTED), frame)
    (image,) = figure.axes[0].images
    assert image.get_array().shape == (4, 16)
    labels = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert labels == ["2 GPUs", "4 GPUs", "8 GPUs", "one GPU an expert"]


def test_a_dense_or_absent_model_is_refused_before_anything_is_written(tmp_path):
    from labkit.checkpoint import save_hf
    from labkit.model import Transformer

    save_hf(Transformer(ModelConfig.preset("tiny", vocab_size=64, dim=32)), tmp_path / "dense")
    for path, says in ((tmp_path / "dense", "dense model"), (tmp_path / "none", "is not there")):
        with pytest.raises(UserError, match=says):
            routing.run(tmp_path / "out", device="cpu", progress=False, checkpoint=path)
    assert not (tmp_path / "out").exists()
