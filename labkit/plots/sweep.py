"""What a sweep of training steps says: throughput, utilization and memory over tokens; drift."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import ScalarFormatter

from labkit.errors import UserError
from labkit.plots.style import (
    LEGEND,
    MARKERS,
    color_of,
    counted,
    marker_key,
    new_figure,
    nothing,
    plottable,
    require,
)

VIEWS = {"tokens_per_s": "tokens a second", "mfu_pct": "MFU (%)", "peak_gib": "peak memory (GiB)"}
STEP = ["model", "layers", "micro_batch_size", "seqlen", "recompute", "micro_batches"]


def sweep(frame) -> Figure:
    """Throughput, MFU and peak memory over the tokens of a step; a colour a number of layers.

    Filled markers keep activations, open ones recompute. Repeats are a point at their median and
    a bar from the least to the most; a cross at the top is a step that did not fit. A model has
    a line of panels. Raises UserError for a missing column.
    """
    require(frame, *STEP, "status")
    rows = plottable(frame, "tokens", "step_ms", *VIEWS)
    if rows.empty:
        return nothing(frame)
    models, layers = list(rows["model"].unique()), sorted(frame["layers"].unique())
    figure, axes = new_figure(len(models), 3, (11, 0.7 + 3.2 * len(models)), squeeze=False)
    full = frame[frame["status"] == "out of memory"]
    for line, model in zip(axes, models, strict=True):
        for i, n in enumerate(layers):
            mine = rows[(rows["model"] == model) & (rows["layers"] == n)]
            for ax, column in zip(line, VIEWS, strict=True):
                _points(ax, mine, column, color_of(i), _marker(i))
            _crosses(line[-1], full[(full["model"] == model) & (full["layers"] == n)], color_of(i))
        for ax, text in zip(line, VIEWS.values(), strict=True):
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(ScalarFormatter())
            ax.tick_params(axis="x", labelsize=8)
            ax.set(xlabel="tokens in a step", ylabel=text)
            ax.set_ylim(0, 1.08 * ax.dataLim.ymax)
        line[0].set_title(model, loc="left", fontsize=10)
    handles = _handles(layers, crosses=len(full) > 0)
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), **LEGEND)
    return figure


def _points(ax, rows, column: str, color, marker: str) -> None:
    for recompute, group in rows.groupby("recompute"):
        seen = group.groupby(STEP)[[column, "tokens"]].agg(["median", "min", "max"])
        middle = seen[column, "median"]
        beyond = [middle - seen[column, "min"], seen[column, "max"] - middle]
        ax.errorbar(seen["tokens", "median"], middle, beyond, fmt=marker, ms=5, color=color,
                    mfc="none" if recompute == "yes" else color, elinewidth=1)  # fmt: skip


def _crosses(ax, rows, color) -> None:
    tokens = rows["micro_batch_size"] * rows["seqlen"] * rows["micro_batches"]
    ax.plot(tokens, np.full(len(rows), 0.97), "x", color=color, transform=ax.get_xaxis_transform())


def _handles(layers: list, crosses: bool) -> list[Line2D]:
    """A legend of colours, then of what filled, open and crossed markers mean."""
    return [
        *(marker_key(_marker(i), color_of(i), counted(n)) for i, n in enumerate(layers)),
        marker_key("o", "0.4", "activations kept"),
        marker_key("o", "0.4", "recomputed", mfc="none"),
        *[marker_key("x", "0.4", "out of memory", ms=6)] * crosses,
    ]


def _marker(i: int) -> str:
    return MARKERS[i % len(MARKERS)]


def drift(frame) -> Figure:
    """Each step's time against the median of its repeats, over the order of measuring.

    A slope is drift. A cross is a row whose clock was held down while it was measured. Steps that
    were measured once are left out. UserError: a missing column, and nothing that was repeated.
    """
    require(frame, *STEP, "position", "throttle")
    rows = plottable(frame, "step_ms")
    if rows.empty:
        return nothing(frame)
    repeats = rows.groupby(STEP)["step_ms"]
    off_pct = 100 * (rows["step_ms"] / repeats.transform("median") - 1)
    again = repeats.transform("size") > 1
    if not again.any():
        raise UserError("no step was measured twice: `labkit sweep --repeats 3` measures each so")
    held = rows["throttle"].map(_held_down)
    figure, ax = new_figure(size=(7.2, 3.6))
    ax.axhline(0, color="0.6", lw=1)
    for mask, marker, color, label in (
        (again & ~held, "o", color_of(0), "clock free"),
        (again & held, "x", color_of(3), "clock held down"),
    ):
        if mask.any():
            ax.plot(rows["position"][mask], off_pct[mask], marker, color=color, ms=5, label=label)
    ax.set(xlabel="position in the sweep", ylabel="step time against\nits repeats' median (%)")
    if held.any():
        ax.legend(**LEGEND)
    return figure


def _held_down(throttle) -> bool:
    """Whether a row's shares of throttle reasons ("power cap 60%; none 40%") name one."""
    known = isinstance(throttle, str)
    return known and any(not part.startswith("none") for part in throttle.split("; "))
