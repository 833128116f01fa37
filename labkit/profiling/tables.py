"""From events to tables: which range the time went to, which kernels, which API calls, which gaps.

A kernel belongs to the ranges that were open on the thread that launched it, at the moment of the
launch, not to those that were open when it ran. The kernels of a backward pass are launched by
autograd's own thread; they belong to its ranges, and to those of the main thread, which waits in
`backward()` meanwhile.
"""

import re

import numpy as np
import pandas as pd

from labkit.profiling.events import Events
from labkit.profiling.kernels import kernel_class

_LAUNCH = re.compile(r"Launch(Kernel|CooperativeKernel)|GraphLaunch")
_SYNC = re.compile(r"Synchronize|EventQuery|StreamQuery")
_COPY = re.compile(r"Memcpy|Memset")
_MEMORY = re.compile(r"Malloc|Free|MemCreate|MemMap|MemSet|MemAddress|HostAlloc")


def fold(name: str) -> str:
    """`layers.3.attn` → `layers.*.attn`: one row for what all layers do."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def instances(events: Events) -> pd.DataFrame:
    """Every single range with the work launched inside: span_us, busy_us and ops.

    The span is from the start of the first operation to the end of the last; a range of CPU
    operators spans its own time.
    """
    work = pd.concat([events.work, _samples(events)], axis=1)
    work = work.sort_values("launch_us", kind="stable")
    own = {thread: mine for thread, mine in work.groupby("thread")}
    others = work[work["thread"] != events.main_thread]
    rows = [_measure(entry, own, others, events) for entry in events.ranges.itertuples()]
    measured = pd.DataFrame(rows, columns=["span_us", "busy_us", "ops", *_sample_columns(events)])
    return pd.concat([events.ranges, measured], axis=1)


def _sample_columns(events: Events) -> list[str]:
    return [] if events.metrics is None else ["samples", *events.metrics.columns.drop("time_us")]


def _samples(events: Events) -> pd.DataFrame:
    """For each operation, how many samples of the counters fell into it, and their sums."""
    work, columns = events.work, _sample_columns(events)
    sums = pd.DataFrame(0.0, index=work.index, columns=columns)
    if not columns or work.empty:
        return sums
    times = events.metrics["time_us"].to_numpy()
    at = np.searchsorted(work["start_us"].to_numpy(), times, side="right") - 1
    inside = (at >= 0) & (times < work["end_us"].to_numpy()[at])
    counted = events.metrics[inside].drop(columns="time_us").fillna(0).assign(samples=1.0)
    return sums.add(counted.groupby(at[inside]).sum(), fill_value=0)[columns]


def _measure(entry, own: dict, others: pd.DataFrame, events: Events) -> tuple:
    inside = [_launched_in(own[entry.thread], entry)] if entry.thread in own else []
    if entry.thread == events.main_thread:
        inside.append(_launched_in(others, entry))
    work = pd.concat(inside) if inside else others.iloc[:0]
    if not events.on_gpu:
        span = entry.end_us - entry.start_us
    else:
        span = work["end_us"].max() - work["start_us"].min() if len(work) else 0.0
    return span, work["busy_us"].sum(), len(work), *work[_sample_columns(events)].sum()


def _launched_in(work: pd.DataFrame, entry) -> pd.DataFrame:
    launches = work["launch_us"].to_numpy()
    first, last = np.searchsorted(launches, [entry.start_us, entry.end_us])
    return work.iloc[first:last]


def ranges_table(events: Events, steps: int) -> pd.DataFrame:
    """A row a range name, layers folded; all a step: span, busy and own ms, instances, operations.

    own_ms is the time of the kernels that were launched in no inner range, so it sums to the whole.
    `(backward)` is what is left of the steps outside of forward, optimizer and recomputations,
    where there are such ranges.
    """
    found = instances(events)
    found["range"] = found["name"].map(fold)
    table = found.groupby("range", sort=False).agg(
        span_ms=("span_us", "sum"),
        busy_ms=("busy_us", "sum"),
        instances=("name", "size"),
        ops=("ops", "sum"),
        **{column: (column, "sum") for column in _sample_columns(events)},
    )
    own = events.work.groupby(innermost_of_work(events).map(fold))["busy_us"].sum()
    table.insert(2, "own_ms", own.reindex(table.index).fillna(0.0))
    table[["span_ms", "busy_ms", "own_ms"]] /= 1e3
    table[["span_ms", "busy_ms", "own_ms", "instances", "ops"]] /= steps
    table = pd.concat([table, _rest_of_the_step(table)])
    for column in _sample_columns(events)[1:]:
        table[column] /= table["samples"]  # NaN where no sample fell: not known
    table = table.sort_values("span_ms", ascending=False, kind="stable")
    return table.reset_index(names="range").drop(columns="samples", errors="ignore")


def _rest_of_the_step(table: pd.DataFrame) -> pd.DataFrame:
    """The `(backward)` row: a step without its forward, optimizer and outermost recomputations."""
    if not {"step", "forward", "optimizer"} <= set(table.index):
        return table.iloc[:0]
    again = {name for name in table.index if name.startswith("recompute.")}
    outermost = {name for name in again if not any(name.startswith(f"{o}.") for o in again)}
    apart = table.loc[["forward", "optimizer", *sorted(outermost)]].sum()
    rest = (table.loc["step"] - apart).clip(lower=0)
    rest["instances"], rest["own_ms"] = table.loc["step", "instances"], 0.0
    return pd.DataFrame([rest], index=["(backward)"])


def kernels_table(events: Events, steps: int) -> pd.DataFrame:
    """A row a kernel (or operator): class, how many a step, mean µs, ms a step and share (%)."""
    work = events.work
    table = work.groupby(["name", "kind"], sort=False)["busy_us"].agg(["size", "mean", "sum"])
    table = table.reset_index()
    total = table["sum"].sum() or 1.0
    result = pd.DataFrame({
        "class": [kernel_class(n, k) for n, k in zip(table["name"], table["kind"], strict=True)],
        "count": table["size"] / steps,
        "mean_us": table["mean"],
        "ms": table["sum"] / 1e3 / steps,
        "share_pct": 100 * table["sum"] / total,
        "name": table["name"],
    })  # fmt: skip
    return result.sort_values("ms", ascending=False, ignore_index=True)


def api_kind(name: str) -> str:
    """launch, synchronize, copy, memory or other."""
    for kind, pattern in {
        "launch": _LAUNCH, "synchronize": _SYNC, "copy": _COPY, "memory": _MEMORY,
    }.items():  # fmt: skip
        if pattern.search(name):
            return kind
    return "other"


def api_table(events: Events, steps: int) -> pd.DataFrame:
    """A row an API call and the innermost range that it was made in: kind, count and CPU ms a step.

    `per_instance` is the count for each time that the range was open.
    """
    api = events.api.assign(range=innermost(events.api, events.ranges).map(fold))
    opened = events.ranges["name"].map(fold).value_counts()
    table = api.assign(ms=(api["end_us"] - api["start_us"]) / 1e3)
    table = table.groupby(["name", "range"], sort=False)["ms"].agg(["size", "sum"]).reset_index()
    result = pd.DataFrame({
        "call": table["name"],
        "kind": table["name"].map(api_kind),
        "range": table["range"],
        "count": table["size"] / steps,
        "per_instance": table["size"] / table["range"].map(opened),
        "cpu_ms": table["sum"] / steps,
    })  # fmt: skip
    order = {"by": ["cpu_ms", "call", "range"], "ascending": [False, True, True]}
    return result.sort_values(**order, ignore_index=True)


def innermost(calls: pd.DataFrame, ranges: pd.DataFrame) -> pd.Series:
    """The name of the innermost range open on each call's thread when it began; "" for none."""
    names = pd.Series("", index=calls.index)
    for thread, mine in calls.groupby("thread"):
        there = ranges[ranges["thread"] == thread]
        for entry in there.itertuples():  # sorted by start: inner ranges come after outer ones
            inside = mine["start_us"].between(entry.start_us, entry.end_us)
            names[mine.index[inside]] = entry.name
    return names


def innermost_of_work(events: Events) -> pd.Series:
    """The innermost range of each operation: of the thread that launched it, or of the main one."""
    calls = events.work[["thread"]].assign(start_us=events.work["launch_us"])
    names = innermost(calls, events.ranges)
    elsewhere = calls[(names == "") & (calls["thread"] != events.main_thread)]
    names[elsewhere.index] = innermost(elsewhere.assign(thread=events.main_thread), events.ranges)
    return names


def gaps(events: Events, steps: int) -> dict[str, float]:
    """How the GPU's time divides, ms a step: span, busy, and idle, of which waiting for a launch.

    A gap counts as waiting for a launch where the next operation was launched after the one before
    it had ended: the queue had run dry. Operations of several streams that overlap count once.
    """
    work = events.work
    if not events.on_gpu or work.empty:
        return {}
    ends = work["end_us"].cummax()
    gap = (work["start_us"] - ends.shift()).clip(lower=0).fillna(0)
    starved = gap.where(work["launch_us"] > ends.shift(), 0.0)
    span = ends.iloc[-1] - work["start_us"].iloc[0]
    found = {"span_ms": span, "busy_ms": span - gap.sum(), "idle_ms": gap.sum(),
             "launch_bound_ms": starved.sum()}  # fmt: skip
    return {name: value / 1e3 / steps for name, value in found.items()}
