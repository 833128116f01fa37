"""The naive mixture's training step before and after the one-line fix: times, and zero fills.

    python benchmarks/naive_backward.py OUT.json [--device auto]

On a GPU four layers of olmoe-1b-7b and 4 × 2048 tokens, on a CPU olmoe-tiny and 4 × 128; in turns.
"""

import json
import statistics
from functools import partial
from pathlib import Path

import typer

from labkit.challenges.naive_backward import unbound_experts, zero_fills
from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.devices import pick
from labkit.profiling.workloads import build_model
from labkit.provenance import machine_facts
from labkit.timers import stage_times
from labkit.train import make_optimizer, train_step


def main(out: Path, device: str = "auto"):
    device = pick(device)
    on_gpu = device.type == "cuda"
    preset, shape = ("olmoe-1b-7b", (4, 2048)) if on_gpu else ("olmoe-tiny", (4, 128))
    cfg = ModelConfig.preset(preset, n_layers=4)
    model, batch = build_model(cfg, device), random_micro_batch(cfg, *shape, device)
    model.moe_impl = "naive"
    optimizer = make_optimizer(model)
    measure = partial(stage_times, model, optimizer, batch, warmup=2, steps=5, device=device)
    count = partial(zero_fills, partial(train_step, model, optimizer, batch), model)
    found = {"before": [], "after": []}
    for _ in range(3):
        found["before"].append(measure())
        with unbound_experts(model):
            found["after"].append(measure())
    fills = {"before": count()}
    with unbound_experts(model):
        fills["after"] = count()
    report = {**machine_facts(device), "model": preset, "layers": 4, "shape": shape}
    for name, times in found.items():
        backward = [sum(parts[1] for parts in one.stages.values()) for one in times]
        report[name] = {
            "step_ms": statistics.median(one.step_ms for one in times),
            "backward_ms": statistics.median(backward),
            "zero_fills": fills[name],
        }
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    typer.run(main)
