"""A small forward pass, eager against compiled layers and padded experts: times and parity.

    python benchmarks/small_forward.py OUT.json [--layers 16 --micro-batch-size 1 --seqlen 512]

All run in bf16 on the same GPU, in turns, with the same weights and tokens.
"""

import json
import statistics
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import typer

from labkit.challenges.small_forward import busiest_rows, compiled_layers, padded_experts
from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.devices import pick
from labkit.perfmodel import forward_floor_ms
from labkit.profiling.workloads import build_model
from labkit.provenance import machine_facts
from labkit.timers import cuda_time

VARIANTS = {"eager": None, "compiled": compiled_layers, "padded": padded_experts}


def capacity_for(model, batch) -> int:
    """Room for the busiest expert of any layer, in multiples of 8 rows."""
    found = []
    hooks = [
        layer.ffn.router.register_forward_hook(lambda module, args, out: found.append(out[1]))
        for layer in model.layers
    ]
    model(batch.tokens, batch.seqs)
    for hook in hooks:
        hook.remove()
    most = max(busiest_rows(experts, model.cfg.n_experts) for experts in found)
    return -(-most // 8) * 8


def measure(model, batch, change, capacity: int) -> tuple[list[float], torch.Tensor]:
    """Times of a pass (ms) and its logits, with a change applied."""
    arguments = (model, capacity) if change is padded_experts else (model,)
    with change(*arguments) if change else nullcontext():
        run = partial(model, batch.tokens, batch.seqs)
        logits = run().float()  # compiles
        return cuda_time(run, warmup=10, repeat=50), logits


@torch.no_grad()
def main(
    out: Path, layers: int = 16, micro_batch_size: int = 1, seqlen: int = 512, rounds: int = 3
):
    cfg = ModelConfig.preset("olmoe-1b-7b", n_layers=layers)
    batch = random_micro_batch(cfg, micro_batch_size, seqlen, "cuda")
    model = build_model(cfg, pick("cuda"))
    capacity = capacity_for(model, batch)
    times, logits = {name: [] for name in VARIANTS}, {}
    for _ in range(rounds):
        for name, change in VARIANTS.items():
            found, logits[name] = measure(model, batch, change, capacity)
            times[name].append(statistics.median(found))
    ms = {name: statistics.median(found) for name, found in times.items()}
    size = logits["eager"].abs().mean()
    off = {
        name: ((one - logits["eager"]).abs().mean() / size).item() for name, one in logits.items()
    }
    report = {
        **machine_facts(), "layers": layers, "micro_batch_size": micro_batch_size, "seqlen": seqlen,
        "capacity": capacity, "floors_ms": forward_floor_ms(cfg, micro_batch_size, seqlen),
        "median_ms": ms, "rounds_ms": times,
        "speedup": {name: ms["eager"] / one for name, one in ms.items()},
        "mean_difference_of_logits": off,
    }  # fmt: skip
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    typer.run(main)
