"""What the tests of Experiment 6 look for in a folder of results."""

from labkit.config import ModelConfig
from labkit.experiments import train
from labkit.experiments.table import TRAIN
from tests.public.judging import require
from tests.public.result_files import (
    Results,
    check_keys,
    check_summary,
    load,
    recorded_table,
    require_same,
)

KEPT, RECOMPUTED, NAIVE = (one.name for one in train.STEPS)
PARTS = ("attn", "attn_norm", "ffn", "ffn.router", "ffn.experts")  # of each layer
PHASES = {"forward_ms": "forward", "backward_ms": "(backward)",
          "recompute_ms": "recompute.layers.*", "optimizer_ms": "optimizer"}  # fmt: skip


def check_steps(folder):
    """train.csv: three steps of one model, in the size that the experiment asks for."""
    results = _load(folder)
    wanted = train.shape(results.on_gpu)
    for one, row in zip(train.STEPS, _rows(results), strict=True):
        asked = wanted | {"recompute": "yes" if one.recompute else "no", "moe_impl": one.moe_impl}
        for what, value in asked.items():
            require(
                row[what] == value,
                f"{results.path.name}, {one.name}: {what} is {row[what]}, the experiment has "
                f"{value}",
            )
    times = results.frame[["before_ms", "during_ms", "busy_ms"]]
    require(
        (times > 0).all(axis=None) and times.stack().nunique() == times.size,
        f"{results.path}: measured times are above 0 and all different; found {times.to_numpy()}",
    )


def check_phases(folder):
    """NAME_ranges.csv: forward, backward, recompute and optimizer, which sum to the step."""
    results = _load(folder)
    for row in _rows(results):
        path, table = recorded_table(results, row, "ranges")
        busy = table.set_index("range")["busy_ms"]
        for name in ("step", "forward", "backward", "(backward)", "optimizer"):
            require(name in busy, f"{path} has no row {name!r}: {results.command} records it")
        for column, name in PHASES.items():
            require_same(
                path,
                f"busy_ms of {name}",
                busy.get(name, 0.0),
                f"{column} in train.csv",
                row[column],
                1e-3,
            )
        require_same(
            path,
            "the phases",
            sum(row[column] for column in PHASES),
            "the step's busy_ms",
            busy["step"],
            0.02,
        )
        require_same(
            path,
            "the ranges' own_ms",
            table["own_ms"].sum(),
            "the step's busy_ms",
            busy["step"],
            0.01,
        )
        require_same(
            path, "the step's busy_ms", busy["step"], "busy_ms in train.csv", row["busy_ms"], 1e-3
        )
        check_summary(results, row)


def check_recompute(folder):
    """Every part of every layer is recomputed in train_rc, and nothing is in the others."""
    results = _load(folder)
    for row in _rows(results):
        path, table = recorded_table(results, row, "ranges")
        counts = table.set_index("range")["instances"]
        again = [name for name in counts.index if name.startswith("recompute.")]
        if row["workload"] != RECOMPUTED:
            require(
                not again, f"{path} has {', '.join(again[:2])}, and this step keeps activations"
            )
            continue
        for name in ("layers.*", *(f"layers.*.{part}" for part in PARTS)):
            found = counts.get(f"recompute.{name}", 0)
            require(
                abs(found - row["layers"]) < 0.01,
                f"{path}: recompute.{name} was open {found:g} times a step, in {row['layers']:g} "
                "layers; were Coding Exercises 4 and 5 done when it was recorded? If not, delete "
                f"{results.path} and record again",
            )


def check_kernels(folder):
    """NAME_kernels.csv: operations that sum to the step; a recomputing step has more of them."""
    results, seen = _load(folder), {}
    kept, again, _ = (row["operations"] for row in _rows(results))
    require(
        again > kept,
        f"{results.path}: {RECOMPUTED} has {again:g} operations and {KEPT} {kept:g}; recomputing "
        "adds a forward of every layer",
    )
    for row in _rows(results):
        path, table = recorded_table(results, row, "kernels")
        for left, found, what in (
            ("the kernels' ms", table["ms"].sum(), "busy_ms"),
            ("the kernels' count", table["count"].sum(), "operations"),
        ):
            require_same(path, left, found, f"{what} in train.csv", row[what], 0.02)
        twin = seen.setdefault(tuple(table["ms"]), path.name)
        require(twin == path.name, f"{path.name} has the very times of {twin}: a copy?")


def check_naive(folder):
    """train_naive: a gradient as large as all experts for each of them, filled with zeros."""
    results = _load(folder)
    kept, _, naive = _rows(results)
    cfg = ModelConfig.preset(naive["model"], n_layers=int(naive["layers"]))
    fills = 3 * cfg.n_layers * cfg.n_experts
    require(
        naive["operations"] >= kept["operations"] + fills,
        f"{results.path}: the naive step has {naive['operations']:g} operations and the grouped "
        f"one {kept['operations']:g}; the loop's backward alone fills {fills} tensors with zeros",
    )
    path, table = recorded_table(results, naive, "kernels")
    words = "FillFunctor|Memset" if results.on_gpu else "aten::fill_"
    found = table.loc[table["name"].str.contains(words), "count"].sum()
    require(
        found >= fills,
        f"{path}: {found:g} operations fill a tensor; gate, up and down of {cfg.n_experts} experts "
        f"in {cfg.n_layers} layers need {fills}. Is it the naive step?",
    )
    require(
        not results.on_gpu or naive["backward_ms"] > kept["backward_ms"],  # others share a CPU
        f"{results.path}: the naive backward ({naive['backward_ms']:.4g} ms) is no slower than the "
        f"grouped one ({kept['backward_ms']:.4g} ms)",
    )


def _load(folder) -> Results:
    results = load(folder, TRAIN, "train", fits=0)
    check_keys(results, [{"workload": one.name} for one in train.STEPS])
    lost = {one.name for one in train.STEPS} - set(results.frame["workload"])
    require(not lost, f"{results.path}: {sorted(lost)} ran out of memory; free the GPU, delete "
                      f"these rows and run {results.command} again")  # fmt: skip
    return results


def _rows(results: Results) -> list[dict]:
    """The rows in the order of STEPS."""
    rows = results.frame.set_index("workload", drop=False)
    return [rows.loc[one.name].to_dict() for one in train.STEPS]
