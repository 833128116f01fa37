"""The head's loss whole and in chunks: peak memory and time of a training step, before and after.

    python benchmarks/chunked_loss.py OUT.json [--layers 4 --micro-batch-size 4 --seqlen 2048]

Both run in bf16 on the same GPU, in turns, from the same weights and tokens.
"""

import gc
import json
import statistics
from functools import partial
from pathlib import Path

import torch
import typer

from labkit.challenges.head_loss import chunked_step
from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.memory import record_timeline
from labkit.profiling.workloads import build_model
from labkit.provenance import machine_facts
from labkit.timers import cuda_time
from labkit.train import make_optimizer, train_step


def measure(cfg: ModelConfig, batch, step) -> dict:
    """Build, run, take the figures; everything is free again when it returns."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = build_model(cfg, torch.device("cuda"))
    optimizer = make_optimizer(model)
    one = partial(step, model, optimizer, batch)
    first_loss = one().item()
    times = cuda_time(one, warmup=5, repeat=20)
    peak = torch.cuda.max_memory_allocated() / 2**30
    lived = record_timeline(one, model, optimizer)
    return {
        "median_ms": statistics.median(times),
        "min_ms": min(times),
        "max_ms": max(times),
        "peak_gib": peak,
        "at_the_peak_gib": {name: n / 2**30 for name, n in lived.categories().items()},
        "first_loss": first_loss,
    }


def main(
    out: Path, layers: int = 4, micro_batch_size: int = 4, seqlen: int = 2048, chunks: int = 8
):
    cfg = ModelConfig.preset("olmoe-1b-7b", n_layers=layers)
    batch = random_micro_batch(cfg, micro_batch_size, seqlen, "cuda")
    steps = {"whole": train_step, "chunked": partial(chunked_step, chunks=chunks)}
    runs = {name: [] for name in steps}
    for _ in range(2):
        for name, step in steps.items():
            runs[name].append(measure(cfg, batch, step))
            gc.collect()
    ms = {name: statistics.median(r["median_ms"] for r in rows) for name, rows in runs.items()}
    gib = {name: max(r["peak_gib"] for r in rows) for name, rows in runs.items()}
    report = {
        **machine_facts(),
        "layers": layers, "micro_batch_size": micro_batch_size, "seqlen": seqlen, "chunks": chunks,
        "runs": runs,
        "saved_gib": gib["whole"] - gib["chunked"],
        "slower_pct": 100 * (ms["chunked"] / ms["whole"] - 1),
    }  # fmt: skip
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    typer.run(main)
