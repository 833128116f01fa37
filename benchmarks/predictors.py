"""Predictors of the same held-out steps side by side: `python benchmarks/predictors.py`.

The model of labkit.predictor, calibrated and as for a machine never run on; the roofline alone; a
linear regression on FLOPs and bytes; and, with `--torch` on a GPU, PyTorch's own RuntimeEstimator
and MemTracker (torch.distributed._tools) on some of the steps. Prints a table, and writes
predictors.json beside the measured steps.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.config import ModelConfig
from labkit.devices import spec
from labkit.experiments.table import GEMM, OPS, REGIMES, SWEEP, read
from labkit.perfmodel import flops_per_token, forward_floor_ms, optimizer_floor_ms, param_count
from labkit.predictor.calibrate import config, configurations, errors
from labkit.predictor.known import SHIPPED
from labkit.predictor.predict import peak_gib
from labkit.predictor.unseen import Readings, from_part1, from_spec, readings_of

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PUBLIC = HERE.parent / "labkit/assets/truth/h200.csv"
HIDDEN = HERE.parent / "tests/hidden/truth/h200.csv"
DEVICE = spec("H200")
TORCH_STEPS = ((2, 1, 512, "no"), (2, 4, 2048, "no"), (4, 1, 2048, "no"), (4, 4, 2048, "yes"),
               (8, 2, 2048, "no"))  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", action="store_true", help="run PyTorch's estimators too")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        what, layers, size, seqlen, recompute = args.one
        print(json.dumps(estimate(what, int(layers), int(size), int(seqlen), recompute == "yes")))
        return
    public = configurations(read(PUBLIC, SWEEP))
    hidden = configurations(read(HIDDEN, SWEEP))
    found = {name: summary(e) for name, e in time_errors(public, hidden).items()}
    memory = summary(np.array([_peak(row) / row.peak_gib - 1 for row in hidden.itertuples()]))
    path = RESULTS / "part4_h200/predictors.json"
    result = json.loads(path.read_text()) if path.is_file() else {}
    result |= {"time": found, "memory": {"labkit": memory}}
    if args.torch:
        result["torch"] = [with_torch(*step) for step in TORCH_STEPS]
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(pd.DataFrame(found).T.to_string())
    print("memory", memory)
    print(pd.DataFrame(result.get("torch", [])).to_string())


def time_errors(public, hidden) -> dict:
    """Name of a predictor → its relative errors on the hidden configurations."""
    alone = from_spec(DEVICE)
    part1 = from_part1(RESULTS / "part1_h200", DEVICE)
    three = from_spec(DEVICE, _readings_without_kernels())
    ours = {
        "labkit, calibrated": SHIPPED[DEVICE.name],
        "labkit, Part 1 with kernels": part1,
        "labkit, gemm, ops and regimes": three,
        "labkit, datasheet alone": alone,
    }
    found = {name: errors(hidden, c)["error"].to_numpy() for name, c in ours.items()}
    measured = hidden["step_ms"].to_numpy()
    found["linear regression"] = regression(public, hidden) / measured - 1
    found["roofline alone"] = (
        np.array([roofline(row) for row in hidden.itertuples()]) / measured - 1
    )
    return found


def _readings_without_kernels() -> Readings:
    folder = RESULTS / "part1_h200"
    return readings_of({s.name: read(s.path(folder), s) for s in (GEMM, OPS, REGIMES)})


def roofline(row) -> float:
    """The larger of both floors, three times, and once more with recomputation; and AdamW's."""
    cfg = config(row)
    floor = max(forward_floor_ms(cfg, int(row.micro_batch_size), int(row.seqlen), DEVICE))
    return (3 + (row.recompute == "yes")) * floor + optimizer_floor_ms(cfg, DEVICE)


def regression(public, hidden) -> np.ndarray:
    """Least relative squares on FLOPs, on bytes of state and of activations, and a constant."""

    def features(steps):
        rows = []
        for row in steps.itertuples():
            cfg, again = config(row), row.recompute == "yes"
            tokens = row.micro_batch_size * row.seqlen
            flops = (3 + again) * tokens * flops_per_token(cfg, int(row.seqlen))
            activations = tokens * cfg.n_layers * cfg.dim * (1 + again)
            rows.append([1, flops, 14 * param_count(cfg), activations])
        return np.array(rows)

    measured = public["step_ms"].to_numpy()
    x = features(public)
    scale = x.max(axis=0)
    found = np.linalg.lstsq(x / scale / measured[:, None], np.ones(len(x)), rcond=None)[0]
    return features(hidden) / scale @ found


def _peak(row) -> float:
    shape = int(row.micro_batch_size), int(row.seqlen), row.recompute == "yes"
    return peak_gib(config(row), *shape, DEVICE)


def summary(error: np.ndarray) -> dict:
    """Percentiles of the absolute error in percent."""
    size = 100 * np.abs(error)
    names = {"median_pct": 50, "p90_pct": 90, "worst_pct": 100}
    return {name: round(float(np.percentile(size, q)), 3) for name, q in names.items()} | {
        "configurations": len(size)
    }


def with_torch(layers: int, size: int, seqlen: int, recompute: str) -> dict:
    """What PyTorch's estimators say of a step, each in a process of its own, beside labkit."""
    cfg = ModelConfig.preset("olmoe-1b-7b", n_layers=layers)
    row = {"layers": layers, "micro_batch_size": size, "seqlen": seqlen, "recompute": recompute}
    row["labkit_gib"] = float(peak_gib(cfg, size, seqlen, recompute == "yes", DEVICE))
    for what in ("measured", "memory", "operator-level-cost-model", "operator-level-benchmark"):
        command = [sys.executable, __file__, "--one", what, str(layers), str(size), str(seqlen)]
        done = subprocess.run([*command, recompute], capture_output=True, text=True, timeout=300)
        last = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        row |= (
            {f"{what} error": last[0][:150]} if last else json.loads(done.stdout.splitlines()[-1])
        )
    return row


def estimate(what: str, layers: int, size: int, seqlen: int, recompute: bool) -> dict:
    """One estimate, or the measured step, as a dict."""
    import torch

    from labkit.data import random_micro_batch
    from labkit.profiling.workloads import build_model
    from labkit.train import make_optimizer, train_step

    cfg = ModelConfig.preset("olmoe-1b-7b", n_layers=layers)
    batch = random_micro_batch(cfg, size, seqlen, "cuda")
    if what.startswith("operator"):
        return {f"{what}_ms": _runtime(cfg, batch, recompute, what)}
    model = build_model(cfg, torch.device("cuda"))
    model.recompute = recompute
    optimizer = make_optimizer(model)
    if what == "measured":
        from labkit.timers import cuda_time

        ms = float(np.median(cuda_time(lambda: train_step(model, optimizer, batch), 5, 20)))
        return {"measured_ms": ms, "measured_gib": torch.cuda.max_memory_allocated() / 2**30}
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer, batch.tokens, batch.targets)
    with tracker:
        for i in range(2):
            train_step(model, optimizer, batch)
            if i == 0:
                tracker.reset_mod_stats()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cuda", 0)]
    return {"MemTracker_gib": max(peak.values()) / 2**30}


def _runtime(cfg, batch, recompute: bool, mode: str) -> float:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    from labkit.data import MicroBatch, Seqs
    from labkit.model import Transformer
    from labkit.train import make_optimizer, train_step

    with FakeTensorMode() as fake, torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Transformer(cfg)
        torch.set_default_dtype(torch.float32)
        model.recompute = recompute
        tokens, targets, ends = map(
            fake.from_tensor, (batch.tokens, batch.targets, batch.seqs.cu_seqlens)
        )
        seqs = Seqs(ends, batch.seqs.max_seqlen, batch.seqs.lengths)
        batch, optimizer = MicroBatch(tokens, targets, seqs), make_optimizer(model)
        train_step(model, optimizer, batch)
        estimator = RuntimeEstimator()
        with estimator(estimate_mode_type=mode):
            train_step(model, optimizer, batch)
    return estimator.total_runtime


if __name__ == "__main__":
    main()
