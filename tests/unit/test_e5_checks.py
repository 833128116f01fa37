"""The checks of E5 pass honest results and fail each doctored one, in words that name it.

The honest ones are what one H200 measured (benchmarks/results/stages_h200.json).
"""

import json
from pathlib import Path

import pytest
import torch

from labkit.experiments import stages
from labkit.experiments.table import STAGES, STEPS, Table
from tests.public import checks_e5
from tests.unit.doctored import Cheats, assert_named, failures

H200 = Path(__file__).parents[2] / "benchmarks" / "results" / "stages_h200.json"
FACTS = {"date": "2026-11-29T12:00:00+00:00", "device": "NVIDIA H200", "dtype": "bfloat16",
         "torch": "2.11.0", "driver": "580.159"}  # fmt: skip
cheat = Cheats()


@pytest.fixture
def h200(tmp_path):
    """A copy of an H200's honest results, to be doctored."""
    said, shape = json.loads(H200.read_text()), checks_e5.shape(on_gpu=True)
    rows, totals = Table(tmp_path, STAGES, FACTS), Table(tmp_path, STEPS, FACTS)
    for recompute, name in (("no", "kept"), ("yes", "recomputed")):
        one, key = said[name], shape | {"recompute": recompute}
        for stage, times in one["stages"].items():
            rows.append(key | {"stage": stage} | dict(zip(checks_e5.KINDS, times, strict=True)))
        step_ms = sum(map(sum, one["stages"].values())) + one["optimizer_ms"]
        totals.append(key | {
            "step_ms": step_ms, "optimizer_ms": one["optimizer_ms"], "peak_gib": one["peak_gib"],
            "optimizer_floor_ms": said["optimizer_floor_ms"], "state_gib": 14.0393,
            "tokens_per_s": 8192e3 / step_ms,
            "mfu_pct": 100 * one["mfu"] * one["step_ms"] / step_ms,
        })  # fmt: skip
    return tmp_path


def test_honest_results_of_an_h200_pass(h200):
    assert not (messages := failures(checks_e5, h200)), messages


def test_what_the_experiment_writes_on_a_cpu_passes(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads wait for each other while other tests run
    stages.run(tmp_path, quick=True, device="cpu", progress=False)
    torch.set_num_threads(threads)
    assert not (messages := failures(checks_e5, tmp_path)), messages


@cheat(STAGES, "lacks 2 of 12 rows, the first: .*stage head")
def no_head(frame):
    return frame[frame["stage"] != "head"]


@cheat(STEPS, "lacks 1 of 2 rows, the first: .*recompute yes")
def only_kept(frame):
    return frame[frame["recompute"] == "no"]


@cheat(STEPS, "1 rows ran out of memory")
def out_of_memory(frame):
    frame.loc[0, "status"] = "out of memory"
    return frame


@cheat(STEPS, "has no step of model olmoe-1b-7b, layers 4")
def another_shape(frame):
    return frame.assign(seqlen=512)


@cheat(STAGES, r"the stages and the optimizer \(recompute no\) .* do not agree")
def a_layer_that_is_faster(frame):
    frame.loc[2, "forward_ms"] = 1.2
    return frame


@cheat(STAGES, "measured ones scatter")
def the_same_times_everywhere(frame):
    return frame.assign(forward_ms=3.4, backward_ms=6.5)


@cheat(STAGES, "where nothing is recomputed")
def a_recomputed_head(frame):
    frame.loc[frame["stage"] == "head", "recompute_ms"] = 2.0
    return frame


@cheat(STAGES, "no recompute time; were Coding Exercises 5 and 7 done")
def recompute_not_told_apart(frame):
    frame["backward_ms"] += frame["recompute_ms"]
    return frame.assign(recompute_ms=0.0)


@cheat(STAGES, "it is the same forward once more")
def a_recomputation_three_times_as_long(frame):
    return frame.assign(recompute_ms=3 * frame["recompute_ms"])


@cheat(STAGES, "it multiplies twice as much")
def forward_and_backward_swapped(frame):
    return frame.rename(columns={"forward_ms": "backward_ms", "backward_ms": "forward_ms"})


@cheat(STEPS, "Coding Exercise 8 was wrong")
def eight_bytes_in_the_floor(frame):
    return frame.assign(optimizer_floor_ms=frame["optimizer_floor_ms"] * 8 / 14)


@cheat(STEPS, "is below its floor of 5.496 ms")
def a_fast_optimizer(frame):
    return frame.assign(optimizer_ms=2.0)


@cheat(STEPS, "tokens_per_s .* do not agree")
def a_better_throughput(frame):
    return frame.assign(tokens_per_s=2 * frame["tokens_per_s"])


@cheat(STEPS, "mfu_pct .* the model's FLOPs over peak .* do not agree")
def recomputing_counted_in_mfu(frame):
    return frame.assign(mfu_pct=frame["mfu_pct"] * 4 / 3)


@cheat(STEPS, "four tensors a parameter are 14.04")
def three_tensors(frame):
    return frame.assign(state_gib=10.53)


@cheat(STEPS, "less than weights and moments alone")
def a_peak_below_the_state(frame):
    return frame.assign(peak_gib=8.0)


@cheat(STEPS, "nothing was saved")
def the_same_peak(frame):
    return frame.assign(peak_gib=20.0)


@cheat(STEPS, "comes from NVIDIA H200, stages_steps.csv from NVIDIA L40")
def two_machines(frame):
    return frame.assign(device="NVIDIA L40")


@pytest.mark.parametrize("name", cheat)
def test_doctored_results_are_named(name, h200):
    assert_named(checks_e5, cheat[name], h200)


def test_nothing_run_yet_says_what_to_run(tmp_path):
    messages = failures(checks_e5, tmp_path)
    assert len(messages) == 5, messages
    assert all("not run yet: `labkit experiment stages`" in one for one in messages), messages
