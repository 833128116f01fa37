"""Figures of Part 1's experiments: one operation at a time."""

import numpy as np
from matplotlib.figure import Figure

from labkit.devices import resolve
from labkit.plots.style import (
    INK,
    LEGEND,
    MARKERS,
    new_figure,
    nothing,
    palette,
    plottable,
    require,
)

SUSTAINED = {
    "tflops": "performance\n(TFLOP/s)",
    "sm_clock_mhz": "SM clock\n(MHz)",
    "power_w": "power (W)",
}


def sustained(frame) -> Figure:
    """TFLOP/s, clock and power of one matrix multiply against time; panels without data are out.

    `frame` is gemm_sustained.csv. Raises UserError for a missing column.
    """
    require(frame, "t_s", "n", *SUSTAINED)
    known = [name for name in SUSTAINED if frame[name].notna().any()]
    if not known:
        return nothing(frame)
    figure, axes = new_figure(
        len(known), size=(7.2, 1.2 + 1.6 * len(known)), sharex=True, squeeze=False
    )
    for ax, name, color in zip(axes[:, 0], known, palette(), strict=False):
        ax.plot(frame["t_s"], frame[name], color=color, lw=1.5)
        ax.set(ylabel=SUSTAINED[name], ylim=(0, 1.08 * frame[name].max()))
    n = int(frame["n"].iloc[0])
    axes[0, 0].set_title(f"{n} × {n} × {n} back to back, from idle")
    axes[-1, 0].set_xlabel("time (s)")
    figure.align_ylabels()
    return figure


def bandwidth(frame, device=None) -> Figure:
    """GB/s against the bytes that an operation must move, a panel for each cache state.

    `frame` is ops.csv. The lines are the bandwidth and the L2 cache of the device, a DeviceSpec or
    a name; None is the device in use. Raises UserError for a missing column.
    """
    spec = resolve(device)
    require(frame, "op", "cache")
    shown = plottable(frame, "moved_bytes", "gbs")
    states = [state for state in STATES if state in set(shown["cache"])]
    if not states:
        return nothing(frame)
    figure, axes = new_figure(1, len(states), size=(1.5 + 4.6 * len(states), 4.2), sharey=True,
                              squeeze=False)  # fmt: skip
    for ax, state in zip(axes[0], states, strict=True):
        mine = shown[shown["cache"] == state].sort_values("moved_bytes")
        for op, marker in zip(dict.fromkeys(shown["op"]), MARKERS, strict=False):
            one = mine[mine["op"] == op]
            ax.plot(one["moved_bytes"] / 1e6, one["gbs"], marker=marker, ms=4, lw=1, label=op)
        _limits(ax, spec)
        ax.set(xscale="log", title=STATES[state], xlabel="bytes that one ideal kernel moves (MB)")
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("those bytes / time (GB/s)")
    axes[0, 0].legend(loc="best", **LEGEND)
    return figure


STATES = {"cold": "L2 flushed before each call", "warm": "caches warm"}


def _limits(ax, spec) -> None:
    ax.axhline(spec.bandwidth_gbs, color=INK[0], lw=1.5)
    ax.annotate(
        f"{spec.name}: {spec.bandwidth_gbs:.4g} GB/s", (0.01, spec.bandwidth_gbs),
        xycoords=ax.get_yaxis_transform(), xytext=(0, 3), textcoords="offset points", fontsize=8,
    )  # fmt: skip
    if spec.l2_mib:
        ax.axvline(spec.l2_mib * 2**20 / 1e6, color=INK[1], lw=1.2, ls="--")
        ax.annotate(
            f"L2 {spec.l2_mib:g} MiB", (spec.l2_mib * 2**20 / 1e6, 0.02), rotation=90,
            xycoords=ax.get_xaxis_transform(), xytext=(3, 0), textcoords="offset points",
            color=INK[1], fontsize=8,
        )  # fmt: skip


COUNTERS = {
    "kernel_pct": "a kernel runs", "memory_busy_pct": "memory busy", "sm_active_pct": "SMs active",
    "tensor_active_pct": "tensor cores active", "dram_pct": "DRAM bandwidth",
    "cpu_pct": "CPU busy",
}  # fmt: skip


def counters(frame) -> Figure:
    """The counters of each workload, in percent of the most that there is; unknown ones are out.

    `frame` is regimes.csv. Raises UserError for a missing column.
    """
    require(frame, "workload", "ms", "regime", "regime_by", *COUNTERS)
    shown = frame[frame["ms"].notna()]
    known = [name for name in COUNTERS if shown[name].notna().any()]
    if not known:
        return nothing(frame)
    figure, ax = new_figure(size=(8.4, 4.4))
    width = 0.8 / len(known)
    places = np.arange(len(shown))
    for i, name in enumerate(known):
        bars = ax.bar(places + (i + 0.5) * width - 0.4, shown[name], 0.92 * width,
                      label=COUNTERS[name])  # fmt: skip
        ax.bar_label(bars, fmt="{:.0f}", fontsize=8, color="0.3")
    ax.set_xticks(places, [_workload_label(row) for row in shown.to_dict("records")], fontsize=8.5)
    ax.grid(False, axis="x")
    ax.set(ylim=(0, 112), ylabel="share of the time, or of the peak (%)")
    figure.legend(loc="outside upper center", ncols=len(known), **LEGEND)
    return figure


def _workload_label(row: dict) -> str:
    regime = row["regime"] if isinstance(row["regime"], str) else "n/a"
    predicted = " (predicted)" if row["regime_by"] == "roofline" else ""
    return f"{row['workload']}\n{row['ms']:.4g} ms a call\n{regime}{predicted}"


def call_times(frame) -> Figure:
    """Time of each call against its number, a line a column; the first calls are what to see."""
    figure, ax = new_figure(size=(7.2, 3.4))
    for name, marker in zip(frame.columns, MARKERS, strict=False):
        ax.plot(range(1, len(frame) + 1), frame[name], marker=marker, ms=4, lw=1, label=name)
    ax.set(yscale="log", xlabel="call", ylabel="time of the call (ms)")
    ax.legend(**LEGEND)
    return figure


def kernels(frame) -> Figure:
    """Bars of the rate of each kernel at its sizes: TFLOP/s of multiplies, GB/s of the others.

    Raises UserError for a missing column.
    """
    rows = plottable(frame, "ms")
    if rows.empty:
        return nothing(frame)
    figure, axes = new_figure(1, 2, size=(10, 3.8))
    for ax, column, unit in zip(axes, ("tflops", "gbs"), ("TFLOP/s", "GB/s"), strict=True):
        computes = rows["flops"] > 0
        mine = rows[computes if column == "tflops" else ~computes & (rows["moved_bytes"] > 0)]
        names = list(dict.fromkeys(mine["kernel"]))
        for y, name in enumerate(names):
            sizes = mine[mine["kernel"] == name].sort_values("size")
            for i, (size, rate) in enumerate(zip(sizes["size"], sizes[column], strict=True)):
                ax.barh(y + 0.27 * (i - (len(sizes) - 1) / 2), rate, 0.25, color=palette()[i])
                ax.annotate(f" {size:,.0f}", (rate, y + 0.27 * (i - (len(sizes) - 1) / 2)),
                            fontsize=7, va="center")  # fmt: skip
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.set_xlabel(f"reached ({unit}); the numbers are tokens, or rows of AdamW's weight")
        ax.xaxis.label.set_size(8)
        ax.margins(x=0.15)
    return figure
