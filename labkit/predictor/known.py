"""Constants of devices: those that ship, a user's own, and those that a spec implies."""

import tomllib
from functools import lru_cache
from pathlib import Path

from labkit import ceilings
from labkit.devices import DeviceSpec
from labkit.errors import UserError
from labkit.predictor.constants import Constants

# Fitted by `labkit calibrate` to labkit/assets/truth, with Part 1 from benchmarks/results.
SHIPPED = {
    "H200 SXM": Constants(
        gemm_tflops=927.4, grouped_tflops=701.2, attention_tflops=338.1,
        attention_backward_tflops=264.9, stream_gbs=3936, strided_gbs=1718, gather_gbs=3133,
        loss_gbs=3317, optimizer_gbs=2700, kernel_us=3.343, power_loss=0.04947,
        launch_us=14.43, relaunch_us=40.41,
        source="calibrated on a sweep of three H200",
    ),
    "AMD EPYC, 2 cores": Constants(
        gemm_tflops=0.1952, grouped_tflops=0.194, attention_tflops=0.07445,
        attention_backward_tflops=0.07339, stream_gbs=107.4, strided_gbs=81.15,
        gather_gbs=85.94, loss_gbs=7.622, optimizer_gbs=64.41, kernel_us=11.74,
        source="calibrated on a sweep of one such CPU",
    ),
}  # fmt: skip


def constants_of(device: DeviceSpec) -> Constants:
    """The constants of a device: a user's, else those that ship, else what its spec implies.

    UserError: a CPU that nobody has calibrated, because no document says what it does.
    """
    if found := users().get(device.name) or SHIPPED.get(device.name):
        return found
    from labkit.predictor.unseen import from_spec

    return from_spec(device)


def users() -> dict[str, Constants]:
    """What `labkit calibrate` wrote into the working directory or the user's configuration."""
    found = {}
    for path in ceilings.user_files("constants.toml"):
        found |= read_table(path, path.stat().st_mtime_ns)
    return found


@lru_cache(maxsize=8)
def read_table(path: Path, _changed: int = 0) -> dict[str, Constants]:
    """Device → constants. UserError: the file is no TOML, or a constant is missing or bad."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}") from None
    try:
        return {name: Constants.from_dict(values) for name, values in table.items()}
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
