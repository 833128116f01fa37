"""Memory over the course of a step, and what it is made of."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.errors import UserError
from labkit.plots.style import INK, LEGEND, new_figure, palette

PARTS = ("weights", "gradients", "moments", "activations", "logits", "temporary", "other")
_PHASE_COLORS = {"forward": 0, "backward": 1, "optimizer": 2}  # of the palette
_STYLES = (":", (0, (1, 3)), "-.")  # of the lines
_NARROW = 0.035  # of the axes' width, for a letter: a phase below this has no room for its name


def memory_timeline(
    timelines: dict, lines: dict[str, float] | None = None, over: str = "time"
) -> Figure:
    """Allocated memory over a call, a panel for each Timeline, with its phases and its peak.

    timelines: title → `labkit.memory.Timeline`, or a text that says why there is none. Panels share
    the memory axis, and those of a row both. lines: label → GiB of dotted lines across all panels.
    over: "time", that of the Python program, or "events", which is the same in every run.
    Raises UserError if there are no panels, and for another `over`.
    """
    if not timelines:
        raise UserError("timelines={}: name one at least, as in {'step': record_timeline(fn)}")
    if over not in ("time", "events"):
        raise UserError(f"over={over!r}; it is 'time' or 'events'")
    cols = 1 if len(timelines) == 1 else 2
    rows = -(-len(timelines) // cols)
    size = (4.2 + 3.6 * (cols - 1), 1.6 + 2.5 * rows) if cols > 1 else (7.2, 4.4)
    figure, grid = new_figure(rows, cols, size=size, sharex="row", sharey=True, squeeze=False)
    axes, drawn = list(grid.flat), [t for t in timelines.values() if not isinstance(t, str)]
    timed = over == "time" and all(np.isfinite(t.t_ms).all() for t in drawn)
    for ax, (title, timeline) in zip(axes, timelines.items(), strict=False):
        ax.set_title(title, fontsize=10)
        if isinstance(timeline, str):
            ax.text(0.5, 0.5, timeline, ha="center", va="center", transform=ax.transAxes)
        else:
            _curve(ax, timeline, timed)
        for style, gib in zip(_STYLES, (lines or {}).values(), strict=False):
            ax.axhline(gib, color=INK[0], linestyle=style, lw=1.2)
    for ax in axes[len(timelines) :]:
        ax.set_axis_off()
    _finish(grid, timelines, timed)
    top = max([t.peak_gib for t in drawn] + [*(lines or {}).values()], default=1.0)
    axes[0].set_ylim(0, 1.25 * top)
    figure.supxlabel(
        "time in Python (ms)" if timed else "allocations and frees, one after the other",
        fontsize=10,
    )
    figure.supylabel("allocated (GiB)", fontsize=10)
    handles = [*_legend(drawn), *_line_handles(lines or {})]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, **LEGEND)
    return figure


def memory_categories(rows, devices: dict[str, float] | None = None) -> Figure:
    """Stacked bars of memory, and how much devices have.

    rows: a DataFrame with a row a bar and a column a category, in GiB; `labkit.memory`'s and
    `labkit.memory_model`'s categories are in bytes. devices: label → GiB of dashed lines.
    Raises UserError for a category that is unknown and for no rows.
    """
    if unknown := [name for name in rows if name not in PARTS]:
        raise UserError(f"no category {unknown[0]!r}; there are {', '.join(PARTS)}")
    if not len(rows):
        raise UserError("no rows: a bar needs one")
    figure, ax = new_figure(size=(7.2, 1.7 + 0.5 * len(rows)))
    names, left = [str(name) for name in rows.index], np.zeros(len(rows))
    for name in (name for name in PARTS if name in rows and rows[name].any()):
        values = rows[name].to_numpy(dtype=float)
        ax.barh(names, values, left=left, color=category_color(name), label=name, height=0.6)
        left += values
    for place, total in enumerate(left):
        ax.annotate(f"{total:.3g} GiB", (total, place), xytext=(4, 0), va="center",
                    textcoords="offset points", fontsize=9,
                    bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 0.5})  # fmt: skip
    devices = devices or {}
    ax.set_xlim(0, 1.15 * max([*left, *devices.values()]))
    ax.set_ylim(len(rows) - 0.5, -0.9 if devices else -0.5)
    for number, (name, gib) in enumerate(devices.items()):
        ax.axvline(gib, color=INK[0], ls="--", lw=1)
        ax.annotate(name, (gib, -0.9), xytext=(-2, -2 - 9 * (number % 2)), fontsize=8,
                    textcoords="offset points", ha="right", va="top")  # fmt: skip
    ax.set_xlabel("memory (GiB)")
    ax.grid(False, axis="y")
    figure.legend(loc="outside upper center", ncols=len(PARTS), **LEGEND)
    return figure


def category_color(name: str):
    """The colour of a category of memory, the same in every figure."""
    return "0.75" if name == "other" else palette()[PARTS.index(name)]


def _x(timeline, timed: bool) -> np.ndarray:
    return timeline.t_ms if timed else np.arange(len(timeline.t_ms))


def _finish(grid, timelines: dict, timed: bool) -> None:
    """What needs the width of a row: its limits, the names of phases, the places of peaks."""
    cells = [*timelines.values(), *[""] * grid.size]
    for number, row in enumerate(grid):
        mine = cells[number * len(row) :][: len(row)]
        shown = [(ax, t) for ax, t in zip(row, mine, strict=False) if not isinstance(t, str)]
        width = max((_x(t, timed)[-1] for _, t in shown), default=1.0)
        row[0].set_xlim(0, width)
        for ax, timeline in shown:
            _shade(ax, timeline, timed, width)
            place = _x(timeline, timed)[timeline.peak_event] / width
            align = "left" if place < 0.1 else "right" if place > 0.9 else "center"
            peak = (place * width, timeline.peak_gib)
            ax.annotate(f"{timeline.peak_gib:.3g}", peak, xytext=(0, 5), fontsize=9, ha=align,
                        textcoords="offset points")  # fmt: skip


def _shade(ax, timeline, timed: bool, width: float) -> None:
    columns = ["start_ms", "end_ms"] if timed else ["first", "last"]
    for name, start, end in timeline.phases[["name", *columns]].itertuples(index=False):
        ax.axvspan(start, end, color=_phase_color(name), alpha=0.18, lw=0)
        if (end - start) / width > _NARROW * len(name) / 2:
            ax.text((start + end) / 2, 0.985, name, fontsize=7, ha="center", va="top",
                    transform=ax.get_xaxis_transform())  # fmt: skip


def _curve(ax, timeline, timed: bool) -> None:
    x, gib = _x(timeline, timed), timeline.frame["allocated_gib"]
    ax.fill_between(x, gib, step="post", color="0.3", alpha=0.25, lw=0)
    ax.step(x, gib, where="post", color="0.15", lw=1.1)
    ax.plot(x[timeline.peak_event], timeline.peak_gib, "v", color=palette()[3], ms=6)


def _phase_color(name: str):
    return palette()[_PHASE_COLORS.get(name, 7)]


def _legend(drawn: list) -> list:
    names = dict.fromkeys(name for t in drawn for name in t.phases["name"])
    phases = [Patch(color=_phase_color(name), alpha=0.3, label=name) for name in names]
    peak = Line2D([], [], marker="v", ls="none", color=palette()[3], label="peak (GiB)")
    return [*phases, peak] if drawn else []


def _line_handles(lines: dict) -> list:
    return [
        Line2D([], [], color=INK[0], ls=style, lw=1.2, label=f"{name} ({gib:.3g} GiB)")
        for style, (name, gib) in zip(_STYLES, lines.items(), strict=False)
    ]
