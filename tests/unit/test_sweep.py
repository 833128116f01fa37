"""Experiment 7: what a sweep's rows say, that none is lost or measured twice, and its figures."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from labkit import plots
from labkit.config import ModelConfig
from labkit.errors import UserError
from labkit.experiments import sweep
from labkit.experiments.machine import Machine
from labkit.experiments.sweep import KEYS, Bench, Grid, in_words, shuffled, truth_grid
from labkit.experiments.table import SWEEP, read
from labkit.perfmodel import mfu
from tests.unit.test_cli import labkit

KINDS = ["forward_ms", "backward_ms", "recompute_ms", "optimizer_ms"]
SMALL = Grid("olmoe-tiny", (1, 2), (1, 2), (16, 32), repeats=2)
SBATCH = Path(__file__).parents[2] / "slurm" / "sweep.sbatch"


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices are no work for several threads, which would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fake(monkeypatch):
    """Rows at once, of steps that cost what their sizes say; the keys that were measured."""
    measured = []

    def measure(self, key, quick=False):
        measured.append(tuple(key.values()))
        return made_up(key)

    monkeypatch.setattr(Bench, "measure", measure)
    return measured


def made_up(key: dict) -> dict:
    tokens = key["micro_batch_size"] * key["seqlen"] * key["micro_batches"]
    step_ms = 5.0 + key["layers"] * tokens / 10 + key["repeat"] / 100
    return {"tokens": tokens, "step_ms": step_ms, "tokens_per_s": 1e3 * tokens / step_ms,
            "mfu_pct": 40.0, "peak_gib": key["layers"] + tokens / 1e3}  # fmt: skip


def run(folder, **options):
    return sweep.run(folder, quick=True, device="cpu", progress=False, **options)


def tuples(keys: list[dict]) -> list[tuple]:
    return [tuple(key.values()) for key in keys]


def keys_of(frame) -> list[tuple]:
    return list(frame[list(KEYS)].itertuples(index=False, name=None))


# ---------------------------------------------------------------------------------------- the grid


def test_a_grid_is_every_combination_once_a_repeat_in_an_order_that_the_seed_decides():
    keys = tuples(SMALL.keys())
    assert keys == tuples(SMALL.keys()), "the order changes by itself"
    assert len(keys) == len(set(keys)) == 2 * 2 * 2 * 2 * 2
    other = Grid(**vars(SMALL) | {"seed": 1}).keys()
    assert tuples(other) != keys
    assert set(tuples(other)) == set(keys)


def test_repeats_keep_apart_and_the_rows_of_a_model_together():
    keys = SMALL.keys()
    repeats = [key["repeat"] for key in keys]
    assert repeats == sorted(repeats), "a repeat begins before the one before it has ended"
    first, second = keys[:16], keys[16:]
    assert [k["layers"] for k in first] in ([1] * 8 + [2] * 8, [2] * 8 + [1] * 8)
    assert [{**k, "repeat": 1} for k in first] != second, "both repeats are in the same order"


def test_combinations_with_too_many_tokens_are_left_out():
    keys = Grid("tiny", (1,), (1, 2, 4), (16, 64), ("no",), max_tokens=64).keys()
    found = sorted((key["micro_batch_size"], key["seqlen"]) for key in keys)
    assert found == [(1, 16), (1, 64), (2, 16), (4, 16)]


def test_values_that_are_given_twice_count_once():
    assert len(Grid("tiny", (1, 1), (2, 2), (16,), ("no", "no")).keys()) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "gpt"}, "no preset 'gpt'"),
        ({"layers": (0,)}, "layers=0"),
        ({"micro_batch_sizes": (1.5,)}, "micro_batch_sizes=1.5"),
        ({"seqlens": ()}, "seqlens: give at least one"),
        ({"seqlens": (128, 513)}, "seqlens=513: olmoe-tiny has 512 positions"),
        ({"micro_batches": (-1,)}, "micro_batches=-1"),
        ({"repeats": 0}, "repeats=0"),
        ({"recompute": ("maybe",)}, "recompute={'maybe'}: it is 'no', 'yes' or both"),
        ({"recompute": ()}, "it is 'no', 'yes' or both"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 15}, "leaves nothing to measure: the smallest micro batch has 16 tokens"),
    ],
)
def test_a_grid_that_cannot_be_measured_is_named(changes, says):
    with pytest.raises(UserError, match=re.escape(says)):
        Grid(**vars(SMALL) | changes)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_truth_covers_what_a_predictor_is_asked_for(on_gpu):
    keys = truth_grid(SimpleNamespace(on_gpu=on_gpu))
    frame = pd.DataFrame(keys)
    tokens = frame["micro_batch_size"] * frame["seqlen"]
    ends = (256, 16384) if on_gpu else (64, 2048)
    assert (tokens.min(), tokens.max()) == ends, f"{tokens.min()} to {tokens.max()} tokens"
    for which, mine in tokens.groupby([frame["model"], frame["layers"], frame["recompute"]]):
        assert (mine.min(), mine.max()) == ends, f"{which} lacks an end"
    assert set(frame["layers"]) == ({1, 2, 3, 4, 6, 8} if on_gpu else {1, 2, 3, 4})
    assert set(Counter(keys_of(frame)).values()) == {1}
    assert set(frame.groupby(list(KEYS[:-1])).size()) == {3}, "not everything is repeated"
    odd = [length for length in frame["seqlen"].unique() if length & (length - 1)]
    assert len(odd) >= 2, f"only {odd} are no powers of two"
    for model, longest in frame.groupby("model")["seqlen"].max().items():
        assert longest <= ModelConfig.preset(model).max_seqlen
    assert len(keys) <= 360, f"{len(keys)} rows are too many for a quarter of an hour"


# ------------------------------------------------------------------------------- what the rows say


@pytest.fixture(scope="module")
def frame(tmp_path_factory):
    """A measured sweep of one layer."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("sweep")
    return run(folder, grid=Grid("olmoe-tiny", (1,), (1, 8), (128,), repeats=3, seed=3))


def test_the_rows_are_in_the_order_of_the_grid(frame):
    assert set(frame["status"]) == {"ok"}, frame["status"].tolist()
    assert list(frame["position"]) == list(range(12))
    assert list(frame["repeat"]) == [0] * 4 + [1] * 4 + [2] * 4


def test_the_kinds_of_work_sum_to_the_step(frame):
    off = frame[KINDS].sum(axis=1) / frame["step_ms"]
    # Of single rows other programs on this machine disturb some.
    assert 0.85 < off.median() < 1.2, f"the parts are {off.round(3).tolist()} of their steps"
    assert (frame[["forward_ms", "backward_ms", "optimizer_ms"]] > 0).all(axis=None)
    for kind in ("forward_ms", "backward_ms"):
        head = frame[f"head_{kind}"] / frame[kind]
        assert head.between(0, 1, inclusive="neither").all(), f"the head's {kind}: {head.tolist()}"


def test_only_what_recomputes_has_recompute_time_and_saves_memory(frame):
    again = frame["recompute"] == "yes"
    assert (frame.loc[again, "recompute_ms"] > 0).all()
    assert (frame.loc[~again, "recompute_ms"] == 0).all()
    large = frame[frame["micro_batch_size"] == 8].groupby("recompute")["peak_gib"].median()
    assert large["yes"] < 0.95 * large["no"], large.to_dict()


def test_throughput_and_utilization_follow_from_the_time(frame):
    for row in frame.to_dict("records"):
        tokens = row["micro_batch_size"] * row["seqlen"]
        assert row["tokens"] == tokens
        assert row["tokens_per_s"] * row["step_ms"] == pytest.approx(1e3 * tokens, rel=1e-4)
        cfg = ModelConfig.preset(row["model"], n_layers=1)
        share = mfu(cfg, tokens, 128, row["step_ms"], Machine.here("cpu").spec)
        assert row["mfu_pct"] == pytest.approx(100 * share, rel=1e-3)


def test_quantiles_lie_around_the_median(frame):
    assert (frame["p10_ms"] <= frame["step_ms"]).all() and (frame["steps"] >= 1).all()
    assert (frame["step_ms"] <= frame["p90_ms"]).all()
    known = frame[frame["spread"].notna()]
    assert len(known) and (known["steps"] >= 6).all(), "a spread of fewer than six steps"
    assert (known["spread"] >= 0).all()


def test_a_cpu_has_no_counters_of_a_gpu(frame):
    none = ["host_ms", "reserved_gib", "kernel_pct", "sm_clock_mhz", "throttle"]
    assert frame[none].isna().all(axis=None)
    assert frame["cpu_pct"].between(0, 100.5, inclusive="right").all(), frame["cpu_pct"].tolist()


def test_eight_times_the_tokens_take_more_time_and_memory(frame):
    medians = frame.groupby(["recompute", "micro_batch_size"])[["step_ms", "peak_gib"]].median()
    for recompute in ("no", "yes"):
        small, large = medians.loc[recompute, 1], medians.loc[recompute, 8]
        assert large["step_ms"] > 2 * small["step_ms"] and large["peak_gib"] > small["peak_gib"]


def test_an_accumulated_step_counts_all_its_tokens_and_has_no_kinds(tmp_path):
    grid = Grid("olmoe-tiny", (1,), (2,), (16,), ("no",), micro_batches=(1, 3))
    rows = run(tmp_path, grid=grid).set_index("micro_batches")
    assert rows["tokens"].to_dict() == {1: 32, 3: 96}
    assert rows.loc[3, KINDS].isna().all() and rows.loc[1, KINDS].notna().all()
    assert rows.loc[3, "step_ms"] > rows.loc[1, "step_ms"]


def test_a_row_in_words_says_what_it_knows():
    key = dict(zip(KEYS, ("tiny", 2, 4, 64, "yes", 3, 0), strict=True))
    found = {"status": "ok", "step_ms": 12.345, "tokens_per_s": 62211.4, "mfu_pct": 41.26,
             "peak_gib": 1.2345, "kernel_pct": None, "sm_clock_mhz": 1980.0}  # fmt: skip
    assert in_words(key | found) == (
        "tiny, layers: 2, 3 × 4 × 64, recomputing: "
        "12.35 ms, 62,211 tokens/s, MFU 41.3 %, 1.23 GiB, 1980 MHz"
    )
    assert in_words(key | {"status": "out of memory"}).endswith("recomputing: out of memory")


# ------------------------------------------------------------------------- nothing lost, none twice


def test_a_killed_run_loses_the_row_in_flight_and_the_next_measures_the_rest(
    tmp_path, fake, monkeypatch
):
    measure, seen = Bench.measure, []

    def killed(self, key, quick=False):
        if len(fake) == 5:
            raise KeyboardInterrupt
        return measure(self, key, quick)

    monkeypatch.setattr(Bench, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, grid=SMALL)
    assert len(read(tmp_path / "sweep.csv", SWEEP)) == 5
    monkeypatch.setattr(Bench, "measure", measure)
    rows = run(tmp_path, grid=SMALL, on_row=lambda *said: seen.append(said))
    assert keys_of(rows) == tuples(SMALL.keys())
    assert list(rows["position"]) == list(range(32))
    assert set(Counter(fake).values()) == {1}, "something was measured twice"
    assert [done for done, _, _ in seen] == list(range(6, 33)) and seen[0][1] == 32
    run(tmp_path, grid=SMALL)
    assert len(fake) == 32, "a complete sweep was measured again"
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_several_grids_accumulate_and_a_list_of_keys_is_measured_in_its_order(
    tmp_path, fake
):
    run(tmp_path, grid=Grid("olmoe-tiny", (1,), (1,), (16,), ("no",)))
    keys = shuffled([("tiny", 1, 2, 64, "no", 1), ("olmoe-tiny", 1, 1, 16, "no", 1)], repeats=2)
    rows = run(tmp_path, grid=keys)
    assert len(rows) == len(fake) == 4 and set(rows["model"]) == {"tiny", "olmoe-tiny"}
    assert keys_of(rows)[1:] == [key for key in tuples(keys) if key != fake[0]]


def limit_tokens(monkeypatch, most: int):
    """A device on which a micro batch of more tokens finds no room."""
    step = sweep.train_step

    def limited(model, optimizer, batch):
        if batch.seqs.n_tokens > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(model, optimizer, batch)

    monkeypatch.setattr(sweep, "train_step", limited)


def test_what_does_not_fit_is_a_row_that_says_so_and_is_not_tried_again(tmp_path, monkeypatch):
    limit_tokens(monkeypatch, 40)
    grid = Grid("olmoe-tiny", (1,), (1, 4), (16,))
    rows = run(tmp_path, grid=grid)
    full = rows[rows["micro_batch_size"] == 4]
    assert list(full["status"]) == ["out of memory"] * 2 and full["step_ms"].isna().all()
    assert set(rows.loc[rows["micro_batch_size"] == 1, "status"]) == {"ok"}
    monkeypatch.setattr(Bench, "measure", lambda *_: pytest.fail("tried again"))
    run(tmp_path, grid=grid)


def test_an_optimizer_that_ran_out_of_memory_half_way_does_not_spoil_the_next_row(
    tmp_path, monkeypatch
):
    zeros, calls = torch.zeros_like, []

    def limited(tensor, *rest, **options):
        calls.append(tensor)
        if len(calls) == 8:  # AdamW's moments, some of them made
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(tensor, *rest, **options)

    monkeypatch.setattr(torch, "zeros_like", limited)
    rows = run(tmp_path, grid=Grid("olmoe-tiny", (1,), (1,), (16, 32), ("no",)))
    assert list(rows["status"]) == ["out of memory", "ok"], rows["status"].tolist()
    assert len(calls) > 8


# ---------------------------------------------------------------------------------- a shell, a job


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layers", "1,two"), "--layers: 'two' is no whole number; write --layers 1,2,4"),
        (("--seqlen", "16", "--seqlen", ""), "--seqlen: '' is no whole number"),
        (("--layers", "0"), "layers=0"),
        (("--seqlen", "4096"), "olmoe-tiny has 512 positions"),
        (("--truth", "--layers", "1"), "--truth has a grid of its own; leave layers out"),
        (("--max-tokens", "8"), "max_tokens=8 leaves nothing"),
    ],
)
def test_bad_options_are_one_line_and_status_2(arguments, words, tmp_path):
    done = labkit("sweep", "--device", "cpu", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and words in done.stderr, done
    assert done.stderr.startswith("error: ") and not list(tmp_path.iterdir()), done.stderr


def test_a_sweep_that_is_interrupted_says_so_and_goes_on(tmp_path):
    command = ["sweep", "--layers", "1,2", "--micro-batch-size", "1", "--seqlen", "16,32",
               "--no-recompute", "--micro-batches", "2", "--quick", "--device", "cpu"]  # fmt: skip
    path = tmp_path / "results" / "sweep.csv"
    started = subprocess.Popen(
        [sys.executable, "-m", "labkit.cli", *command],
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (path.is_file() and path.read_text().count("\n") >= 2):
        assert started.poll() is None and time.monotonic() < deadline, started.communicate()
        time.sleep(0.02)
    started.send_signal(signal.SIGINT)
    out, said = started.communicate(timeout=60)
    assert started.returncode == 130 and "the same command goes on from here" in said, said
    had = path.read_text()
    assert out.startswith("1/4  olmoe-tiny, layers: "), out
    again = labkit(*command, cwd=tmp_path)
    assert again.returncode == 0 and "4 rows" in again.stdout, again
    assert path.read_text().startswith(had), "rows that were there have changed"
    assert len(path.read_text().splitlines()) == 1 + 4, "a row was measured twice"


def submit(folder, *options):
    """Run the batch script as Slurm would, where `srun` is a script that runs its command."""
    (folder / "bin").mkdir(exist_ok=True)
    srun = folder / "bin" / "srun"
    srun.write_text('#!/bin/sh\nexec "$@"\n')
    srun.chmod(0o755)
    return subprocess.run(
        ["bash", SBATCH, *options], cwd="/", capture_output=True, text=True, timeout=120,
        env=os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}",
                          "SLURM_SUBMIT_DIR": str(folder), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_job_without_an_environment_says_what_to_do(tmp_path):
    done = submit(tmp_path)
    assert done.returncode == 1 and f"no .venv/bin/labkit in {tmp_path}" in done.stderr, done
    assert "make check" in done.stderr


def test_a_job_measures_and_the_same_job_goes_on(tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    command = tmp_path / ".venv" / "bin" / "labkit"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m labkit.cli "$@"\n')
    command.chmod(0o755)
    options = ("--device", "cpu", "--layers", "1", "--micro-batch-size", "1", "--seqlen", "16",
               "--quick")  # fmt: skip
    first = submit(tmp_path, *options)
    assert first.returncode == 0 and "2/2  olmoe-tiny" in first.stdout, first
    had = (tmp_path / "results" / "sweep.csv").read_text()
    again = submit(tmp_path, *options)
    assert again.returncode == 0 and "olmoe-tiny" not in again.stdout, again
    assert (tmp_path / "results" / "sweep.csv").read_text() == had


def test_the_batch_script_is_shell_that_asks_for_one_gpu_and_a_log_by_job():
    assert subprocess.run(["bash", "-n", SBATCH]).returncode == 0
    text = SBATCH.read_text()
    for line in ("#SBATCH --gpus=1", "#SBATCH --output=sweep-%j.log"):
        assert line in text, f"{line} is missing"


# ----------------------------------------------------------------------------------------- figures


def made_up_rows(**changes) -> pd.DataFrame:
    grid = Grid(**vars(SMALL) | {"repeats": 3} | changes)
    rows = [key | {"position": place, "status": "ok", "throttle": None} | made_up(key)
            for place, key in enumerate(grid.keys())]  # fmt: skip
    return pd.DataFrame(rows)


def test_three_panels_with_units_and_a_legend_of_layers_and_recomputation():
    figure = plots.sweep(made_up_rows())
    assert [ax.get_ylabel() for ax in figure.axes] == [
        "tokens a second", "MFU (%)", "peak memory (GiB)"
    ]  # fmt: skip
    assert {ax.get_xlabel() for ax in figure.axes} == {"tokens in a step"}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "1 layer", "2 layers", "activations kept", "recomputed"
    ]  # fmt: skip


def test_repeats_are_one_point_at_their_median_and_a_bar():
    frame = made_up_rows(layers=(1,), micro_batch_sizes=(1,), seqlens=(32,), recompute=("no",))
    frame["peak_gib"] = [1.0, 4.0, 2.0]
    points, bars = plots.sweep(frame).axes[2].containers[0][::2]
    assert points.get_ydata().tolist() == [2.0] and points.get_xdata().tolist() == [32]
    (segment,) = bars[0].get_segments()
    assert segment[:, 1].tolist() == [1.0, 4.0]


def test_a_model_has_its_own_panels_and_what_did_not_fit_is_a_cross():
    frame = pd.concat([made_up_rows(), made_up_rows(model="tiny")], ignore_index=True)
    full = (frame["model"] == "tiny") & (frame["layers"] == 2) & (frame["seqlen"] == 32)
    frame.loc[full, ["tokens", "step_ms", "tokens_per_s", "mfu_pct", "peak_gib"]] = float("nan")
    frame.loc[full, "status"] = "out of memory"
    figure = plots.sweep(frame)
    assert len(figure.axes) == 6
    assert [ax.get_title("left") for ax in figure.axes[::3]] == ["olmoe-tiny", "tiny"]
    crosses = [sorted({*line.get_xdata()}) for line in figure.axes[5].lines
               if line.get_marker() == "x"]  # fmt: skip
    assert crosses == [[], [32, 64]], crosses
    assert "out of memory" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_drift_shows_each_row_against_its_median_and_marks_a_clock_that_was_held_down():
    frame = made_up_rows(layers=(1,), micro_batch_sizes=(1,), seqlens=(32,), recompute=("no",))
    frame["step_ms"], frame["throttle"] = [10.0, 11.0, 10.0], ["none 100%", None, "none 100%"]
    frame.loc[1, "throttle"] = "power cap 60%; none 40%"
    alone = made_up_rows(layers=(2,), repeats=1)
    (ax,) = plots.drift(pd.concat([frame, alone], ignore_index=True)).axes
    free, held = ax.lines[1:]
    assert free.get_xydata().tolist() == [[0, 0], [2, 0]]
    assert held.get_xydata().tolist() == [[1, pytest.approx(10)]]
    assert "(%)" in ax.get_ylabel() and [t.get_text() for t in ax.get_legend().get_texts()] == [
        "clock free", "clock held down"
    ]  # fmt: skip


def test_figures_of_nothing_say_why_and_missing_columns_are_named():
    frame = made_up_rows()
    with pytest.raises(UserError, match="peak_gib"):
        plots.sweep(frame.drop(columns="peak_gib"))
    with pytest.raises(UserError, match="position"):
        plots.drift(frame.drop(columns="position"))
    with pytest.raises(UserError, match="measured twice: `labkit sweep --repeats 3`"):
        plots.drift(made_up_rows(repeats=1))
    for draw in (plots.sweep, plots.drift):
        (text,) = draw(frame.assign(step_ms=float("nan"), status="out of memory")).axes[0].texts
        assert text.get_text() == "nothing was measured\nout of memory"
