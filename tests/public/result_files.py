"""What the checks of every experiment look at: is a file there, complete, and one measurement?

Each function raises an AssertionError that names the file, the row and the way out.
"""

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.devices import DeviceSpec, lookup
from labkit.errors import UserError
from labkit.experiments import table
from labkit.experiments.table import Schema
from tests.public.judging import require

ROOT = Path(__file__).parents[2]
# The second is where a notebook that was told profile = "cpu" rehearses.
PLACES = ("results", "results/cpu")
RECORDED = {  # the columns of a recording's tables
    "ranges": ["range", "span_ms", "busy_ms", "own_ms", "instances", "ops"],
    "kernels": ["class", "count", "mean_us", "ms", "share_pct", "name"],
    "api": ["call", "kind", "range", "count", "per_instance", "cpu_ms"],
    "summary": ["what", "value"],
}
FASTEST_CALL_MS = 1e-4  # no call of PyTorch returns sooner
# Memory never runs above the datasheet's rate. A core does: boost clocks of graphics cards go
# several percent beyond the clock that the datasheet's peak was worked out from.
MOST_BANDWIDTH, MOST_COMPUTE = 1.05, 1.15


@dataclass(frozen=True)
class Results:
    """The good rows of one file, on one device."""

    frame: pd.DataFrame
    schema: Schema
    path: Path
    command: str

    @property
    def on_gpu(self) -> bool:
        """By what only a GPU has: a driver, a dtype, or an entry in the device table."""
        first = self.frame.iloc[0]
        has_driver = isinstance(first["driver"], str) and bool(first["driver"])
        return has_driver or first["dtype"] != "float32" or lookup(self.device) is not None

    @property
    def quick(self) -> bool:
        return bool((self.frame["quick"] == "yes").any())

    @property
    def device(self) -> str:
        return self.frame["device"].iloc[0]

    @property
    def dtype(self) -> str:
        return self.frame["dtype"].iloc[0]

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def spec(self) -> DeviceSpec | None:
        """What the device can do by its datasheet, if the table has it."""
        return lookup(self.device)

    def which(self, row) -> str:
        """A row in words: "gemm.csv, shape lm_head, M 64"."""
        return f"{self.path.name}, " + ", ".join(f"{key} {row[key]}" for key in self.schema.keys)


def folder(file: str = "*.csv") -> Path:
    """Where this checkout has a file of results, as seen from the working directory."""
    places = [Path(os.path.relpath(ROOT / place)) for place in PLACES]
    return next((place for place in places if any(place.glob(file))), places[0])


def load(folder, schema: Schema, command: str, fits: float = 0.75) -> Results:
    """The file of a schema: there, with its columns, from one device, nothing failed, not quick.

    At least `fits` of its rows did not run out of memory.

    A short measurement counts on a CPU, which is the rehearsal; on a GPU it does not, because
    clocks and counters have not settled by then.
    """
    path, run = schema.path(folder), f"`labkit experiment {command}`"
    require(path.is_file(), f"not run yet: {run} writes {path}")
    try:
        frame = table.read(path, schema)
    except UserError as error:
        raise AssertionError(str(error)) from None
    require(len(frame), f"{path} has no rows yet: run {run}")
    failed = frame[~frame["status"].isin(["ok", "out of memory"])]
    if len(failed):
        what = ", ".join(f"{key} {failed[key].iloc[0]}" for key in schema.keys)
        raise AssertionError(
            f"{path}, {what} has the status {failed['status'].iloc[0]!r}; {run} tries it again"
        )
    for name in ("device", "dtype", "date"):
        require(frame[name].notna().all(), f"{path}: {name} is empty in some rows")
    for name in ("device", "dtype"):
        found = list(frame[name].unique())
        require(len(found) == 1, f"{path} mixes {name} {found[:3]}: measure all of it on one")
    good = frame[frame["status"] == "ok"].reset_index(drop=True)
    require(len(good), f"{path}: every row ran out of memory; is something else on this device?")
    require(
        len(good) >= fits * len(frame),
        f"{path}: {len(frame) - len(good)} of {len(frame)} rows ran out of memory; is something "
        "else on this device?",
    )
    results = Results(good, schema, path, run)
    _check_dates(results)
    short = good[good["quick"] == "yes"]
    require(
        not (results.on_gpu and len(short)),
        f"{path}: {len(short)} rows are from --quick, too short for a GPU's clock and counters to "
        f"settle; {run} without it measures those again",
    )
    return results


def _check_dates(results: Results):
    for text in results.frame["date"].unique():
        try:
            when = datetime.fromisoformat(text)
            late = when - timedelta(days=1) > datetime.now(UTC)
        except (TypeError, ValueError):
            raise AssertionError(f"{results.path}: date {text!r} is no date with a zone") from None
        require(not late, f"{results.path}: the date {text} has not come yet")


def check_keys(results: Results, expected: list[dict]):
    """Every row that the experiment measures is there, in memory or out of it."""
    frame = table.read(results.path, results.schema)
    names = list(results.schema.keys)
    there = set(frame[names].itertuples(index=False, name=None))
    missing = [key for key in expected if tuple(key[name] for name in names) not in there]
    first = ", ".join(f"{name} {value}" for name, value in missing[0].items()) if missing else ""
    require(
        not missing,
        f"{results.path} lacks {len(missing)} of {len(expected)} rows, the first: {first}; "
        f"{results.command} goes on where it stopped",
    )


def check_rates(results: Results, **numerators):
    """A rate is its numerator over `ms`: tflops=FLOPs / 1e9, say, in a row's rounding."""
    frame = results.frame
    for place, ms in enumerate(frame["ms"]):
        require(
            ms >= FASTEST_CALL_MS,
            f"{results.which(frame.iloc[place])}: {ms} ms is no time that a call can take",
        )
    for name, numerator in numerators.items():
        right = np.asarray(numerator / frame["ms"], dtype=float)
        wrong = np.flatnonzero(~np.isclose(frame[name], right, rtol=1e-3))
        if len(wrong):
            row = frame.iloc[wrong[0]]
            raise AssertionError(
                f"{results.which(row)}: {name} says {row[name]:.5g}, but its sizes and its "
                f"{row['ms']:.5g} ms give {right[wrong[0]]:.5g}; if Coding Exercise 2 was wrong "
                f"when this was measured, delete {results.path} and measure again"
            )


def check_most(results: Results, name: str, most: float, rows=None, why: str = ""):
    """No row (of those selected) has more of something than a known device can do."""
    frame = results.frame if rows is None else results.frame[rows]
    over = frame[frame[name] > most]
    if len(over):
        row = over.loc[over[name].idxmax()]
        raise AssertionError(
            f"{results.which(row)}: {name} {row[name]:.5g} is more than a {results.spec.name} can "
            f"do ({most:.5g} at the very most){why}"
        )


def check_growth(results: Results, by: str, *series: str):
    """In each series, a hundred times the work takes longer; and no series is a copy of another.

    Less may not, where memory is the limit. On a CPU, where other programs slow some of the calls,
    only the ends are compared.
    """
    seen = {}
    for which, rows in results.frame.groupby(list(series)):
        rows = rows.sort_values(by)
        words = ", ".join(map(str, which))
        times, half = rows["ms"].to_numpy(), len(rows) // 2
        few = rows[by].iloc[-1] < 100 * rows[by].iloc[0]
        rises = not results.on_gpu or np.median(times[half:]) > np.median(times[:half])
        require(
            few or (rises and times[-1] > 2 * times.min()),
            f"{results.path.name}, {words}: the times do not grow with {by} "
            f"({times[0]:.4g} ms for {rows[by].iloc[0]:g}, {times[-1]:.4g} ms for "
            f"{rows[by].iloc[-1]:g})",
        )
        twin = seen.setdefault(tuple(times), words)
        require(
            twin == words, f"{results.path.name}: {words} has the very times of {twin}: a copy?"
        )


def check_distinct(results: Results, share: float = 1 / 3):
    """Measured times scatter: a column of few values was not measured."""
    times = results.frame["ms"]
    require(
        times.nunique() >= share * len(times),
        f"{results.path.name}: {len(times)} rows have {times.nunique()} different times; "
        "measured ones scatter",
    )


def recorded_table(results: Results, row, which: str):
    """One table of a recording: there, with its columns, and without a number below zero."""
    path = results.path.parent / f"{row['workload']}_{which}.csv"
    require(path.is_file(), f"{path} is not there: {results.command} writes it")
    try:
        frame = pd.read_csv(path)
    except (ValueError, UnicodeDecodeError) as error:
        raise AssertionError(f"{path} cannot be read as a CSV file: {error}") from None
    missing = [name for name in RECORDED[which] if name not in frame]
    require(not missing, f"{path} lacks the columns {missing}")
    numbers = frame.select_dtypes("number")
    bad = [name for name in numbers if (numbers[name] < 0).any()]
    require(not bad, f"{path}: {bad} have values below zero")
    return path, frame


def check_summary(results: Results, row: dict):
    """NAME_summary.csv tells of the same run as the row."""
    path, table = recorded_table(results, row, "summary")
    said = table.set_index("what")["value"]
    for what in ("before_ms", "during_ms"):
        found = pd.to_numeric(said.get(what), errors="coerce")
        require_same(path, what, found, results.path.name, row[what], 1e-3)
    require(
        said.get("device") == results.device,
        f"{path} comes from {said.get('device')}, {results.path.name} from {results.device}",
    )


def require_same(path, left: str, found: float, right: str, expected: float, tolerance: float):
    require(
        abs(found - expected) <= tolerance * abs(expected),
        f"{path}: {left} ({found:.5g}) and {right} ({expected:.5g}) do not agree",
    )


def require_possible_peak(results: Results, row: dict, parameters: int):
    """A peak is above weights and moments, and within what PyTorch held."""
    state = 3 * results.itemsize * parameters / 2**30
    require(
        row["peak_gib"] >= 0.99 * state,
        f"{results.which(row)}: a peak of {row['peak_gib']:.4g} GiB is less than weights and "
        f"moments alone, {state:.4g} GiB",
    )
    require(
        not row["reserved_gib"] < row["peak_gib"],
        f"{results.which(row)}: {row['reserved_gib']:.4g} GiB reserved cannot hold a peak of "
        f"{row['peak_gib']:.4g} GiB",
    )
