"""Where a training step's time goes, stage by stage."""

import numpy as np
from matplotlib.figure import Figure

from labkit.plots.style import LEGEND, new_figure, nothing, palette, require

KINDS = {"forward_ms": "forward", "backward_ms": "backward", "recompute_ms": "recompute",
         "optimizer_ms": "optimizer"}  # fmt: skip


def stages(frame, totals) -> Figure:
    """Stacked bars of each stage, activations kept above recomputed; the floor of the optimizer.

    frame: stages.csv, totals: stages_steps.csv, of which the last shape is drawn.
    Raises UserError for a missing column.
    """
    shape = ["model", "layers", "micro_batch_size", "seqlen"]
    require(frame, *shape, "recompute", "stage", *list(KINDS)[:3])
    require(totals, *shape, "recompute", "step_ms", "optimizer_ms", "optimizer_floor_ms")
    done = totals[totals["step_ms"].notna()]
    if done.empty:
        return nothing(totals)
    last = done.iloc[-1][shape]
    done = done[(done[shape] == last).all(axis=1)]
    figure, axes = new_figure(len(done), size=(7.4, 1.6 + 2.2 * len(done)), sharex=True,
                              squeeze=False)  # fmt: skip
    for ax, total in zip(axes[:, 0], done.to_dict("records"), strict=True):
        mine = frame[(frame[shape] == last).all(axis=1)]
        _bars(ax, mine[mine["recompute"] == total["recompute"]], total)
    axes[-1, 0].set_xlim(0, 1.05 * max(ax.dataLim.xmax for ax in axes[:, 0]))
    axes[-1, 0].set_xlabel("time in one step (ms)")
    handles = [axes[0, 0].containers[i] for i in range(len(KINDS))]
    figure.legend(handles, KINDS.values(), loc="outside upper center", ncols=4, **LEGEND)
    return figure


def _bars(ax, mine, total: dict) -> None:
    names = [*mine["stage"], "optimizer"]
    left = np.zeros(len(names))
    for color, kind in zip(palette(), KINDS, strict=False):
        if kind == "optimizer_ms":
            values = np.array([*np.zeros(len(mine)), total["optimizer_ms"]])
        else:
            values = np.array([*mine[kind], 0.0])
        ax.barh(names, values, left=left, color=color, height=0.7)
        left += values
    ax.plot([total["optimizer_floor_ms"]] * 2, [len(mine) - 0.45, len(mine) + 0.45], "k:", lw=2)
    ax.annotate("floor", (total["optimizer_floor_ms"], len(mine) + 0.45), fontsize=8,
                xytext=(3, -2), textcoords="offset points")  # fmt: skip
    ax.invert_yaxis()
    kept = "recomputed" if total["recompute"] == "yes" else "kept"
    ax.set_title(f"activations {kept}: {total['step_ms']:.4g} ms", fontsize=10)
