"""Fit the constants to measured steps, starting from what Part 1 says of the device.

Each measured time is a row of a least-squares problem in the logarithms of the constants: a factor
of the constant is a factor of the time. What Part 1 says enters as further rows, each as wide as
such a measurement is wrong about a step.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec
from labkit.errors import UserError
from labkit.predictor.constants import MEANINGS, NAMES, Constants
from labkit.predictor.steptime import step_time

KINDS = ("forward", "backward", "recompute", "optimizer")
STEP_SD, KIND_SD = 0.01, 0.04  # relative: of what the model can get right of a step, of its parts
HOST_SD = 0.1  # of a step that waits for Python, from one process to the next
MEASURED_SD, GUESSED_SD = 0.1, 0.5  # of a constant from Part 1, from a datasheet
LOOSE_SD = 0.3  # of these, of which Part 1 says little
LOOSE = {"power_loss", "launch_us", "relaunch_us", "kernel_us"}
WAITS = 0.02  # from which share of waiting on, the kinds of work say nothing of the device
IDENTIFIED_SD = 0.35  # of a constant's logarithm: beyond that nobody knows it
FEWEST_ROWS = 12
FOLDS, ROUNDS = 5, 2


@dataclass(frozen=True)
class Fit:
    """Constants, how well each is known, and how wrong they are about steps they have not seen.

    `sd` is the relative standard deviation of each constant, `errors` the relative error of each
    configuration's time in cross-validation, where it was left out of the fit.
    """

    constants: Constants
    sd: dict[str, float]
    errors: "object"  # a DataFrame: the configuration, measured and predicted ms, error

    def table(self):
        """A DataFrame: a row a constant, with unit, meaning and uncertainty."""
        import pandas as pd

        values = self.constants.to_dict()
        return pd.DataFrame(
            [
                {"constant": name, "value": values[name], "± %": 100 * self.sd[name],
                 "unit": MEANINGS[name]["unit"], "bound by": MEANINGS[name]["bound"],
                 "what it is": MEANINGS[name]["what"]}
                for name in NAMES
            ]
        )  # fmt: skip


def calibrate(frame, start: Constants, *, measured: bool = True, folds: int = FOLDS) -> Fit:
    """Fit the constants to the rows of a sweep (sweep.csv as a DataFrame).

    `start` are the constants of Part 1; `measured` says that they were measured, and not guessed
    from a datasheet. Repeats count by their median. UserError: too few rows, rows that are no
    times, several devices, or a constant that neither the sweep nor Part 1 tells.
    """
    return _calibrate(configurations(frame), start, measured, folds)


def _calibrate(steps, start: Constants, measured: bool, folds: int = FOLDS) -> Fit:
    free = [name for name in NAMES if getattr(start, name) > 0]
    widths = _widths(free, measured)
    constants, sd = _fit(steps, start, free, widths)
    if vague := [name for name in free if sd[name] > IDENTIFIED_SD]:
        raise UserError(_not_identified(vague, steps, measured))
    errors = _cross_validate(steps, start, free, widths, folds)
    known = sd | {name: 0.0 for name in NAMES if name not in free}
    return Fit(constants, known, errors)


def calibrate_files(sweep, part1=None, device: str | None = None, save=None) -> Fit:
    """`calibrate` on a sweep.csv, or the folder that has it, and on the Part 1 in a folder.

    None as `part1` is the sweep's folder; without any Part 1 there, a GPU's datasheet is the start.
    `device` is the device in the table; None: the one that the sweep names. The constants go into
    the TOML file `save`, beside those of other devices that it has. UserError: as `calibrate`, and
    a file that is no sweep or that cannot be written.
    """
    from labkit.devices import resolve
    from labkit.experiments.table import SWEEP, read

    path = Path(sweep)
    path = SWEEP.path(path) if path.is_dir() else path
    steps = configurations(read(path, SWEEP))
    spec = resolve(device) if device else _named(steps["device"].iloc[0])
    start, measured = _start(Path(part1 or path.parent), spec, strict=part1 is not None)
    found = _calibrate(steps, start, measured)
    source = f"calibrated on {len(steps)} configurations of {path}"
    found = replace(found, constants=replace(found.constants, source=source))
    if save is not None:
        write(save, spec.name, found.constants)
    return found


def _named(name: str) -> DeviceSpec:
    """The device that a sweep's rows name: of the table, or the one in use."""
    from labkit.devices import current, lookup, pick

    if found := lookup(name):
        return found
    here = current(pick("cpu"))
    if name == here.name:
        return here
    raise UserError(f"the sweep is of {name!r}, which is not in the table; say which device it is")


def _start(folder: Path, device: DeviceSpec, strict: bool) -> tuple[Constants, bool]:
    """Where the fit starts, and whether it was measured. A GPU starts with what Python needs."""
    from labkit.predictor.unseen import POWER_LOSS, RELAUNCH_US, from_part1, from_spec, has_part1

    if strict or has_part1(folder) or device.dtype == "float32":
        start, measured = from_part1(folder, device), True
    else:
        start, measured = from_spec(device), False
    if device.dtype != "float32":
        start = replace(start, power_loss=POWER_LOSS, relaunch_us=start.relaunch_us or RELAUNCH_US)
    return start, measured


def write(path, device: str, constants: Constants) -> None:
    """Put the constants of a device into a TOML file, in place of older ones of the same device."""
    from labkit.files import whole_file
    from labkit.predictor.known import read_table

    path = Path(path)
    table = read_table(path, path.stat().st_mtime_ns) if path.is_file() else {}
    lines = []
    for name, each in (table | {device: constants}).items():
        lines += [f"[{json.dumps(name)}]"]
        lines += [
            f"{key} = {json.dumps(value) if isinstance(value, str) else f'{value:.6g}'}"
            for key, value in each.to_dict().items()
        ]
    with whole_file(path) as draft:
        draft.write_text("\n".join(lines) + "\n", encoding="utf-8")


def configurations(frame):
    """A row for each measured configuration: the medians of its repeats.

    UserError: too few of them, a value that is no number above 0, rows of several devices.
    """
    keys = ["model", "layers", "micro_batch_size", "seqlen", "recompute", "micro_batches"]
    rows = frame[frame["status"] == "ok"] if "status" in frame else frame
    for name in ("layers", "micro_batch_size", "seqlen", "step_ms", "p10_ms", "p90_ms", "peak_gib"):
        bad = rows[~(rows[name] > 0) | np.isinf(rows[name].astype(float))]
        if len(bad):
            row = bad.iloc[0]
            raise UserError(
                f"{name}={row[name]} in the row of {row['layers']:g} layers and "
                f"{row['micro_batch_size']:g} × {row['seqlen']:g} tokens; it must be a number "
                "above 0: delete the row, and it is measured again"
            )
    if len(devices := sorted(rows["device"].unique())) > 1:
        raise UserError(f"the sweep has rows of {devices}; calibrate one device at a time")
    groups = rows.groupby(keys, as_index=False)
    medians = groups.median(numeric_only=True).assign(repeats=groups.size()["size"])
    if len(medians) < FEWEST_ROWS:
        raise UserError(
            f"{len(medians)} configurations are too few for {len(NAMES)} constants; measure at "
            f"least {FEWEST_ROWS}: `labkit sweep --truth` takes a grid that is enough"
        )
    device = rows["device"].iloc[0]
    return medians.assign(device=device, dtype=rows["dtype"].iloc[0])


def _widths(free: list[str], measured: bool) -> dict[str, float]:
    if not measured:
        return dict.fromkeys(free, GUESSED_SD)
    return {name: LOOSE_SD if name in LOOSE else MEASURED_SD for name in free}


def _fit(steps, start: Constants, free: list[str], widths) -> tuple[Constants, dict[str, float]]:
    """The constants that fit best, and the relative standard deviation of each.

    Which steps wait for Python is told by the constants of the round before.
    """
    rows = [(row, config(row)) for row in steps.itertuples()]
    prior = np.array([1 / widths[name] for name in free])
    best, z = start, np.zeros(len(free))

    def constants(z) -> Constants:
        moved = {n: getattr(start, n) * math.exp(v) for n, v in zip(free, z, strict=True)}
        return replace(start, **moved)

    for _ in range(ROUNDS):
        waits = [_waits(_predict(row, cfg, best)) for row, cfg in rows]

        def residuals(z, waits=waits):
            c = constants(z)
            found = [
                r for (row, cfg), waiting in zip(rows, waits, strict=True)
                for r in _residuals(row, _predict(row, cfg, c), waiting)
            ]  # fmt: skip
            return np.array([*found, *(z * prior)])

        z, jacobian = _least_squares(residuals, z)
        best = constants(z)
    covariance = np.linalg.inv(jacobian.T @ jacobian)
    return best, dict(zip(free, np.sqrt(np.diag(covariance)), strict=True))


def _predict(row, cfg: ModelConfig, c: Constants):
    """The model's prediction for a row of a sweep."""
    return step_time(
        cfg, int(row.micro_batch_size), int(row.seqlen), row.recompute == "yes", c,
        bytes_per_element=4 if row.dtype == "float32" else 2, micro_batches=int(row.micro_batches),
    )  # fmt: skip


def _waits(predicted) -> bool:
    return predicted.by("group").get("host", 0.0) > WAITS * predicted


def _residuals(row, predicted, waits: bool):
    """(ln predicted − ln measured) / sd of the step and, if nobody waits, of its kinds of work.

    0 for a kind that says nothing: the number of residuals must not change.
    """
    noise = (row.p90_ms - row.p10_ms) / 2.56 / row.step_ms  # of a normal distribution
    sd = math.hypot(STEP_SD, math.hypot(noise, HOST_SD * waits) / math.sqrt(row.repeats))
    yield math.log(predicted / row.step_ms) / sd
    kinds = predicted.by("group")
    for kind in KINDS:
        measured = getattr(row, f"{kind}_ms")
        known = measured > 0 and kind in kinds and not waits and row.micro_batches == 1
        yield math.log(kinds[kind] / measured) / KIND_SD if known else 0.0


def config(row) -> ModelConfig:
    """The model of a row of a sweep."""
    return ModelConfig.preset(row.model, n_layers=int(row.layers))


def _least_squares(residuals, z, steps: int = 30):
    """Levenberg and Marquardt's, with the weights of a loss that outliers cannot pull on."""
    damping, r = 1e-3, residuals(z)
    for _ in range(steps):
        weights = 1 / np.sqrt(np.sqrt(1 + (r / 3) ** 2))  # of √1+x², at three deviations
        jacobian = _jacobian(residuals, z, r) * weights[:, None]
        normal = jacobian.T @ jacobian
        moved = z - np.linalg.solve(
            normal + damping * np.diag(np.diag(normal)), jacobian.T @ (weights * r)
        )
        tried = residuals(moved)
        if _loss(tried) < _loss(r):
            done = np.abs(moved - z).max() < 1e-4
            z, r, damping = moved, tried, damping / 3
            if done:
                break
        else:
            damping *= 4
    return z, jacobian


def _loss(r) -> float:
    return float((np.sqrt(1 + (r / 3) ** 2) - 1).sum())


def _jacobian(residuals, z, r, step: float = 1e-4):
    return np.array([(residuals(z + step * unit) - r) / step for unit in np.eye(len(z))]).T


def _cross_validate(steps, start, free, widths, folds: int):
    """Every configuration predicted by constants that were fitted to others."""
    import pandas as pd

    fold = np.random.default_rng(0).permutation(len(steps)) % folds
    parts = []
    for i in range(folds):
        constants, _ = _fit(steps[fold != i], start, free, widths)
        parts.append(errors(steps[fold == i], constants))
    return pd.concat(parts).sort_index()


def errors(steps, constants: Constants):
    """The configurations with `predicted_ms` and its relative `error`."""
    predicted = [float(_predict(row, config(row), constants)) for row in steps.itertuples()]
    found = steps.assign(predicted_ms=predicted)
    return found.assign(error=found["predicted_ms"] / found["step_ms"] - 1)


def _not_identified(vague: list[str], steps, measured: bool) -> str:
    what = ", ".join(f"{name} ({MEANINGS[name]['what']})" for name in vague)
    varied = {
        "layers": "numbers of layers", "seqlen": "sequence lengths",
        "micro_batch_size": "micro batch sizes", "recompute": "settings of recompute",
    }  # fmt: skip
    few = [what for name, what in varied.items() if steps[name].nunique() < 2]
    missing = [f"rows of other {', '.join(few)}"] if few else []
    if not measured:
        missing.append("Part 1 of this device (`labkit experiment gemm`, ops, regimes, kernels)")
    return (
        f"the rows do not tell {what}: many values fit equally well; add "
        f"{' and '.join(missing) or 'steps of fewer and of more tokens'}"
    )
