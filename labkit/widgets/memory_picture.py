"""What a training step needs in memory, beside what GPUs have: a figure, and the same in words."""

import pandas as pd

from labkit import plots
from labkit.config import ModelConfig
from labkit.devices import lookup
from labkit.errors import UserError
from labkit.memory_model import step_bytes
from labkit.perfmodel import param_count

SEQLENS = (128, 256, 512, 1024, 2048, 4096)
GPUS = ("T4", "RTX 4090", "L40", "H100 SXM", "H200 SXM", "B200")  # each of another size

_ROOM = 1.1  # times the estimate: below this a GPU may or may not do

# Name → bytes of a parameter's weight, gradient and two moments, and of an activation's element.
STATES = {
    "bfloat16": ((2, 2, 4), 2),
    "bfloat16, float32 moments": ((2, 2, 8), 2),
    "bfloat16, float32 moments and master weights": ((6, 2, 8), 2),
    "float32": ((4, 4, 8), 4),
}


def estimate(model, layers, micro_batch_size, seqlen, recompute, state) -> dict[str, float]:
    """GiB by category; see `labkit.memory_model.step_bytes`. UserError for an unknown state."""
    if state not in STATES:
        raise UserError(f"state={state!r}; it is one of {list(STATES)}")
    of_parameter, of_activation = STATES[state]
    found = step_bytes(
        _config(model, layers), micro_batch_size, seqlen, bool(recompute), of_activation,
        of_parameter,
    )  # fmt: skip
    return {name: size / 2**30 for name, size in found.items()}


def figure(model, layers, micro_batch_size, seqlen, recompute, state, device=None):
    """The estimate as a bar, with the memory of GPUs beside it."""
    parts = estimate(model, layers, micro_batch_size, seqlen, recompute, state)
    name = f"{layers} layers\n{micro_batch_size} × {seqlen:,}" + "\nrecomputed" * bool(recompute)
    rows = pd.DataFrame([parts], index=[name])
    return plots.memory_categories(rows, _shown(sum(parts.values()), device))


def words(parts: dict[str, float], device, model, layers, **choice) -> list[str]:
    """What the figure shows, in sentences."""
    total = sum(parts.values())
    most = max(parts, key=parts.get)
    cfg = _config(model, layers)
    verdicts = {"It fits on": [], "It is tight on": [], "It is too much for": []}
    for name, gib in _known(device).items():
        verdict = list(verdicts)[0 if gib >= _ROOM * total else 1 if gib >= total else 2]
        verdicts[verdict].append(name)
    said = [f"{verdict} {', '.join(names)}." for verdict, names in verdicts.items() if names]
    return [
        f"{total:.3g} GiB for {param_count(cfg) / 1e9:.3g} billion parameters; "
        f"most of it is {most}, {parts[most]:.3g} GiB.",
        " ".join(said),
        "This is the peak: the backward pass of the loss, with an earlier micro batch's gradients. "
        "The CUDA context and unused parts of the allocator's blocks come on top.",
    ]


def _config(model: str, layers: int) -> ModelConfig:
    cfg = ModelConfig.preset(model, n_layers=layers)
    return ModelConfig.preset(model, n_layers=layers, max_seqlen=max(cfg.max_seqlen, SEQLENS[-1]))


def _known(device) -> dict[str, float]:
    """Memory in GiB of the GPUs to compare with, and of the device in use, the smallest first."""
    gpus = {spec.name: spec.memory_gib for name in GPUS if (spec := lookup(name))}
    if device is not None:
        gpus[device.name] = device.memory_gib
    return dict(sorted(gpus.items(), key=lambda item: item[1]))


def _shown(total: float, device) -> dict[str, float]:
    """The GPUs up to the first that has twice of it, so that the bar is not lost beside them."""
    shown = {}
    for name, gib in _known(device).items():
        shown[name] = gib
        if gib >= 2 * total:
            break
    return shown
