"""How fast each matrix multiply of a model runs, over the number of tokens; and one, for seconds.

Writes gemm.csv and roofline.png, gemm_sustained.csv and gemm_sustained.png.
"""

import time
from pathlib import Path

import pandas as pd
import torch

from labkit import plots
from labkit.config import ModelConfig
from labkit.experiments import measured_ceilings
from labkit.experiments.machine import Machine, with_reached
from labkit.experiments.progress import steps
from labkit.experiments.table import GEMM, SUSTAINED, Table, save
from labkit.monitor import Monitor
from labkit.perfmodel import gemm_bytes, gemm_flops, roofline_tflops

MAX_M = 32768
MAX_CPU_GFLOP = 20  # of one call on a CPU, where it takes some 0.2 s
MAX_CPU_GFLOP_QUICK = 2
IDLE_S = 5.0  # lets a GPU cool a little, and its clock recover, before the sustained multiply


def run(output="results", quick=False, device=None, progress=None, model="olmoe-1b-7b"):
    """Measure every matrix multiply of a model for 1 to 32768 tokens; the rows of gemm.csv.

    Goes on after the rows that `output` has. A GPU multiplies in the dtype that it trains in, with
    its L2 cache flushed before each call: in a model, a layer's weights come from memory. A CPU
    leaves out the multiplies that would take it long. `quick` takes every other power of two and
    less time for each. `model` is a ModelConfig or the name of a preset.
    Raises UserError, before it measures, for bad input and a folder that cannot be written.
    """
    cfg = model if isinstance(model, ModelConfig) else ModelConfig.preset(model)
    machine = Machine.here(device)
    table = Table(output, GEMM, machine.facts, quick)
    sustained = Table(output, SUSTAINED, machine.facts, quick)
    todo = [key for key in grid(machine, cfg, quick) if not table.has(**key)]
    with steps("gemm", len(todo) + (0 if sustained else 1), progress) as step:
        for key in todo:
            step(f"{key['shape']} M={key['M']}")
            table.append(key | machine.attempt(lambda key=key: _measure(machine, key, quick)))
        if not sustained:
            step("one multiply, held")
            sustained.replace(sustain(machine, quick))
    frame = table.frame()
    save(figure(frame, machine.spec, output), Path(output) / "roofline.png")
    save(plots.sustained(sustained.frame()), Path(output) / "gemm_sustained.png")
    return frame


def shapes(cfg: ModelConfig) -> dict[tuple[int, int], str]:
    """(k, n) of each weight of the model that tokens are multiplied by → its name, or names."""
    q_dim, kv_dim = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    expert = "expert " if cfg.is_moe else ""
    weights = [
        ("q_proj", cfg.dim, q_dim),
        ("k_proj", cfg.dim, kv_dim),
        ("v_proj", cfg.dim, kv_dim),
        ("o_proj", q_dim, cfg.dim),
        *([("router", cfg.dim, cfg.n_experts)] if cfg.is_moe else []),
        (f"{expert}gate_proj", cfg.dim, cfg.ffn_dim),
        (f"{expert}up_proj", cfg.dim, cfg.ffn_dim),
        (f"{expert}down_proj", cfg.ffn_dim, cfg.dim),
        ("lm_head", cfg.dim, cfg.vocab_size),
    ]
    merged = {}
    for name, k, n in weights:
        merged.setdefault((k, n), []).append(name)
    return {sizes: _joined(names) for sizes, names in merged.items()}


def _joined(names: list[str]) -> str:
    """["expert gate_proj", "expert up_proj"] → "expert gate/up_proj"."""
    first, *others = names
    if all(name.startswith("expert ") for name in names):
        others = [name.removeprefix("expert ") for name in others]
    *others, last = [first, *others]
    return "/".join([*(name.removesuffix("_proj") for name in others), last])


def grid(machine: Machine, cfg: ModelConfig, quick: bool = False) -> list[dict]:
    """The keys of the rows to measure: each shape with M in powers of two."""
    counts = [2**i for i in range(0, MAX_M.bit_length(), 2 if quick else 1)]
    most = (MAX_CPU_GFLOP_QUICK if quick else MAX_CPU_GFLOP) * 1e9
    return [
        {"shape": name, "M": M, "k": k, "n": n}
        for (k, n), name in shapes(cfg).items()
        for M in counts
        if machine.on_gpu or gemm_flops(M, k, n) <= most
    ]


def _multiply(machine: Machine, M: int, k: int, n: int):
    """A function that multiplies [M, k] by a weight [n, k] transposed, as nn.Linear does."""
    x, weight, out = machine.random(M, k), machine.random(n, k), machine.empty(M, n)
    return lambda: torch.mm(x, weight.T, out=out)


def _measure(machine: Machine, key: dict, quick: bool) -> dict:
    sizes = key["M"], key["k"], key["n"]
    flops, moved = gemm_flops(*sizes), gemm_bytes(*sizes, machine.dtype.itemsize)
    bound = roofline_tflops(flops / moved, machine.spec)
    timed = machine.time(
        _multiply(machine, *sizes), budget_s=0.1 if quick else 0.4, flush_l2=machine.on_gpu
    )
    return timed | {
        "tflops": flops / timed["ms"] / 1e9,
        "gbs": moved / timed["ms"] / 1e6,
        "intensity_flop_per_byte": flops / moved,
        "bound_tflops": bound,
    }


def sustain(machine: Machine, quick: bool = False) -> list[dict]:
    """The rows of gemm_sustained.csv: a large multiply back to back, starting from idle.

    A row is an interval of some 50 ms that ended at `t_s` seconds: its mean time a call, and the
    sample of the counters that is nearest to it in time.
    """
    rows: list[dict] = []
    n = 8192 if machine.on_gpu else 1024
    outcome = machine.attempt(lambda: rows.extend(_sustain(machine, n, quick)) or {})
    return rows if outcome["status"] == "ok" else [outcome | {"t_s": 0.0, "n": n}]


def _sustain(machine: Machine, n: int, quick: bool) -> list[dict]:
    seconds = 6.0 if machine.on_gpu and not quick else 2.0
    multiply = _multiply(machine, n, n, n)
    calls = machine.calls_in(multiply, 0.05)
    if machine.on_gpu:
        time.sleep(1.0 if quick else IDLE_S)
    with Monitor(machine.device) as monitor:
        ends_s = machine.steadily(multiply, seconds, calls)
    rows = pd.DataFrame({"t_s": ends_s, "n": n, "calls": calls})
    rows["ms"] = rows["t_s"].diff().fillna(rows["t_s"]) * 1e3 / calls
    rows["tflops"] = gemm_flops(n, n, n) / rows["ms"] / 1e9
    counters = monitor.samples[["t_s", "sm_clock_mhz", "power_w", "temperature_c", "throttle"]]
    rows = pd.merge_asof(rows, counters, on="t_s", direction="nearest", tolerance=0.3)
    return rows.to_dict("records")


def figure(frame, spec, folder=None):
    """gemm.csv over the roofline; dashed, what `folder` says that large operations reached."""
    if folder is not None:
        spec = with_reached(spec, measured_ceilings(folder))
    return plots.roofline(spec, frame.sort_values("M", kind="stable"))
