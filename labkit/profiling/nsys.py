"""Nsight Systems as the recorder: run a command under `nsys profile`, read its SQLite export.

The export's tables are those of the "SQLite Schema Reference" in NVIDIA's documentation. Times
there are nanoseconds. Tables appear only when there is something in them.
"""

import re
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pandas as pd

from labkit.errors import NotThisMachine, UserError
from labkit.profiling.events import API_COLUMNS, RANGE_COLUMNS, Events, make_work

OLDEST = (2024, 5)  # --gpu-metrics-devices took its present name
_PUSH_POP = 59  # NvtxPushPopRange in ENUM_NSYS_EVENT_TYPE
METRICS = {
    "sm_active_pct": r"^SMs? Active",
    "tensor_active_pct": r"^Tensor (Active|Pipe)|Tensor Active",
    "dram_read_pct": r"^DRAM Read",
    "dram_write_pct": r"^DRAM Write",
}


def find_nsys() -> str:
    """The nsys on the PATH. NotThisMachine: there is none, it does not answer, or it is too old."""
    program = shutil.which("nsys")
    if program is None:
        raise NotThisMachine("no nsys on the PATH; --backend torch records without it")
    said = _run([program, "--version"]).stdout
    release = re.search(r"version (\d+)\.(\d+)", said)
    if not release:
        raise NotThisMachine(f"{program} does not say its version: {said.strip()[:80]!r}")
    if tuple(map(int, release.groups())) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise NotThisMachine(f"{program} is {release[0]}; {wanted} or later is needed")
    return program


def record(command: list[str], report: str | Path) -> tuple[Path, str]:
    """Run a command under nsys → (its SQLite export, a note or "").

    The command says when to record: torch.cuda.profiler.start() and stop(). GPU metrics are
    recorded where the driver allows it; the note says when it did not. UserError: nsys failed.
    """
    program, report = find_nsys(), Path(report).with_suffix(".nsys-rep")
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)  # of an earlier run: below, that it is there means success
    base = [
        program, "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true",
        f"--output={report}",
    ]  # fmt: skip
    note = ""
    done = _run([*base, "--gpu-metrics-devices=cuda-visible", *command])
    if done.returncode and not report.exists():
        note = "the GPU's performance counters may not be read here: no GPU metrics"
        done = _run([*base, *command])
    if done.returncode or not report.exists():
        raise UserError(f"nsys ended with status {done.returncode}: {_last_lines(done)}")
    export = report.with_suffix(".sqlite")
    done = _run([program, "export", "--type=sqlite", "--force-overwrite=true",
                 f"--output={export}", str(report)])  # fmt: skip
    if done.returncode or not export.exists():
        raise UserError(f"nsys could not export {report}: {_last_lines(done)}")
    return export, note


def _run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
    )


def _last_lines(done: subprocess.CompletedProcess) -> str:
    lines = (done.stdout + done.stderr).strip().splitlines()
    return " | ".join(lines[-5:]) or "it said nothing"


def read_sqlite(path: str | Path) -> Events:
    """The events of an export. Raises UserError if the file is none, or holds no GPU work."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} is not there")
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
        try:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path} is not an SQLite export of nsys: {error}") from None
        if "CUPTI_ACTIVITY_KIND_KERNEL" not in tables:
            raise UserError(f"{path} holds no kernels: nothing ran on the GPU while nsys recorded")
        api, ranges = _api(db, tables), _ranges(db, tables)
        work = make_work(_gpu(db, tables), api)
        metrics = _metrics(db, tables)
    main = int(ranges["thread"].iloc[0]) if len(ranges) else -1
    return Events(ranges, api, work, main, True, metrics)


def _query(db, sql: str, columns: list[str]) -> pd.DataFrame:
    frame = pd.DataFrame(db.execute(sql).fetchall(), columns=columns)
    for column in ("start_us", "end_us"):
        frame[column] = frame[column] / 1e3
    order = {"by": ["start_us", "end_us"], "ascending": [True, False]}
    return frame.sort_values(**order, ignore_index=True)


def _ranges(db, tables: set[str]) -> pd.DataFrame:
    if "NVTX_EVENTS" not in tables:
        return pd.DataFrame(columns=RANGE_COLUMNS)
    sql = f"""SELECT COALESCE(n.text, s.value), n.start, n.end, n.globalTid FROM NVTX_EVENTS n
              LEFT JOIN StringIds s ON s.id = n.textId
              WHERE n.eventType = {_PUSH_POP} AND n.end IS NOT NULL"""
    return _query(db, sql, RANGE_COLUMNS)


def _api(db, tables: set[str]) -> pd.DataFrame:
    if "CUPTI_ACTIVITY_KIND_RUNTIME" not in tables:
        return pd.DataFrame(columns=API_COLUMNS)
    sql = """SELECT s.value, r.start, r.end, r.globalTid, r.correlationId
             FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN StringIds s ON s.id = r.nameId"""
    api = _query(db, sql, API_COLUMNS)
    return api.assign(name=api["name"].str.replace(r"_v\d+$", "", regex=True))


def _gpu(db, tables: set[str]) -> pd.DataFrame:
    columns = ["name", "kind", "start_us", "end_us", "stream", "correlation"]
    kernels = """SELECT s.value, 'kernel', k.start, k.end, k.streamId, k.correlationId
                 FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName"""
    parts = [kernels]
    for kind, table in {"copy": "MEMCPY", "fill": "MEMSET"}.items():
        if f"CUPTI_ACTIVITY_KIND_{table}" in tables:
            parts.append(f"""SELECT '{table.title()}', '{kind}', start, end, streamId, correlationId
                             FROM CUPTI_ACTIVITY_KIND_{table}""")
    return _query(db, " UNION ALL ".join(parts), columns)


def _metrics(db, tables: set[str]) -> pd.DataFrame | None:
    """Hardware counters, a row a sample: time_us and a column a metric of METRICS (percent)."""
    if not {"GPU_METRICS", "TARGET_INFO_GPU_METRICS"} <= tables:
        return None
    names = dict(db.execute("SELECT DISTINCT metricId, metricName FROM TARGET_INFO_GPU_METRICS"))
    column_of = {
        number: column
        for column, pattern in METRICS.items()
        for number, name in names.items()
        if re.search(pattern, name)
    }
    rows = db.execute("SELECT timestamp, metricId, value FROM GPU_METRICS")
    frame = pd.DataFrame(rows.fetchall(), columns=["time_us", "metric", "value"])
    frame = frame[frame["metric"].isin(column_of)]
    frame = frame.assign(metric=frame["metric"].map(column_of), time_us=frame["time_us"] / 1e3)
    return frame.pivot_table(index="time_us", columns="metric", values="value").reset_index()
