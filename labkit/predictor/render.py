"""Predictions and fits as tables for a terminal."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from labkit.predictor.calibrate import Fit
from labkit.predictor.prediction import Prediction


def prediction(time: Prediction, memory: Prediction, tokens: int, mfu: float, room: float) -> Group:
    """The step and the peak, each with its terms; `mfu` is 0…1, `room` the device's GiB."""
    said = [
        f"{float(time):.4g} ms a step: {1e3 * tokens / time:,.0f} tokens/s, MFU {mfu:.1%}",
        f"{float(memory):.4g} GiB at most, {memory.note}, of {room:.4g} GiB",
        f"constants: {time.source}",
    ]
    return Group(*map(Text, said), _terms(time), _terms(memory))


def _terms(whole: Prediction) -> Table:
    """A row a term, a column a group."""
    groups = list(whole.by("group"))
    table = Table(box=None, header_style="bold")
    table.add_column(whole.unit)
    for group in groups:
        table.add_column(group, justify="right")
    table.add_column("share", justify="right")
    table.add_column("bound by", no_wrap=True)
    for name, total in sorted(whole.by("name").items(), key=lambda item: -item[1]):
        mine = [term for term in whole.terms if term.name == name]
        cells = [sum(t.value for t in mine if t.group == group) for group in groups]
        shown = [f"{value:.3g}" if value else "" for value in cells]
        table.add_row(name, *shown, f"{total / whole:.1%}", mine[0].bound)
    return table


def fit(found: Fit) -> Group:
    """The constants with meaning and uncertainty, and how wrong they are about other steps."""
    table = Table(box=None, header_style="bold")
    for column in ("constant", "value", "±", "unit", "bound by", "what it is"):
        number = column in ("value", "±")
        table.add_column(column, justify="right" if number else "left", no_wrap=column[0] == "c")
    for row in found.table().to_dict("records"):
        if not row["value"]:
            continue  # a CPU does not wait for itself
        sure = f"{row['± %']:.1f} %" if row["± %"] else ""
        table.add_row(
            row["constant"], f"{row['value']:.4g}", sure, row["unit"], row["bound by"],
            row["what it is"],
        )  # fmt: skip
    wrong = found.errors["error"].abs()
    middle, most, worst = (f"{wrong.quantile(q):.2%}" for q in (0.5, 0.9, 1.0))
    said = (
        f"{len(wrong)} configurations, each predicted by a fit to the others: median error "
        f"{middle}, nine in ten within {most}, worst {worst}"
    )
    return Group(table, Text(said))
