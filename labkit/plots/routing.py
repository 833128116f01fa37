"""Where tokens go in a mixture of experts."""

import numpy as np
from matplotlib.figure import Figure

from labkit.plots.style import INK, LEGEND, MARKERS, new_figure, nothing, palette, require


def routing(experts, layers) -> Figure:
    """Rows an expert as a map of layers × experts, in multiples of the mean; below, imbalance.

    `experts` is routing_experts.csv (layer, expert, over_mean), `layers` is routing.csv: the
    busiest expert over the mean, and the busiest of n GPUs over theirs (columns gpusN_over_mean).
    Raises UserError for a missing column.
    """
    require(experts, "layer", "expert", "over_mean")
    require(layers, "layer", "busiest_over_mean")
    grid = experts.pivot(index="layer", columns="expert", values="over_mean")
    if not grid.notna().any(axis=None):
        return nothing(experts)
    height = 0.9 + 0.26 * len(grid)
    figure, (above, below) = new_figure(
        2, size=(8.4, height + 2.9), height_ratios=[max(height, 1.2), 2.2]
    )
    above.grid(False)
    most = max(2.0, np.nanmax(grid.to_numpy()))
    shown = above.imshow(grid, aspect="auto", cmap="cividis", vmin=0, vmax=most)
    above.set(xlabel="expert", ylabel="layer", yticks=range(len(grid)), yticklabels=grid.index)
    if len(grid) > 8:
        above.set_yticks(range(0, len(grid), 4), grid.index[::4])
    figure.colorbar(shown, ax=above, label="rows / mean of the layer", pad=0.01)
    _imbalance(below, layers)
    return figure


def _imbalance(ax, layers) -> None:
    columns = [name for name in layers if name.startswith("gpus") and layers[name].notna().any()]
    names = {name: f"{name.removeprefix('gpus').partition('_')[0]} GPUs" for name in columns}
    names["busiest_over_mean"] = "one GPU an expert"
    for (column, name), marker, color in zip(names.items(), MARKERS, palette(), strict=False):
        ax.plot(layers["layer"], layers[column], marker=marker, ms=4, lw=1, color=color, label=name)
    ax.axhline(1, color=INK[1], lw=1)
    ax.set(xlabel="layer", ylabel="busiest / mean", ylim=(0.9, None))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(ncols=len(names), **LEGEND)
