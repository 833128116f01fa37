"""The checks of E4 pass honest results and fail each doctored one, in words that name it."""

import pytest

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec, spec
from labkit.experiments.table import MICRO_BATCHES, Table
from labkit.memory_model import step_bytes
from labkit.plots import new_figure
from tests.public import checks_e4
from tests.public.slips_c3 import floors
from tests.unit.doctored import Cheats, assert_named, failures

CPU = DeviceSpec("Some CPU, 8 cores", 0.5, 40, 32, dtype="float32")
cheat = Cheats()


def measure(folder, device: DeviceSpec, on_gpu: bool):
    """What a device would measure: its arithmetic at 40 % of peak, and 2 ms a micro batch."""
    facts = {"date": "2026-10-01T12:00:00+00:00", "device": device.name, "dtype": device.dtype,
             "torch": "2.13.0", "driver": "580.95" if on_gpu else None}  # fmt: skip
    table, size = Table(folder, MICRO_BATCHES, facts), 2 if on_gpu else 4
    for key in checks_e4.expected(on_gpu):
        cfg = ModelConfig.preset(key["model"], n_layers=key["layers"])
        again, sequences = key["recompute"] == "yes", key["global_batch_size"]
        work = floors(cfg, sequences, key["seqlen"], device)[0]
        peak = sum(step_bytes(cfg, key["micro_batch_size"], key["seqlen"], again, size).values())
        peak /= 2**30
        if peak > device.memory_gib:
            table.append(key | {"status": "out of memory"})
            continue
        count = -(-sequences // key["micro_batch_size"])
        ms = (3 + again) * work / 0.4 + 2 * count
        table.append(key | {
            "micro_batches": count, "step_ms": ms, "spread": 0.01, "steps": 9, "peak_gib": peak,
            "tokens_per_s": 1e3 * sequences * key["seqlen"] / ms,
            "reserved_gib": 1.05 * peak if on_gpu else None,
        })  # fmt: skip
    new_figure(size=(5, 4))[0].savefig(folder / "micro_batches.png")
    return folder


@pytest.fixture
def h200(tmp_path):
    return measure(tmp_path, spec("H200"), on_gpu=True)


@pytest.mark.parametrize("name", ["H200", "L40", "RTX 3090"])
def test_honest_results_pass_also_where_much_does_not_fit(name, tmp_path):
    measure(tmp_path, spec(name), on_gpu=True)
    assert not (messages := failures(checks_e4, tmp_path)), messages


def test_honest_results_of_a_cpu_and_of_an_unknown_gpu_pass(tmp_path):
    for folder, device in (("cpu", CPU), ("gpu", DeviceSpec("Some GPU", 100, 1000, 48))):
        (tmp_path / folder).mkdir()
        measure(tmp_path / folder, device, on_gpu=folder == "gpu")
        assert not (messages := failures(checks_e4, tmp_path / folder)), messages


@cheat(MICRO_BATCHES, "lacks 2 of 10 rows, the first: .*micro_batch_size 1, recompute no")
def a_size_left_out(frame):
    return frame[frame["micro_batch_size"] != 1]


@cheat(MICRO_BATCHES, "has no step of model olmoe-1b-7b, layers 4")
def fewer_layers(frame):
    return frame.assign(layers=2)


@cheat(MICRO_BATCHES, "tokens_per_s says .* ms give")
def a_better_throughput(frame):
    return frame.assign(tokens_per_s=1.3 * frame["tokens_per_s"])


@cheat(MICRO_BATCHES, "below the compute floor .* no H200")
def faster_than_light(frame):
    return frame.assign(step_ms=frame["step_ms"] / 9, tokens_per_s=9 * frame["tokens_per_s"])


@cheat(MICRO_BATCHES, "it has 16 micro batches, and 16 sequences make 1")
def miscounted(frame):
    return frame.assign(micro_batches=16)


@cheat(MICRO_BATCHES, "the very same time")
def the_same_time_everywhere(frame):
    return frame.assign(step_ms=500.0, tokens_per_s=16 * 2048 / 0.5)


@cheat(MICRO_BATCHES, "less than weights and moments alone")
def no_weights(frame):
    return frame.assign(peak_gib=frame["peak_gib"] - 12)


@cheat(MICRO_BATCHES, "micro batches of 1 have a higher peak")
def upside_down(frame):
    return frame.assign(peak_gib=80 - frame["peak_gib"], reserved_gib=90)


@cheat(MICRO_BATCHES, "the peak is the same for all sizes")
def one_peak(frame):
    return frame.assign(peak_gib=30.0, reserved_gib=40)


@cheat(MICRO_BATCHES, "cannot hold a peak")
def less_reserved_than_allocated(frame):
    return frame.assign(reserved_gib=1.0)


@cheat(MICRO_BATCHES, "recomputation raises the peak")
def swapped(frame):
    return frame.assign(recompute=frame["recompute"].map({"no": "yes", "yes": "no"}))


@cheat(MICRO_BATCHES, "of 4 fit and those of 2 do not")
def a_small_one_that_does_not_fit(frame):
    frame.loc[frame["micro_batch_size"] == 2, "status"] = "out of memory"
    return frame


@cheat(MICRO_BATCHES, "fit with activations kept, and do not with recomputation")
def recomputing_does_not_fit(frame):
    large = (frame["micro_batch_size"] == 16) & (frame["recompute"] == "yes")
    frame.loc[large, "status"] = "out of memory"
    return frame


@cheat(MICRO_BATCHES, "every row ran out of memory")
def nothing_fits(frame):
    return frame.assign(status="out of memory")


@cheat(MICRO_BATCHES, "is faster than one that does not")
def recomputing_for_free(frame):
    factor = frame["recompute"].map({"no": 1.0, "yes": 0.7})
    return frame.assign(
        step_ms=factor * frame["step_ms"], tokens_per_s=frame["tokens_per_s"] / factor
    )


@pytest.mark.parametrize("name", cheat)
def test_doctored_results_are_named(name, h200):
    assert_named(checks_e4, cheat[name], h200)


def test_the_figure_must_be_a_picture(h200):
    path = h200 / "micro_batches.png"
    path.write_text("four panels")
    assert any("is no picture" in one for one in failures(checks_e4, h200))
    new_figure(size=(0.5, 0.5))[0].savefig(path)
    assert any("four panels need more" in one for one in failures(checks_e4, h200))
    path.unlink()
    assert any("micro_batches.png is not there" in one for one in failures(checks_e4, h200))


def test_nothing_run_yet_says_what_to_run(tmp_path):
    messages = failures(checks_e4, tmp_path)
    assert len(messages) == 5, messages
    assert all("not run yet: `labkit experiment micro_batches`" in one for one in messages)
