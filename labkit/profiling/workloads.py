"""What `labkit profile` can record: a step of labkit's model, or a callable of the user's own."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.devices import pick, training_dtype
from labkit.errors import UserError
from labkit.model import Transformer
from labkit.train import make_optimizer, train_step

MODES = ("forward", "train")


@dataclass(frozen=True)
class Workload:
    """One step as a function without arguments, and the module whose parts get ranges."""

    fn: Callable[[], object]
    model: torch.nn.Module | None = None


def build_model(cfg: ModelConfig, device: torch.device) -> Transformer:
    """A model with random weights in the device's training dtype, made where it will live."""
    with torch.device("meta"):
        model = Transformer(cfg)
    model = model.to(training_dtype(device)).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.ones_(weight)
        else:
            std = 0.02 if name == "embed.weight" else (3 * weight.shape[-1]) ** -0.5
            torch.nn.init.normal_(weight, std=std, generator=generator)
    return model


def labkit_step(
    preset: str,
    mode: str = "forward",
    layers: int | None = None,
    micro_batch_size: int = 1,
    seqlen: int = 512,
    moe_impl: str = "grouped",
    recompute: bool = False,
    device=None,
    checkpoint: str | Path | None = None,
) -> Workload:
    """A forward pass or a training step of a preset with random weights, or of a checkpoint."""
    if mode not in MODES:
        raise UserError(f"mode={mode!r}; it is {' or '.join(MODES)}")
    device = pick(device)
    if checkpoint:
        from labkit.checkpoint import load_hf

        model = load_hf(checkpoint, device)
        if layers is not None:
            model.cfg = replace(model.cfg, n_layers=min(layers, model.cfg.n_layers))
            model.layers = model.layers[:layers]
    else:
        cfg = ModelConfig.preset(preset, **({} if layers is None else {"n_layers": layers}))
        model = build_model(cfg, device)
    model.moe_impl, model.recompute = moe_impl, recompute
    batch = random_micro_batch(model.cfg, micro_batch_size, seqlen, device)
    if mode == "train":
        return Workload(partial(train_step, model, make_optimizer(model), batch), model)
    return Workload(torch.no_grad()(partial(model, batch.tokens, batch.seqs)), model)


def load_target(target: str) -> Workload:
    """`package.module:make_step` → what it makes: a callable, or a pair of it and its nn.Module.

    The module is looked for in the working directory as well. A bad name, or something else made,
    is a UserError; an exception of the user's own code comes through.
    """
    where, colon, name = target.partition(":")
    if not (all(where.split(".")) and colon and name):
        raise UserError(f"--target {target!r} is not of the form package.module:make_step")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name and where.startswith(error.name):
            raise UserError(f"--target {target!r}: there is no module {error.name!r}") from None
        raise
    finally:
        sys.path.pop(0)
    make = getattr(module, name, None)
    if not callable(make):
        raise UserError(f"--target {target!r}: {where} has no function {name!r}")
    made = make()
    fn, model = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not callable(fn) or not isinstance(model, torch.nn.Module | None):
        raise UserError(
            f"{target} made {type(made).__name__}: it must return a callable, "
            "or a pair of a callable and its nn.Module"
        )
    return Workload(fn, model)
