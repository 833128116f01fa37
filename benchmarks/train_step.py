"""A training step of labkit against transformers' OLMoE: time, memory, and the same loss.

    python benchmarks/train_step.py OUT.json [--layers 4 --micro-batch-size 4 --seqlen 2048]

Both run in bf16 with fused AdamW on the same GPU, in turns, from the same weights and tokens.
"""

import gc
import json
import statistics
import tempfile
from pathlib import Path

import torch
import transformers
import typer

from labkit.checkpoint import load_hf, save_hf
from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.model import Transformer
from labkit.provenance import machine_facts
from labkit.timers import cuda_time
from labkit.train import make_optimizer, train_step


def reference_step(model, optimizer, batch, micro_batch_size):
    tokens = batch.tokens.view(micro_batch_size, -1)
    logits = model(input_ids=tokens).logits.flatten(0, 1).float()
    loss = torch.nn.functional.cross_entropy(logits, batch.targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def measure(build, rounds: int) -> dict:
    """Build, run, take the figures, and free everything before the other implementation runs."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = build()
    first_loss = step().item()
    times = [ms for _ in range(rounds) for ms in cuda_time(step, warmup=5, repeat=15)]
    return {
        "median_ms": statistics.median(times),
        "min_ms": min(times),
        "max_ms": max(times),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "first_loss": first_loss,
    }


def main(out: Path, layers: int = 4, micro_batch_size: int = 4, seqlen: int = 2048):
    cfg = ModelConfig.preset("olmoe-1b-7b", n_layers=layers)
    batch = random_micro_batch(cfg, micro_batch_size, seqlen, "cuda")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder) / "checkpoint"
        save_hf(Transformer(cfg).bfloat16(), folder)

        def ours():
            model = load_hf(folder, device="cuda")
            optimizer = make_optimizer(model)
            return lambda: train_step(model, optimizer, batch)

        def theirs():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, experts_implementation="grouped_mm"
            ).cuda()
            optimizer = torch.optim.AdamW(
                model.parameters(), lr=4e-4, betas=(0.9, 0.95), fused=True
            )
            return lambda: reference_step(model, optimizer, batch, micro_batch_size)

        runs = {"labkit": [], "transformers": []}
        for _ in range(2):
            for name, build in (("labkit", ours), ("transformers", theirs)):
                runs[name].append(measure(build, rounds=2))
                gc.collect()
    medians = {n: statistics.median(r["median_ms"] for r in rows) for n, rows in runs.items()}
    report = {
        **machine_facts(),
        "transformers": transformers.__version__,
        "layers": layers, "micro_batch_size": micro_batch_size, "seqlen": seqlen,
        "runs": runs,
        "speedup": medians["transformers"] / medians["labkit"],
    }  # fmt: skip
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    typer.run(main)
