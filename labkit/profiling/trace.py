"""Read the Chrome trace that torch.profiler (Kineto) writes."""

import gzip
import json
import zlib
from pathlib import Path

import pandas as pd

from labkit.errors import UserError
from labkit.profiling.events import (
    API_COLUMNS,
    RANGE_COLUMNS,
    WORK_COLUMNS,
    Events,
    make_work,
    own_time,
)

_KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}


def read_trace(path: str | Path) -> Events:
    """The events of a trace file (`.json` or `.json.gz`). UserError: it is not one."""
    path = Path(path)
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            raw = json.load(file)["traceEvents"]
    except (ValueError, KeyError, TypeError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a trace of torch.profiler: {error!r}") from None
    spans = [event for event in raw if event.get("ph") == "X"]
    api = _api(spans)
    gpu = _gpu(spans)
    ranges = _frame(spans, {"user_annotation"})[RANGE_COLUMNS]
    on_gpu = len(gpu) > 0
    work = make_work(gpu, api) if on_gpu else _operators(spans)
    main = int(ranges["thread"].iloc[0]) if len(ranges) else -1
    return Events(ranges, api, work, main, on_gpu)


def _frame(spans: list[dict], categories: set[str]) -> pd.DataFrame:
    rows = [
        (e["name"], e["ts"], e["ts"] + e["dur"], e["tid"], e["cat"], e.get("args", {}))
        for e in spans
        if e.get("cat") in categories
    ]
    columns = ["name", "start_us", "end_us", "thread", "cat", "args"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.sort_values(["start_us", "end_us"], ascending=[True, False], ignore_index=True)


def _api(spans: list[dict]) -> pd.DataFrame:
    frame = _frame(spans, {"cuda_runtime", "cuda_driver"})
    frame["correlation"] = [args.get("correlation", -1) for args in frame["args"]]
    return frame[API_COLUMNS]


def _gpu(spans: list[dict]) -> pd.DataFrame:
    frame = _frame(spans, set(_KINDS))
    frame["kind"] = frame["cat"].map(_KINDS)
    frame["stream"] = [args.get("stream", 0) for args in frame["args"]]
    frame["correlation"] = [args.get("correlation", -1) for args in frame["args"]]
    return frame


def _operators(spans: list[dict]) -> pd.DataFrame:
    """CPU operators as work; each counts its own time, so that they sum to what was spent."""
    ops = _frame(spans, {"cpu_op"})
    ops["busy_us"] = 0.0
    for _, mine in ops.groupby("thread"):
        ops.loc[mine.index, "busy_us"] = own_time(mine)
    ops = ops.assign(kind="operator", stream=0, launch_us=ops["start_us"])
    return ops[WORK_COLUMNS]
