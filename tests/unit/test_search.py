"""What fits, what is fastest, and several GPUs: against what was measured on H200."""

import json
from pathlib import Path

import pytest

from labkit.config import ModelConfig
from labkit.devices import spec
from labkit.errors import UserError
from labkit.experiments.table import MICRO_BATCHES, read
from labkit.predictor.predict import peak_gib, step_ms
from labkit.predictor.search import (
    data_parallel,
    fastest,
    largest_micro_batch,
    most_layers,
    what_fits,
)

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
OLMOE = ModelConfig.preset("olmoe-1b-7b", n_layers=4)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("gib", [16.0, 20.0, 44.4])
def test_the_largest_micro_batch_fits_and_the_next_does_not(recompute, gib):
    size = largest_micro_batch(OLMOE, 2048, recompute, "L40", gib)
    assert peak_gib(OLMOE, size, 2048, recompute, spec("L40")) <= gib
    assert peak_gib(OLMOE, size + 1, 2048, recompute, spec("L40")) > gib


def test_nothing_fits_where_the_state_does_not():
    assert largest_micro_batch(OLMOE, 2048, True, "L40", 10.0) == 0
    frame = what_fits(OLMOE, 2048, "L40", 10.0)
    assert frame["micro_batch_size"].tolist() == [0, 0]
    with pytest.raises(UserError, match=r"nothing fits into 10 GiB.*recomputing, needs 1\d"):
        fastest(OLMOE, 2048, 4, "L40", 10.0)


def test_most_layers_fit_and_one_more_does_not():
    whole = ModelConfig.preset("olmoe-1b-7b")
    n = most_layers(whole, 1, 2048, True, "L40")
    more = ModelConfig.preset("olmoe-1b-7b", n_layers=n + 1)
    assert 1 < n < 16 and peak_gib(more, 1, 2048, True, spec("L40")) > 44


def test_the_ways_through_a_global_batch_as_they_were_measured():
    measured = read(MICRO_BATCHES.path(RESULTS / "part3_h200"), MICRO_BATCHES)
    found = fastest(OLMOE, 2048, 16, "H200").set_index(["micro_batch_size", "recompute"])
    kept = measured[measured["recompute"] == "no"].sort_values("step_ms")
    order = [size for size, again in found.index if not again]
    assert order == kept["micro_batch_size"].tolist()
    for row in measured.itertuples():
        mine = found.loc[(int(row.micro_batch_size), row.recompute == "yes")]
        assert abs(mine["peak_gib"] / row.peak_gib - 1) < 0.003
        if row.micro_batch_size > 1:  # steps of one sequence wait for Python
            assert abs(mine["step_ms"] / row.step_ms - 1) < 0.05


def test_less_memory_is_never_faster():
    best = [fastest(OLMOE, 2048, 16, "H200", gib)["step_ms"].iloc[0] for gib in (16, 20, 30, 60)]
    assert best == sorted(best, reverse=True) and best[0] > 1.2 * best[-1]


def test_two_gpus_as_they_were_measured():
    rows = json.loads((RESULTS / "part4_h200/data_parallel.json").read_text())["rows"]
    for row in (row for row in rows if row["what"] == "step"):
        cfg = ModelConfig.preset("olmoe-1b-7b", n_layers=row["layers"])
        shape = (cfg, row["micro_batch_size"], row["seqlen"], False, "H200")
        for column, hidden in (("after_ms", 0.0), ("overlapped_ms", 0.5)):
            found = data_parallel(*shape, gpus=2, link_gbs=280, hidden=hidden)
            assert abs(found / row[column] - 1) < 0.06, f"{row}: {found}"


def test_one_gpu_exchanges_nothing_and_more_exchange_more():
    one = data_parallel(OLMOE, 4, 2048, device="H200", gpus=1, link_gbs=280)
    assert one == step_ms(OLMOE, 4, 2048, False, spec("H200"))
    times = [data_parallel(OLMOE, 4, 2048, device="H200", gpus=n, link_gbs=280) for n in (2, 4, 8)]
    exchanged = [time.by("group")["communication"] for time in times]
    assert exchanged == sorted(exchanged) and exchanged[-1] < 4 * exchanged[0]


@pytest.mark.parametrize("bad", [{"gpus": 0, "link_gbs": 1}, {"gpus": 2, "link_gbs": 0}])
def test_bad_input_is_named(bad):
    with pytest.raises(UserError, match=r"(gpus|link_gbs)=0"):
        data_parallel(OLMOE, 4, 2048, device="H200", **bad)
    with pytest.raises(UserError, match="memory_gib=-1"):
        what_fits(OLMOE, 2048, "H200", -1)
