"""Predictions beside measurements: how far off, where, and what they are made of."""

import math
from itertools import groupby
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from labkit.errors import UserError
from labkit.plots.stages import KINDS
from labkit.plots.style import (
    INK,
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
from labkit.predictor import Term


class Quantity(NamedTuple):
    """What is predicted: the column with it, words, and the two thresholds of Exercise 9."""

    predicted: str
    words: str
    narrow_pct: int
    wide_pct: int


QUANTITIES = {
    "step_ms": Quantity("predicted_ms", "step time (ms)", 15, 30),
    "peak_gib": Quantity("predicted_gib", "peak memory (GiB)", 8, 20),
}
STEP = ("model", "layers", "recompute", "tokens")
WAITS = 0.95  # of a step: a launch that takes so long leaves gaps, on the H200 that was measured


def predicted(frame, what: str = "step_ms") -> Figure:
    """Predicted against measured, with the diagonal and the band of full points.

    A colour is a number of layers, a marker a model; filled markers keep activations, open ones
    recompute. `what` is "step_ms", with the column `predicted_ms`, or "peak_gib", with
    `predicted_gib`. Raises UserError for another quantity and for a missing column.
    """
    rows, quantity = _rows(frame, what)
    if rows.empty:
        return nothing(frame)
    figure, ax = new_figure(size=(7.2, 5.2))
    _points(ax, rows, rows[what], rows[quantity.predicted])
    both = rows[[what, quantity.predicted]]
    line = np.array([0.8 * both.min().min(), 1.25 * both.max().max()])
    ax.plot(line, line, color="0.4", lw=1, zorder=1)
    band = quantity.narrow_pct / 100
    ax.fill_between(line, line * (1 - band), line * (1 + band), color="0.4", alpha=0.15, lw=0)
    ax.set(xscale="log", yscale="log", xlim=line, ylim=line)
    ax.set(xlabel=f"measured {quantity.words}", ylabel=f"predicted {quantity.words}")
    for axis in (ax.xaxis, ax.yaxis):
        _plain_ticks(axis)
    ax.set_title(_verdict(rows, what, quantity), fontsize=10)
    figure.legend(handles=_handles(rows), loc="outside right upper", **LEGEND)
    return figure


def residuals(frame, what: str = "step_ms") -> Figure:
    """Relative error over the tokens of a step, with the bands of full and of some points.

    Markers as in `predicted`. A ring is a step whose launch took Python longer than the step lasts
    (`host_ms`), nearly: the GPU waits. Raises UserError as `predicted` does.
    """
    rows, quantity = _rows(frame, what)
    if rows.empty:
        return nothing(frame)
    error_pct = 100 * (rows[quantity.predicted] / rows[what] - 1)
    figure, ax = new_figure(size=(8.2, 4.2))
    _over_tokens(ax, rows)
    _points(ax, rows, _spread(rows), error_pct)
    waits = _waits(rows) & (what == "step_ms")
    ax.plot(_spread(rows)[waits], error_pct[waits], "o", ms=11, mfc="none", color=INK[0])
    ax.axhspan(-quantity.narrow_pct, quantity.narrow_pct, color="0.4", alpha=0.15, lw=0)
    for sign in (-1, 1):
        ax.axhline(sign * quantity.wide_pct, color="0.4", lw=1, ls=":")
    ax.axhline(0, color="0.4", lw=1, zorder=1)
    most = 1.1 * max(1.15 * quantity.wide_pct, error_pct.abs().max())
    ax.set(ylim=(-most, most), ylabel=f"error of the {quantity.words.rpartition(' ')[0]} (%)")
    ax.set_title(_verdict(rows, what, quantity), fontsize=10)
    handles = _handles(rows)
    if waits.any():
        handles.append(marker_key("o", INK[0], "waits for Python", ms=11, mfc="none"))
    figure.legend(handles=handles, loc="outside right upper", **LEGEND)
    return figure


def terms_against(frame) -> Figure:
    """The four kinds of work over tokens: points measured, lines predicted; a line a model.

    Columns `forward_ms`, `predicted_forward_ms` and so on; a prediction that is missing has no
    line. Steps that wait for Python are faint: their kinds contain the waiting. Raises UserError
    for a missing column.
    """
    require(frame, *STEP, "host_ms", "step_ms", *KINDS, *(f"predicted_{kind}" for kind in KINDS))
    rows = plottable(frame, "tokens", "forward_ms")
    if rows.empty:
        return nothing(frame)
    models, layers = list(rows["model"].unique()), sorted(rows["layers"].unique())
    figure, axes = new_figure(len(models), 4, (12, 0.8 + 2.9 * len(models)), squeeze=False)
    for line, model in zip(axes, models, strict=True):
        mine = rows[rows["model"] == model]
        for ax, (kind, name) in zip(line, KINDS.items(), strict=True):
            for i, n in enumerate(layers):
                _kind(ax, mine[mine["layers"] == n], kind, i)
            _over_tokens(ax, mine)
            ax.set(yscale="log", title=name)
            _plain_ticks(ax.yaxis)
        line[0].set_ylabel(f"{model}\ntime in a step (ms)")
    handles = [marker_key(MARKERS[i % 5], color_of(i), counted(n)) for i, n in enumerate(layers)]
    handles.append(marker_key("o", "0.4", "measured"))
    handles.append(Line2D([], [], color="0.4", label="predicted"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), **LEGEND)
    return figure


def terms(predictions, measured=None, unit: str = "ms") -> Figure:
    """Stacked bars of what predictions are made of, coloured by the resource that binds each term.

    `predictions` is a Prediction, or a list of (label, Prediction); a plain number, in `unit`, is
    one block. `measured` is a number, or a list of one for each bar, None where there is none.
    Memory's terms are coloured by whose the bytes are. UserError: no bars, or not as many numbers.
    """
    bars = list(predictions) if isinstance(predictions, list | tuple) else [("", predictions)]
    found = list(measured) if np.ndim(measured) else [measured] * len(bars)
    if not bars or len(found) != len(bars):
        raise UserError(f"{len(bars)} predictions and {len(found)} measured numbers; give as many")
    figure, ax = new_figure(size=(9.2, 1.6 + 0.55 * len(bars)))
    handles = draw_terms(ax, bars, found, unit)
    key = figure.legend(handles=handles, loc="outside right upper", **LEGEND | {"fontsize": 7})
    for text in key.get_texts():
        text.set_weight("bold" if text.get_text().endswith(":") else "normal")
    figure.set_figheight(max(figure.get_figheight(), 0.4 + 0.17 * len(handles)))
    return figure


def draw_terms(ax, bars: list, measured: list, unit: str = "ms") -> list:
    """Draw the bars of `terms` into an axes, and return the handles of their legend."""
    parts = [_parts(value, unit) for _, value in bars]
    colors = _colors([term for terms in parts for term in terms])
    longest = max(float(value) for _, value in bars)
    for y, (terms, number) in enumerate(zip(parts, measured, strict=True)):
        left = 0.0
        for name, family in colors:
            value = sum(t.value for t in terms if (t.name, _family(t)) == (name, family))
            color = colors[name, family]
            ax.barh(y, value, 0.7, left, color=color, ec="white", lw=0.5)
            if value > 0.012 * (len(name) + 1) * longest:
                ax.text(left + value / 2, y, name, ha="center", va="center", fontsize=7,
                        color="black" if sum(color[:3]) > 1.6 else "white")  # fmt: skip
            left += value
        ax.annotate(f"{left:.3g}", (left, y), (5, 0), textcoords="offset points", va="center",
                    fontsize=9)  # fmt: skip
        if number is not None:
            ax.plot(number, y + 0.42, "^", color="black", ms=8, clip_on=False, zorder=5)
    ax.set_yticks(range(len(bars)), [label for label, _ in bars])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(bars) - 0.35, -0.5)
    ax.set_xlim(0, 1.12 * max([longest, *(n for n in measured if n)]))
    unit = getattr(bars[0][1], "unit", unit)
    ax.set_xlabel(AXES.get(unit, unit))
    ax.grid(False, axis="y")
    marks = [marker_key("^", "black", "measured", ms=8)] if any(measured) else []
    return _families(colors) + marks


def _parts(value, unit: str) -> tuple[Term, ...]:
    """The terms of a prediction; a plain number is its only one."""
    return getattr(value, "terms", None) or (Term(f"one number, in {unit}", "", float(value), ""),)


def _family(term: Term) -> str:
    return term.group if term.bound == "memory capacity" else term.bound


AXES = {"ms": "time (ms)", "GiB": "memory (GiB)"}
SHADES = {
    "compute": "Blues", "memory bandwidth": "Oranges", "overhead": "Greys", "network": "Greens",
    "state": "Purples", "activations": "Greens",
}  # fmt: skip


def _colors(terms: list[Term]) -> dict[tuple[str, str], tuple]:
    """(name, family) → colour, families together, each in shades of one hue."""
    keys = list(dict.fromkeys((term.name, _family(term)) for term in terms))
    families = list(dict.fromkeys(family for _, family in keys))
    found = {}
    for family in families:
        mine = [key for key in keys if key[1] == family]
        shades = np.linspace(0.85, 0.35, max(len(mine), 4))  # a few more or less keep their colours
        cmap = colormaps[SHADES.get(family, "Greys")]
        found |= {key: cmap(shade) for key, shade in zip(mine, shades, strict=False)}
    return found


def _families(colors: dict) -> list:
    """A legend of the colours, under the name of each family."""
    handles = []
    for family, keys in groupby(colors, key=lambda key: key[1]):
        if family:
            handles.append(Line2D([], [], ls="", label=f"{family}:"))
        handles += [Patch(color=colors[key], label=key[0]) for key in keys]
    return handles


def _rows(frame, what: str) -> tuple:
    """The rows that can be shown, and the quantity."""
    if what not in QUANTITIES:
        raise UserError(f"what={what!r}; one predicts {' or '.join(QUANTITIES)}")
    quantity = QUANTITIES[what]
    require(frame, *STEP, "host_ms")
    return plottable(frame, "tokens", what, quantity.predicted), quantity


def _verdict(rows, what: str, quantity: Quantity) -> str:
    error = (rows[quantity.predicted] / rows[what] - 1).abs()
    share = (error <= quantity.narrow_pct / 100).mean()
    return (
        f"{len(rows)} configurations: median error {100 * error.median():.2g} %, "
        f"{100 * share:.3g} % of them within {quantity.narrow_pct} %"
    )


def _points(ax, rows, x, y) -> None:
    layers, models = sorted(rows["layers"].unique()), list(rows["model"].unique())
    for (model, n, recompute), mine in rows.groupby(["model", "layers", "recompute"]):
        color = color_of(layers.index(n))
        ax.plot(x[mine.index], y[mine.index], MARKERS[models.index(model) % 5], color=color, ms=5,
                mfc="none" if recompute == "yes" else color)  # fmt: skip


def _spread(rows):
    """Tokens, a little to the side for each number of layers, so that points do not hide others."""
    layers = sorted(rows["layers"].unique())
    place = rows["layers"].map(layers.index) - (len(layers) - 1) / 2
    return rows["tokens"] * 2 ** (0.09 * place)


def _waits(rows):
    """Which steps wait for Python; none where that is empty, as on a CPU."""
    return rows["host_ms"] >= WAITS * rows["step_ms"]


def _kind(ax, mine, kind: str, i: int) -> None:
    """The points and the line of one number of layers in one panel."""
    known = mine[mine[kind] > 0].sort_values("tokens")
    for mask, alpha in ((~_waits(known), 1.0), (_waits(known), 0.25)):
        ax.plot(known["tokens"][mask], known[kind][mask], MARKERS[i % 5], color=color_of(i), ms=4,
                alpha=alpha)  # fmt: skip
    line = known.groupby("tokens")[f"predicted_{kind}"].mean()
    ax.plot(line.index, line, color=color_of(i), lw=1)


def _plain_ticks(axis) -> None:
    """1, 2, 5, 10 … on a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _over_tokens(ax, rows) -> None:
    ax.set_xscale("log", base=2)
    low, high = (math.log2(rows["tokens"].agg(end)) for end in ("min", "max"))
    ax.set_xticks([2**n for n in range(math.floor(low), math.ceil(high) + 1)])
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.tick_params(axis="x", labelsize=7.5, rotation=30)
    ax.set_xlim(2 ** (low - 0.5), 2 ** (high + 0.5))
    ax.set_xlabel("tokens in a step")


def _handles(rows) -> list:
    """A legend of colours, of models if there are several, and of filled and open markers."""
    layers, models = sorted(rows["layers"].unique()), list(rows["model"].unique())
    handles = [marker_key("o", color_of(i), counted(n)) for i, n in enumerate(layers)]
    if len(models) > 1:
        handles += [marker_key(MARKERS[i % 5], "0.4", model) for i, model in enumerate(models)]
    names = {"no": ("0.4", "activations kept"), "yes": ("none", "recomputed")}
    there = [names[key] for key in names if key in set(rows["recompute"])]
    return handles + [marker_key("o", "0.4", label, mfc=face) for face, label in there]
