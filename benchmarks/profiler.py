"""What the profiler says of a forward pass against CUDA events, and what its hooks cost.

    python benchmarks/profiler.py OUT_FOLDER [--preset olmoe-1b-7b]

The full model with random weights: 1 × 512 and 32 × 512 tokens, grouped and naive.
"""

import json
import statistics
from pathlib import Path

import torch
import typer

from labkit.hooks import annotate
from labkit.perfmodel import forward_floor_ms
from labkit.profiling import profile
from labkit.profiling.tables import instances
from labkit.profiling.workloads import labkit_step
from labkit.provenance import machine_facts
from labkit.timers import cuda_time

RUNS = {
    "fwd_small": (1, "grouped"), "fwd_large": (32, "grouped"), "fwd_small_naive": (1, "naive"),
    "fwd_large_naive": (32, "naive"),
}  # fmt: skip


def module_ms(model, fn, path: str, repeat: int = 20) -> float:
    """The mean GPU time of a module's forward by CUDA events around it."""
    module, marks = model.get_submodule(path), []

    def record(*_):
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()

    hooks = [module.register_forward_pre_hook(record), module.register_forward_hook(record)]
    for _ in range(repeat):
        fn()
    torch.cuda.synchronize()
    for hook in hooks:
        hook.remove()
    pairs = zip(marks[::2], marks[1::2], strict=True)
    return statistics.median(a.elapsed_time(b) for a, b in pairs)


def leaves(recording) -> float:
    """The modules' own kernel time, which together is the whole pass."""
    return recording.ranges.set_index("range")["own_ms"].drop("step").sum()


def forward_run(name: str, sequences: int, moe_impl: str, preset: str, folder: Path) -> dict:
    work = labkit_step(preset, micro_batch_size=sequences, seqlen=512, moe_impl=moe_impl)
    recording = profile(work.fn, model=work.model, steps=8 if moe_impl == "grouped" else 2)
    recording.save(folder, name)
    table = recording.ranges.set_index("range")
    pass_ms = statistics.median(cuda_time(work.fn, warmup=3, repeat=10))
    syncs = recording.api[recording.api["kind"] == "synchronize"].iloc[:2]
    row = {
        "pass_ms": pass_ms, "before_ms": recording.before_ms, "during_ms": recording.during_ms,
        "floors_ms": forward_floor_ms(work.model.cfg, sequences, 512),
        "step_busy_ms": table.loc["step", "busy_ms"], "step_span_ms": table.loc["step", "span_ms"],
        "leaf_busy_ms": leaves(recording), "gaps": recording.gaps,
        "parts_ms": table["span_ms"].round(4).to_dict(), "ops": table["ops"].to_dict(),
        "syncs": syncs[["call", "range", "count", "per_instance", "cpu_ms"]].to_dict("records"),
        "classes": recording.kernels.groupby("class")[["count", "ms"]].sum().to_dict(),
    }  # fmt: skip
    if sequences > 1 and moe_impl == "grouped":
        found = instances(recording.events)
        for path in ("layers.3.attn", "layers.3.ffn", "layers.3.ffn.experts", "lm_head"):
            span_ms = found[found["name"] == path]["span_us"].median() / 1e3
            row.setdefault("modules", {})[path] = {
                "events_ms": module_ms(work.model, work.fn, path), "range_ms": span_ms,
            }  # fmt: skip
        row["annotate"] = annotate_cost(work)
    print(name, json.dumps(row, indent=1, default=str), flush=True)
    return row


def annotate_cost(work) -> dict:
    """A pass without and with ranges, in turns."""
    plain, named = [], []
    for _ in range(4):
        plain += cuda_time(work.fn, warmup=2, repeat=5)
        with annotate(work.model):
            named += cuda_time(work.fn, warmup=2, repeat=5)
    plain_ms, named_ms = statistics.median(plain), statistics.median(named)
    return {"plain_ms": plain_ms, "annotated_ms": named_ms, "cost": named_ms / plain_ms - 1}


def backward_credit() -> dict:
    """The share of a backward's kernel time that a range around backward() is credited with."""
    work = labkit_step("olmoe-1b-7b", "train", layers=2, micro_batch_size=4, seqlen=1024)
    recording = profile(work.fn, model=work.model)
    table = recording.ranges.set_index("range")["busy_ms"]
    return {
        "backward_range_ms": table["backward"], "left_of_the_step_ms": table["(backward)"],
        "credit": table["backward"] / table["(backward)"],
    }  # fmt: skip


def main(folder: Path, preset: str = "olmoe-1b-7b"):
    folder.mkdir(parents=True, exist_ok=True)
    report = machine_facts()
    for name, (sequences, moe_impl) in RUNS.items():
        report[name] = forward_run(name, sequences, moe_impl, preset, folder)
        torch.cuda.empty_cache()
    report["backward"] = backward_credit()
    print(report["backward"])
    (folder / "profiler.json").write_text(json.dumps(report, indent=2, default=str) + "\n")


if __name__ == "__main__":
    typer.run(main)
