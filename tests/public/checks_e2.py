"""What the tests of Experiment 2 look for in a folder of results."""

from types import SimpleNamespace

from labkit.config import ModelConfig
from labkit.experiments import gemm, ops, regimes
from labkit.experiments.table import GEMM, OPS, REGIMES, SUSTAINED
from tests.public.judging import require
from tests.public.result_files import (
    MOST_BANDWIDTH,
    MOST_COMPUTE,
    Results,
    check_distinct,
    check_growth,
    check_keys,
    check_most,
    check_rates,
    load,
)

SMALLEST_LAST_OP = {True: 2**29, False: 2**24}  # bytes of the largest tensor, on a GPU and a CPU


def check_gemm(folder):
    """gemm.csv: every shape at every M, with rates that follow from the times."""
    results = load(folder, GEMM, "gemm")
    machine = SimpleNamespace(on_gpu=results.on_gpu)
    check_keys(results, gemm.grid(machine, ModelConfig.preset("olmoe-1b-7b"), results.quick))
    M, k, n = (results.frame[name].astype(float) for name in ("M", "k", "n"))
    flops, moved = 2 * M * k * n, results.itemsize * (M * k + k * n + M * n)
    check_rates(results, tflops=flops / 1e9, gbs=moved / 1e6)
    check_distinct(results)
    check_growth(results, "M", "shape")
    _check_compute(results)
    _check_bandwidth(results, _beyond_l2(results, moved))


def check_sustained(folder):
    """gemm_sustained.csv: one multiply for seconds, interval after interval."""
    results = load(folder, SUSTAINED, "gemm")
    frame, least_s = results.frame, 5.5 if results.on_gpu else 1.5
    n, ends_s = frame["n"].astype(float), frame["t_s"]
    check_rates(results, tflops=2 * n**3 / 1e9)
    check_distinct(results)
    require(
        ends_s.iloc[-1] >= least_s and len(frame) >= 10,
        f"{results.path}: {len(frame)} intervals up to {ends_s.iloc[-1]:.3g} s; a held multiply "
        f"has at least 10 of them, and {least_s:g} s",
    )
    took_s = ends_s.diff().fillna(ends_s.iloc[0])
    off = (frame["ms"] * frame["calls"] / 1e3 - took_s).abs() > 0.02 * took_s + 1e-4
    if off.any():
        row = frame[off].iloc[0]
        raise AssertionError(
            f"{results.which(row)}: {row['calls']:g} calls of {row['ms']:.4g} ms are not the "
            f"{took_s[off].iloc[0]:.4g} s since the row before"
        )
    _check_compute(results)


def check_ops(folder):
    """ops.csv: four operations, from cache-sized to large tensors, cold and warm."""
    results = load(folder, OPS, "ops")
    frame, step = results.frame, 2 if results.quick else 1
    largest = max(int(frame["tensor_bytes"].max()), SMALLEST_LAST_OP[results.on_gpu])
    caches = ("cold", "warm") if results.on_gpu else ("warm",)
    powers = range(ops.SMALLEST.bit_length() - 1, largest.bit_length(), step)
    check_keys(results, [
        {"op": op, "tensor_bytes": 2**power, "cache": cache}
        for op in ops.MOVED_TENSORS for cache in caches for power in powers
    ])  # fmt: skip
    moved = frame["op"].map(ops.MOVED_TENSORS) * frame["tensor_bytes"].astype(float)
    check_rates(results, gbs=moved / 1e6)
    check_distinct(results)
    check_growth(results, "tensor_bytes", "op", "cache")
    _check_bandwidth(results, (frame["cache"] == "cold") & _beyond_l2(results, moved))


def check_regimes(folder):
    """regimes.csv: the launch and three workloads, with counters that fit what they say."""
    results = load(folder, REGIMES, "regimes")
    frame = results.frame
    machine = SimpleNamespace(
        on_gpu=results.on_gpu, dtype=SimpleNamespace(itemsize=results.itemsize)
    )
    works = {work.name: work for work in regimes.workloads(machine)}
    check_keys(results, [{"workload": name} for name in works])
    flops, moved = (
        frame["workload"].map(lambda name, what=what: getattr(works[name], what)).astype(float)
        for what in ("flops", "moved_bytes")
    )
    check_rates(results, tflops=flops / 1e9, gbs=moved / 1e6)
    check_distinct(results, share=1)
    launch, large, _, small = (frame[frame["workload"] == name].iloc[0] for name in works)
    require(
        large["tflops"] > 0.7 * small["tflops"] and large["ms"] > launch["ms"],
        f"{results.path.name}: the large multiply ({large['tflops']:.4g} TFLOP/s, {large['ms']:.4g}"
        f" ms) is slower than the small one ({small['tflops']:.4g} TFLOP/s) or no longer than the "
        f"bare launch ({launch['ms']:.4g} ms)",
    )
    for row in frame.to_dict("records"):
        _check_counters(results, row)
    _check_compute(results)
    _check_bandwidth(results, frame["workload"].str.startswith("add"))


def _check_counters(results: Results, row: dict):
    """Run long enough, shares between 0 and 100 %, and the regime that they stand for."""
    least_ms = 2500 if results.on_gpu else 500
    require(
        row["calls"] * row["ms"] >= least_ms,
        f"{results.which(row)}: {row['calls']:g} calls of {row['ms']:.4g} ms are less than "
        f"{least_ms / 1e3:g} s, too short for the counters",
    )
    known = {name: value for name, value in row.items() if name.endswith("_pct") and value == value}
    for name, value in known.items():
        require(0 <= value <= 100, f"{results.which(row)}: {name} is {value:g} %")
    by_counters = regimes.regime(
        {name: value for name, value in known.items() if name != "cpu_pct"}
    )
    require(
        by_counters is None or row["regime"] == by_counters,
        f"{results.which(row)}: it says {row['regime']}, and its counters {by_counters}",
    )


def check_one_machine(folder):
    """All files come from the same device in the same dtype, and agree on the large multiply."""
    found = [
        load(folder, schema, command)
        for schema, command in ((GEMM, "gemm"), (SUSTAINED, "gemm"), (OPS, "ops"),
                                (REGIMES, "regimes"))
    ]  # fmt: skip
    for what in ("device", "dtype"):
        by_file = {one.path.name: getattr(one, what) for one in found}
        require(
            len(set(by_file.values())) == 1,
            f"the files were measured with different {what}s: {by_file}; measure all on one",
        )
    held, large = found[1].frame["ms"].median(), found[3].frame
    large = large[large["workload"].str.startswith("large")]["ms"].iloc[0]
    most = 2 if found[0].on_gpu else 5  # other programs share a CPU
    require(
        1 / most < held / large < most,
        f"the same multiply takes {held:.4g} ms in gemm_sustained.csv and {large:.4g} ms in "
        "regimes.csv; were both measured on an idle machine?",
    )


def _beyond_l2(results: Results, moved):
    """Rows that move more than the L2 cache holds: the cache cannot keep what they write."""
    l2_mib = results.spec.l2_mib if results.spec and results.spec.l2_mib else 256
    return moved > l2_mib * 2**20


def _check_compute(results: Results):
    if results.spec and results.dtype in results.spec.peaks:
        check_most(results, "tflops", MOST_COMPUTE * results.spec.peak(results.dtype))


def _check_bandwidth(results: Results, rows):
    if results.spec:
        why = "; was the cache flushed before each call?"
        check_most(results, "gbs", MOST_BANDWIDTH * results.spec.bandwidth_gbs, rows, why)
