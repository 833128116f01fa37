"""The look of all figures, and what they share.

No pyplot: a figure that nobody keeps is freed.
"""

import io
from functools import cache

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from labkit.errors import UserError

INK = ("0.15", "0.55")  # of the ceilings: the first device dark, the second light
MARKERS = "os^Dv"
LEGEND = {"fontsize": 8, "framealpha": 0.9}


class LabFigure(Figure):
    """A Figure that shows in a notebook when a cell returns it, whichever backend is set."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def new_figure(rows: int = 1, cols: int = 1, size=(7.2, 4.6), **subplots):
    """A figure in labkit's look and its axes, as `Figure.subplots(rows, cols)` gives them."""
    figure = LabFigure(figsize=size, dpi=110, layout="constrained")
    axes = figure.subplots(rows, cols, **subplots)
    for ax in np.ravel(axes):
        ax.set_prop_cycle(color=palette())
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, color="0.9")
        ax.set_axisbelow(True)
    return figure, axes


@cache
def palette() -> list:
    """Ten colours that colour-blind readers can tell apart."""
    import seaborn

    return seaborn.color_palette("colorblind")


def color_of(i: int):
    """The colour of the i-th of several things; after ten they begin again."""
    return palette()[i % len(palette())]


def counted(layers: float) -> str:
    """A number of layers in words."""
    return "1 layer" if layers == 1 else f"{layers:g} layers"


def marker_key(marker: str, color, label: str, **style) -> Line2D:
    """A legend's entry of a marker."""
    return Line2D([], [], ls="", marker=marker, color=color, label=label, **{"ms": 5} | style)


def plottable(frame, *columns):
    """The rows that have a number above 0 in each of the columns, which a log axis can show."""
    if frame is None:
        return None
    require(frame, *columns)
    numbers = frame[list(columns)].apply(pd.to_numeric, errors="coerce")
    return frame[(numbers > 0).all(axis=1)]


def require(frame, *columns) -> None:
    """UserError: the frame lacks one of the columns."""
    if missing := [name for name in columns if name not in frame]:
        raise UserError(f"the rows have no column {missing}; they have {list(frame.columns)}")


def nothing(frame) -> Figure:
    """A figure that says that there is nothing to show, and what the rows say of it."""
    figure, ax = new_figure(size=(7.2, 1.6))
    found = frame["status"].dropna().unique() if "status" in frame else []
    ax.text(0.5, 0.5, "\n".join(["nothing was measured", *found]), ha="center", va="center")
    ax.set_axis_off()
    return figure
