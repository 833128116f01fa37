"""The kernels of a training step that gemm and ops lack, each by itself: for a performance model.

Writes kernels.csv and kernels.png.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from labkit import plots
from labkit.attention import causal_attention
from labkit.config import ModelConfig
from labkit.data import Seqs
from labkit.experiments.machine import Machine
from labkit.experiments.progress import steps
from labkit.experiments.table import KERNELS, Table, save
from labkit.model import rope_angles, rotate

SEQLEN = 1024  # of attention
CHAIN = 50  # operations in a row that do next to nothing


def run(output="results", quick=False, device=None, progress=None, model=None):
    """Measure the kernels of a model's training step on random data; the rows of kernels.csv.

    `size` is the number of tokens; of AdamW, the rows of a weight with `dim` columns; of the last
    two, operations in a chain that do next to nothing: their time is Python's, for going forward
    and backward, and, recomputed, forward twice. `kernels` is how many kernels the others launch.
    `model`: None is olmoe-1b-7b on a GPU, olmoe-tiny on a CPU.
    Goes on after the rows that `output` has; `quick` takes less time.
    Raises UserError, before it measures, for bad input and a folder that cannot be written.
    """
    machine = Machine.here(device)
    preset = model or ("olmoe-1b-7b" if machine.on_gpu else "olmoe-tiny")
    cfg = ModelConfig.preset(preset)
    table = Table(output, KERNELS, machine.facts, quick)
    todo = [key for key in grid(machine) if not table.has(**key)]
    with steps("kernels", len(todo), progress) as step:
        for key in todo:
            step(f"{key['kernel']}, {key['size']}")
            row = machine.attempt(lambda key=key: _measure(machine, cfg, key, quick))
            table.append(key | {"model": preset} | row)
    frame = table.frame()
    save(plots.kernels(frame), Path(output) / "kernels.png")
    return frame


def grid(machine: Machine) -> list[dict]:
    """The keys of the rows to measure."""
    tokens = (1024, 4096, 16384) if machine.on_gpu else (128, 512, 2048)
    sizes = {name: tokens for name in KINDS}
    sizes["AdamW"] = (2048, 16384, 131072) if machine.on_gpu else (512, 2048, 16384)
    sizes |= {name: (CHAIN,) for name in CHAINS}
    return [{"kernel": name, "size": size} for name in sizes for size in sizes[name]]


def _measure(machine: Machine, cfg: ModelConfig, key: dict, quick: bool) -> dict:
    name, size = key["kernel"], key["size"]
    if name in CHAINS:
        fn = CHAINS[name](machine, size)
        ends_s = machine.steadily(fn, 0.2 if quick else 1.0, calls := machine.calls_in(fn, 0.02))
        return {"ms": 1e3 * ends_s[-1] / calls / len(ends_s), "calls": calls * len(ends_s)}
    fn, flops, moved, kernels = KINDS[name](machine, cfg, size)
    timed = machine.time(fn, budget_s=0.1 if quick else 0.4, flush_l2=machine.on_gpu)
    return timed | {
        "flops": flops,
        "moved_bytes": moved,
        "kernels": kernels,
        "tflops": flops / timed["ms"] / 1e9,
        "gbs": moved / timed["ms"] / 1e6,
    }


def _grouped(machine: Machine, cfg: ModelConfig, T: int) -> tuple[Callable, int, int, int]:
    """up_proj of all experts, on rows that are sent to them at random."""
    D, inner, n, k = cfg.dim, cfg.ffn_dim, cfg.n_experts, cfg.experts_per_token
    x, weight = machine.random(T * k, D), machine.random(n, inner, D)
    chosen = torch.rand(T, n, device=machine.device).topk(k).indices.flatten()
    ends = chosen.bincount(minlength=n).cumsum(0).to(torch.int32)
    moved = (T * k * (D + inner) + n * D * inner) * machine.dtype.itemsize
    return lambda: F.grouped_mm(x, weight.mT, offs=ends), 2 * T * k * D * inner, moved, 2


def _heads(machine: Machine, cfg: ModelConfig, T: int):
    return machine.random(T, cfg.n_heads, cfg.head_dim)


def _attention(machine: Machine, cfg: ModelConfig, T: int, backward: bool = False):
    S = min(T, SEQLEN)
    seqs = Seqs.from_lengths([S] * (T // S), machine.device)
    q, k, v = (_heads(machine, cfg, T).requires_grad_(backward) for _ in range(3))
    flops = 2 * cfg.n_heads * cfg.head_dim * (S + 1) * T
    tensor = q.numel() * machine.dtype.itemsize
    if not backward:
        return lambda: causal_attention(q, k, v, seqs), flops, 4 * tensor, 1
    y, grad = causal_attention(q, k, v, seqs), _heads(machine, cfg, T)
    fn = lambda: torch.autograd.grad(y, (q, k, v), grad, retain_graph=True)  # noqa: E731
    return fn, 2.5 * flops, 8 * tensor, 3


def _rotary(machine: Machine, cfg: ModelConfig, T: int):
    x = _heads(machine, cfg, T)
    rope = rope_angles(cfg, torch.arange(T, device=machine.device), machine.dtype)
    return lambda: rotate(x, *rope), 0, 7 * x.numel() * machine.dtype.itemsize, 3


def _dispatch(machine: Machine, cfg: ModelConfig, T: int):
    """Each token to its rows, in another order, and their sum back."""
    k, D = cfg.experts_per_token, cfg.dim
    x, order = machine.random(T, D), torch.randperm(T * k, device=machine.device)
    token_of_row = order // k

    def fn():
        rows = x.index_select(0, token_of_row)
        return rows.index_select(0, order).view(T, k, D).sum(1)

    return fn, 0, (2 * T * D + 4 * T * k * D) * machine.dtype.itemsize, 3


def _softmax(machine: Machine, cfg: ModelConfig, T: int):
    """Of float32 logits over the vocabulary, forward and backward."""
    x, grad = (torch.randn(T, cfg.vocab_size, device=machine.device) for _ in range(2))

    def fn():
        y = F.log_softmax(x, dim=-1)
        return torch.ops.aten._log_softmax_backward_data(grad, y, -1, torch.float32)

    return fn, 0, 24 * x.numel(), 2


def _adamw(machine: Machine, cfg: ModelConfig, rows: int):
    weight = torch.nn.Parameter(machine.random(rows, cfg.dim))
    weight.grad = machine.random(rows, cfg.dim)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return optimizer.step, 0, 7 * weight.numel() * machine.dtype.itemsize, 1


def _chain(machine: Machine, n: int, again: bool = False) -> Callable:
    """Forward and backward of n operations on one number; with `again`, recomputed between."""
    x = machine.random(1).requires_grad_()

    def chained(y):
        for _ in range(n):
            y = y.sin()  # keeps its input for the backward, as most operations do
        return y

    def fn():
        y = checkpoint(chained, x, use_reentrant=False) if again else chained(x)
        y.backward()

    return fn


KINDS = {
    "grouped multiply": _grouped,
    "attention": _attention,
    "attention backward": lambda *args: _attention(*args, backward=True),
    "rotary angles": _rotary,
    "dispatch": _dispatch,
    "softmax": _softmax,
    "AdamW": _adamw,
}
CHAINS = {
    "launch, forward and backward": _chain,
    "launch, recomputed": lambda *args: _chain(*args, again=True),
}
