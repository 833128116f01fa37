"""A step as a strip of time: ranges above, the operations that they launched below."""

import numpy as np
import pandas as pd
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labkit.errors import UserError
from labkit.plots.style import LEGEND, new_figure, palette
from labkit.profiling.events import Events
from labkit.profiling.kernels import kernel_class

_CLASS_COLORS = {
    "gemm": 0,
    "attention": 1,
    "elementwise": 2,
    "index": 3,
    "norm": 4,
    "sort": 5,
    "optimizer": 6,
    "reduce": 8,
    "copy": 9,
    "embedding": "0.1",
    "softmax": "0.3",
    "scan": "0.5",
}  # fmt: skip; of the palette, or a grey
_SHADES = ("0.93", "0.84")  # of neighbouring ranges
_HEIGHT = 0.28  # inches of a row


def timeline(
    recording, first_ms: float | None = None, last_ms: float | None = None, step: int = -1
) -> Figure:
    """One step of a recording from first_ms to last_ms after its start, whole by default.

    Above, the named ranges of each thread that opened any, nested: the time in which Python
    launched. Below, the operations, coloured by class: a row a GPU stream, or the CPU's operators.
    White is time in which none ran. step: which of the recorded steps, from 0; −1, the last, is
    the one that the recorder's own start disturbs least.
    Raises UserError for a step that was not recorded and a window without anything in it.
    """
    events = recording.events
    ranges, work = _step(events, step)
    length = max(ranges["end_ms"].max(), work["end_ms"].max() if len(work) else 0.0)
    first, last = 0.0 if first_ms is None else first_ms, length if last_ms is None else last_ms
    if not (0 <= first < last and first < length):
        raise UserError(
            f"first_ms={first_ms}, last_ms={last_ms}: the step lasts from 0 to {length:.4g} ms"
        )
    rows = _rows(ranges, events.main_thread)
    streams = sorted(work["stream"].unique()) or [0]
    n_rows = [rows["row"].max() + 1, len(streams)]
    size = (10, 1.3 + _HEIGHT * (n_rows[0] + 1.6 * n_rows[1]))
    figure, (above, below) = new_figure(
        2, size=size, sharex=True, height_ratios=[n_rows[0], 1.6 * n_rows[1]]
    )
    above.set_xlim(first, last)
    _draw_ranges(above, rows, size[0] * 72 * 0.86 / (last - first), (first, last))
    kinds = _draw_work(below, work, streams, events.on_gpu, (first, last))
    below.set_xlabel("time since the step began (ms)")
    if kinds:
        compact = {"ncols": min(len(kinds), 12), "columnspacing": 1.0, "handlelength": 1.2}
        figure.legend(handles=kinds, loc="outside upper center", **compact, **LEGEND)
    return figure


def _step(events: Events, number: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Ranges and work of one step, in ms since it began."""
    steps = events.ranges[events.ranges["name"] == "step"]
    try:
        chosen = steps.iloc[number]
    except IndexError:
        raise UserError(f"step={number}: the recording has {len(steps)} steps") from None
    begin, end = chosen["start_us"], chosen["end_us"]

    def cut(frame, column):
        inside = frame[frame[column].between(begin, end)].copy()
        inside["start_ms"] = (inside["start_us"] - begin) / 1e3
        inside["end_ms"] = (inside["end_us"] - begin) / 1e3
        return inside

    return cut(events.ranges, "start_us"), cut(events.work, "launch_us")


def _rows(ranges: pd.DataFrame, main_thread: int) -> pd.DataFrame:
    """The ranges with a row each: their depth, below the rows of the threads before theirs."""
    placed, first = [], 0
    threads = sorted(ranges["thread"].unique(), key=lambda thread: thread != main_thread)
    for thread in threads:
        mine = ranges[ranges["thread"] == thread].sort_values(
            ["start_us", "end_us"], ascending=[True, False]
        )
        depth = _depth(mine["start_us"].to_numpy(), mine["end_us"].to_numpy())
        placed.append(mine.assign(row=first + depth))
        first += depth.max() + 1
    return pd.concat(placed)


def _depth(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """How many intervals each lies in; sorted by start, outer ones first."""
    depth, open_ends = np.zeros(len(starts), dtype=int), []
    for i, start in enumerate(starts):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        depth[i] = len(open_ends)
        open_ends.append(ends[i])
    return depth


def _draw_ranges(ax, rows: pd.DataFrame, points_per_ms: float, window) -> None:
    shown = rows[(rows["end_ms"] > window[0]) & (rows["start_ms"] < window[1])]
    for row, there in shown.groupby("row"):
        shades = [_SHADES[i % 2] for i in range(len(there))]
        ax.add_collection(_boxes(there, row - 0.45, 0.9, shades, edgecolors="0.6", linewidths=0.4))
        for entry in there.itertuples():
            left, right = max(entry.start_ms, window[0]), min(entry.end_ms, window[1])
            room = (right - left) * points_per_ms / 4.2  # characters of 7 points
            if label := _label(entry.name, room):
                ax.text((left + right) / 2, row, label, fontsize=7, ha="center", va="center",
                        clip_on=True)  # fmt: skip
    middles = rows.groupby("thread", sort=False)["row"].agg(lambda row: (row.min() + row.max()) / 2)
    names = ["Python", *["autograd"] * (len(middles) - 1)]
    ax.set(ylim=(rows["row"].max() + 0.55, -0.55), yticks=middles.tolist(), yticklabels=names)
    _bare(ax)


def _label(name: str, room: float) -> str:
    """As much of a range's path as has room: `layers.3`, then `3`, then nothing."""
    words = name.split(".")
    ends = [".".join(words[-2:]), words[-1]] if words[-1].isdigit() else [words[-1]]
    if name.startswith("recompute.") and len(words) == len(ends) + 1:
        ends.insert(0, name)
    return next((end for end in ends if len(end) <= room), "")


def _draw_work(ax, work: pd.DataFrame, streams: list, on_gpu: bool, window) -> list[Patch]:
    """Draw the operations; → a legend of their classes, the most time first."""
    shown = work.assign(kind_class=list(map(kernel_class, work["name"], work["kind"])))
    shown = shown[(shown["end_ms"] > window[0]) & (shown["start_ms"] < window[1])]
    for row, stream in enumerate(streams):
        there = shown[shown["stream"] == stream].sort_values("start_us", kind="stable")
        colors = [_color(name) for name in there["kind_class"]]
        ax.add_collection(_boxes(there, row - 0.42, 0.84, colors, linewidths=0))
    names = [f"stream {s}" for s in streams] if on_gpu else ["operators"]
    ax.set(ylim=(len(streams) - 0.5, -0.5), yticks=range(len(names)), yticklabels=names)
    _bare(ax)
    order = shown.groupby("kind_class")["busy_us"].sum().sort_values(ascending=False).index
    return [Patch(color=_color(name), label=name) for name in order]


def _boxes(frame: pd.DataFrame, bottom: float, height: float, colors, **style) -> PolyCollection:
    left, right = frame["start_ms"].to_numpy(), frame["end_ms"].to_numpy()
    low, high = np.full_like(left, bottom), np.full_like(left, bottom + height)
    corners = np.stack([left, low, left, high, right, high, right, low], axis=1)
    return PolyCollection(corners.reshape(-1, 4, 2), facecolors=colors, **style)


def _color(kind: str):
    color = _CLASS_COLORS.get(kind, "0.75")
    return palette()[color] if isinstance(color, int) else color


def _bare(ax) -> None:
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
