"""Figures of memory, and the memory explorer: what they show and say."""

import io
import pickle

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from labkit import plots, widgets
from labkit.errors import UserError
from labkit.memory import read_snapshot
from labkit.memory.timeline import replay
from labkit.widgets import memory_picture
from labkit.widgets.memory_picture import GPUS, STATES, estimate

MIB = 2**20
PHASES = [("forward", 1, 2, 0.0, 2.0), ("backward", 3, 4, 2.0, 5.0)]


def timeline(scale=1):
    """1 MiB of weights; activations of 2 and 3 MiB come, and go."""
    sizes = [(1.0, 10, 2), (2.0, 20, 3), (3.0, 20, -3), (5.0, 10, -2)]
    events = [(t, address, scale * size * MIB) for t, address, size in sizes]
    return replay({1: scale * MIB}, events, [(0, "weights", [1])], PHASES)


def texts(figure) -> list[str]:
    found = [text.get_text() for ax in figure.axes for text in ax.texts]
    legends = [legend.get_texts() for legend in figure.legends]
    return found + [text.get_text() for entries in legends for text in entries]


# ---------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("over", ["time", "events"])
def test_the_curve_is_the_timeline_and_its_peak_is_marked(over):
    lived = timeline()
    figure = plots.memory_timeline({"step": lived}, {"weights": 1 / 1024}, over)
    curve, peak, state = figure.axes[0].lines
    x = [0, 1, 2, 3, 5] if over == "time" else [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(curve.get_xdata(), x)
    np.testing.assert_allclose(np.array(curve.get_ydata()) * 1024, [1, 3, 6, 3, 1])
    assert (peak.get_xdata()[0], peak.get_ydata()[0] * 1024) == (2, 6)
    assert state.get_ydata()[0] == 1 / 1024
    assert {"forward", "backward", "0.00586"} <= set(texts(figure)), texts(figure)
    assert "ms" in figure._supxlabel.get_text() or over == "events"


def test_panels_share_the_memory_axis_and_say_what_is_missing():
    panels = {"a": timeline(), "b": timeline(3), "c": "out of memory"}
    figure = plots.memory_timeline(panels)
    limits = {ax.get_ylim() for ax in figure.axes[:3]}
    assert len(limits) == 1 and limits.pop()[1] > 18 / 1024
    assert "out of memory" in texts(figure)
    assert not figure.axes[3].axison, "an empty panel"
    only_text = plots.memory_timeline({"a": "out of memory"})
    assert only_text._repr_png_().startswith(b"\x89PNG")


def test_a_timeline_without_clock_is_drawn_over_its_events(tmp_path):
    trace = [{"action": "alloc", "addr": 1, "size": 512}]
    path = tmp_path / "old.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [trace]}))
    figure = plots.memory_timeline({"old": read_snapshot(path)})
    assert "allocations" in figure._supxlabel.get_text()


def test_bars_add_up_and_devices_are_lines():
    rows = pd.DataFrame([timeline().categories()], index=["step"]) / 2**30
    figure = plots.memory_categories(rows, {"small": 0.004, "large": 0.02})
    (ax,) = figure.axes
    bars = [bar for container in ax.containers for bar in container]
    assert sum(bar.get_width() for bar in bars) == pytest.approx(6 / 1024)
    assert [line.get_xdata()[0] for line in ax.lines] == [0.004, 0.02]
    assert {"weights", "activations", "small", "large"} <= set(texts(figure)) and len(bars) == 2


def test_arguments_that_make_no_figure_are_named():
    for call, says in (
        (lambda: plots.memory_timeline({}), "timelines"),
        (lambda: plots.memory_timeline({"a": timeline()}, over="noon"), "over='noon'"),
        (lambda: plots.memory_categories(pd.DataFrame({"weather": [1]})), "weather"),
        (lambda: plots.memory_categories(pd.DataFrame({"weights": []})), "no rows"),
    ):
        with pytest.raises(UserError, match=says):
            call()


# --------------------------------------------------------------------------------------- explorer


@pytest.fixture
def explorer():
    return widgets.memory_explorer("H200 SXM")


def test_the_explorer_tells_what_fits(explorer):
    assert explorer.summary.startswith("23.5 GiB for 1.88 billion parameters"), explorer.summary
    assert "fits on L40, H100 SXM, H200 SXM" in explorer.summary, explorer.summary
    assert "too much for T4." in explorer.summary, explorer.summary
    before = explorer.image.value
    explorer.layers.value = 16
    assert explorer.image.value != before
    assert "too much for T4, RTX 4090, L40." in explorer.summary, explorer.summary
    assert Image.open(io.BytesIO(explorer.image.value)).size[0] > 500


def test_every_control_changes_the_estimate(explorer):
    changes = {"model": "small", "layers": 1, "micro_batch_size": 1, "seqlen": 128,
               "recompute": True, "state": "float32"}  # fmt: skip
    for name, value in changes.items():
        before, control = explorer.summary, getattr(explorer, name)
        kept, control.value = control.value, value
        assert explorer.summary != before, f"{name} = {value}: {explorer.summary}"
        control.value = kept
        assert explorer.summary == before
    assert all(control.description and control.tooltip for control in explorer.controls)


def test_an_error_is_told_in_the_widget(explorer, monkeypatch):
    from labkit.widgets import memory

    def unwritten(**choice):
        raise NotImplementedError("Coding Exercise 3: labkit/perfmodel.py, param_count")

    monkeypatch.setattr(memory, "estimate", unwritten)
    explorer.layers.value = 1
    assert explorer.summary == "Coding Exercise 3: labkit/perfmodel.py, param_count"
    assert explorer.image.layout.display == "none"
    monkeypatch.undo()
    explorer.layers.value = 2
    assert explorer.image.layout.display is None and "GiB" in explorer.summary


def test_the_static_figure_shows_what_the_explorer_shows():
    figure = widgets.memory_static(layers=2, micro_batch_size=8, seqlen=1024, recompute=True)
    assert figure.axes[0].get_yticklabels()[0].get_text() == "2 layers\n8 × 1,024\nrecomputed"
    parts = estimate("olmoe-1b-7b", 2, 8, 1024, True, "bfloat16")
    assert f"{sum(parts.values()):.3g} GiB" in texts(figure), texts(figure)


@pytest.mark.parametrize("state", list(STATES))
def test_a_state_has_its_bytes_for_each_parameter(state):
    from labkit.config import ModelConfig
    from labkit.perfmodel import param_count

    parts = estimate("olmoe-1b-7b", 4, 1, 128, False, state)
    n_bytes = sum(parts[name] for name in ("weights", "gradients", "moments")) * 2**30
    each = n_bytes / param_count(ModelConfig.preset("olmoe-1b-7b", n_layers=4))
    expected = {"bfloat16": 8, "bfloat16, float32 moments": 12, "float32": 16}.get(state, 16)
    assert each == pytest.approx(expected), f"{each} bytes a parameter"


def test_bad_input_is_named():
    for changes, says in (({"state": "int3"}, "int3"), ({"model": "olmo"}, "olmo"),
                          ({"seqlen": 0}, "seqlen=0"), ({"device": "L41"}, "L41")):  # fmt: skip
        with pytest.raises(UserError, match=says):
            widgets.memory_static(**changes)
    assert all(memory_picture.lookup(name) for name in GPUS), "a GPU that the table lacks"
