"""Constants of a device that never ran a step: from its datasheet, or Part 1's measurements of it.

What was not measured is taken from what was by the ratios below. A kernel that computes
indices, or does much for each byte, is bound by memory on one device and by its ordinary units on
another, so its rate is the lower of two.
"""

from dataclasses import dataclass
from pathlib import Path

from labkit.devices import DeviceSpec
from labkit.errors import UserError
from labkit.predictor.constants import Constants

GEMM_OF_PEAK = 0.75  # of the datasheet's dense rate
ADD_OF_BANDWIDTH = 0.85  # of the datasheet's bandwidth
STREAM_OF_ADD = 0.89  # smaller tensors, and more kinds of kernels, than one large add
OPTIMIZER_OF_ADD = 0.95
# The rest are ratios of kernels by themselves on an H200: part1_h200 in benchmarks/results.
GROUPED_OF_GEMM, ATTENTION_OF_GEMM, BACKWARD_OF_FORWARD = 0.9, 0.55, 0.8
# GB/s for each float32 TFLOP/s of the ordinary units.
UNITS_GBS = {"strided_gbs": 25.2, "gather_gbs": 46.8, "loss_gbs": 45.7, "optimizer_gbs": 42.2}
KERNEL_US, LAUNCH_US, RELAUNCH_US, RELAUNCH_OF_LAUNCH = 3.0, 15.0, 40.0, 2.7
POWER_LOSS = 0.05  # where a fit starts; a device that never ran a step is taken to have none


@dataclass(frozen=True)
class Readings:
    """What Part 1 says of a device; None where it was not measured.

    The fastest dense multiply, the largest add, the shortest kernel, and Python's time for an
    operation.
    """

    gemm_tflops: float | None = None
    add_gbs: float | None = None
    kernel_us: float | None = None
    launch_us: float | None = None


def from_spec(device: DeviceSpec, readings: Readings | None = None) -> Constants:
    """Constants from a datasheet and what else is known. UserError: a CPU, which has no datasheet.

    A float32 rate must be known, in `device.peaks`, for kernels that are bound by ordinary units.
    """
    if device.dtype == "float32":
        raise UserError(
            f"no constants for {device.name}: nobody states what it does in a step; measure "
            "`labkit sweep --truth` and `labkit experiment kernels`, then `labkit calibrate`"
        )
    readings = readings or Readings()
    gemm = readings.gemm_tflops or GEMM_OF_PEAK * device.peak_tflops
    add = readings.add_gbs or ADD_OF_BANDWIDTH * device.bandwidth_gbs
    units = {name: gbs * device.peak("float32") for name, gbs in UNITS_GBS.items()}
    most = dict.fromkeys(units, STREAM_OF_ADD * add) | {"optimizer_gbs": OPTIMIZER_OF_ADD * add}
    attention = ATTENTION_OF_GEMM * gemm
    launch = readings.launch_us or LAUNCH_US
    measured = " and Part 1" if readings != Readings() else " alone"
    return Constants(
        gemm_tflops=gemm,
        grouped_tflops=GROUPED_OF_GEMM * gemm,
        attention_tflops=attention,
        attention_backward_tflops=BACKWARD_OF_FORWARD * attention,
        stream_gbs=STREAM_OF_ADD * add,
        kernel_us=readings.kernel_us or KERNEL_US,
        launch_us=launch,
        relaunch_us=RELAUNCH_OF_LAUNCH * launch,
        **{name: min(units[name], most[name]) for name in units},
        source=f"the datasheet{measured}: no step was seen",
    )


def from_part1(folder, device: DeviceSpec) -> Constants:
    """Constants from gemm.csv, ops.csv, regimes.csv and kernels.csv, as far as they are there.

    UserError: none is there, they come from another device, or rows are bad.
    """
    from labkit.experiments.table import read

    found = {}
    for schema in _schemas():
        if schema.path(folder).is_file():
            frame = read(schema.path(folder), schema)
            found[schema.name] = frame[frame["status"] == "ok"]
    if not found:
        raise UserError(
            f"{Path(folder)} has none of gemm.csv, ops.csv, regimes.csv and kernels.csv; "
            "`labkit experiment gemm` and so on write them"
        )
    _check_rows(found)
    kernels = found.pop("kernels", None)
    if device.dtype == "float32" and (kernels is None or not {"gemm", "ops"} <= found.keys()):
        raise UserError(
            f"{Path(folder)}: a CPU has no datasheet to fill gaps with; measure gemm, ops and "
            "kernels (`labkit experiment kernels --device cpu`)"
        )
    readings = readings_of(found)
    if kernels is None:
        return from_spec(device, readings)
    return _with_kernels(kernels, readings, device)


def _schemas():
    from labkit.experiments import table

    return table.GEMM, table.OPS, table.REGIMES, table.KERNELS


def has_part1(folder) -> bool:
    """Whether a folder has any of the files of `from_part1`."""
    return any(schema.path(folder).is_file() for schema in _schemas())


def _check_rows(found: dict) -> None:
    """UserError: rows of several devices, or times that are none."""
    for name, frame in found.items():
        if bad := [ms for ms in frame["ms"] if not 0 < ms < float("inf")]:
            raise UserError(f"{name}.csv has a time of {bad[0]} ms; delete that row")
    devices = {device for frame in found.values() for device in frame["device"]}
    if len(devices) > 1:
        raise UserError(f"the files come from {sorted(devices)}: keep one folder each")


def readings_of(found: dict) -> Readings:
    """Readings from the rows of gemm, ops and regimes, by name; what is absent is not read."""
    gemm, ops, regimes = (found.get(name) for name in ("gemm", "ops", "regimes"))
    add = ops[ops["op"] == "add"] if ops is not None else ()
    launch = regimes[regimes["workload"] == "launch"] if regimes is not None else ()
    return Readings(
        gemm_tflops=float(gemm["tflops"].max()) if gemm is not None and len(gemm) else None,
        add_gbs=float(add.loc[add["tensor_bytes"].idxmax(), "gbs"].max()) if len(add) else None,
        kernel_us=1e3 * float(ops["ms"].min()) if ops is not None and len(ops) else None,
        launch_us=LAUNCH_US_OF_LOOP * 1e3 * float(launch["ms"].iloc[-1]) if len(launch) else None,
    )


LAUNCH, RELAUNCH = "launch, forward and backward", "launch, recomputed"
LAUNCH_US_OF_LOOP = 1.75  # an operation of a module, with a gradient, of a bare one in a loop


def _with_kernels(kernels, readings: Readings, device: DeviceSpec) -> Constants:
    """Each kernel's rate at its largest size, after what is fixed has been taken off."""
    on_gpu = device.dtype != "float32"
    kernel_us = readings.kernel_us or KERNEL_US
    rows = {name: mine.loc[mine["size"].idxmax()] for name, mine in kernels.groupby("kernel")}
    stream = STREAM_OF_ADD * (readings.add_gbs or ADD_OF_BANDWIDTH * device.bandwidth_gbs)

    def rest_ms(name: str, off_ms: float = 0.0) -> float:
        row = rows[name]
        return max(row["ms"] - row["kernels"] * kernel_us / 1e3 - off_ms, row["ms"] / 10)

    def gbs(name: str) -> float:
        return rows[name]["moved_bytes"] / rest_ms(name) / 1e6

    def tflops(name: str, moved_gbs: float) -> float:
        row = rows[name]
        return row["flops"] / rest_ms(name, row["moved_bytes"] / moved_gbs / 1e6) / 1e9

    strided = gbs("rotary angles")
    launch = (readings.launch_us or LAUNCH_US) * on_gpu
    relaunch = RELAUNCH_OF_LAUNCH * launch
    if on_gpu and {LAUNCH, RELAUNCH} <= rows.keys():
        there, again = rows[LAUNCH], rows[RELAUNCH]
        launch = 1e3 * there["ms"] / there["size"] / 3  # sin; in the backward cos, and times
        relaunch = 1e3 * (again["ms"] - there["ms"]) / again["size"]
    return Constants(
        gemm_tflops=readings.gemm_tflops or GEMM_OF_PEAK * device.peak_tflops,
        grouped_tflops=tflops("grouped multiply", 2 * stream),
        attention_tflops=tflops("attention", strided),
        attention_backward_tflops=tflops("attention backward", strided),
        stream_gbs=stream,
        strided_gbs=strided,
        gather_gbs=gbs("dispatch"),
        loss_gbs=gbs("softmax"),
        optimizer_gbs=gbs("AdamW"),
        kernel_us=kernel_us,
        launch_us=launch,
        relaunch_us=relaunch,
        source="Part 1: no step was seen",
    )
