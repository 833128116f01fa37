"""How many tokens of a real text each expert gets, and what that would cost on several GPUs.

Writes routing.csv (a row a layer), routing_experts.csv (a row an expert) and routing.png.
"""

from pathlib import Path

import numpy as np
import torch

from labkit import plots
from labkit.data import Seqs, sample_text
from labkit.errors import UserError
from labkit.experiments.machine import Machine
from labkit.experiments.progress import steps
from labkit.experiments.table import ROUTED, ROUTING, Table, save

GPUS = (2, 4, 8)
TOKENS, TOKENS_QUICK = 16384, 4096


def run(output="results", quick=False, device=None, progress=None, checkpoint=None):
    """Count the rows that a model's routers send to each expert; the rows of routing.csv.

    The text is the play that ships with labkit, the model the one that ships with it, or that of
    `checkpoint`, a model directory with its tokenizer. `quick` reads less of the play.
    busiest_over_mean: rows of the busiest expert over the mean. gpusN_over_mean: the same of N GPUs
    that hold the experts in contiguous blocks; all wait for the slowest, so it is the factor by
    which imbalance stretches the experts' time. Empty if there are fewer experts than GPUs.
    Raises UserError, before it measures, for bad input, a dense model and a folder that cannot be
    written.
    """
    from labkit.checkpoint import read_config
    from labkit.doctor import SHIPPED

    path = Path(checkpoint or SHIPPED)
    cfg = read_config(path)
    if not cfg.is_moe:
        raise UserError(f"{path} is a dense model: it has no experts, and nothing is routed")
    machine = Machine.here(device)
    layers = Table(output, ROUTING, machine.facts, quick)
    experts = Table(output, ROUTED, machine.facts, quick)
    if not _done(layers, experts, path.name):
        counts = count(path, machine, TOKENS_QUICK if quick else TOKENS, progress)
        same = {"model": path.name}
        layers.replace([same | row for row in by_layer(counts, cfg.experts_per_token)])
        experts.replace([same | row for row in by_expert(counts)])
    frame = layers.frame()
    save(plots.routing(experts.frame(), frame), Path(output) / "routing.png")
    return frame


def _done(layers: Table, experts: Table, model: str) -> bool:
    return bool(layers and experts) and all(
        set(table.frame()["model"]) == {model} for table in (layers, experts)
    )


def count(path: Path, machine: Machine, n_tokens: int, progress=None) -> np.ndarray:
    """Rows of each expert `[layers, experts]`, for the first tokens of the play."""
    from labkit.checkpoint import load_hf, load_tokenizer

    ids = load_tokenizer(path).encode(sample_text()).ids[:n_tokens]
    model = load_hf(path, machine.device)
    counts = torch.zeros(
        model.cfg.n_layers, model.cfg.n_experts, dtype=torch.long, device=machine.device
    )

    def add(number, module, args, output):
        counts[number] += output[1].flatten().bincount(minlength=model.cfg.n_experts)

    hooks = [
        layer.ffn.router.register_forward_hook(lambda *given, number=number: add(number, *given))
        for number, layer in enumerate(model.layers)
    ]
    size = min(model.cfg.max_seqlen, 2048)
    windows = [ids[first : first + size] for first in range(0, len(ids), size)]
    try:
        with steps("routing", len(windows), progress) as step, torch.no_grad():
            for number, window in enumerate(windows):
                step(f"tokens {number * size:,} to {number * size + len(window):,}")
                tokens = torch.tensor(window, device=machine.device)
                model.hidden(tokens, Seqs.from_lengths([len(window)], machine.device))
    finally:
        for hook in hooks:
            hook.remove()
    return counts.cpu().numpy()


def by_layer(counts: np.ndarray, experts_per_token: int) -> list[dict]:
    """The rows of routing.csv, from the rows that each expert got `[layers, experts]`."""
    return [
        {
            "layer": number,
            "tokens": int(rows.sum()) // experts_per_token,
            "experts": len(rows),
            "experts_per_token": experts_per_token,
            "busiest_over_mean": over_mean(rows, len(rows)),
            "empty_experts": int((rows == 0).sum()),
            **{f"gpus{n}_over_mean": over_mean(rows, n) for n in GPUS},
        }
        for number, rows in enumerate(counts)
    ]


def over_mean(rows: np.ndarray, gpus: int) -> float | None:
    """Rows on the busiest of `gpus` GPUs over the mean, experts in contiguous blocks."""
    if gpus > len(rows):
        return None
    loads = [block.sum() for block in np.array_split(rows, gpus)]
    return float(max(loads) / np.mean(loads))


def by_expert(counts: np.ndarray) -> list[dict]:
    """The rows of routing_experts.csv."""
    return [
        {"layer": layer, "expert": expert, "rows": int(n), "over_mean": float(n / rows.mean())}
        for layer, rows in enumerate(counts)
        for expert, n in enumerate(rows)
    ]
