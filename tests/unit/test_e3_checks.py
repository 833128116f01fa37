"""The checks of E3 pass honest results and fail each doctored one, in words that name it.

tests/data/forward_h200 holds what one H200 (torch 2.11, random weights) measured.
"""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from labkit.devices import spec
from labkit.experiments import forward
from labkit.experiments.table import FORWARD, Table, read
from tests.public import checks_e3, slips_c3

DATA = Path(__file__).parents[1] / "data" / "forward_h200"
CHECKS = [
    checks_e3.check_passes,
    checks_e3.check_floors,
    checks_e3.check_ranges,
    checks_e3.check_kernels,
    checks_e3.check_naive,
]
FACTS = {"date": "2026-11-01T12:00:00+00:00", "device": "NVIDIA H200", "dtype": "bfloat16",
         "torch": "2.11.0", "driver": "580.159"}  # fmt: skip
MODEL = {"model": "olmoe-1b-7b", "weights": "random", "layers": 16, "steps": 2}


def row_of(one: forward.Pass) -> dict:
    """What `forward.run` writes of a pass, from its files."""
    said = pd.read_csv(DATA / f"{one.name}_summary.csv", index_col="what")["value"]
    step = pd.read_csv(DATA / f"{one.name}_ranges.csv", index_col="range").loc["step"]
    api = pd.read_csv(DATA / f"{one.name}_api.csv")
    waits = api[(api["kind"] == "synchronize") & api["range"].notna()]["count"].sum()
    cfg = forward.ModelConfig.preset("olmoe-1b-7b")
    compute_ms, memory_ms = slips_c3.floors(cfg, one.micro_batch_size, one.seqlen, spec("H200"))
    return MODEL | {
        "workload": one.name, "micro_batch_size": one.micro_batch_size, "seqlen": one.seqlen,
        "moe_impl": one.moe_impl, "busy_ms": step["busy_ms"], "operations": step["ops"],
        "synchronizations": waits, "compute_floor_ms": compute_ms, "memory_floor_ms": memory_ms,
        "regime": "overhead-bound", "regime_by": "idle time",
        **{name: float(said[name]) for name in ("before_ms", "during_ms", "idle_ms")},
    }  # fmt: skip


@pytest.fixture
def h200(tmp_path):
    """A copy of an H200's honest results, to be doctored."""
    for path in DATA.glob("*.csv"):
        shutil.copy(path, tmp_path)
    table = Table(tmp_path, FORWARD, FACTS)
    for one in forward.passes(on_gpu=True):
        table.append(row_of(one))
    return tmp_path


def failures(folder) -> list[str]:
    messages = []
    for check in CHECKS:
        try:
            check(folder)
        except AssertionError as error:
            messages.append(str(error))
    return messages


def test_honest_results_of_an_h200_pass(h200):
    assert not (messages := failures(h200)), messages


def test_what_the_experiment_writes_on_a_cpu_passes(tmp_path, monkeypatch):
    short = [
        forward.Pass("fwd_small", 1, 32),
        forward.Pass("fwd_large", 8, 64),
        forward.Pass("fwd_small_naive", 1, 32, "naive"),
    ]
    for module in (forward, checks_e3):
        monkeypatch.setattr(module, "passes", lambda on_gpu: short)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads wait for each other while other tests run
    forward.run(tmp_path, quick=True, device="cpu", progress=False)
    torch.set_num_threads(threads)
    assert not (messages := failures(tmp_path)), messages


def test_a_slice_of_a_gpu_passes(h200):
    """Its rates are a share of the GPU's: both floors are seven times as high."""
    for path in h200.glob("*_summary.csv"):
        path.write_text(path.read_text().replace("NVIDIA H200", "NVIDIA H200 MIG 1g.18gb"))
    frame = read(h200 / "forward.csv", FORWARD).assign(device="NVIDIA H200 MIG 1g.18gb")
    frame[["compute_floor_ms", "memory_floor_ms"]] *= 7
    frame.to_csv(h200 / "forward.csv", index=False)
    assert not (messages := failures(h200)), messages


CHEATS = {}


def cheat(file: str, says: str):
    """Register a change of one file's rows, with the words that a failed check must say."""
    return lambda change: CHEATS.setdefault(change.__name__, (file, change, says))[1]


@cheat("forward", "lacks 1 of 3 rows, the first: workload fwd_large")
def a_pass_left_out(frame):
    return frame[frame["workload"] != "fwd_large"]


@cheat("forward", r"different layers: \[16, 4\]")
def fewer_layers_for_the_naive_one(frame):
    frame.loc[2, "layers"] = 4
    return frame


@cheat("forward", "fwd_large: micro_batch_size is 8, the experiment has 32")
def a_smaller_large_pass(frame):
    frame.loc[1, "micro_batch_size"] = 8
    return frame


@cheat("forward", "Coding Exercise 3 was wrong")
def multiply_adds_in_the_floor(frame):
    return frame.assign(compute_floor_ms=frame["compute_floor_ms"] / 2)


@cheat("forward", "Coding Exercise 3 was wrong")
def all_experts_in_the_floor(frame):
    return frame.assign(compute_floor_ms=frame["compute_floor_ms"] * 5.9)


@cheat("forward", "below the floor of 39.62 ms, which no H200")
def faster_than_light(frame):
    frame.loc[1, "before_ms"] = 12.0
    return frame


@cheat("forward", "all different")
def the_same_time_twice(frame):
    return frame.assign(before_ms=19.2)


@cheat("forward", "1 rows are from --quick")
def quick_on_a_gpu(frame):
    frame.loc[0, "quick"] = "yes"
    return frame


@cheat("forward", "status 'failed: no idea'")
def a_failed_pass(frame):
    frame.loc[0, "status"] = "failed: no idea"
    return frame


@cheat("fwd_small_summary", "comes from NVIDIA L40, forward.csv from NVIDIA H200")
def a_recording_of_another_gpu(frame):
    return frame.replace("NVIDIA H200", "NVIDIA L40")


@cheat("fwd_large_summary", "before_ms .* and forward.csv .* do not agree")
def another_run_of_the_recorder(frame):
    frame.loc[frame["what"] == "before_ms", "value"] = "88.1"
    return frame


@cheat("fwd_small_ranges", r"no row 'layers\.\*\.attn'.*Coding Exercise 4")
def ranges_of_an_empty_annotate(frame):
    return frame[frame["range"] == "step"]


@cheat("fwd_small_ranges", r"layers\.\*\.attn was open 32 times a pass, the model has it 16")
def every_range_opened_twice(frame):
    return frame.assign(instances=frame["instances"].where(frame["range"] == "step", 32))


@cheat("fwd_large_ranges", "own_ms .* do not agree")
def a_part_taken_out(frame):
    frame.loc[frame["range"].str.endswith("experts"), "own_ms"] *= 0.8
    return frame


@cheat("fwd_large_ranges", "lacks the columns")
def a_column_lost(frame):
    return frame.drop(columns="own_ms")


@cheat("fwd_large_ranges", "values below zero")
def less_than_nothing(frame):
    return frame.assign(busy_ms=-frame["busy_ms"])


@cheat("fwd_large_kernels", "the kernels' ms .* do not agree")
def fewer_kernels(frame):
    return frame[frame["class"] != "gemm"]


@cheat("fwd_small_naive_api", "synchronizations a pass; the loop waits .* which is 1024")
def no_waits(frame):
    return frame[frame["kind"] != "synchronize"]


@pytest.mark.parametrize("name", CHEATS)
def test_doctored_results_are_named(name, h200):
    file, change, says = CHEATS[name]
    path = h200 / f"{file}.csv"
    frame = read(path, FORWARD) if file == "forward" else pd.read_csv(path)
    change(frame).to_csv(path, index=False)
    if name == "no_waits":  # a careful cheat
        rows = read(h200 / "forward.csv", FORWARD).assign(synchronizations=0)
        rows.to_csv(h200 / "forward.csv", index=False)
    messages = failures(h200)
    assert any(re.search(says, message) for message in messages), (
        f"{name}: no message says {says!r}; the checks said {messages or 'nothing: it passes'}"
    )


def test_the_small_pass_in_place_of_the_large_one(h200):
    for which in ("ranges", "kernels", "api", "summary"):
        shutil.copy(h200 / f"fwd_small_{which}.csv", h200 / f"fwd_large_{which}.csv")
    frame = read(h200 / "forward.csv", FORWARD).set_index("workload")
    for column in ("busy_ms", "operations"):
        frame.loc["fwd_large", column] = frame.loc["fwd_small", column]
    frame.reset_index().to_csv(h200 / "forward.csv", index=False)
    messages = failures(h200)
    assert any("has the very times of fwd_small_kernels.csv" in one for one in messages), messages


def test_nothing_run_yet_says_what_to_run(tmp_path, h200):
    messages = failures(tmp_path / "nowhere")
    assert len(messages) == 5, messages
    assert all("not run yet: `labkit experiment forward`" in one for one in messages), messages
    (h200 / "fwd_large_ranges.csv").unlink()
    assert any("fwd_large_ranges.csv is not there" in one for one in failures(h200))
