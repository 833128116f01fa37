"""The predictor: what its numbers are made of, how they move, and how near they are to measured."""

import math
import pickle
import time
from itertools import pairwise, product
from pathlib import Path

import pytest

from labkit.config import PRESETS, ModelConfig
from labkit.devices import DeviceSpec, known_devices, spec
from labkit.errors import UserError
from labkit.experiments.table import SWEEP, read
from labkit.perfmodel import param_count, predict_peak_gib, predict_step_ms
from labkit.predictor import Prediction, Term
from labkit.predictor.calibrate import config, configurations
from labkit.predictor.known import SHIPPED, constants_of
from labkit.predictor.peak import peak_memory
from labkit.predictor.predict import peak_gib, step_ms
from labkit.predictor.steptime import host_ms, step_time

HIDDEN = Path(__file__).parents[1] / "hidden/truth/h200.csv"
OLMOE = ModelConfig.preset("olmoe-1b-7b", n_layers=4)
H200 = SHIPPED["H200 SXM"]
FUNCTIONS = [predict_step_ms, predict_peak_gib]
TRAINED = [name for name in known_devices() if spec(name).dtype != "float32"]


@pytest.fixture(autouse=True)
def _nobodys_constants(tmp_path, monkeypatch):
    """Not those that somebody calibrated and keeps at home, or where the tests are started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


# ----------------------------------------------------------------------------------------- terms


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize(("recompute", "micro_batches"), [*product((False, True), (1, 4))])
def test_terms_sum_to_the_whole(function, model, recompute, micro_batches):
    cfg = ModelConfig.preset(model)
    found = function(cfg, 2, 512, recompute, "H200", micro_batches=micro_batches)
    values = [term.value for term in found.terms]
    assert abs(math.fsum(values) / found - 1) < 1e-9, f"{found}: the terms sum to {sum(values)}"
    assert min(values) >= 0, f"{found.terms}"
    for field in ("name", "group", "bound"):
        assert abs(sum(found.by(field).values()) / found - 1) < 1e-9, f"by {field}: {found.by()}"


def test_a_prediction_is_a_number_with_a_table():
    found = predict_step_ms(OLMOE, 4, 2048, True, "H200")
    assert isinstance(found, float) and found > 0 and found + 1 == float(found) + 1
    assert found.unit == "ms" and "H200" in found.source and str(found).endswith(" ms")
    groups = found.by("group")
    assert list(groups) == ["forward", "backward", "recompute", "optimizer"], groups
    assert found.by("bound").keys() == {"compute", "memory bandwidth", "overhead"}
    table = found.table()
    assert list(table.columns) == ["name", "group", "ms", "bound", "share"]
    assert len(table) == len(found.terms) and abs(table["share"].sum() - 1) < 1e-9
    assert predict_peak_gib(OLMOE, 4, 2048, device="H200").table()["gib"].min() > 0


def test_a_prediction_survives_a_pickle():
    found = predict_peak_gib(OLMOE, 4, 2048, device="H200")
    again = pickle.loads(pickle.dumps(found))
    assert again == found and (again.terms, again.unit, again.note) == (
        found.terms, found.unit, found.note,
    )  # fmt: skip
    assert isinstance(again, Prediction) and isinstance(again.terms[0], Term)


def test_an_empty_prediction_is_zero():
    nothing = Prediction([], "ms")
    assert nothing == 0 and nothing.by() == {} and len(nothing.table()) == 0


# ---------------------------------------------------------------------------------------- growth


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize("recompute", [False, True])
def test_more_tokens_and_more_layers_need_more(function, model, recompute):
    cfg = ModelConfig.preset(model, n_layers=4)
    tokens = [function(cfg, size, 256, recompute, "H200") for size in range(1, 64)]
    for few, more in pairwise(tokens):
        waits = "waiting for Python" in more.by()  # then it is as long as Python's work, to a bit
        assert more > few or (waits and abs(more / few - 1) < 1e-12), f"{few!r}, then {more!r}"
    layers = [
        function(ModelConfig.preset(model, n_layers=n), 2, 512, recompute, "H200")
        for n in range(1, 9)
    ]
    for few, more in pairwise(layers):
        assert more > few, f"{few} and, with one more layer, {more}"


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_recomputing_costs_the_layers_forward_on_the_device(model, micro_batches):
    """What Python needs is not the device's: a step that waits is not compared."""
    cfg, shape = ModelConfig.preset(model), (16, 512)
    kept, again = (
        step_time(cfg, *shape, recompute, H200, micro_batches=micro_batches)
        for recompute in (False, True)
    )
    bare = step_time(ModelConfig.preset(model, n_layers=1), *shape, False, H200)
    two = step_time(ModelConfig.preset(model, n_layers=2), *shape, False, H200)
    layer = two.by("group")["forward"] - bare.by("group")["forward"]
    cost = again.by("group")["recompute"]
    expected = layer * cfg.n_layers * micro_batches
    assert abs(cost / expected - 1) < 1e-9, f"{cost} ms, and the layers' forward {expected} ms"
    for group in ("forward", "backward", "optimizer"):
        assert again.by("group")[group] == kept.by("group")[group], f"{group} changes"


@pytest.mark.parametrize("model", ["olmoe-1b-7b", "medium"])
def test_recomputing_saves_memory_where_activations_are_large(model):
    cfg = ModelConfig.preset(model, n_layers=8)
    few = [predict_peak_gib(cfg, 1, 16, recompute, "H200") for recompute in (False, True)]
    many = [predict_peak_gib(cfg, 8, 2048, recompute, "H200") for recompute in (False, True)]
    assert abs(few[1] / few[0] - 1) < 0.01, f"16 tokens: {few[0]}, and {few[1]} recomputed"
    assert many[1] < 0.75 * many[0], f"16,384 tokens: {many[0]}, and {many[1]} recomputed"


@pytest.mark.parametrize("recompute", [False, True])
def test_accumulation_updates_once_and_adds_gradients(recompute):
    n = 4
    one = predict_step_ms(OLMOE, 4, 2048, recompute, "H200")
    four = predict_step_ms(OLMOE, 4, 2048, recompute, "H200", micro_batches=n)
    passes = n * (one - one.by("group")["optimizer"])
    assert passes < four < n * one, f"{four} of four, {one} of one"
    peaks = [
        predict_peak_gib(OLMOE, 4, 2048, recompute, "H200", micro_batches=m) for m in (1, 2, 4)
    ]
    assert peaks[0] < peaks[1] == peaks[2], f"of 1, 2 and 4 micro batches: {peaks}"


def test_a_step_that_waits_is_as_long_as_pythons_work():
    few = step_time(OLMOE, 1, 256, True, H200)
    assert few.by()["waiting for Python"] > 0
    assert abs(few / host_ms(OLMOE, H200, 1, True) - 1) < 0.05
    many = step_time(OLMOE, 8, 2048, True, H200)
    assert "waiting for Python" not in many.by(), f"{many!r}"


# ---------------------------------------------------------------------- models, devices, numbers


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("model", PRESETS)
def test_every_model_on_every_device_that_trains_in_two_bytes(name, model):
    cfg = ModelConfig.preset(model, n_layers=1)
    for recompute in (False, True):
        ms = predict_step_ms(cfg, 1, 512, recompute, name)
        gib = predict_peak_gib(cfg, 1, 512, recompute, name)
        floor = 14 * param_count(cfg) / spec(name).bandwidth_gbs / 1e6
        assert floor < ms < 500, f"{ms}, and AdamW alone moves {floor:.3g} ms' worth of bytes"
        assert 8 * param_count(cfg) / 2**30 < gib < spec(name).memory_gib, f"{gib}"


@pytest.mark.parametrize("name", sorted(known_devices().keys() - set(TRAINED)))
def test_a_device_without_bfloat16_says_what_to_measure(name):
    with pytest.raises(UserError, match=f"{name}.*labkit sweep --truth"):
        predict_step_ms(ModelConfig.preset("tiny"), 1, 512, False, name)


def test_the_bytes_of_a_training_state():
    """A float32 state on the same device: twice the optimizer's bytes, twice the state's memory."""
    bf16, fp32 = (
        step_time(OLMOE, 4, 2048, False, H200, state_bytes=state).by("group")["optimizer"]
        for state in (None, (4, 4, 8))
    )
    assert abs(fp32 / bf16 - 2) < 1e-9, f"{bf16} and {fp32} ms"
    small, large = (
        peak_gib(OLMOE, 1, 64, False, spec("H200"), state_bytes=state).by("group")["state"]
        for state in (None, (4, 4, 8))
    )
    assert abs(large / small - 2) < 1e-9, f"{small} and {large} GiB"
    assert abs(small * 2**30 / param_count(OLMOE) / 8 - 1) < 1e-9
    mixed = peak_gib(OLMOE, 1, 64, False, spec("H200"), state_bytes=(2, 4, 8)).by("name")
    assert abs(mixed["moments"] / mixed["weights"] - 4) < 1e-9, f"{mixed}"


def test_float32_needs_twice_the_memory_of_bfloat16_beside_the_loss():
    two, four = (peak_memory(OLMOE, 1, 256, False, bytes_per_element=b) for b in (2, 4))
    assert two.by("group")["state"] * 2 == four.by("group")["state"]


def test_what_does_not_fit_says_so_with_the_ways_out():
    cfg, device = ModelConfig.preset("olmoe-1b-7b", n_layers=8), spec("L40")
    with pytest.raises(UserError) as raised:
        predict_step_ms(cfg, 8, 2048, False, device)
    said = str(raised.value)
    needed = float(predict_peak_gib(cfg, 8, 2048, False, device))
    assert f"needs {needed:.3g} GiB and L40 has 45" in said, said
    assert "recompute=True needs" in said and "micro_batch_size=" in said, said
    size = int(said.partition("micro_batch_size=")[2].split()[0])
    assert predict_step_ms(cfg, size, 2048, False, device) > 0
    with pytest.raises(UserError):
        predict_step_ms(cfg, size + 1, 2048, False, device)
    with pytest.raises(UserError, match="n_layers=13 would fit"):
        predict_step_ms(ModelConfig.preset("olmoe-1b-7b"), 1, 512, False, device)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"seqlen": 0}, "seqlen=0"),
        ({"seqlen": -1}, "seqlen=-1"),
        ({"seqlen": 2.5}, "seqlen=2.5"),
        ({"seqlen": math.nan}, "seqlen=nan"),
        ({"micro_batch_size": True}, "micro_batch_size=True"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"device": "H2000"}, "H2000"),
    ],
)
def test_bad_arguments_are_named(function, given, says):
    arguments = {"micro_batch_size": 1, "seqlen": 128, "device": "H200"} | given
    with pytest.raises(UserError, match=says):
        function(OLMOE, **arguments)


def test_constants_that_are_no_numbers_are_named():
    for bad in (math.nan, math.inf, -1.0, 0.0):
        with pytest.raises(UserError, match="stream_gbs"):
            type(H200)(**H200.to_dict() | {"stream_gbs": bad})


def test_numbers_of_numpy_do():
    import numpy as np

    sizes = np.array([4, 2048], dtype=np.int16)  # their product overflows
    assert predict_step_ms(OLMOE, *sizes, device="H200") == predict_step_ms(
        OLMOE, 4, 2048, device="H200"
    )


def test_a_device_may_be_given_as_a_spec():
    device = DeviceSpec("H200 SXM", 989, 4800, 140.4)
    assert predict_step_ms(OLMOE, 4, 2048, device=device) == predict_step_ms(
        OLMOE, 4, 2048, device="NVIDIA H200"
    )
    assert constants_of(device) == H200


@pytest.mark.parametrize("function", [step_ms, peak_gib])
def test_a_prediction_takes_less_than_100_microseconds(function):
    device, took = spec("H200"), []
    for _ in range(200):
        began = time.perf_counter()
        function(OLMOE, 4, 2048, True, device)
        took.append(time.perf_counter() - began)
    assert min(took) < 100e-6, f"{1e6 * min(took):.0f} µs"


# -------------------------------------------------------------------------------------- accuracy


@pytest.fixture(scope="module")
def held_out():
    """Configurations that no constant was fitted to, with relative errors of time and memory."""
    steps = configurations(read(HIDDEN, SWEEP))
    shapes = [
        (config(row), int(row.micro_batch_size), int(row.seqlen), row.recompute == "yes", "H200")
        for row in steps.itertuples()
    ]
    many = [int(n) for n in steps["micro_batches"]]
    both = [
        [float(function(*shape, micro_batches=n)) for shape, n in zip(shapes, many, strict=True)]
        for function in FUNCTIONS
    ]
    return steps.assign(
        time_error=(both[0] / steps["step_ms"] - 1).abs(),
        memory_error=(both[1] / steps["peak_gib"] - 1).abs(),
    )


def worst(steps, column: str) -> str:
    shown = ["layers", "micro_batch_size", "seqlen", "recompute", "step_ms", "peak_gib", column]
    return "\n" + steps.sort_values(column)[shown].tail(5).to_string(index=False)


def test_memory_on_an_h200_is_within_a_percent_and_a_half(held_out):
    error = held_out["memory_error"]
    assert error.median() < 0.003, f"median {error.median():.2%}{worst(held_out, 'memory_error')}"
    assert error.max() < 0.015, f"worst {error.max():.2%}{worst(held_out, 'memory_error')}"


def test_time_on_an_h200_is_within_three_percent_from_4096_tokens_on(held_out):
    many = held_out[held_out["tokens"] >= 4096]
    error = many["time_error"]
    assert error.median() < 0.01, f"median {error.median():.2%}{worst(many, 'time_error')}"
    assert error.max() < 0.03, f"worst {error.max():.2%}{worst(many, 'time_error')}"
