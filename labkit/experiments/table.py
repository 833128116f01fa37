"""Results that survive: CSV files that grow by a row when it is measured, and go on when restarted.

The columns of every experiment are here, with their units in their names. A cell of what is not
known is empty.
"""

import csv
import io
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import UserError
from labkit.files import whole_file

IDENTITY = ("device", "dtype", "schema")  # what the rows of one file have in common
FACTS = ("date", *IDENTITY, "torch", "driver")
TEXT = {"shape", "op", "cache", "kernel", "workload", "model", "weights", "moe_impl", "recompute",
        "stage", "regime", "regime_by", "host_bound", "throttle", "quick", "status",
        *FACTS}  # fmt: skip


@dataclass(frozen=True)
class Schema:
    """The columns of one file. Rows that agree in `keys` are measurements of the same thing.

    `quick` says "yes" of a short measurement, which a full run repeats; `status` is "ok", "out of
    memory" or "failed: …". `version` changes when a column changes its meaning.
    """

    name: str
    keys: tuple[str, ...]
    measured: tuple[str, ...]
    version: int = 1

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.keys, *self.measured, "quick", "status", *FACTS)

    def path(self, folder) -> Path:
        return Path(folder) / f"{self.name}.csv"


_TIMED = ("ms", "spread", "calls", "host_ms", "host_bound", "sm_clock_mhz", "throttle")
COUNTERS = ("kernel_pct", "memory_busy_pct", "sm_active_pct", "tensor_active_pct", "dram_pct",
             "cpu_pct", "sm_clock_mhz", "power_w", "temperature_c", "throttle")  # fmt: skip

GEMM = Schema(
    "gemm", ("shape", "M", "k", "n"),
    ("tflops", "gbs", "intensity_flop_per_byte", "bound_tflops", *_TIMED),
)  # fmt: skip
SUSTAINED = Schema(
    "gemm_sustained", ("t_s",),
    ("n", "calls", "ms", "tflops", "sm_clock_mhz", "power_w", "temperature_c", "throttle"),
)  # fmt: skip
OPS = Schema("ops", ("op", "tensor_bytes", "cache"), ("moved_bytes", "gbs", *_TIMED))
REGIMES = Schema(
    "regimes", ("workload",),
    ("calls", "ms", "tflops", "gbs", "intensity_flop_per_byte", *COUNTERS, "regime", "regime_by"),
)  # fmt: skip
KERNELS = Schema(
    "kernels", ("kernel", "size"),
    ("model", "flops", "moved_bytes", "kernels", "tflops", "gbs", *_TIMED),
)  # fmt: skip
FORWARD = Schema(
    "forward", ("workload",),
    ("model", "weights", "layers", "micro_batch_size", "seqlen", "moe_impl", "steps", "before_ms",
     "during_ms", "compute_floor_ms", "memory_floor_ms", "busy_ms", "idle_ms", "launch_bound_ms",
     "operations", "synchronizations", "regime", "regime_by"),
)  # fmt: skip
TRAIN = Schema(
    "train", ("workload",),
    ("model", "layers", "micro_batch_size", "seqlen", "recompute", "moe_impl", "steps", "before_ms",
     "during_ms", "busy_ms", "idle_ms", "launch_bound_ms", "forward_ms", "backward_ms",
     "recompute_ms", "optimizer_ms", "operations"),
)  # fmt: skip
ROUTING = Schema(
    "routing", ("layer",),
    ("model", "tokens", "experts", "experts_per_token", "busiest_over_mean", "empty_experts",
     "gpus2_over_mean", "gpus4_over_mean", "gpus8_over_mean"),
)  # fmt: skip
ROUTED = Schema("routing_experts", ("layer", "expert"), ("model", "rows", "over_mean"))
_STEP = ("model", "layers", "micro_batch_size", "seqlen", "recompute")
MICRO_BATCHES = Schema(
    "micro_batches", (*_STEP, "global_batch_size"),
    ("micro_batches", "step_ms", "spread", "steps", "tokens_per_s", "peak_gib", "reserved_gib"),
)  # fmt: skip
STAGES = Schema("stages", (*_STEP, "stage"), ("forward_ms", "backward_ms", "recompute_ms"))
STEPS = Schema(
    "stages_steps", _STEP,
    ("step_ms", "optimizer_ms", "optimizer_floor_ms", "tokens_per_s", "mfu_pct", "peak_gib",
     "state_gib", *COUNTERS),
)  # fmt: skip

SWEEP = Schema(
    "sweep", (*_STEP, "micro_batches", "repeat"),
    ("position", "tokens", "step_ms", "p10_ms", "p90_ms", "spread", "steps", "host_ms",
     "forward_ms", "backward_ms", "recompute_ms", "optimizer_ms", "head_forward_ms",
     "head_backward_ms", "tokens_per_s", "mfu_pct", "peak_gib", "reserved_gib", *COUNTERS),
)  # fmt: skip


class Table:
    """The file of one schema in a folder, opened to go on with.

    `facts` describe the machine (FACTS). Raises UserError, before anything is measured, for a
    folder that cannot be written and for a file whose rows were measured under other facts.
    """

    def __init__(self, folder, schema: Schema, facts: dict, quick: bool = False):
        self.schema, self.path = schema, schema.path(folder)
        self._common = {**facts, "schema": schema.version, "quick": "yes" if quick else "no"}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                rows = _rows(self.path, schema) if file.tell() else []
                self._check_identity(rows)
                file.truncate(_complete_bytes(self.path.read_bytes()))
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        self._done = {self._key(row) for row in rows if self._counts(row)}

    def _check_identity(self, rows: list[dict]) -> None:
        for name in IDENTITY:
            here = _cell(self._common[name])
            if others := sorted({row[name] for row in rows} - {here}):
                raise UserError(
                    f"{self.path} was measured with {name} {others[0]!r}, and this run has {here!r}"
                    f"; move it aside (mv {self.path} {self.path}.old) or choose another output"
                )

    def _counts(self, row: dict) -> bool:
        """A failed row is tried again, and a quick row does not stand in for a full one."""
        good_enough = row["quick"] == "no" or self._common["quick"] == "yes"
        return good_enough and not row["status"].startswith("failed")

    def _key(self, row: dict) -> tuple:
        return tuple(_cell(row[name]) for name in self.schema.keys)

    def __len__(self) -> int:
        return len(self._done)

    def has(self, **key) -> bool:
        """Whether this has been measured, as thoroughly as this run measures."""
        return self._key(key) in self._done

    def append(self, row: dict) -> None:
        """Write a row and hand it to the system, so that a killed run keeps it."""
        new = not self.path.exists() or not self.path.stat().st_size
        text = _csv([self._complete(row)], self.schema, header=new)
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write(text)
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        self._done.add(self._key(row))

    def replace(self, rows: list[dict]) -> None:
        """Write all the rows in place of what is there: for a series that is one measurement."""
        rows = [self._complete(row) for row in rows]
        with _whole_file(self.path) as draft:
            draft.write_text(_csv(rows, self.schema, header=True), encoding="utf-8")
        self._done = {self._key(row) for row in rows}

    def _complete(self, row: dict) -> dict:
        row = {"status": "ok", **self._common, **row}
        assert not (extra := row.keys() - set(self.schema.columns)), f"no column {extra}"
        return row

    def frame(self):
        return read(self.path, self.schema)


def save(figure, path) -> None:
    """Write a figure as a PNG. Raises UserError for a place that cannot be written."""
    with _whole_file(Path(path)) as draft:
        figure.savefig(draft, format="png")


def read(path, schema: Schema):
    """A DataFrame of a file that an experiment wrote; what is not known is NaN.

    The last measurement of a thing counts, and a last line that a killed run cut short does not.
    Raises UserError for an absent file, and for a column that is missing, unknown or no number.
    """
    import pandas as pd

    path = Path(path)
    if not path.is_file():
        from labkit.experiments import EXPERIMENTS

        name = next(name for name in EXPERIMENTS if schema.name.startswith(name))
        raise UserError(f"{path} does not exist: `labkit experiment {name}` writes it")
    frame = pd.DataFrame(_rows(path, schema), columns=list(schema.columns), dtype="object")
    frame = frame.mask(frame == "")
    for name in schema.columns:
        if name not in TEXT:
            frame[name] = _numbers(frame[name], path)
    return frame.drop_duplicates(list(schema.keys), keep="last", ignore_index=True)


def _numbers(column, path):
    import pandas as pd

    numbers = pd.to_numeric(column, errors="coerce")
    if bad := column[numbers.isna() & column.notna()].tolist():
        raise UserError(f"{path}: column {column.name!r} holds {bad[0]!r}, which is no number")
    return numbers


def _rows(path: Path, schema: Schema) -> list[dict]:
    """The complete lines of a file as texts by column. Raises UserError for any other file."""
    try:
        data = path.read_bytes()
        complete = _complete_bytes(data)
        if not complete and not _csv([], schema, header=True).encode().startswith(data):
            raise csv.Error("its one line is not the head of a table")
        text = data[:complete].decode("utf-8")
        header, *lines = list(csv.reader(io.StringIO(text, newline=""))) or [schema.columns]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as a CSV file: {error}") from None
    missing = [name for name in schema.columns if name not in header]
    unknown = [name for name in header if name not in schema.columns]
    if missing or unknown:
        wrong = [f"lacks the columns {missing}"] * bool(missing)
        wrong += [f"has the unknown columns {unknown}"] * bool(unknown)
        raise UserError(f"{path} {' and '.join(wrong)}; move it aside and measure again")
    for number, line in enumerate(lines, start=2):
        if len(line) != len(header):
            raise UserError(
                f"{path}, line {number}: {len(line)} cells under {len(header)} columns; "
                "delete that line, and it is measured again"
            )
    return [dict(zip(header, line, strict=True)) for line in lines]


def _complete_bytes(data: bytes) -> int:
    """How many bytes there are up to the end of the last line that was written to its end."""
    return data.rfind(b"\n") + 1


def _csv(rows: list[dict], schema: Schema, header: bool) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow(schema.columns)
    writer.writerows([_cell(row.get(name)) for name in schema.columns] for row in rows)
    return text.getvalue()


def _cell(value) -> str:
    """A value as one line of text: six digits of a float, nothing for None and NaN."""
    if value is None or value != value:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())


@contextmanager
def _whole_file(path: Path):
    """As `files.whole_file`, with a UserError for a place that cannot be written."""
    try:
        with whole_file(path) as draft:
            yield draft
    except OSError as error:
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} cannot be written ({os.strerror(error.errno) if error.errno else error}); "
        "choose another folder with `output` (--output)"
    )
