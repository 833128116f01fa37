"""The roofline: what bounds an operation, and what was reached under it."""

from itertools import cycle

import numpy as np
from matplotlib.figure import Figure

from labkit.devices import resolve
from labkit.errors import UserError
from labkit.plots.style import INK, LEGEND, MARKERS, new_figure, palette, plottable


def roofline(devices=None, points=None, *, ax=None) -> Figure:
    """TFLOP/s against arithmetic intensity, under the ceilings of one or two devices.

    `devices` is a DeviceSpec, a name in the device table, or a list of two; None is the device in
    use. Solid: peak compute and bandwidth. Dashed: what was reached, where `spec.measured` has it.
    `points` is a DataFrame with `intensity_flop_per_byte` and `tflops`; points of one `shape`
    are joined in their order, and those of one `device` have one marker. Rows without a number
    above 0 are left out. Draws on `ax` if there is one. Raises UserError for a missing column.
    """
    chosen = devices if isinstance(devices, (list, tuple)) else [devices]
    specs = [resolve(device) for device in chosen]
    if not 1 <= len(specs) <= len(INK):
        raise UserError(f"{len(specs)} devices: a roofline shows one or two")
    points = plottable(points, "intensity_flop_per_byte", "tflops")
    ax = ax if ax is not None else new_figure()[1]
    ax.set(
        xscale="log", yscale="log", title="Roofline",
        xlabel="arithmetic intensity (FLOP/byte)", ylabel="performance (TFLOP/s)",
    )  # fmt: skip
    low, high = _intensity_range(specs, points)
    for spec, ink in zip(specs, INK, strict=False):
        _ceilings(ax, spec, ink, np.geomspace(low, high, 400))
    if points is not None:
        _points(ax, points)
    ax.set_xlim(low, high)
    ax.legend(loc="best", **LEGEND)
    return ax.figure


def _ceilings(ax, spec, ink, intensity) -> None:
    roof = np.minimum(spec.peak_tflops, intensity * spec.bandwidth_gbs / 1e3)
    ax.plot(intensity, roof, color=ink, lw=1.8, label=_ceiling_label(spec))
    ax.plot(spec.ridge, spec.peak_tflops, "o", color=ink, ms=6)
    ax.annotate(
        f"ridge: {spec.ridge:.3g} FLOP/byte", (spec.ridge, spec.peak_tflops), color=ink,
        xytext=(0, 6), textcoords="offset points", ha="center", fontsize=9,
    )  # fmt: skip
    reached = spec.measured
    if not reached or not (reached.gemm_tflops or reached.copy_gbs):
        return
    compute = reached.gemm_tflops or spec.peak_tflops
    memory = intensity * (reached.copy_gbs or spec.bandwidth_gbs) / 1e3
    known = np.where(memory < compute, bool(reached.copy_gbs), bool(reached.gemm_tflops))
    reached_roof = np.where(known, np.minimum(compute, memory), np.nan)
    if not np.allclose(reached_roof, roof, rtol=1e-3):
        ax.plot(intensity, reached_roof, "--", color=ink, lw=1.3, label=_reached_label(reached))


def _ceiling_label(spec) -> str:
    compute, memory = f"{spec.peak_tflops:.3g} TFLOP/s", f"{spec.bandwidth_gbs:.4g} GB/s"
    return f"{spec.name}, {spec.dtype}: {compute}, {memory}"


def _reached_label(reached) -> str:
    compute = f"{reached.gemm_tflops:.3g} TFLOP/s" if reached.gemm_tflops else ""
    memory = f"{reached.copy_gbs:.4g} GB/s" if reached.copy_gbs else ""
    return f"reached here: {', '.join(filter(None, (compute, memory)))}"


def _points(ax, points) -> None:
    absent = {name: "" for name in ("shape", "device") if name not in points}
    points = points.assign(**absent)
    colors = dict(zip(points["shape"].unique(), cycle(palette()), strict=False))
    markers = dict(zip(points["device"].unique(), cycle(MARKERS), strict=False))
    for (shape, device), mine in points.groupby(["shape", "device"], sort=False):
        named = [shape, device if len(markers) > 1 else ""]
        ax.plot(
            mine["intensity_flop_per_byte"], mine["tflops"], color=colors[shape],
            marker=markers[device], ms=4, lw=1, ls="-" if shape else "none",
            label=", ".join(filter(None, named)) or None,
        )  # fmt: skip


def _intensity_range(specs, points) -> tuple[float, float]:
    """From a decade or two below the ridge to one above it, and around every point."""
    seen = [spec.ridge / 100 for spec in specs] + [spec.ridge * 20 for spec in specs]
    if points is not None and len(points):
        x = points["intensity_flop_per_byte"]
        seen += [x.min() / 1.5, x.max() * 1.5]
    return min(seen), max(seen)
