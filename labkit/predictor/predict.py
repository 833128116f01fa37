"""Predictions for a device: its constants, its memory, and the two models."""

from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec
from labkit.errors import UserError
from labkit.perfmodel import bytes_per_element
from labkit.predictor.constants import Constants
from labkit.predictor.known import constants_of
from labkit.predictor.peak import peak_memory
from labkit.predictor.prediction import Prediction
from labkit.predictor.steptime import step_time


def step_ms(
    cfg: ModelConfig,
    micro_batch_size: int,
    seqlen: int,
    recompute: bool,
    device: DeviceSpec,
    *,
    micro_batches: int = 1,
    state_bytes: tuple[float, float, float] | None = None,
    constants: Constants | None = None,
) -> Prediction:
    """The time of an optimizer step, in ms.

    `constants`: None takes those known for the device. UserError: the step does not fit into the
    device's memory, or nothing is known of the device.
    """
    peak = peak_gib(
        cfg, micro_batch_size, seqlen, recompute, device,
        micro_batches=micro_batches, state_bytes=state_bytes,
    )  # fmt: skip
    if peak > device.memory_gib:
        more = {"micro_batches": micro_batches, "state_bytes": state_bytes}
        raise UserError(_does_not_fit(cfg, peak, micro_batch_size, seqlen, recompute, device, more))
    return step_time(
        cfg, micro_batch_size, seqlen, recompute, constants or constants_of(device),
        bytes_per_element=bytes_per_element(device),
        micro_batches=micro_batches, state_bytes=state_bytes,
    )  # fmt: skip


def peak_gib(
    cfg: ModelConfig,
    micro_batch_size: int,
    seqlen: int,
    recompute: bool,
    device: DeviceSpec,
    *,
    micro_batches: int = 1,
    state_bytes: tuple[float, float, float] | None = None,
) -> Prediction:
    """The most memory that tensors have at one time in an optimizer step, in GiB."""
    b = bytes_per_element(device)
    on_gpu = b < 4
    return peak_memory(
        cfg, micro_batch_size, seqlen, recompute,
        bytes_per_element=b, micro_batches=micro_batches, state_bytes=state_bytes,
        workspace_mib=workspace_mib(device) if on_gpu else 0,
        on_gpu=on_gpu, shares_kv_heads=on_gpu and _shares_kv_heads(),
    )  # fmt: skip


@cache
def _shares_kv_heads() -> bool:
    """Whether FlashAttention needs no copies of keys and values: from PyTorch 2.12 on."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return True
    return (int(major), int(minor)) >= (2, 12)


def workspace_mib(device: DeviceSpec) -> float:
    """What cuBLAS keeps, for the forward and for the backward thread: PyTorch's defaults.

    Twice 32 MiB on Hopper, twice 8.125 MiB elsewhere (aten/src/ATen/cuda/CUDABlas.cpp).
    """
    hopper = any(name in device.name.upper() for name in ("H100", "H200", "H800", "GH200"))
    return 64 if hopper else 16.25


def _does_not_fit(cfg, peak, micro_batch_size, seqlen, recompute, device, more: dict) -> str:
    """The number, and the nearest ways out that would fit."""

    def need(cfg=cfg, size=micro_batch_size, again=recompute) -> float:
        return float(peak_gib(cfg, size, seqlen, again, device, **more))

    ways = []
    if not recompute and (again := need(again=True)) <= device.memory_gib:
        ways.append(f"recompute=True needs {again:.3g}")
    smaller = ((size, need(size=size)) for size in range(micro_batch_size - 1, 0, -1))
    if fits := next((each for each in smaller if each[1] <= device.memory_gib), None):
        ways.append(f"micro_batch_size={fits[0]} needs {fits[1]:.3g}")
    if not ways:
        counts = range(cfg.n_layers - 1, 0, -1)
        fits = (n for n in counts if need(replace(cfg, n_layers=n)) <= device.memory_gib)
        ways = [f"n_layers={n} would fit" for n in fits][:1]
    hint = "; ".join(ways) or "not even one layer would fit"
    return (
        f"the step needs {float(peak):.3g} GiB and {device.name} has {device.memory_gib:.3g} "
        f"({hint})"
    )
