"""Figures: what they show, what they leave out, and that a notebook can show them."""

import gc
import weakref

import numpy as np
import pandas as pd
import pytest

from labkit import devices, plots
from labkit.errors import UserError
from labkit.plots.operations import COUNTERS

H200 = devices.spec("H200")


def lines(figure, style=None) -> dict:
    found = {line.get_label(): line for ax in figure.axes for line in ax.lines}
    return {name: line for name, line in found.items() if style in (None, line.get_linestyle())}


def points(**columns) -> pd.DataFrame:
    return pd.DataFrame({"intensity_flop_per_byte": [1.0, 100.0], "tflops": [2.0, 300.0]} | columns)


def test_the_roof_is_the_lower_of_the_two_bounds_and_turns_at_the_ridge():
    figure = plots.roofline(H200)
    (roof,) = [line for name, line in lines(figure).items() if name.startswith("H200")]
    x, y = roof.get_data()
    expected = np.minimum(H200.peak_tflops, x * H200.bandwidth_gbs / 1e3)
    np.testing.assert_allclose(y, expected, rtol=1e-9)
    assert x[0] < H200.ridge < x[-1]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert f"ridge: {H200.ridge:.3g} FLOP/byte" in texts, texts


@pytest.mark.parametrize("known", [{"copy_gbs": 4000.0}, {"gemm_tflops": 700.0}])
def test_only_the_ceiling_that_was_measured_is_dashed(known):
    figure = plots.roofline(H200.with_measured(**known))
    (dashed,) = lines(figure, "--").values()
    x, y = dashed.get_data()
    shown = x[np.isfinite(y)]
    assert len(shown), f"{known}: nothing is shown"
    is_slope = "copy_gbs" in known
    assert (shown < H200.ridge * 1.3).all() if is_slope else (shown > H200.ridge * 0.6).all()
    assert np.nanmax(y) <= max(700.0, H200.peak_tflops)


def test_ceilings_that_are_the_same_are_drawn_once():
    same = H200.with_measured(copy_gbs=H200.bandwidth_gbs, gemm_tflops=H200.peak_tflops)
    assert not lines(plots.roofline(same), "--")


def test_points_are_in_view_with_a_line_for_each_shape_and_device():
    frame = pd.concat(
        [
            points(shape=shape, device=device)
            for shape in ("lm_head", "router")
            for device in ("H200", "L40")
        ]
    )
    frame.loc[len(frame)] = [1e5, 1.0, "router", "L40"]
    figure = plots.roofline([H200, "L40"], frame)
    for name in ("lm_head, H200", "lm_head, L40", "router, H200", "router, L40"):
        assert name in lines(figure), f"{name} is not among {list(lines(figure))}"
    low, high = figure.axes[0].get_xlim()
    assert low < 1.0 and high > 1e5


def test_rows_that_were_not_measured_are_left_out():
    frame = points(shape="router").assign(tflops=[2.0, None])
    assert list(lines(plots.roofline(H200, frame))["router"].get_ydata()) == [2.0]
    plots.roofline(H200, frame.iloc[:0]).savefig("/dev/null", format="png")


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda: plots.roofline("H200", points().drop(columns="tflops")), "tflops"),
        (lambda: plots.roofline("abacus"), "abacus"),
        (lambda: plots.roofline([H200] * 3), "3 devices"),
        (lambda: plots.roofline([]), "0 devices"),
        (lambda: plots.sustained(points()), "t_s"),
        (lambda: plots.bandwidth(points(), H200), "op"),
        (lambda: plots.counters(points()), "workload"),
    ],
)
def test_bad_input_is_named(draw, says):
    with pytest.raises(UserError, match=says):
        draw()


def test_panels_without_data_are_left_out():
    frame = pd.DataFrame({"t_s": [0.1, 0.2], "n": 64, "tflops": [1.0, 2.0],
                          "sm_clock_mhz": [None, None], "power_w": [300.0, 310.0]})  # fmt: skip
    labels = [ax.get_ylabel() for ax in plots.sustained(frame).axes]
    assert labels == ["performance\n(TFLOP/s)", "power (W)"]


def test_bandwidth_has_a_panel_a_cache_state_and_marks_the_device():
    frame = pd.DataFrame({"op": "copy", "cache": ["cold", "warm"], "moved_bytes": [2e6, 2e6],
                          "gbs": [900.0, 9000.0]})  # fmt: skip
    figure = plots.bandwidth(frame, H200)
    assert len(figure.axes) == 2
    for ax in figure.axes:
        assert ax.get_ylim()[1] > 9000, "a panel does not show the highest point"
        texts = [text.get_text() for text in ax.texts]
        assert "H200 SXM: 4800 GB/s" in texts and "L2 60 MiB" in texts, texts
    assert len(plots.bandwidth(frame[:1], H200).axes) == 1


def test_counters_that_nobody_has_are_left_out():
    unknown = dict.fromkeys(COUNTERS, np.nan)
    frame = pd.DataFrame([{"workload": "launch", "ms": 0.004, "regime": "overhead-bound",
                           "regime_by": "roofline", **unknown, "cpu_pct": 50.0}])  # fmt: skip
    figure = plots.counters(frame)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["CPU busy"]
    label = figure.axes[0].get_xticklabels()[0].get_text()
    assert label == "launch\n0.004 ms a call\noverhead-bound (predicted)"


def test_a_table_of_failures_says_so():
    frame = pd.DataFrame({"op": ["copy"], "cache": "cold", "moved_bytes": np.nan, "gbs": np.nan,
                          "status": "out of memory"})  # fmt: skip
    (text,) = plots.bandwidth(frame, H200).axes[0].texts
    assert text.get_text() == "nothing was measured\nout of memory"


def test_a_figure_is_a_png_to_a_notebook_and_is_freed_when_dropped():
    import matplotlib.pyplot as plt

    figure = plots.roofline(H200)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert not plt.get_fignums(), "the figure is known to pyplot"
    kept = weakref.ref(figure)
    del figure
    gc.collect()
    assert kept() is None, "a dropped figure stays in memory"


def test_labels_have_units():
    figure = plots.roofline(H200, points())
    ax = figure.axes[0]
    assert "FLOP/byte" in ax.get_xlabel() and "TFLOP/s" in ax.get_ylabel()
