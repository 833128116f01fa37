"""Figures of predictions beside measurements, and the step explorer: what they show and say."""

import io
import time
from threading import Thread

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from labkit import perfmodel, plots, widgets
from labkit.devices import DeviceSpec, spec
from labkit.errors import UserError
from labkit.experiments.table import SWEEP, read
from labkit.perfmodel import bytes_per_element
from labkit.plots.predictor import KINDS
from labkit.predictor import Constants, Prediction, Term
from labkit.predictor.calibrate import KINDS as GROUPS
from labkit.predictor.calibrate import config, configurations
from labkit.predictor.constants import NAMES
from labkit.predictor.predict import peak_gib
from labkit.predictor.steptime import step_time
from labkit.widgets import predictor_picture
from labkit.widgets.predictor_picture import NUMBERS, TRUTH, Measured, Step, words

FOUR = {"model": "olmoe-1b-7b", "layers": 4, "micro_batch_size": 4, "seqlen": 2048,
        "micro_batches": 1, "recompute": False}  # fmt: skip


CPU = DeviceSpec("a CPU", 0.2, 40.0, 24.0, dtype="float32")


def judged(name: str) -> pd.DataFrame:
    """The configurations of "h200" or "cpu", with predictions by constants of round numbers."""
    device, tflops, gbs = (spec("H200"), 700, 3000) if name == "h200" else (CPU, 0.15, 40)
    rates = [each for each in NAMES if each.endswith(("tflops", "gbs"))]
    constants = Constants(kernel_us=3, **{each: gbs if "gbs" in each else tflops for each in rates})
    rows = configurations(read(TRUTH / f"{name}.csv", SWEEP))
    shapes = [
        (config(row), row.micro_batch_size, row.seqlen, row.recompute == "yes")
        for row in rows.itertuples()
    ]
    b = bytes_per_element(device)
    times = [step_time(*shape, constants, bytes_per_element=b) for shape in shapes]
    kinds = {f"predicted_{k}_ms": [ms.by("group").get(k, np.nan) for ms in times] for k in GROUPS}
    peaks = [peak_gib(*shape, device) for shape in shapes]
    return rows.assign(predicted_ms=times, predicted_gib=peaks, **kinds)


@pytest.fixture(scope="module", params=["h200", "cpu"])
def rows(request):
    return judged(request.param)


def drawn(ax) -> np.ndarray:
    """All points [n, 2] of the markers with a size that `_points` uses."""
    found = [line.get_xydata() for line in ax.lines if line.get_markersize() == 5]
    return np.concatenate([each for each in found if len(each)])


def texts(figure) -> list[str]:
    found = [text.get_text() for ax in figure.axes for text in [*ax.texts, ax.title]]
    return found + [text.get_text() for legend in figure.legends for text in legend.get_texts()]


# ---------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("what", "guess"), [("step_ms", "predicted_ms"), ("peak_gib", "predicted_gib")]
)
def test_every_configuration_is_a_point_at_what_was_measured_and_predicted(rows, what, guess):
    figure = plots.predicted(rows, what)
    ax = figure.axes[0]
    found, expected = drawn(ax), rows[[what, guess]].to_numpy(dtype=float)
    np.testing.assert_allclose(np.sort(found, axis=0), np.sort(expected, axis=0))
    assert len(found) == len(rows) and (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    error = (rows[guess] / rows[what] - 1).abs()
    said = f"median error {100 * error.median():.2g} %"
    assert said in ax.get_title(), f"{ax.get_title()!r}, not {said!r}"


def test_open_markers_recompute_and_models_have_markers_of_their_own():
    for name, models in (("h200", 1), ("cpu", 2)):
        rows = judged(name)
        lines = [line for line in plots.predicted(rows).axes[0].lines if line.get_markersize() == 5]
        filled = [x for line in lines if line.get_mfc() != "none" for x in line.get_xdata()]
        kept = rows[rows["recompute"] == "no"]["step_ms"]
        np.testing.assert_allclose(np.sort(filled), np.sort(kept), err_msg=name)
        markers = {line.get_marker() for line in lines} - {"None"}
        assert len(markers) == models, f"{name}: markers {markers}"


def test_residuals_are_errors_in_percent_and_rings_wait_for_python(rows):
    ax = plots.residuals(rows).axes[0]
    error_pct = 100 * (rows["predicted_ms"] / rows["step_ms"] - 1)
    np.testing.assert_allclose(np.sort(drawn(ax)[:, 1]), np.sort(error_pct), rtol=1e-9)
    rings = next(line for line in ax.lines if line.get_markersize() == 11)
    waits = (rows["host_ms"] >= 0.95 * rows["step_ms"]).sum()
    assert len(rings.get_xdata()) == waits, f"{len(rings.get_xdata())} rings, {waits} steps wait"
    low, high = ax.get_ylim()
    assert low == -high and high >= error_pct.abs().max()


def test_no_ring_on_memory_and_none_on_a_cpu():
    for figure in (plots.residuals(judged("h200"), "peak_gib"), plots.residuals(judged("cpu"))):
        assert "waits for Python" not in texts(figure)
    assert "waits for Python" in texts(plots.residuals(judged("h200")))


def test_each_kind_of_work_has_its_points_and_its_lines(rows):
    figure = plots.terms_against(rows)
    models = list(rows["model"].unique())
    assert len(figure.axes) == 4 * len(models)
    for i, kind in enumerate(KINDS):
        points, guessed = [], []
        for j in range(len(models)):
            for line in figure.axes[4 * j + i].lines:
                (guessed if line.get_marker() == "None" else points).extend(line.get_ydata())
        measured = rows[kind][rows[kind] > 0]
        np.testing.assert_allclose(np.sort(points), np.sort(measured))
        known = rows[rows[kind] > 0].groupby(["model", "layers", "tokens"])
        expected = known[f"predicted_{kind}"].mean()
        np.testing.assert_allclose(np.sort(guessed), np.sort(expected))


def test_a_prediction_that_knows_no_kinds_has_no_lines():
    frame = judged("cpu")
    frame[[f"predicted_{kind}" for kind in KINDS]] = np.nan
    lines = [line for ax in plots.terms_against(frame).axes for line in ax.lines]
    guessed = [line.get_ydata() for line in lines if line.get_marker() == "None"]
    assert not np.isfinite(np.concatenate(guessed)).any()


def parts(ax) -> list[float]:
    return [bar.get_width() for bar in ax.patches]


def test_bars_add_up_and_resources_have_hues_of_their_own():
    both = [("a", step(3.0)), ("b", step(6.0))]
    figure = plots.terms(both, [17.0, None])
    (ax,) = figure.axes
    ends = [bar.get_x() + bar.get_width() for bar in ax.patches]
    assert ends == pytest.approx([3, 8, 9, 6, 11, 12]), "the parts lie end to end"
    marks = [line for line in ax.lines if line.get_marker() == "^"]
    assert [line.get_xdata()[0] for line in marks] == [17.0]
    assert {"compute:", "memory bandwidth:", "overhead:", "measured"} <= set(texts(figure))
    colors = [to_rgb(bar.get_facecolor()) for bar in ax.patches[:3]]
    blue, orange, grey = colors
    assert blue[2] > blue[0] and orange[0] > orange[2] and max(grey) - min(grey) < 0.02, colors


def step(ms: float) -> Prediction:
    return Prediction([Term("experts", "forward", ms, "compute"),
                       Term("loss", "forward", 5.0, "memory bandwidth"),
                       Term("kernel starts", "forward", 1.0, "overhead")], "ms")  # fmt: skip


def test_memory_is_coloured_by_whose_the_bytes_are():
    peak = perfmodel.predict_peak_gib(FOURS, 4, 2048, device="H200")
    figure = plots.terms(peak, 20.0, unit="GiB")
    assert {"state:", "activations:"} <= set(texts(figure)), texts(figure)
    assert figure.axes[0].get_xlabel() == "memory (GiB)"
    assert sum(parts(figure.axes[0])) == pytest.approx(float(peak))


FOURS = Step(**FOUR, device=spec("H200")).cfg


def test_a_plain_number_is_one_block():
    figure = plots.terms([("a", 12.5), ("b", np.float64(4))], pd.Series([12.0, 5.0]))
    marks = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_marker() == "^"]
    assert marks == [12.0, 5.0]
    assert [width for width in parts(figure.axes[0]) if width] == [12.5, 4]


def test_what_makes_no_figure_is_named():
    frame = judged("cpu")
    for call, says in (
        (lambda: plots.predicted(frame, "power_w"), "power_w"),
        (lambda: plots.predicted(frame.drop(columns="predicted_ms")), "predicted_ms"),
        (lambda: plots.residuals(frame.drop(columns="host_ms")), "host_ms"),
        (lambda: plots.terms_against(frame.drop(columns="predicted_forward_ms")), "forward_ms"),
        (lambda: plots.terms([]), "0 predictions"),
        (lambda: plots.terms([("a", 1.0)], [1.0, 2.0]), "1 predictions and 2"),
    ):
        with pytest.raises(UserError, match=says):
            call()
    nothing = plots.predicted(frame.assign(predicted_ms=np.nan))
    assert "nothing was measured" in texts(nothing)[0]


# --------------------------------------------------------------------------------------- explorer


@pytest.fixture
def explorer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no results, and no constants of the user's, here
    return widgets.step_explorer("H200")


def test_the_explorer_says_what_its_figure_shows(explorer):
    predicted = perfmodel.predict_step_ms(FOURS, 4, 2048, device="H200")
    assert explorer.summary.startswith(f"{float(predicted):.4g} ms a step on H200 SXM")
    for said in ("tokens a second, MFU", "bound by compute", "GiB at most at the backward of"):
        assert said in explorer.summary, explorer.summary
    assert Image.open(io.BytesIO(explorer.image.value)).size[0] > 800


def test_a_measured_step_is_set_beside_its_prediction(explorer):
    truth = configurations(read(TRUTH / "h200.csv", SWEEP)).query(
        "layers == 4 and micro_batch_size == 4 and seqlen == 2048 and recompute == 'no'"
    )
    said = f"Measured: {truth['step_ms'].item():.4g} ms"
    assert said in explorer.summary, f"{said!r} is not in {explorer.summary}"
    explorer.layers.value = 6
    assert "Measured" not in explorer.summary, "nobody measured six layers"
    explorer.layers.value, explorer.seqlen.value = 4, 1024
    assert "Measured nearby: " in explorer.summary or "Measured: " in explorer.summary


def test_every_control_changes_the_words(explorer):
    changes = {"model": "small", "layers": 1, "micro_batch_size": 1, "seqlen": 128,
               "micro_batches": 4, "recompute": True, "device": "H100 SXM"}  # fmt: skip
    for name, value in changes.items():
        before, control = explorer.summary, getattr(explorer, name)
        kept, control.value = control.value, value
        assert explorer.summary != before, f"{name} = {value}: {explorer.summary}"
        control.value = kept
        assert explorer.summary == before
    assert all(control.description and control.tooltip for control in explorer.controls)


def test_what_does_not_fit_is_a_red_sentence_with_the_number(explorer):
    explorer.device.value, explorer.micro_batch_size.value = "L40", 64
    explorer.layers.value = 8
    first = explorer.summary.splitlines()[0]
    needed = float(perfmodel.predict_peak_gib(
        Step(**FOUR | {"layers": 8}, device=spec("L40")).cfg, 64, 2048, device="L40"
    ))  # fmt: skip
    assert f"needs {needed:.3g} GiB" in first and "has 45" in first, first
    assert "color: #b00020" in explorer.words.value
    explorer.micro_batch_size.value = 1
    assert "color: #b00020" not in explorer.words.value, explorer.summary


def test_a_predictor_that_ignores_memory_is_stopped_by_its_own_peak(explorer, monkeypatch):
    monkeypatch.setattr(perfmodel, "predict_step_ms", lambda *shape, **more: 12.5)
    monkeypatch.setattr(perfmodel, "predict_peak_gib", lambda *shape, **more: 150.0)
    explorer.layers.value = 2
    assert "needs 150 GiB" in explorer.summary.splitlines()[0], explorer.summary


def test_open_exercises_and_plain_numbers(explorer, monkeypatch):
    def unwritten(*shape, **more):
        raise NotImplementedError("Coding Exercise 9: labkit/perfmodel.py, predict_step_ms")

    monkeypatch.setattr(perfmodel, "predict_step_ms", unwritten)
    explorer.layers.value = 2
    first = explorer.summary.splitlines()[0]
    assert first == "Coding Exercise 9 first: labkit/perfmodel.py, predict_step_ms"
    assert "GiB at most" in explorer.summary, "memory is written, and shows"
    monkeypatch.setattr(perfmodel, "predict_step_ms", lambda *shape, **more: 12.5)
    explorer.layers.value = 3
    assert explorer.summary.startswith("12.5 ms a step"), explorer.summary
    assert "One number does not say what limits it" in explorer.summary
    monkeypatch.setattr(perfmodel, "predict_step_ms", lambda *shape, **more: None)
    explorer.layers.value = 4
    assert "returned None" in explorer.summary, explorer.summary
    monkeypatch.setattr(perfmodel, "predict_step_ms", lambda *shape, **more: 1 / 0)
    explorer.layers.value = 6
    assert explorer.summary.startswith("ZeroDivisionError")
    assert explorer.image.layout.display == "none"


def test_python_that_limits_a_step_is_named(explorer):
    explorer.layers.value, explorer.seqlen.value = 8, 256
    explorer.micro_batch_size.value, explorer.recompute.value = 1, True
    assert "Python limits it: the GPU waits" in explorer.summary, explorer.summary


def test_a_cpu_that_nobody_calibrated_says_what_to_run():
    chosen = FOUR | {"model": "olmoe-tiny", "seqlen": 128}
    step = Step.predicted(**chosen, device=CPU)
    said = "\n".join(words(step, Measured()))
    assert step.ms is None and "labkit calibrate" in said, said
    assert step.gib is not None and "GiB at most" in said


def test_a_sweep_of_ones_own_goes_first(tmp_path):
    frame = read(TRUTH / "h200.csv", SWEEP).query("layers == 4 and seqlen == 2048")
    frame.assign(step_ms=frame["step_ms"] * 2).to_csv(tmp_path / "sweep.csv", index=False)
    step = Step.predicted(**FOUR, device=spec("H200"))
    shipped, _ = Measured().beside(step)
    own, _ = Measured(tmp_path / "sweep.csv").beside(step)
    assert own["step_ms"] == pytest.approx(2 * shipped["step_ms"])


def test_nearby_steps_have_nearly_as_many_tokens():
    step = Step.predicted(**FOUR | {"micro_batch_size": 16, "seqlen": 512}, device=spec("H200"))
    exact, near = Measured().beside(step)
    tokens = [row["micro_batch_size"] * row["seqlen"] for row in near]
    assert tokens and exact is None
    assert all(1 / 1.5 <= n / step.tokens <= 1.5 for n in tokens), f"{tokens}, of {step.tokens}"
    assert all(row["layers"] == 4 and row["recompute"] == "no" for row in near)


def test_a_move_of_the_step_explorer_is_drawn_within_a_fifth_of_a_second(explorer):
    times_s = []
    for value in (1, 2, 3, 4, 6, 8, 12, 16, 1, 2, 3):
        start = time.perf_counter()
        explorer.layers.value = value
        times_s.append(time.perf_counter() - start)
    typical_ms = 1e3 * sorted(times_s)[5]
    assert typical_ms < 200, f"{typical_ms:.0f} ms a move"


def test_controls_that_move_in_threads_of_their_own_leave_the_last_state(explorer, monkeypatch):
    from labkit.widgets import predictor

    def slowly(step, measured):
        if step.device.name == "H200 SXM":  # the first: give the second the time to overtake
            second.start()
            second.join(0.5)
        return predictor_picture.figure(step, measured)

    monkeypatch.setattr(predictor, "figure", slowly)
    first = Thread(target=lambda: setattr(explorer.layers, "value", 8))
    second = Thread(target=lambda: setattr(explorer.device, "value", "H100 SXM"))
    first.start()
    first.join(10)
    second.join(10)
    expected = Step.predicted(**FOUR | {"layers": 8}, device=spec("H100 SXM")).words()[0]
    assert explorer.summary.startswith(expected), explorer.summary


def test_the_static_figure_has_the_bars_of_both_predictions():
    figure = widgets.step_static(device="H200")
    functions = perfmodel.predict_step_ms, perfmodel.predict_peak_gib
    exact, _ = Measured().beside(Step(**FOUR, device=spec("H200")))
    for ax, function, column in zip(figure.axes, functions, NUMBERS, strict=True):
        number = float(function(FOURS, 4, 2048, device="H200"))
        assert sum(parts(ax)) == pytest.approx(number)
        marks = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "^"]
        assert exact[column] in marks, f"{marks}, not {exact[column]}"


def test_bad_input_of_the_static_figure_is_named(tmp_path):
    for changes, says in (({"model": "olmo"}, "olmo"), ({"seqlen": 0}, "seqlen=0"),
                          ({"device": "L41"}, "L41"),
                          ({"sweep_csv": tmp_path / "none.csv"}, "none.csv")):  # fmt: skip
        with pytest.raises(UserError, match=says):
            widgets.step_static(**{"device": "H200"} | changes)
