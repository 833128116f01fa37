"""Figures. Each function takes a DataFrame and returns a Figure, which a notebook shows."""

from labkit.plots.memory import memory_categories, memory_timeline
from labkit.plots.micro_batches import micro_batches
from labkit.plots.model import shares
from labkit.plots.operations import bandwidth, call_times, counters, kernels, sustained
from labkit.plots.predictor import predicted, residuals, terms, terms_against
from labkit.plots.profile import kernel_classes, step_bar
from labkit.plots.roofline import roofline
from labkit.plots.routing import routing
from labkit.plots.stages import stages
from labkit.plots.style import LEGEND, new_figure, palette
from labkit.plots.sweep import drift, sweep
from labkit.plots.timeline import timeline

__all__ = [
    "LEGEND", "bandwidth", "call_times", "counters", "drift", "kernel_classes", "kernels",
    "memory_categories", "memory_timeline", "micro_batches", "new_figure", "palette", "predicted",
    "residuals", "roofline", "routing", "shares", "stages", "step_bar", "sustained", "sweep",
    "terms", "terms_against", "timeline",
]  # fmt: skip
