"""Figures of a model: what it is made of, and where a step of it goes."""

import numpy as np
from matplotlib.figure import Figure

from labkit.plots.style import LEGEND, new_figure, palette

_NARROW_PCT = 4  # a part below this has no room for its number


def shares(frame, label: str) -> Figure:
    """A bar a column, divided among the rows in percent. `label` names the axis, with its unit."""
    parts = 100 * frame / frame.sum()
    figure, ax = new_figure(size=(7.2, 1.2 + 0.6 * len(parts.columns)))
    left = np.zeros(len(parts.columns))
    for (part, values), color in zip(parts.iterrows(), palette(), strict=False):
        bars = ax.barh(list(parts.columns), values, left=left, color=color, label=part)
        texts = [f"{value:.0f}" if value >= _NARROW_PCT else "" for value in values]
        ax.bar_label(bars, texts, label_type="center", fontsize=9)
        left += values.to_numpy()
    ax.set(xlim=(0, 100), xlabel=label)
    ax.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=len(parts), **LEGEND)
    return figure
