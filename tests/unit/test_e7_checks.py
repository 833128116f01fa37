"""The checks of E7 pass honest results and fail each doctored one, in words that name it."""

import random

import pandas as pd
import pytest
import torch

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec, spec
from labkit.experiments import sweep
from labkit.experiments.sweep import Grid
from labkit.experiments.table import SWEEP, Table
from labkit.perfmodel import mfu, optimizer_floor_ms
from tests.public import checks_e7
from tests.public.slips_c3 import floors
from tests.unit.doctored import Cheats, assert_named, failures

CPU = DeviceSpec("Some CPU, 8 cores", 0.5, 40, 32, dtype="float32")
cheat = Cheats()


def measure(folder, device: DeviceSpec, on_gpu: bool, **changes):
    """What a device would measure: its arithmetic at half of peak, its bandwidth, 1 ms a layer."""
    facts = {"date": "2026-11-01T12:00:00+00:00", "device": device.name, "dtype": device.dtype,
             "torch": "2.13.0", "driver": "580.95" if on_gpu else None}  # fmt: skip
    if on_gpu:
        grid = Grid("olmoe-1b-7b", (2, 4), (1, 8), (256, 768, 2048), repeats=2)
    else:
        grid = Grid("olmoe-tiny", (1, 2), (1, 8), (64, 100, 256))
    table, scatter = Table(folder, SWEEP, facts), random.Random(0)
    keys = Grid(**vars(grid) | changes).keys()
    for place, key in enumerate(keys):
        table.append(key | {"position": place} | step(key, device, on_gpu, scatter))
    return folder


def step(key: dict, device: DeviceSpec, on_gpu: bool, scatter: random.Random) -> dict:
    cfg = ModelConfig.preset(key["model"], n_layers=key["layers"])
    size, seqlen, again = key["micro_batch_size"], key["seqlen"], key["recompute"] == "yes"
    results = checks_e7.Results(pd.DataFrame([{"dtype": device.dtype}]), SWEEP, None, "")
    peak_gib = checks_e7._peak(results, key) / 2**30
    if peak_gib > device.memory_gib:
        return {"status": "out of memory"}
    compute, weights = floors(cfg, size, seqlen, device)
    forward = key["layers"] + max(2 * compute, 2 * weights) * scatter.uniform(0.98, 1.02)
    optimizer = 1.1 * optimizer_floor_ms(cfg, device)
    n, tokens = key["micro_batches"], size * seqlen * key["micro_batches"]
    one = {"forward_ms": forward, "backward_ms": 2 * forward, "recompute_ms": 0.8 * forward * again,
           "optimizer_ms": optimizer, "head_forward_ms": 0.1 * forward,
           "head_backward_ms": 0.2 * forward}  # fmt: skip
    step_ms = n * (3 + 0.8 * again) * forward + optimizer
    return (one if n == 1 else {}) | {
        "tokens": tokens, "step_ms": step_ms, "p10_ms": 0.99 * step_ms, "p90_ms": 1.02 * step_ms,
        "spread": 0.01, "steps": 9, "tokens_per_s": 1e3 * tokens / step_ms, "peak_gib": peak_gib,
        "mfu_pct": 100 * mfu(cfg, tokens, seqlen, step_ms, device),
        "reserved_gib": 1.05 * peak_gib if on_gpu else None,
    }  # fmt: skip


@pytest.fixture
def h200(tmp_path):
    return measure(tmp_path, spec("H200"), on_gpu=True)


@pytest.mark.parametrize("name", ["H200", "L40", "RTX 3090"])
def test_honest_results_pass_also_where_much_does_not_fit(name, tmp_path):
    measure(tmp_path, spec(name), on_gpu=True)
    assert not (messages := failures(checks_e7, tmp_path)), messages


def test_honest_results_of_a_cpu_and_of_an_unknown_gpu_pass(tmp_path):
    for folder, device in (("cpu", CPU), ("gpu", DeviceSpec("Some GPU", 100, 1000, 48))):
        (tmp_path / folder).mkdir()
        measure(tmp_path / folder, device, on_gpu=folder == "gpu")
        assert not (messages := failures(checks_e7, tmp_path / folder)), messages


def test_accumulated_steps_and_other_models_beside_them_pass(h200):
    measure(h200, spec("H200"), True, micro_batches=(2, 4), micro_batch_sizes=(1,), repeats=1)
    measure(h200, spec("H200"), True, model="small", repeats=1)
    assert not (messages := failures(checks_e7, h200)), messages


def test_what_the_experiment_writes_on_a_cpu_passes(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads wait for each other while other tests run
    grid = Grid("olmoe-tiny", (1, 2), (1,), (32, 96, 256))
    sweep.run(tmp_path, quick=True, device="cpu", progress=False, grid=grid)
    torch.set_num_threads(threads)
    assert not (messages := failures(checks_e7, tmp_path)), messages


# ------------------------------------------------------------------------------------ not enough


@cheat(SWEEP, "configurations of olmoe-1b-7b: 8; a performance model needs at least 12")
def few_configurations(frame):
    return frame[frame["seqlen"] == 768]


@cheat(SWEEP, "numbers of layers of olmoe-1b-7b: 1; .* 2; `labkit sweep --layers 1,2,4")
def one_number_of_layers(frame):
    return frame[frame["layers"] == 4]


@cheat(SWEEP, "numbers of tokens of olmoe-1b-7b: 2; .* at least 3")
def two_numbers_of_tokens(frame):
    return frame.assign(tokens=256 * frame["micro_batch_size"])


@cheat(SWEEP, "settings of recompute of olmoe-1b-7b: 1; .* at least 2")
def never_recomputed(frame):
    return frame[frame["recompute"] == "no"]


@cheat(SWEEP, "no step of a single micro batch")
def only_accumulated(frame):
    return frame.assign(micro_batches=2)


@cheat(SWEEP, "mixes device .*NVIDIA L40")
def two_devices(frame):
    frame.loc[:9, "device"] = "NVIDIA L40"
    return frame


@cheat(SWEEP, "too short for a GPU's clock")
def short_runs_on_a_gpu(frame):
    return frame.assign(quick="yes")


@cheat(SWEEP, "every row ran out of memory")
def nothing_fits(frame):
    return frame.assign(status="out of memory")


# ------------------------------------------------------------------------------------ not plausible


@cheat(SWEEP, "there is no such model")
def an_unknown_model(frame):
    return frame.assign(model="gpt-5")


@cheat(SWEEP, "recompute is yes or no")
def another_recompute(frame):
    frame.loc[0, "recompute"] = "both"
    return frame


@cheat(SWEEP, "layers is no whole number above 0")
def half_a_layer(frame):
    return frame.assign(layers=frame["layers"] + 0.5)


@cheat(SWEEP, "step_ms is nan, and must be above 0")
def a_time_that_is_missing(frame):
    frame.loc[3, "step_ms"] = float("nan")
    return frame


@cheat(SWEEP, "step_ms is inf, and must be above 0")
def an_infinite_time(frame):
    frame.loc[3, ["step_ms", "p90_ms"]] = float("inf")
    return frame


@cheat(SWEEP, "is no median between the tenths")
def tenths_of_other_rows(frame):
    return frame.assign(p90_ms=frame["p10_ms"])


@cheat(SWEEP, "tokens .* and its sizes' .* do not agree")
def tokens_of_one_sequence(frame):
    return frame.assign(tokens=frame["seqlen"])


@cheat(SWEEP, "tokens_per_s .* and its step's .* do not agree")
def a_better_throughput(frame):
    return frame.assign(tokens_per_s=1.3 * frame["tokens_per_s"])


@cheat(SWEEP, "mfu_pct .* do not agree")
def recomputing_counted_in_mfu(frame):
    return frame.assign(mfu_pct=frame["mfu_pct"] * 4 / 3)


@cheat(SWEEP, "below the compute floor .* no H200")
def faster_than_light(frame):
    times = ["step_ms", "p10_ms", "p90_ms"]
    frame[times] /= 9
    return frame.assign(tokens_per_s=9 * frame["tokens_per_s"], mfu_pct=9 * frame["mfu_pct"])


@cheat(SWEEP, r"repeat 1: it has the very times of .*repeat 0: a copy\?")
def a_repeat_that_is_a_copy(frame):
    first = frame[frame["repeat"] == 0]
    return pd.concat([first, first.assign(repeat=1)], ignore_index=True)


@cheat(SWEEP, r"layers 4.* it has the very times of .*layers 2.*: a copy\?")
def layers_that_are_a_copy(frame):
    two = frame[frame["layers"] == 2]
    return pd.concat([two, two.assign(layers=4)], ignore_index=True)


@cheat(SWEEP, "only 1 have different times")
def the_same_time_everywhere(frame):
    return frame.assign(step_ms=80.0)


# ------------------------------------------------------------------------------------ kinds of work


@cheat(SWEEP, "take .* times the step")
def a_step_of_another_row(frame):
    largest = frame["step_ms"].idxmax()
    frame.loc[largest, ["step_ms", "p10_ms", "p90_ms"]] *= 3
    return frame


@cheat(SWEEP, "in the median of all rows; they sum to it")
def kinds_that_are_a_third_too_long(frame):
    return frame.assign(**{kind: 1.35 * frame[kind] for kind in checks_e7.KINDS})


@cheat(SWEEP, "nan times the step")
def no_kinds(frame):
    return frame.assign(forward_ms=None)


@cheat(SWEEP, "an optimizer time above 0")
def a_free_optimizer(frame):
    return frame.assign(optimizer_ms=0.0)


@cheat(SWEEP, "where nothing is recomputed")
def recompute_everywhere(frame):
    return frame.assign(recompute_ms=1.0)


@cheat(SWEEP, "no recompute time; were Coding Exercises 5 and 7 done")
def recompute_not_told_apart(frame):
    frame["backward_ms"] += frame["recompute_ms"]
    return frame.assign(recompute_ms=0.0)


@cheat(SWEEP, "it multiplies twice as much")
def forward_and_backward_swapped(frame):
    return frame.rename(columns={"forward_ms": "backward_ms", "backward_ms": "forward_ms"})


# ------------------------------------------------------------------------------ growth and memory


@cheat(SWEEP, "with micro_batch_size 1; more work is not faster")
def micro_batches_swapped(frame):
    return frame.assign(micro_batch_size=9 - frame["micro_batch_size"])


@cheat(SWEEP, "with layers 2; more work is not faster")
def layers_swapped(frame):
    return frame.assign(layers=6 - frame["layers"])


@cheat(SWEEP, "the time does not grow with the tokens")
def a_time_for_all_tokens(frame):
    seqlen = frame["seqlen"].replace(256, 128)
    tokens, step_ms = frame["micro_batch_size"] * seqlen, 50 + frame["step_ms"] / 1e3
    return frame.assign(seqlen=seqlen, tokens=tokens, step_ms=step_ms)


@cheat(SWEEP, "steps that recompute take .* computing more takes longer")
def recompute_swapped(frame):
    return frame.assign(recompute=frame["recompute"].map({"no": "yes", "yes": "no"}))


@cheat(SWEEP, "nothing was saved")
def the_peak_of_kept_activations(frame):
    frame = frame.sort_values(checks_e7.STEP, ignore_index=True)
    kept = frame[frame["recompute"] == "no"]["peak_gib"]
    frame.loc[frame["recompute"] == "yes", "peak_gib"] = kept.to_numpy()
    return frame.assign(reserved_gib=100)


@cheat(SWEEP, "less than weights and moments alone")
def no_weights(frame):
    return frame.assign(peak_gib=frame["peak_gib"] / 2)


@cheat(SWEEP, "cannot hold a peak")
def less_reserved_than_allocated(frame):
    return frame.assign(reserved_gib=1.0)


@cheat(SWEEP, "more does not need less")
def memory_upside_down(frame):
    return frame.assign(peak_gib=60 - frame["peak_gib"], reserved_gib=100)


@pytest.fixture
def cpu(tmp_path):
    return measure(tmp_path, CPU, on_gpu=False)


def no_growth(frame):
    return frame.assign(step_ms=50 + frame["step_ms"] / 1e3)


def kinds_twice(frame):
    return frame.assign(**{kind: 2 * frame[kind] for kind in checks_e7.KINDS})


def copied_layers(frame):
    one = frame[frame["layers"] == 1]
    return pd.concat([one, one.assign(layers=2)], ignore_index=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (no_growth, "steps of 2048 tokens take .* the time does not grow with the tokens"),
        (recompute_swapped, "where nothing is recomputed"),
        (kinds_twice, "they sum to it"),
        (copied_layers, "a copy"),
        (the_peak_of_kept_activations, "nothing was saved"),
    ],
)
def test_doctored_results_of_a_cpu_are_named(change, says, cpu):
    assert_named(checks_e7, (SWEEP, change, says), cpu)


@pytest.mark.parametrize("name", cheat)
def test_doctored_results_are_named(name, h200):
    assert_named(checks_e7, cheat[name], h200)


def test_nothing_run_yet_says_what_to_run(tmp_path):
    messages = failures(checks_e7, tmp_path)
    assert len(messages) == 5, messages
    assert all("not run yet: `labkit experiment sweep`" in one for one in messages), messages
