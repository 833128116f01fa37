"""Key figures: what a notebook found, in numbers or a few words, for the report of a run."""

import sys
from dataclasses import asdict, dataclass

from labkit.errors import UserError

MIME = "application/vnd.labkit.figure+json"


@dataclass(frozen=True)
class KeyFigure:
    """A number, or a few words, that a notebook found. Raises UserError for anything else."""

    name: str
    value: int | float | str
    unit: str = ""

    def __post_init__(self):
        for part, text, longest in (("name", self.name, 60), ("unit", self.unit, 20)):
            if not isinstance(text, str) or len(text) > longest or "\n" in text:
                raise UserError(f"{part}={text!r} must be one line of at most {longest} characters")
        if not self.name.strip():
            raise UserError(f"name={self.name!r}: a key figure needs a name")
        if isinstance(self.value, str):
            if not self.value.strip() or len(self.value) > 80 or "\n" in self.value:
                raise UserError(
                    f"{self.name}: a value in words is one line of 1 to 80 characters, "
                    f"not {self.value[:100]!r}"
                )
        elif isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise UserError(f"{self.name}: {self.value!r} is neither a number nor words"[:200])
        elif not -1e300 < self.value < 1e300:
            raise UserError(f"{self.name}: a value must be finite; say 'n/a' for what is not known")

    @property
    def shown(self) -> str:
        """The value as people read it: four digits of a float, an integer in groups of three."""
        if isinstance(self.value, str):
            return self.value
        return f"{self.value:,}" if isinstance(self.value, int) else f"{self.value:.4g}"

    def __str__(self) -> str:
        return f"{self.name}: {self.shown} {self.unit}".rstrip()

    def _ipython_display_(self):
        """Nothing: `record` has shown it, and a cell's last line must not show it again."""


def record(name: str, value, unit: str = "") -> KeyFigure:
    """Show a key figure and keep it for the report: `record("GEMM", 1.38, "ms")`.

    `value` is a finite number (a NumPy scalar or a tensor of one element will do) or a few words.
    Recorded again, a name gets the new value. Raises UserError for another value. Outside a
    notebook it only returns the KeyFigure.
    """
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            raise UserError(f"{name}: {type(value).__name__} holds more than one number") from None
    figure = KeyFigure(name, value, unit)
    ipython = sys.modules.get("IPython")
    if ipython and ipython.get_ipython():
        ipython.display.display({"text/plain": str(figure), MIME: asdict(figure)}, raw=True)
    return figure


def key_figures(nb) -> tuple[KeyFigure, ...]:
    """The figures recorded in an executed notebook: the last of each name, in order."""
    found = {}
    for cell in nb.cells:
        for output in cell.get("outputs", ()):
            bundle = output.get("data", {}).get(MIME)
            try:
                figure = KeyFigure(**bundle)
            except (TypeError, UserError):  # none, or not from `record`
                continue
            found[figure.name] = figure
    return tuple(found.values())
