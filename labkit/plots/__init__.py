"""Figures. Each function takes a DataFrame and returns a Figure, which a notebook shows."""

from labkit.plots.model import shares
from labkit.plots.operations import bandwidth, call_times, counters, sustained
from labkit.plots.roofline import roofline
from labkit.plots.style import LEGEND, new_figure, palette

__all__ = [
    "LEGEND", "bandwidth", "call_times", "counters", "new_figure", "palette", "roofline", "shares",
    "sustained",
]  # fmt: skip
