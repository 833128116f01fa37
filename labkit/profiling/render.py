"""A recording for a terminal."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from labkit.profiling.recording import Recording

_ROWS = 20


def render(recording: Recording) -> Group:
    """What a step cost, where it went, and what the host did; the largest rows of each table."""
    events = recording.events
    head = f"one step: {recording.before_ms:.2f} ms before recording, "
    head += f"{recording.during_ms:.2f} ms while recording"
    parts = [Text(head)]
    if gaps := recording.gaps:
        parts.append(Text(
            f"GPU: busy {gaps['busy_ms']:.2f} of {gaps['span_ms']:.2f} ms; "
            f"idle {gaps['idle_ms']:.2f} ms ({gaps['launch_bound_ms']:.2f} waiting for a launch)"
        ))  # fmt: skip
    unit = "GPU" if events.on_gpu else "CPU"
    parts.append(_table(recording.ranges, {
        "range": ("range", "{}"),
        f"{unit} ms": ("span_ms", "{:.3f}"), "busy ms": ("busy_ms", "{:.3f}"),
        "own ms": ("own_ms", "{:.3f}"),
        "instances": ("instances", "{:g}"), f"{unit} ops": ("ops", "{:g}"),
        "SM %": ("sm_active_pct", "{:.0f}"), "tensor %": ("tensor_active_pct", "{:.0f}"),
        "DRAM read %": ("dram_read_pct", "{:.0f}"), "DRAM write %": ("dram_write_pct", "{:.0f}"),
    }))  # fmt: skip
    classes = recording.kernels.groupby("class")[["count", "ms", "share_pct"]].sum()
    classes = classes.sort_values("ms", ascending=False).reset_index()
    parts.append(_table(classes, {
        "class": ("class", "{}"), "count": ("count", "{:g}"), "ms": ("ms", "{:.3f}"),
        "share %": ("share_pct", "{:.1f}"),
    }))  # fmt: skip
    if len(recording.api):
        parts.append(_table(recording.api.head(8), {
            "API call": ("call", "{}"), "kind": ("kind", "{}"), "in range": ("range", "{}"),
            "count": ("count", "{:g}"), "CPU ms": ("cpu_ms", "{:.3f}"),
        }))  # fmt: skip
    if recording.skipped:
        names = ", ".join(recording.skipped)
        parts.append(Text(f"compiled in place, so without a range of their own: {names}"))
    return Group(*parts)


def _table(frame, columns: dict[str, tuple[str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    shown = {title: spec for title, spec in columns.items() if spec[0] in frame}
    for number, title in enumerate(shown):
        table.add_column(title, justify="left" if number == 0 else "right", overflow="fold")
    for row in frame.head(_ROWS).to_dict("records"):
        table.add_row(*(
            Text("n/a" if row[column] != row[column] else form.format(row[column]))
            for column, form in shown.values()
        ))  # fmt: skip
    if len(frame) > _ROWS:
        table.add_row(Text(f"… {len(frame) - _ROWS} more in the CSV", style="dim"))
    return table
