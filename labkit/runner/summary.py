"""What a run found: one record a notebook, kept in `summary.json`."""

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path

from labkit import __version__
from labkit.errors import UserError
from labkit.files import whole_file
from labkit.report import KeyFigure

STATUSES = ("ok", "failed", "interrupted", "unfinished")
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Picture:
    """A thumbnail of a figure in an executed notebook; `file` is relative to the output folder."""

    file: str
    caption: str
    cell_id: str
    width: int
    height: int


@dataclass(frozen=True)
class Failure:
    """Why a notebook did not reach its end. Without a cell, it never started."""

    error: str  # one line
    cell: int | None = None  # the n of In [n] in the executed notebook
    cell_id: str = ""
    source: str = ""  # the first line of the cell
    line: int | None = None  # the line of the cell that raised, from 1
    code: str = ""  # that line
    traceback: str = ""

    @property
    def where(self) -> str:
        """The cell, the line in it and its text; "" when no cell ran."""
        if self.cell is None:
            return ""
        line = f" line {self.line}" if self.line else ""
        return f"cell [{self.cell}]{line}: {self.code or self.source}"


@dataclass(frozen=True)
class NotebookResult:
    """What became of one notebook. Paths are relative: the notebook's to the course, the others
    to the output folder. `unfinished`: it has started; it is running, or the run was killed."""

    path: str
    status: str
    fingerprint: str = ""  # of the notebook, the parameters and labkit's version
    title: str = ""
    parameters: dict = field(default_factory=dict)
    started: str = ""  # local time, ISO 8601
    seconds: float = 0.0
    cells: int = 0  # code cells that should run
    cells_run: int = 0
    executed: str = ""  # the executed notebook
    page: str = ""  # its HTML
    figures: tuple[KeyFigure, ...] = ()
    pictures: tuple[Picture, ...] = ()
    failure: Failure | None = None
    reused: bool = False  # kept from an earlier run by resume

    def __post_init__(self):
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is none of {STATUSES}")

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @classmethod
    def from_dict(cls, record: dict) -> "NotebookResult":
        """The inverse of dataclasses.asdict. Raises ValueError, TypeError or KeyError."""
        parts = {
            "figures": tuple(KeyFigure(**figure) for figure in record["figures"]),
            "pictures": tuple(Picture(**picture) for picture in record["pictures"]),
            "failure": Failure(**record["failure"]) if record["failure"] else None,
        }
        return cls(**{**record, **parts})


def exit_code(results: list[NotebookResult]) -> int:
    """0 when all succeeded, 130 when the run was interrupted, else 1."""
    if any(result.status == "interrupted" for result in results):
        return 130
    return 0 if all(result.ok for result in results) else 1


def write_text(path: Path, text: str):
    """Write all of the file or nothing; its folder is made if it is absent. Raises OSError."""
    with whole_file(path) as draft:
        # A lone surrogate, which UTF-8 cannot hold, becomes its JSON escape.
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")


def read_summary(output: Path, note=lambda message: None) -> dict[str, NotebookResult]:
    """The records in `output` by notebook path; none when nothing ran there yet. A file that
    cannot be understood is renamed, and `note(message)` says so."""
    path = output / SUMMARY
    try:
        records = json.loads(path.read_text(encoding="utf-8"))["notebooks"]
        return {record["path"]: NotebookResult.from_dict(record) for record in records}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        aside = path.with_name("summary.unreadable.json")
        os.replace(path, aside)
        note(f"{path} cannot be understood ({error}); it is now {aside.name}")
        return {}


def write_summary(output: Path, results: list[NotebookResult]):
    """Write the records, and what they were made by, to `summary.json`."""
    summary = {
        "labkit": __version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "notebooks": [asdict(result) for result in results],
    }
    write_text(output / SUMMARY, json.dumps(summary, indent=1, default=str) + "\n")
