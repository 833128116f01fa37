"""Experiments: each measures, writes what it found to a folder, and returns it as a DataFrame.

An experiment is a module with `run(output="results", quick=False, device=None, progress=None)`.
"""

from importlib import import_module

from labkit.ceilings import Ceilings
from labkit.errors import UserError

EXPERIMENTS = {
    "gemm": "Every matrix multiply of the model under the roofline, and one held for seconds",
    "ops": "Copy, add, silu(x)·y and RMSNorm: bandwidth over size, with cold and warm caches",
    "regimes": "Bound by compute, by memory or by overhead: what the counters say of each",
    "kernels": "A step's other kernels: grouped multiply, attention, rotary angles, softmax, AdamW",
    "forward": "Three forward passes through the profiler: a small, a large and a naive one",
    "routing": "How many tokens of a real text each expert gets, and what imbalance would cost",
    "train": "Three training steps through the profiler: kept, recomputed and naive",
    "stages": "One training step: forward, backward and recompute of every stage",
    "micro_batches": "One global batch in micro batches of several sizes: time and memory",
    "sweep": "Training steps over a grid of layers, micro batches, sequence lengths and recompute",
}


def run_experiment(name: str, output="results", quick=False, device=None, progress=None):
    """Measure what `output` does not have yet, and return the rows as a DataFrame.

    `progress`: see `labkit.experiments.progress.steps`. Raises UserError for a name that is not in
    EXPERIMENTS and for what the experiment refuses.
    """
    if name not in EXPERIMENTS:
        raise UserError(f"no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    module = import_module(f"labkit.experiments.{name}")
    return module.run(output=output, quick=quick, device=device, progress=progress)


def measured_ceilings(folder="results") -> Ceilings:
    """What large operations reached, from the files that gemm, ops and regimes left in a folder.

    `gemm_tflops` is the fastest matrix multiply, `copy_gbs` the largest copy (with a flushed cache
    if that was measured), `launch_us` the time of a call of the smallest kernel in a Python loop.
    None for what is not there. Raises UserError if the files come from different devices.
    """
    from labkit.experiments import table

    def rows(schema):
        path = schema.path(folder)
        frame = table.read(path, schema) if path.is_file() else None
        return None if frame is None else frame[frame["status"] == "ok"]

    found = {schema.name: rows(schema) for schema in (table.GEMM, table.OPS, table.REGIMES)}
    frames = {name: frame for name, frame in found.items() if frame is not None and len(frame)}
    devices = {device for frame in frames.values() for device in frame["device"]}
    if len(devices) > 1:
        raise UserError(f"the files in {folder} come from {sorted(devices)}: keep one folder each")
    return Ceilings(
        gemm_tflops=_gemm_tflops(frames.get("gemm")),
        copy_gbs=_copy_gbs(frames.get("ops")),
        launch_us=_launch_us(frames.get("regimes")),
    )


def _gemm_tflops(frame) -> float | None:
    return None if frame is None else float(frame["tflops"].max())


def _copy_gbs(frame) -> float | None:
    if frame is None or not len(copies := frame[frame["op"] == "copy"]):
        return None
    # Cold ones come last, and of those the largest.
    largest = copies.sort_values(["cache", "tensor_bytes"], ascending=[False, True]).iloc[-1]
    return float(largest["gbs"])


def _launch_us(frame) -> float | None:
    if frame is None or not len(launch := frame[frame["workload"] == "launch"]):
        return None
    return float(launch["ms"].iloc[-1]) * 1e3
