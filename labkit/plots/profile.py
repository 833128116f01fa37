"""Figures of a recording: where a step goes, kernel by kernel and part by part."""

from itertools import cycle

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labkit.errors import UserError
from labkit.plots.style import INK, LEGEND, new_figure, palette, require
from labkit.profiling.parts import PARTS, REST, part_times

IDLE = "nothing runs"
_COLORS = {"attention": 0, "experts": 1, "ffn": 1, "router": 2, "lm_head": 3, "norms": 4,
           "embedding": 5, "backward": 6, "optimizer": 8, "recompute": 9}  # fmt: skip
_ROOM = 0.035  # a part below this share of its panel has no room for its number
_DISTURBED = 1.15  # recording a CPU, or other programs on it, made operations so much longer
_SIMILAR = 4  # steps whose lengths differ by less than this factor share an axis


def step_bar(recordings: dict, floors: dict | None = None, step_ms: dict | None = None) -> Figure:
    """A panel a recording: a step (ms) as a bar, divided among the parts of the model.

    recordings: name → Recording, or its table of ranges. A part's share is the time of its own
    operations. What is left of a step, hatched, is time in which no operation ran: of a step that
    was not recorded (a Recording's before_ms, or `step_ms`: name → ms), because recording stretches
    the gaps; of the recorded one if that is all there is. floors: name → (compute_ms, memory_ms),
    drawn below the bar. Steps of similar length share an axis. Raises UserError for no recordings.
    """
    _some(recordings)
    rows = [
        _row(name, recording, (floors or {}).get(name), (step_ms or {}).get(name))
        for name, recording in recordings.items()
    ]
    ends = [row["end_ms"] for row in rows]
    shared = max(ends) < _SIMILAR * min(ends)
    height = 0.9 + (1.35 if floors else 1.05) * len(rows)
    figure, axes = new_figure(len(rows), size=(8.4, height), squeeze=False)
    colors = _part_colors(rows)
    for ax, row, end in zip(axes[:, 0], rows, ends, strict=True):
        _draw_step(ax, row, colors)
        ax.set_xlim(0, 1.16 * (max(ends) if shared else end))
    axes[-1, 0].set_xlabel("time of a step (ms)")
    shown = [*colors, *([IDLE] if any(row["idle_ms"] for row in rows) else [])]
    patches = [Patch(label=name, **_fill(name, colors)) for name in shown]
    figure.legend(handles=patches, loc="outside upper center", ncols=min(len(shown), 8), **LEGEND)
    return figure


def _row(name: str, recording, floors, step_ms) -> dict:
    """What one panel shows; a table of ranges knows its recorded step alone."""
    ranges = getattr(recording, "ranges", recording)
    require(ranges, "range", "own_ms", "span_ms")
    parts = part_times(ranges)
    recorded = ranges.loc[ranges["range"] == "step", "span_ms"]
    during_ms = float(recorded.iloc[0]) if len(recorded) else float(parts.sum())
    step_ms = step_ms or getattr(recording, "before_ms", None) or during_ms
    idle_ms = max(0.0, step_ms - parts.sum())
    floors = tuple(floors) if floors is not None else ()
    return {
        "name": name, "parts": parts, "idle_ms": idle_ms, "step_ms": step_ms, "floors": floors,
        "end_ms": max(parts.sum() + idle_ms, *floors, 1e-9),
    }  # fmt: skip


def _part_colors(rows: list[dict]) -> dict[str, object]:
    """A colour for each part, in order; the parts of labkit's model have the same everywhere."""
    found = dict.fromkeys(part for row in rows for part in row["parts"].index)
    order = [*(part for part in PARTS if part in found),
             *(part for part in found if part not in (*PARTS, REST))]  # fmt: skip
    spare = cycle(number for number in range(len(palette())) if number not in _COLORS.values())
    colors = {part: palette()[_COLORS.get(part, next(spare))] for part in order}
    return colors | ({REST: "0.6"} if REST in found else {})


def _fill(name: str, colors: dict) -> dict:
    if name == IDLE:
        return {"facecolor": "0.96", "edgecolor": "0.7", "hatch": "////", "lw": 0}
    return {"facecolor": colors[name]}


def _draw_step(ax, row: dict, colors: dict) -> None:
    left = 0.0
    for part in [part for part in colors if part in row["parts"]]:
        ms = row["parts"][part]
        ax.barh(0, ms, left=left, height=0.62, **_fill(part, colors))
        if ms >= _ROOM * row["end_ms"]:
            ax.text(left + ms / 2, 0, _ms(ms), ha="center", va="center", fontsize=8)
        left += ms
    if row["idle_ms"]:
        ax.barh(0, row["idle_ms"], left=left, height=0.62, **_fill(IDLE, colors))
    end = left + row["idle_ms"]
    ax.text(end, 0, f" {_ms(row['step_ms'])} ms", va="center", fontsize=9, weight="bold")
    if left > _DISTURBED * row["step_ms"]:
        note = f"\n\n recorded: {_ms(left)}"
        ax.text(end, 0.06, note, va="center", fontsize=7.5, color="0.25")
    for i, (ms, kind) in enumerate(zip(row["floors"], ("compute", "memory"), strict=False)):
        y = 0.5 + 0.26 * i
        ax.barh(y, ms, height=0.18, color=INK[i])
        ax.text(ms, y, f" {kind} floor {_ms(ms)}", va="center", fontsize=7.5, color="0.25")
    ax.set(yticks=[0], yticklabels=[row["name"]], ylim=(1.0 if row["floors"] else 0.42, -0.42))
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def kernel_classes(recordings: dict) -> Figure:
    """Two panels a recording: ms and operations a step in each class of kernels (or operators).

    recordings: name → Recording, or its table of kernels. Raises UserError for no recordings.
    """
    _some(recordings)
    frames = {}
    for name, recording in recordings.items():
        kernels = getattr(recording, "kernels", recording)
        require(kernels, "class", "ms", "count")
        frames[name] = kernels.groupby("class")[["ms", "count"]].sum()
    total = pd.concat(frames.values()).groupby(level=0)["ms"].sum().sort_values()
    figure, axes = new_figure(
        len(frames), 2, size=(8.4, 0.6 + (0.35 + 0.19 * len(total)) * len(frames)), squeeze=False,
        sharey=True,
    )  # fmt: skip
    for row, (name, frame) in zip(axes, frames.items(), strict=True):
        frame = frame.reindex(total.index, fill_value=0)
        for ax, column, color, form in zip(
            row, ("ms", "count"), palette(), ("{:.3g}", "{:,.0f}"), strict=False
        ):
            bars = ax.barh(frame.index, frame[column], height=0.75, color=color)
            texts = [form.format(value) if value else "" for value in frame[column]]
            ax.bar_label(bars, texts, padding=2, fontsize=7.5, color="0.3")
            ax.set_xlim(0, 1.15 * max(frame[column].max(), 1e-9))
            ax.grid(False, axis="y")
            ax.tick_params(axis="y", labelsize=8, length=0)
        row[0].set_title(name, loc="left", fontsize=9, weight="bold")
    axes[-1, 0].set_xlabel("time a step (ms)")
    axes[-1, 1].set_xlabel("operations a step")
    return figure


def _some(recordings) -> None:
    if not isinstance(recordings, dict) or not recordings:
        raise UserError(f"recordings={recordings!r:.60} must be a dict of at least one recording")
