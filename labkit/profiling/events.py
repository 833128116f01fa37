"""What a recording holds, whoever recorded it: ranges, API calls, and the work that they launched.

Times are microseconds on one clock. Work is a GPU operation (kernel, copy, fill) or, where there is
no GPU, a CPU operator. `thread` is the thread that opened, called or launched.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

RANGE_COLUMNS = ["name", "start_us", "end_us", "thread"]
API_COLUMNS = ["name", "start_us", "end_us", "thread", "correlation"]
WORK_COLUMNS = ["name", "kind", "start_us", "end_us", "busy_us", "stream", "thread", "launch_us"]


@dataclass(frozen=True, eq=False)
class Events:
    """One recording, as three DataFrames.

    ranges: RANGE_COLUMNS. api: API_COLUMNS; CUDA calls, none on a CPU. work: WORK_COLUMNS, sorted
    by start; kind is "kernel", "copy", "fill" or "operator", and busy_us is the operation's own
    time, without the operators that it called. metrics: hardware counters, a row a sample (time_us
    and columns in percent), where they were recorded.
    """

    ranges: pd.DataFrame
    api: pd.DataFrame
    work: pd.DataFrame
    main_thread: int
    on_gpu: bool
    metrics: pd.DataFrame | None = None


def make_work(gpu: pd.DataFrame, api: pd.DataFrame) -> pd.DataFrame:
    """GPU operations (name, kind, start_us, end_us, stream, correlation) with their launches.

    An operation belongs to the thread that called the API with its correlation number; one whose
    call was not recorded counts as launched when it started, by no thread.
    """
    calls = api.drop_duplicates("correlation").set_index("correlation")
    launch = calls.reindex(gpu["correlation"])
    return (
        gpu.assign(
            busy_us=gpu["end_us"] - gpu["start_us"],
            thread=launch["thread"].fillna(-1).to_numpy(np.int64),
            launch_us=np.where(
                launch["start_us"].isna(), gpu["start_us"], launch["start_us"]
            ),
        )[WORK_COLUMNS]
        .sort_values("start_us", ignore_index=True)
    )  # fmt: skip


def own_time(ops: pd.DataFrame) -> np.ndarray:
    """The time of each nested interval without its children's; one thread, sorted by start."""
    starts, ends = ops["start_us"].to_numpy(), ops["end_us"].to_numpy()
    own, open_ops = ends - starts, []
    for i, start in enumerate(starts):
        while open_ops and ends[open_ops[-1]] <= start:
            open_ops.pop()
        if open_ops:
            own[open_ops[-1]] -= ends[i] - start
        open_ops.append(i)
    return own
