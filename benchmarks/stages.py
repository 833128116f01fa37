"""stage_times on the step that Part 3 uses: its parts, their sum, and what its hooks cost.

python benchmarks/stages.py OUT.json [--layers 4 --micro-batch-size 4 --seqlen 2048]
"""

import json
import statistics
from functools import partial
from pathlib import Path

import torch
import typer

from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.devices import pick
from labkit.perfmodel import mfu, optimizer_floor_ms
from labkit.profiling.workloads import build_model
from labkit.provenance import machine_facts
from labkit.timers import cuda_time, stage_times
from labkit.train import make_optimizer, train_step


def measure(model, optimizer, batch, rounds: int = 4) -> dict:
    """The step by itself and by its stages, in turns."""
    step = partial(train_step, model, optimizer, batch)
    whole, found = [], []
    for _ in range(rounds):
        whole += cuda_time(step, warmup=2, repeat=5)
        found.append(stage_times(model, optimizer, batch, warmup=2, steps=5))
    step_ms = statistics.median(whole)
    sums = [times.step_ms for times in found]
    middle = sorted(found, key=lambda times: times.step_ms)[rounds // 2]
    return {
        "step_ms": step_ms,
        "sum_of_stages_ms": statistics.median(sums),
        "cost_of_hooks": statistics.median(sums) / step_ms - 1,
        "stages": middle.stages,
        "optimizer_ms": middle.optimizer_ms,
    }


def main(out: Path, layers: int = 4, micro_batch_size: int = 4, seqlen: int = 2048):
    cfg = ModelConfig.preset("olmoe-1b-7b", n_layers=layers)
    batch = random_micro_batch(cfg, micro_batch_size, seqlen, "cuda")
    model = build_model(cfg, pick("cuda"))
    optimizer = make_optimizer(model)
    report = {**machine_facts(), "layers": layers, "micro_batch_size": micro_batch_size,
              "seqlen": seqlen, "optimizer_floor_ms": optimizer_floor_ms(cfg)}  # fmt: skip
    for name, recompute in (("kept", False), ("recomputed", True)):
        model.recompute = recompute
        train_step(model, optimizer, batch)
        torch.cuda.reset_peak_memory_stats()
        row = measure(model, optimizer, batch)
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["mfu"] = mfu(cfg, batch.seqs.n_tokens, seqlen, row["step_ms"])
        report[name] = row
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    typer.run(main)
