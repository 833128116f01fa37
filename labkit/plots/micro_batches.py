"""What the size of a micro batch does to a step: its throughput and its memory."""

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from labkit.plots.style import LEGEND, new_figure, nothing, palette, require

_PANELS = {"tokens_per_s": "tokens a second", "peak_gib": "peak memory (GiB)"}
_NAMES = {"no": "activations kept", "yes": "recomputed"}


def micro_batches(frame) -> Figure:
    """Tokens a second and peak memory over the micro batch size, activations kept and recomputed.

    frame: micro_batches.csv, of which the last global batch is drawn; a size that did not fit is
    a cross at the top. Raises UserError for a missing column.
    """
    shape = ["model", "layers", "seqlen", "global_batch_size"]
    require(frame, *shape, "micro_batch_size", "recompute", "status", *_PANELS)
    if frame["tokens_per_s"].notna().sum() == 0:
        return nothing(frame)
    mine = frame[(frame[shape] == frame.iloc[-1][shape]).all(axis=1)]
    figure, axes = new_figure(1, len(_PANELS), size=(8.4, 3.2))
    for ax, (column, label) in zip(axes, _PANELS.items(), strict=True):
        for color, (recompute, name) in zip(palette(), _NAMES.items(), strict=False):
            rows = mine[mine["recompute"] == recompute].sort_values("micro_batch_size")
            ax.plot(rows["micro_batch_size"], rows[column], "o-", color=color, label=name)
            full = rows[rows["status"] == "out of memory"]["micro_batch_size"]
            ax.plot(full, [0.97] * len(full), "x", color=color, ms=9,
                    transform=ax.get_xaxis_transform())  # fmt: skip
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(ScalarFormatter())
        ax.set_xticks(sorted(mine["micro_batch_size"].unique()))
        ax.set(xlabel="micro batch size (sequences)", ylabel=label)
        ax.set_ylim(0, 1.15 * mine[column].max())
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=2, **LEGEND)
    return figure
