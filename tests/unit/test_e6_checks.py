"""Experiment 6 makes its three recordings, and its checks name each doctored one."""

import shutil

import pytest
import torch

from labkit.errors import UserError
from labkit.experiments import table, train
from labkit.experiments.table import TRAIN
from tests.public import checks_e6
from tests.unit.doctored import Cheats, assert_named, failures

cheat = Cheats()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What the experiment writes on this CPU."""
    folder, threads = tmp_path_factory.mktemp("train"), torch.get_num_threads()
    torch.set_num_threads(1)  # two threads wait for each other while other tests run
    train.run(folder, device="cpu", progress=False)
    torch.set_num_threads(threads)
    return folder


@pytest.fixture
def honest(measured, tmp_path):
    return shutil.copytree(measured, tmp_path / "results")


def test_honest_results_pass(honest):
    assert not (messages := failures(checks_e6, honest)), messages
    assert (honest / "train.png").stat().st_size > 10_000


def test_a_second_run_measures_what_is_not_there(honest, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "_measure", lambda machine, one, *rest: seen.append(one.name) or {})
    train.run(honest, device="cpu", progress=False)
    assert not seen, f"{seen} were recorded again"
    (honest / "train_rc_api.csv").unlink()
    monkeypatch.setattr(train, "figure", lambda frame, output: train.plots.new_figure()[0])
    train.run(honest, device="cpu", progress=False)
    assert seen == ["train_rc"], seen


def test_a_recording_is_read_again(honest):
    recording = train.load(honest, "train_rc")
    rows = table.read(honest / "train.csv", TRAIN).set_index("workload")
    found = train.summary(recording)["recompute_ms"]
    assert found == pytest.approx(rows.loc["train_rc", "recompute_ms"], rel=1e-4)
    with pytest.raises(UserError, match="does not exist: `labkit experiment train`"):
        train.load(honest, "train_x")


@cheat(TRAIN, "lacks 1 of 3 rows, the first: workload train_rc")
def a_step_left_out(frame):
    return frame[frame["workload"] != "train_rc"]


@cheat(TRAIN, r"\['train_naive'\] ran out of memory")
def one_that_did_not_fit(frame):
    frame.loc[2, "status"] = "out of memory"
    return frame


@cheat(TRAIN, "train_rc: recompute is no, the experiment has yes")
def not_recomputed(frame):
    return frame.assign(recompute="no")


@cheat(TRAIN, "train: layers is 1, the experiment has 2")
def fewer_layers(frame):
    return frame.assign(layers=1)


@cheat(TRAIN, "all different")
def the_same_time_twice(frame):
    return frame.assign(before_ms=40.0)


@cheat(TRAIN, r"busy_ms of \(backward\) .* backward_ms in train.csv .* do not agree")
def a_faster_backward(frame):
    return frame.assign(backward_ms=frame["backward_ms"] / 2)


@cheat("train_ranges.csv", "the ranges' own_ms .* do not agree")
def a_part_taken_out(frame):
    return frame.assign(own_ms=frame["own_ms"] * 0.8)


@cheat("train_ranges.csv", r"has no row '\(backward\)'")
def no_backward(frame):
    return frame[frame["range"] != "(backward)"]


@cheat("train_rc_ranges.csv", r"recompute.layers.\*.attn was open 0 times.*Exercises 4 and 5")
def nothing_below_the_layers(frame):
    return frame[~frame["range"].str.startswith("recompute.layers.*.")]


@cheat("train_kernels.csv", "the kernels' ms .* do not agree")
def fewer_kernels(frame):
    return frame[frame["class"] != "gemm"]


@cheat("train_naive_kernels.csv", "operations fill a tensor; gate, up and down .* Is it the naive")
def nothing_filled(frame):
    return frame[frame["name"] != "aten::fill_"]


@cheat(TRAIN, "the loop's backward alone fills")
def a_grouped_one_for_the_naive_one(frame):
    frame.loc[2, "operations"] = frame.loc[0, "operations"]
    return frame


@cheat(TRAIN, "recomputing adds a forward of every layer")
def no_more_operations(frame):
    frame.loc[1, "operations"] = frame.loc[0, "operations"]
    return frame


@cheat("train_summary.csv", "comes from NVIDIA L40, train.csv from")
def another_machine(frame):
    frame.loc[frame["what"] == "device", "value"] = "NVIDIA L40"
    return frame


@pytest.mark.parametrize("name", cheat)
def test_doctored_results_are_named(name, honest):
    assert_named(checks_e6, cheat[name], honest)


def test_the_kept_step_in_place_of_the_recomputed_one(honest):
    for path in honest.glob("train_rc_*"):
        shutil.copy(honest / path.name.replace("train_rc", "train"), path)
    messages = failures(checks_e6, honest)
    assert any("train_rc_kernels.csv has the very times" in one or "do not agree" in one
               for one in messages), messages  # fmt: skip


def test_nothing_run_yet_says_what_to_run(tmp_path):
    messages = failures(checks_e6, tmp_path)
    assert len(messages) == 5, messages
    assert all("not run yet: `labkit experiment train`" in one for one in messages), messages
