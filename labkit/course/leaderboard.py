"""Predictors ranked: each runs in a process of its own, and is compared out here."""

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from labkit.course import contestant
from labkit.errors import UserError, positive_number
from labkit.files import whole_file

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

TRUTH = Path(__file__).parents[1] / "assets/truth/h200.csv"
MEASURED = {"predict_step_ms": "step_ms", "predict_peak_gib": "peak_gib"}  # function → column
CONFIGURATION = ("device", "model", "layers", "micro_batch_size", "seqlen", "micro_batches")
CLOSE = 0.15  # of what was measured
COLUMNS = (
    "place", "predictor", "time_median_pct", "time_worst_pct", "steps_within_15_pct",
    "memory_median_pct", "memory_worst_pct", "steps", "problem",
)  # fmt: skip


class Answer(NamedTuple):
    """What a function of a hand-in gave for one step: a number, or why there is none."""

    value: float | None = None
    why: str = ""

    @property
    def number(self) -> float | None:
        """The value, if it can be a time or an amount of memory."""
        return self.value if self.value is not None and 0 < self.value < math.inf else None

    def __str__(self) -> str:
        return self.why or f"{self.value} is no prediction"


@dataclass(frozen=True)
class Standing:
    """How one predictor did: the relative errors of its predictions, infinite where it has none.

    `problem` says why there are none, or some are missing.
    """

    name: str
    time: tuple[float, ...]
    memory: tuple[float, ...]
    problem: str = ""

    @property
    def ranked(self) -> bool:
        return median(self.time) < math.inf

    def cells(self, place: int) -> dict:
        """Its row, by COLUMNS; percentages are None where there is no number."""
        return {
            "place": place if self.ranked else None,
            "predictor": self.name,
            "time_median_pct": _percent(median(self.time)),
            "time_worst_pct": _percent(max(self.time)),
            "steps_within_15_pct": sum(error <= CLOSE for error in self.time),
            "memory_median_pct": _percent(median(self.memory)),
            "memory_worst_pct": _percent(max(self.memory)),
            "steps": len(self.time),
            "problem": self.problem,
        }


def measured_steps(path: str | Path = TRUTH) -> "pd.DataFrame":
    """A row for each step that a sweep measured: the medians of its repeats; `recompute` is a bool.

    UserError: no such file, or none of its steps ran, or a time or a peak is no number above 0.
    """
    from labkit.experiments.table import SWEEP, read

    frame = read(path, SWEEP)
    frame = frame[frame["status"] == "ok"]
    for name in MEASURED.values():
        for number in frame[name]:
            positive_number(f"{path}: {name}", number)
    if not len(frame):
        raise UserError(f"{path} has no step that was measured; `labkit sweep` measures some")
    keys = [*CONFIGURATION, "recompute"]
    steps = frame.groupby(keys, as_index=False).median(numeric_only=True)
    sizes = {name: int for name in CONFIGURATION[2:]}
    return steps.astype(sizes).assign(recompute=steps["recompute"] == "yes")


def rank(
    handins: Iterable[str | Path],
    truth: Iterable[str | Path] = (TRUTH,),
    *,
    limit_s: float = 30.0,
) -> list[Standing]:
    """Predictors from the best to the worst, by the median relative error of their times.

    A hand-in is a perfmodel.py, under whatever name, or a folder with one, or with a labkit that
    has one: then all of that labkit is its own. One that cannot be found or loaded, ends Python, or
    takes more than `limit_s` seconds is a standing too, with the reason: a step that it said
    nothing of counts as infinitely wrong.

    A hand-in's process is told the configurations, and not what was measured; files and programs
    are refused. It is no sandbox: run the code of strangers where it can do no harm.
    UserError: a truth that cannot be read, or of a device that the table lacks.
    """
    import pandas as pd

    positive_number("limit_s", limit_s)
    steps = pd.concat([measured_steps(path) for path in truth], ignore_index=True)
    _check_devices(steps)
    handins = [Path(path) for path in handins]
    standings = []
    for path, name in zip(handins, _names(handins), strict=True):
        answers, problem = _predictions(path, steps, limit_s)
        standings.append(_standing(name, answers, problem, steps))
    return sorted(standings, key=lambda one: (median(one.time), median(one.memory), one.name))


def _check_devices(steps) -> None:
    from labkit.devices import lookup

    for name in steps["device"].unique():
        if lookup(name) is None:
            raise UserError(
                f"the truth was measured on {name!r}, which is not in the table of devices; a "
                "predictor is asked for a device by its name"
            )


def _names(handins: list[Path]) -> list[str]:
    """What tells hand-ins apart: alice for alice/, alice.py and alice/labkit/perfmodel.py."""
    names = []
    for path in map(Path.absolute, handins):
        parts = [part for part in path.parts if part not in ("labkit", "perfmodel.py")]
        names.append(_printable(parts[-1].removesuffix(".py")))
    return [
        name if names.count(name) == 1 else _printable(path)
        for name, path in zip(names, handins, strict=True)
    ]


def _find(path: Path) -> tuple[Path, Path | None] | None:
    """(the file, the folder of its own labkit or None); None if there is no such hand-in."""
    places = [path / "labkit/perfmodel.py", path / "perfmodel.py"]
    places += [path] if path.suffix == ".py" else []
    file = next((place.absolute() for place in places if place.is_file()), None)
    if file is None:
        return None
    has_labkit = file.parent.name == "labkit" and (file.parent / "__init__.py").is_file()
    return file, file.parents[1] if has_labkit else None


def _predictions(path: Path, steps, limit_s: float) -> tuple[list[dict], str]:
    """(the answers that a hand-in gave, in the order of the steps; why there are no more)."""
    found = _find(path)
    if found is None:
        return [], "it has no perfmodel.py" if path.exists() else f"{path} does not exist"
    file, own_labkit = found
    task = {
        "file": str(file),
        "own_labkit": str(own_labkit) if own_labkit else None,
        "labkit": str(Path(__file__).parents[2]),
        "functions": list(MEASURED),
        "configurations": steps[[*CONFIGURATION, "recompute"]].to_dict("records"),
    }
    with tempfile.TemporaryFile() as reports, tempfile.TemporaryDirectory() as folder:
        ending = _run(task, reports.fileno(), folder, limit_s)
        return _read(os.pread(reports.fileno(), contestant.REPORT_BYTES, 0), ending)


def _run(task: dict, descriptor: int, folder: str, limit_s: float) -> str:
    """Run a hand-in, which leaves nothing outside the folder; how it ended, "" if well."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", contestant.__file__],
        cwd=folder,
        env={"TMPDIR": folder, "PATH": os.defpath, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        start_new_session=True,
    )
    try:
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(task | {"descriptor": descriptor}).encode())
            process.stdin.close()
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"it did not finish within {limit_s:g} s (an endless loop?)"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status < 0:
        return f"it ended Python with {signal.strsignal(-status) or -status}"
    return f"it ended Python with exit status {status}" if status else ""


def _read(data: bytes, ending: str) -> tuple[list[dict], str]:
    """Answers and problem. Whatever the process wrote, this raises nothing."""
    answers = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
            if "problem" in record:
                return [], _printable(record["problem"])
            answers.append({name: _answer(*record["answers"][name]) for name in MEASURED})
        except (ValueError, TypeError, KeyError, RecursionError):
            return answers, ending or "it wrote into its report"
    return answers, ending


def _answer(value, why) -> Answer:
    """ValueError: nothing that our script writes."""
    if not isinstance(value, float | None) or not isinstance(why, str):
        raise ValueError(f"no answer: {value!r:.20}")
    return Answer(value, _printable(why))


def _standing(name: str, answers: list[dict], problem: str, steps) -> Standing:
    problems, errors = [problem] if problem else [], {}
    if not problem and len(answers) < len(steps):
        problems.append("it left before the end")
    for function, column in MEASURED.items():
        given = [answer[function] for answer in answers[: len(steps)]]
        if bad := [answer for answer in given if answer.number is None]:
            problems.append(f"{function}, {len(bad)} of {len(steps)}: {bad[0]}")
        given += [Answer()] * (len(steps) - len(given))
        errors[column] = tuple(
            abs(answer.number / measured - 1) if answer.number else math.inf
            for answer, measured in zip(given, steps[column], strict=True)
        )
    return Standing(name, errors["step_ms"], errors["peak_gib"], "; ".join(problems))


def _printable(text) -> str:
    """What a terminal shows of a text that a stranger wrote, and not too much of it."""
    return "".join(sign for sign in str(text)[:300] if sign.isprintable())


def _percent(error: float) -> float | None:
    return round(100 * error, 3) if error < math.inf else None


def rows(standings: list[Standing]) -> list[dict]:
    """The rows of a leaderboard, from the best to the worst, by COLUMNS."""
    return [one.cells(place) for place, one in enumerate(standings, start=1)]


def render(standings: list[Standing]) -> "Table":
    """The leaderboard for rich."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "predictor", "time", "worst", "within 15 %", "memory", "worst", ""):
        is_number = heading not in ("predictor", "")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number)
    errors = [name for name in COLUMNS if name.endswith(("median_pct", "worst_pct"))]
    for row in rows(standings):
        percent = [_shown(row[name]) for name in errors]
        close = f"{row['steps_within_15_pct']} of {row['steps']}"
        cells = [str(row["place"] or "–"), row["predictor"], *percent[:2], close, *percent[2:]]
        table.add_row(*map(Text, cells), Text(row["problem"], style="red"))
    return table


def _shown(percent: float | None) -> str:
    return "–" if percent is None else f"{percent:.1f} %"


def write_csv(standings: list[Standing], path: str | Path) -> None:
    """Write the leaderboard as a CSV file. UserError: a place that cannot be written."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(standings))
    try:
        with whole_file(Path(path)) as draft:
            draft.write_text(text.getvalue(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another") from None
