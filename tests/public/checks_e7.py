"""What the tests of Experiment 7 look for in a folder of results."""

from itertools import pairwise

import numpy as np
import pandas as pd

from labkit.config import PRESETS, ModelConfig
from labkit.experiments.table import SWEEP
from labkit.memory_model import step_bytes
from tests.public.judging import require
from tests.public.result_files import (
    MOST_COMPUTE,
    Results,
    load,
    require_possible_peak,
    require_same,
)
from tests.public.slips_c3 import floors, flops, params

STEP = list(SWEEP.keys[:-1])  # a configuration: the repeats of it agree in these
SIZES = ("layers", "micro_batch_size", "seqlen", "micro_batches")
KINDS = ["forward_ms", "backward_ms", "recompute_ms", "optimizer_ms"]
AGAIN = "if another program was busy, delete the row, and the same command measures it again"
MORE = "`labkit sweep --layers 1,2,4 --micro-batch-size 1,2,4` adds some"


def check_rows(folder):
    """sweep.csv: enough configurations of one model for a performance model to rest on."""
    results = _load(folder)
    one = results.frame[results.frame["micro_batches"] == 1]
    require(len(one), f"{results.path} has no step of a single micro batch; {MORE}")
    model = one["model"].mode()[0]
    steps = one[one["model"] == model].drop_duplicates(STEP)
    counts = {
        "configurations": (len(steps), 12),
        "numbers of layers": (steps["layers"].nunique(), 2),
        "numbers of tokens": (steps["tokens"].nunique(), 3),
        "settings of recompute": (steps["recompute"].nunique(), 2),
    }
    for what, (found, least) in counts.items():
        require(
            found >= least,
            f"{results.path}, {what} of {model}: {found}; a performance model needs at least "
            f"{least}; {MORE}",
        )


def check_rates(folder):
    """Times are times, rates follow from them, no step beats its arithmetic, no row is a copy."""
    results = _load(folder)
    _check_copies(results)
    for row in results.frame.to_dict("records"):
        which = results.which(row)
        for name in ("step_ms", "p10_ms", "p90_ms", "steps", "peak_gib"):
            require(0 < row[name] < np.inf, f"{which}: {name} is {row[name]}, and must be above 0")
        require(
            row["p10_ms"] <= row["step_ms"] <= row["p90_ms"],
            f"{which}: {row['step_ms']:.5g} ms is no median between the tenths "
            f"{row['p10_ms']:.5g} and {row['p90_ms']:.5g}",
        )
        tokens = row["micro_batches"] * row["micro_batch_size"] * row["seqlen"]
        rate = 1e3 * tokens / row["step_ms"]
        require_same(which, "tokens", row["tokens"], "its sizes'", tokens, 0)
        require_same(which, "tokens_per_s", row["tokens_per_s"], "its step's", rate, 1e-3)
        _check_work(results, row)


def _check_copies(results: Results):
    seen = {}
    for row in results.frame.to_dict("records"):
        twin = seen.setdefault((row["step_ms"], row["p10_ms"], row["p90_ms"]), row)
        require(
            twin is row,
            f"{results.which(row)}: it has the very times of {results.which(twin)}: a copy? "
            "Delete one of the two",
        )
    times = results.frame["step_ms"]
    require(
        times.nunique() > 0.9 * len(times),
        f"{results.path}: of {len(times)} steps only {times.nunique()} have different times; "
        "measured ones scatter",
    )


def _check_work(results: Results, row: dict):
    """MFU, and the floor of the arithmetic, if the device is known."""
    spec = results.spec
    if spec is None or "MIG" in results.device:
        return
    which, cfg, seqlen = results.which(row), _config(row), int(row["seqlen"])
    mfu = 3 * row["tokens"] * flops(cfg, seqlen) / (spec.peak_tflops * 1e7 * row["step_ms"])
    require_same(which, "mfu_pct", row["mfu_pct"], "the model's FLOPs over peak", mfu, 0.01)
    floor = 3 * floors(cfg, int(row["tokens"]) // seqlen, seqlen, spec)[0]
    require(
        row["step_ms"] >= floor / MOST_COMPUTE,
        f"{which}: {row['step_ms']:.4g} ms is below the compute floor of {floor:.4g} ms, which no "
        f"{spec.name} can reach",
    )


def check_kinds(folder):
    """The kinds of work sum to the step, and only a step that recomputes has recompute time."""
    results = _load(folder)
    rows = results.frame[results.frame["micro_batches"] == 1]
    require(len(rows), f"{results.path} has no step of a single micro batch; {MORE}")
    sums = rows[KINDS].sum(axis=1, skipna=False) / rows["step_ms"]
    for row, share in zip(rows.to_dict("records"), sums, strict=True):
        which, again = results.which(row), row["recompute"] == "yes"
        require(  # other programs share a CPU, and one row may have met them
            0.7 < share < 1.5 or (share > 0 and not results.on_gpu),
            f"{which}: forward, backward, recompute and optimizer take {share:.3g} times the step: "
            f"{AGAIN}",
        )
        require(
            min(row["forward_ms"], row["backward_ms"], row["optimizer_ms"]) > 0,
            f"{which}: every step has a forward, a backward and an optimizer time above 0",
        )
        require(
            again or row["recompute_ms"] == 0,
            f"{which}: {row['recompute_ms']:.4g} ms of recompute, where nothing is recomputed",
        )
        require(
            not again or row["recompute_ms"] > 0,
            f"{which}: no recompute time; were Coding Exercises 5 and 7 done when this was "
            f"measured? If not, delete {results.path} and measure again",
        )
    least, most = (0.85, 1.2) if results.on_gpu else (0.6, 1.6)
    require(
        least < sums.median() < most,
        f"{results.path}: forward, backward, recompute and optimizer take {sums.median():.3g} "
        "times their step, in the median of all rows; they sum to it",
    )
    large = rows[rows["tokens"] >= (4096 if results.on_gpu else 1)]  # fewer wait for Python
    ratio = (large["backward_ms"] / large["forward_ms"]).median()
    require(
        not ratio < 1,
        f"{results.path}: the backward takes {ratio:.3g} times the forward; it multiplies twice "
        "as much",
    )


def check_growth(folder):
    """More tokens, more layers and recomputation take no less time."""
    results = _load(folder)
    steps = _steps(results)
    if results.on_gpu:  # other programs share a CPU
        _check_each_series(results, steps)
    for (model, layers), rows in steps.groupby(["model", "layers"]):
        tokens, times = rows["tokens"], rows["step_ms"]
        few, many = (times[tokens == end].median() for end in (tokens.min(), tokens.max()))
        require(
            tokens.max() < 16 * tokens.min() or many > 1.3 * few,
            f"{results.path.name}, model {model}, layers {layers}: steps of {tokens.max():g} tokens"
            f" take {many:.4g} ms, and of {tokens.min():g} tokens {few:.4g} ms: the time does not "
            "grow with the tokens",
        )
    ratios = [again["step_ms"] / kept["step_ms"] for kept, again in _pairs(steps)]
    require(
        not ratios or np.median(ratios) > (1 if results.on_gpu else 0.8),
        f"{results.path}: steps that recompute take {np.median(ratios or [0]):.3g} times those "
        "that do not, in the median; computing more takes longer",
    )


def _check_each_series(results: Results, steps: pd.DataFrame):
    for by in SIZES:
        for small, large in (pair for rows in _series(steps, by) for pair in pairwise(rows)):
            require(  # tenths, because steps that wait for Python scatter
                large["p90_ms"] >= 0.9 * small["p10_ms"],
                f"{_which(results, large)} takes {large['step_ms']:.4g} ms, and "
                f"{small['step_ms']:.4g} with {by} {small[by]}; more work is not faster: {AGAIN}",
            )


def check_memory(folder):
    """The peak is above the state, grows with the step, and falls where activations are dropped."""
    results = _load(folder)
    for row in results.frame.to_dict("records"):
        require_possible_peak(results, row, params(_config(row)))
    steps = _steps(results)
    for by in SIZES:
        for small, large in (pair for rows in _series(steps, by) for pair in pairwise(rows)):
            require(
                large["peak_gib"] >= 0.99 * small["peak_gib"],
                f"{_which(results, large)} peaks at {large['peak_gib']:.4g} GiB, and at "
                f"{small['peak_gib']:.4g} with {by} {small[by]}; more does not need less",
            )
    for kept, again in _pairs(steps):
        factor = 0.98 if 1.05 * _peak(results, again) < 0.9 * _peak(results, kept) else 1.01
        require(
            again["peak_gib"] <= factor * kept["peak_gib"],
            f"{_which(results, again)} peaks at {again['peak_gib']:.4g} GiB, and at "
            f"{kept['peak_gib']:.4g} with activations kept: nothing was saved",
        )


def _load(folder) -> Results:
    """Rows whose sizes make sense; what does not fit is a result here, so most may not have."""
    results = load(folder, SWEEP, "sweep", fits=0)
    for row in results.frame.to_dict("records"):
        which = results.which(row)
        require(row["model"] in PRESETS, f"{which}: there is no such model")
        require(row["recompute"] in ("no", "yes"), f"{which}: recompute is yes or no")
        for name in SIZES:
            require(
                row[name] >= 1 and row[name] % 1 == 0, f"{which}: {name} is no whole number above 0"
            )
    return results


def _steps(results: Results) -> pd.DataFrame:
    """The median of the repeats of each configuration."""
    columns = ["tokens", "step_ms", "p10_ms", "p90_ms", "peak_gib"]
    return results.frame.groupby(STEP)[columns].median().reset_index()


def _series(steps: pd.DataFrame, by: str):
    """Rows that differ only in `by`, in its order."""
    for _, rows in steps.groupby([name for name in STEP if name != by]):
        yield rows.sort_values(by).to_dict("records")


def _pairs(steps: pd.DataFrame) -> list[tuple[dict, dict]]:
    """(kept, recomputed) of each configuration that has both."""
    return [tuple(rows) for rows in _series(steps, "recompute") if len(rows) == 2]


def _peak(results: Results, row: dict) -> float:
    """An estimate in bytes: activations and loss without gradients, or all gradients without them.

    Where the second is more, recomputing saves nothing.
    """
    b, again = results.itemsize, row["recompute"] == "yes"
    sizes = int(row["micro_batch_size"]), int(row["seqlen"])
    found = step_bytes(_config(row), *sizes, again, b)
    gradients = found["gradients"]
    return max(sum(found.values()) - gradients, found["weights"] + gradients + found["moments"])


def _which(results: Results, row: dict) -> str:
    return f"{results.path.name}, " + ", ".join(f"{name} {row[name]}" for name in STEP)


def _config(row: dict) -> ModelConfig:
    return ModelConfig.preset(row["model"], n_layers=int(row["layers"]))
