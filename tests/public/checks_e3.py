"""What the tests of Experiment 3 look for in a folder of results."""

from dataclasses import replace

import numpy as np

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec
from labkit.experiments.forward import passes
from labkit.experiments.table import FORWARD
from tests.public import slips_c3
from tests.public.judging import require
from tests.public.result_files import (
    MOST_COMPUTE,
    Results,
    check_keys,
    check_summary,
    load,
    recorded_table,
    require_same,
)

SMALL, LARGE, NAIVE = (one.name for one in passes(on_gpu=True))
PARTS = ("attn", "attn_norm", "ffn", "ffn.router", "ffn.experts")  # of each layer


def check_passes(folder):
    """forward.csv: three passes of one model, in the sizes that the experiment asks for."""
    results = _load(folder)
    for what in ("model", "weights", "layers"):
        found = results.frame[what].unique().tolist()
        require(len(found) == 1, f"{results.path}: the passes have different {what}: {found}")
    rows = results.frame.set_index("workload")
    for one in passes(results.on_gpu):
        for what in ("micro_batch_size", "seqlen", "moe_impl"):
            found, asked = rows.loc[one.name, what], getattr(one, what)
            require(
                found == asked,
                f"{results.path.name}, {one.name}: {what} is {found}, the experiment has {asked}",
            )
    times = results.frame[["before_ms", "during_ms", "busy_ms"]]
    require(
        (times > 0).all(axis=None) and times.stack().nunique() == times.size,
        f"{results.path}: measured times are above 0 and all different; found {times.to_numpy()}",
    )


def check_floors(folder):
    """forward.csv: the two floors of each pass are right, and no pass is below them."""
    results = _load(folder)
    cfg, known = _config(results), results.spec
    if "MIG" in results.device:  # its rates are a share of the GPU's, which the file does not tell
        known = None
    device = known or _device_of(results, cfg)
    for row in results.frame.to_dict("records"):
        found = row["compute_floor_ms"], row["memory_floor_ms"]
        right = slips_c3.floors(cfg, int(row["micro_batch_size"]), int(row["seqlen"]), device)
        require(
            np.allclose(found, right, rtol=0.01 if known else 0.3),
            f"{results.which(row)}: the floors say {found[0]:.4g} and {found[1]:.4g} ms, and are "
            f"{right[0]:.4g} and {right[1]:.4g}; if Coding Exercise 3 was wrong when this was "
            f"measured, delete {results.path} and measure again",
        )
        require(
            not known or row["before_ms"] >= max(found) / MOST_COMPUTE,
            f"{results.which(row)}: {row['before_ms']:.4g} ms is below the floor of "
            f"{max(found):.4g} ms, which no {results.spec and results.spec.name} can reach",
        )


def check_ranges(folder):
    """NAME_ranges.csv: every part of the model, and parts that sum to the whole."""
    results = _load(folder)
    layers = int(results.frame["layers"].iloc[0])
    expected = {f"layers.*.{part}": layers for part in PARTS} | {"layers.*": layers}
    expected |= dict.fromkeys(("step", "embed", "norm", "lm_head"), 1)
    for row in results.frame.to_dict("records"):
        path, table = recorded_table(results, row, "ranges")
        table = table.set_index("range")
        for part, instances in expected.items():
            require(
                part in table.index,
                f"{path} has no row {part!r}: was Coding Exercise 4 (annotate) done when it was "
                f"recorded? If not, delete {results.path} and record again",
            )
            found = table.loc[part, "instances"]
            require(
                abs(found - instances) < 0.01,
                f"{path}: {part} was open {found:g} times a pass, the model has it {instances}",
            )
        step = table.loc["step"]
        require_same(
            path,
            "the parts' own_ms",
            table["own_ms"].sum(),
            "the step's busy_ms",
            step["busy_ms"],
            0.01,
        )
        require_same(
            path,
            "the step's busy_ms",
            step["busy_ms"],
            "busy_ms in forward.csv",
            row["busy_ms"],
            1e-3,
        )
        require(
            (table["busy_ms"] <= table["span_ms"] * 1.01 + 1e-3).all(),
            f"{path}: a range is busy for longer than it lasts",
        )
        check_summary(results, row)


def check_kernels(folder):
    """NAME_kernels.csv: operations that sum to the pass, and a large pass that has more to do."""
    results = _load(folder)
    seen, gemms = {}, {}
    for row in results.frame.to_dict("records"):
        path, table = recorded_table(results, row, "kernels")
        require_same(
            path,
            "the kernels' ms",
            table["ms"].sum(),
            "busy_ms in forward.csv",
            row["busy_ms"],
            0.02,
        )
        require_same(
            path,
            "the kernels' count",
            table["count"].sum(),
            "operations in forward.csv",
            row["operations"],
            0.02,
        )
        require_same(
            path,
            "count × mean_us",
            (table["count"] * table["mean_us"]).sum() / 1e3,
            "the ms",
            table["ms"].sum(),
            0.01,
        )
        twin = seen.setdefault(tuple(table["ms"]), path.name)
        require(twin == path.name, f"{path.name} has the very times of {twin}: a copy?")
        gemms[row["workload"]] = table.loc[table["class"] == "gemm", "ms"].sum()
    tokens = results.frame.set_index("workload")[["micro_batch_size", "seqlen"]].prod(axis=1)
    times = gemms[LARGE] / max(gemms[SMALL], 1e-9)
    require(
        times > (2 if results.on_gpu else 1),  # other programs share a CPU
        f"the matrix multiplies of {LARGE} take {times:.2g} times those of {SMALL}, with "
        f"{tokens[LARGE] / tokens[SMALL]:g} times the tokens: is each file what its name says?",
    )


def check_naive(folder):
    """The loop over experts shows: a wait for the GPU for each of them, in every layer."""
    results = _load(folder)
    cfg = _config(results)
    rows = results.frame.set_index("workload", drop=False)
    visits = cfg.n_layers * cfg.n_experts
    if not results.on_gpu:  # nothing waits on a CPU; what would is there all the same
        for name, least, most in ((SMALL, 0, 0.1 * visits), (NAIVE, visits, 1.1 * visits)):
            path, table = recorded_table(results, rows.loc[name], "kernels")
            found = table.loc[table["name"] == "aten::nonzero", "count"].sum()
            require(
                least <= found <= most,
                f"{path}: aten::nonzero ran {found:g} times a pass; {cfg.n_layers} layers of "
                f"{cfg.n_experts} experts make {visits} for the loop, and none for grouped",
            )
        return
    for name in (SMALL, NAIVE):
        path, table = recorded_table(results, rows.loc[name], "api")
        inside = table[(table["kind"] == "synchronize") & table["range"].notna()]
        found = inside["count"].sum()
        require_same(
            path,
            "its synchronizations",
            found,
            "those in forward.csv",
            rows.loc[name, "synchronizations"],
            0.01,
        )
        if name == NAIVE:
            require(
                found >= 0.9 * visits,
                f"{path}: {found:g} synchronizations a pass; the loop waits for the GPU once for "
                f"each of {cfg.n_experts} experts in {cfg.n_layers} layers, which is {visits}",
            )
        else:
            require(
                found < 0.5 * visits,
                f"{path}: the grouped pass waits {found:g} times; is it a naive one?",
            )
    require(
        rows.loc[NAIVE, "before_ms"] > rows.loc[SMALL, "before_ms"],
        f"{results.path}: the naive pass ({rows.loc[NAIVE, 'before_ms']:.4g} ms) is no slower than "
        f"the grouped one ({rows.loc[SMALL, 'before_ms']:.4g} ms)",
    )


def _load(folder) -> Results:
    results = load(folder, FORWARD, "forward")
    check_keys(results, [{"workload": one.name} for one in passes(results.on_gpu)])
    lost = {one.name for one in passes(results.on_gpu)} - set(results.frame["workload"])
    require(not lost, f"{results.path}: {sorted(lost)} ran out of memory; free the GPU, delete "
                      f"these rows and run {results.command} again")  # fmt: skip
    return results


def _config(results: Results) -> ModelConfig:
    layers = int(results.frame["layers"].iloc[0])
    return ModelConfig.preset("olmoe-1b-7b" if results.on_gpu else "olmoe-tiny", n_layers=layers)


def _device_of(results: Results, cfg: ModelConfig) -> DeviceSpec:
    """A device that no table knows: the one whose ceilings give the first row's floors."""
    first = results.frame.iloc[0]
    size = int(first["micro_batch_size"]), int(first["seqlen"])
    unit = DeviceSpec("unknown", 1.0, 1.0, 1.0, dtype=results.dtype)
    compute_ms, memory_ms = slips_c3.floors(cfg, *size, unit)
    return replace(
        unit,
        peak_tflops=compute_ms / first["compute_floor_ms"],
        bandwidth_gbs=memory_ms / first["memory_floor_ms"],
    )
