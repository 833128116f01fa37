"""What the tests of Experiment 5 look for in a folder of results."""

import numpy as np

from labkit.config import ModelConfig
from labkit.experiments.table import STAGES, STEPS
from tests.public import checks_c8
from tests.public.judging import require
from tests.public.result_files import MOST_BANDWIDTH, Results, check_keys, load, require_same
from tests.public.slips_c3 import flops, params

KINDS = ["forward_ms", "backward_ms", "recompute_ms"]


def shape(on_gpu: bool) -> dict:
    """The step that the experiment measures."""
    return {
        "model": "olmoe-1b-7b" if on_gpu else "olmoe-tiny", "layers": 4, "micro_batch_size": 4,
        "seqlen": 2048 if on_gpu else 128,
    }  # fmt: skip


def names(layers: int) -> list[str]:
    return ["embed", *(f"layers.{number}" for number in range(layers)), "head"]


def check_rows(folder):
    """stages.csv and stages_steps.csv: every stage of the step, kept and recomputed."""
    for schema in (STAGES, STEPS):
        results = _load(folder, schema)
        keys = [shape(results.on_gpu) | {"recompute": one} for one in ("no", "yes")]
        if schema is STAGES:
            keys = [key | {"stage": name} for key in keys for name in names(key["layers"])]
        check_keys(results, keys)
        absent = len(keys) - len(results.frame)
        require(
            absent <= 0,
            f"{results.path}: {absent} rows ran out of memory; free the device, delete them and "
            f"run {results.command} again",
        )


def check_sums(folder):
    """The stages and the optimizer sum to the step."""
    stages, totals = _load(folder, STAGES), _load(folder, STEPS)
    times = stages.frame[KINDS].to_numpy().ravel()
    measured = times[times > 0]
    require(
        len(set(measured)) > 0.9 * len(measured),
        f"{stages.path}: of {len(measured)} times only {len(set(measured))} differ; measured ones "
        "scatter",
    )
    for total in totals.frame.to_dict("records"):
        mine = stages.frame[stages.frame["recompute"] == total["recompute"]]
        parts = mine[KINDS].to_numpy().sum() + total["optimizer_ms"]
        require_same(
            stages.path, f"the stages and the optimizer (recompute {total['recompute']})", parts,
            "step_ms in stages_steps.csv", total["step_ms"], 2e-3,
        )  # fmt: skip


def check_recompute(folder):
    """Only layers are recomputed, only with recomputation, and about as fast as they ran before."""
    results = _load(folder, STAGES)
    for row in results.frame.to_dict("records"):
        again = row["recompute"] == "yes" and row["stage"].startswith("layers.")
        which, found = results.which(row), row["recompute_ms"]
        require(
            again or found == 0,
            f"{which}: {found:.4g} ms of recompute, where nothing is recomputed",
        )
        require(
            not again or found > 0,
            f"{which}: no recompute time; were Coding Exercises 5 and 7 done when this was "
            f"measured? If not, delete {results.path} and {STEPS.path(folder)}, and measure again",
        )
        require(
            not (again and results.on_gpu) or 0.5 < found / row["forward_ms"] < 1.5,
            f"{which}: recomputing takes {found:.4g} ms and the forward {row['forward_ms']:.4g} ms;"
            " it is the same forward once more",
        )


def check_plausible(folder):
    """The optimizer's floor, throughput and MFU are right; backward takes longer than forward."""
    stages, totals = _load(folder, STAGES), _load(folder, STEPS)
    spec = None if "MIG" in totals.device else totals.spec
    for row in totals.frame.to_dict("records"):
        which, cfg, tokens = (
            totals.which(row),
            _config(row),
            row["micro_batch_size"] * row["seqlen"],
        )
        require_same(
            which,
            "tokens_per_s",
            row["tokens_per_s"],
            "its step's",
            1e3 * tokens / row["step_ms"],
            1e-3,
        )
        if spec:
            floor = checks_c8.floor_ms(cfg, spec)
            require(
                np.isclose(row["optimizer_floor_ms"], floor, rtol=0.01),
                f"{which}: the floor says {row['optimizer_floor_ms']:.4g} ms, and is {floor:.4g}; "
                "if Coding Exercise 8 was wrong when this was measured, delete the file",
            )
            require(
                row["optimizer_ms"] >= floor / MOST_BANDWIDTH,
                f"{which}: an optimizer step of {row['optimizer_ms']:.4g} ms is below its floor of "
                f"{floor:.4g} ms",
            )
            work = 3 * tokens * flops(cfg, int(row["seqlen"]))
            mfu = work / (spec.peak_tflops * 1e7 * row["step_ms"])
            require_same(which, "mfu_pct", row["mfu_pct"], "the model's FLOPs over peak", mfu, 0.01)
    if stages.on_gpu:  # other programs share a CPU
        layers = stages.frame[stages.frame["stage"].str.startswith("layers.")]
        for recompute, rows in layers.groupby("recompute"):
            ratio = rows["backward_ms"].sum() / rows["forward_ms"].sum()
            require(
                1.3 < ratio < 4,
                f"{stages.path.name}, recompute {recompute}: the layers' backward takes {ratio:.3g}"
                " times their forward; it multiplies twice as much",
            )


def check_memory(folder):
    """The training state is right, and the peak is above it; recomputation lowers it."""
    stages, totals = _load(folder, STAGES), _load(folder, STEPS)
    require(
        stages.device == totals.device,
        f"{stages.path.name} comes from {stages.device}, {totals.path.name} from {totals.device}",
    )
    for row in totals.frame.to_dict("records"):
        state = 4 * totals.itemsize * params(_config(row)) / 2**30
        require(
            np.isclose(row["state_gib"], state, rtol=0.01),
            f"{totals.which(row)}: a training state of {row['state_gib']:.4g} GiB; four tensors a "
            f"parameter are {state:.4g}",
        )
        require(
            not row["peak_gib"] < 0.75 * state,
            f"{totals.which(row)}: a peak of {row['peak_gib']:.4g} GiB is less than weights and "
            f"moments alone, {0.75 * state:.4g} GiB",
        )
    peaks = totals.frame.set_index("recompute")["peak_gib"]
    if totals.on_gpu and len(peaks) == 2:
        require(
            peaks["yes"] < peaks["no"],
            f"{totals.path}: recomputing peaks at {peaks['yes']:.4g} GiB, and keeping activations "
            f"at {peaks['no']:.4g} GiB: nothing was saved",
        )


def _load(folder, schema) -> Results:
    """The rows of the step that the experiment measures."""
    results = load(folder, schema, "stages", fits=0.5)
    wanted = shape(results.on_gpu)
    mine = (results.frame[list(wanted)] == list(wanted.values())).all(axis=1)
    said = ", ".join(f"{name} {value}" for name, value in wanted.items())
    require(
        mine.any(), f"{results.path} has no step of {said}: run {results.command} without options"
    )
    frame = results.frame[mine].reset_index(drop=True)
    return Results(frame, schema, results.path, results.command)


def _config(row) -> ModelConfig:
    return ModelConfig.preset(row["model"], n_layers=int(row["layers"]))
