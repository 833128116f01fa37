"""Where a training step's time goes, stage by stage, with activations kept and recomputed.

Writes stages.csv (a row a stage), stages_steps.csv (a row a step) and stages.png.
"""

from functools import partial
from pathlib import Path

import torch

from labkit import plots
from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.experiments.machine import Machine
from labkit.experiments.progress import steps
from labkit.experiments.table import COUNTERS, STAGES, STEPS, Table, save
from labkit.monitor import Monitor
from labkit.perfmodel import mfu, optimizer_floor_ms, state_bytes
from labkit.profiling.workloads import build_model
from labkit.timers import stage_times
from labkit.train import make_optimizer, train_step


def run(
    output="results", quick=False, device=None, progress=None, *,
    model=None, layers=None, micro_batch_size=None, seqlen=None,
):  # fmt: skip
    """Measure a step without and with recomputation; the rows of stages.csv.

    On a GPU four layers of olmoe-1b-7b and 4 × 2048 tokens, on a CPU olmoe-tiny and 4 × 128,
    unless told otherwise. Goes on after the rows that `output` has.
    Raises UserError, before it measures, for bad input and a folder that cannot be written.
    """
    machine = Machine.here(device)
    preset = model or ("olmoe-1b-7b" if machine.on_gpu else "olmoe-tiny")
    cfg = ModelConfig.preset(preset, n_layers=4 if layers is None else layers)
    usual = 2048 if machine.on_gpu else 128
    shape = {
        "model": preset, "layers": cfg.n_layers,
        "micro_batch_size": 4 if micro_batch_size is None else micro_batch_size,
        "seqlen": usual if seqlen is None else seqlen,
    }  # fmt: skip
    batch = random_micro_batch(cfg, shape["micro_batch_size"], shape["seqlen"], machine.device)
    stages = Table(output, STAGES, machine.facts, quick)
    totals = Table(output, STEPS, machine.facts, quick)
    todo = [r for r in ("no", "yes") if not totals.has(**shape, recompute=r)]
    with steps("stages", len(todo), progress) as step:
        for recompute in todo:
            step(f"recompute: {recompute}")
            found = {}
            measure = partial(_measure, machine, cfg, batch, recompute == "yes", quick, found)
            total = machine.attempt(measure)
            for name, times in found.items():
                parts = dict(zip(("forward_ms", "backward_ms", "recompute_ms"), times, strict=True))
                stages.append(shape | {"recompute": recompute, "stage": name} | parts)
            totals.append(shape | {"recompute": recompute} | total)
    frame = stages.frame()
    save(plots.stages(frame, totals.frame()), Path(output) / "stages.png")
    return frame


def _measure(machine: Machine, cfg, batch, recompute: bool, quick: bool, found: dict) -> dict:
    """Fill `found` with the stages' times → the row of the whole step."""
    model = build_model(cfg, machine.device)
    model.recompute = recompute
    optimizer = make_optimizer(model)
    times = stage_times(
        model, optimizer, batch, warmup=2, steps=2 if quick else 5, device=machine.device
    )
    found.update(times.stages)
    step = partial(train_step, model, optimizer, batch)
    seconds = (1.0 if quick else 3.0) if machine.on_gpu else 1.0
    if machine.on_gpu:
        torch.cuda.reset_peak_memory_stats(machine.device)
    with Monitor(machine.device) as monitor:
        machine.steadily(step, seconds, 1)
    seen = monitor.summary()
    peak = torch.cuda.max_memory_allocated(machine.device) / 2**30 if machine.on_gpu else None
    tokens, longest = batch.seqs.n_tokens, batch.seqs.max_seqlen
    return {
        "step_ms": times.step_ms,
        "optimizer_ms": times.optimizer_ms,
        "optimizer_floor_ms": optimizer_floor_ms(cfg, machine.spec),
        "tokens_per_s": 1e3 * tokens / times.step_ms,
        "mfu_pct": 100 * mfu(cfg, tokens, longest, times.step_ms, machine.spec),
        "peak_gib": peak,
        "state_gib": state_bytes(cfg, machine.dtype.itemsize) / 2**30,
        **{name: seen[name] for name in COUNTERS},
    }
