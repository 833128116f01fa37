"""What the tests of Coding Exercise 9 look for, as functions of an implementation.

Predictions are compared with measured steps, the rows of a sweep. They are asked for under watch:
nothing may be read, and torch cannot be imported.
"""

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from labkit.config import ModelConfig
from labkit.course.contestant import MISSING, in_words, watched
from labkit.course.leaderboard import measured_steps
from labkit.devices import spec
from labkit.predictor.prediction import Prediction
from tests.public import slips_c9 as slips
from tests.public.judging import require

DEVICE = "H200"
UNITS = {"step_ms": "ms", "peak_gib": "GiB"}
EXPLAIN = {"step_ms": slips.time_slip, "peak_gib": slips.memory_slip}
PLAIN = "it must be plain arithmetic, with no file, no torch and no GPU"
WORST = 3


def truth(path: Path) -> pd.DataFrame:
    """The measured steps of a single micro batch."""
    steps = measured_steps(path)
    return steps[steps["micro_batches"] == 1].reset_index(drop=True)


def check_close(function, column: str, steps: pd.DataFrame, within: float):
    """Of five steps at least four are predicted within a share of what was measured."""
    predictions = predict(function, *map(shape, steps.itertuples()))
    found, measured = np.array(predictions, dtype=float), steps[column].to_numpy()
    off = abs(found / measured - 1)
    close, needed = int((off <= within).sum()), math.ceil(slips.MOST * len(steps))
    if close >= needed:
        return
    worst = [
        described(step, getattr(step, column), predictions[step.Index], UNITS[column])
        for step in steps.loc[np.argsort(-off, kind="stable")[:WORST]].itertuples()
    ]
    said = [
        f"{close} of {len(steps)} steps are within {100 * within:.0f} %, and {needed} must be",
        explanation(column, steps, found, off > within),
        f"The worst: {'; '.join(worst)}",
    ]
    raise AssertionError(". ".join(one for one in said if one))


def explanation(column: str, steps: pd.DataFrame, found: np.ndarray, off: np.ndarray) -> str:
    """Why predictions are wrong, as far as their errors tell; "" if they do not."""
    words = slips.factor_slip(column, steps, found)
    words = words or EXPLAIN[column](steps, found, spec(DEVICE))
    words = words or slips.where_off(steps, off) or ""
    return words[:1].upper() + words[1:]


def described(step, measured: float, predicted: float, unit: str) -> str:
    text = f"{in_short(shape(step))}: {measured:.4g} {unit} measured, "
    text += f"{float(predicted):.4g} predicted"
    if isinstance(predicted, Prediction):
        largest = sorted(predicted.by().items(), key=lambda term: -term[1])[:WORST]
        text += f" ({', '.join(f'{name} {value:.3g}' for name, value in largest)}, …)"
    return text


def shape(step) -> tuple:
    """The arguments of a prediction."""
    return slips.config(step), step.micro_batch_size, step.seqlen, step.recompute


def olmoe(layers: int, micro_batch_size: int, seqlen: int, recompute: bool = False) -> tuple:
    cfg = ModelConfig.preset("olmoe-1b-7b", n_layers=layers)
    return cfg, micro_batch_size, seqlen, recompute


def predict(function, *shapes: tuple) -> list[float]:
    """What a function predicts, with an AssertionError for what is no prediction."""
    found = []
    with watched() as tried:
        for cfg, size, seqlen, recompute in shapes:
            call = f"{function.__name__} of {in_short((cfg, size, seqlen, recompute))}"
            try:
                one, problem = function(cfg, size, seqlen, recompute, DEVICE), ""
            except NotImplementedError:
                raise
            except Exception as error:
                one, problem = None, in_words(error)
            if tried or problem == "it imports torch":
                raise AssertionError(f"{call}: {tried[0] if tried else problem}; {PLAIN}")
            require(not problem, f"{call} raised {problem}")
            found.append(checked(call, one))
    return found


def checked(call: str, found) -> float:
    require(found is not None, f"{call} returned None: is the return missing?")
    require(
        isinstance(found, (int, float, np.number)) and not isinstance(found, bool),
        f"{call} returned a {type(found).__name__}, not a number",
    )
    require(0 < found < math.inf, f"{call} returned {float(found):g}; it must be above 0")
    return found


def check_number(function, *shapes: tuple):
    """A plain number above 0, the same each time."""
    first, again = predict(function, *shapes), predict(function, *reversed(shapes))[::-1]
    for one, other in zip(first, again, strict=True):
        require(
            float(one) == float(other),
            f"{function.__name__} returned {float(one):.6g}, and {float(other):.6g} for the same "
            "step: the same input must give the same number",
        )


def check_unit(function, column: str, steps: pd.DataFrame):
    """Not off by a constant factor, such as that of another unit."""
    found = np.array(predict(function, *map(shape, steps.itertuples())), dtype=float)
    words = slips.factor_slip(column, steps, found)
    require(words is None, f"{function.__name__}: {words}")


def check_model(predict_step_ms, steps: pd.DataFrame):
    """A model, and no table of the steps that students are given: those scatter."""
    found = np.array(predict(predict_step_ms, *map(shape, steps.itertuples())), dtype=float)
    exact = int((abs(found / steps["step_ms"].to_numpy() - 1) < 1e-4).sum())
    require(
        exact < len(steps) / 2,
        f"{exact} of {len(steps)} times are exactly what was measured: a pasted table? The hidden "
        "tests ask for other steps; say where the time goes, and fit what you do not know",
    )


def check_growth(function, *series: list[tuple]):
    """Each series of shapes has more and more tokens, or layers."""
    for shapes in series:
        found = predict(function, *shapes)
        for before, after in pairwise(range(len(found))):
            require(
                found[after] >= found[before],
                f"{function.__name__} falls from {found[before]:.4g} to {found[after]:.4g}, from "
                f"{in_short(shapes[before])} to {in_short(shapes[after])}: more work, or more that "
                "is kept, cannot cost less",
            )
        require(
            found[-1] > found[0],
            f"{function.__name__} returned {found[0]:.4g} for {in_short(shapes[0])} and for "
            f"{in_short(shapes[-1])}: does it look at layers and tokens?",
        )


def in_short(shape: tuple) -> str:
    cfg, size, seqlen, recompute = shape
    layers = f"{cfg.n_layers} layer{'s' * (cfg.n_layers > 1)}"
    return f"{layers}, {size} × {seqlen}" + ", recomputing" * recompute


def check_recompute_time(predict_step_ms, *shapes: tuple):
    """Recomputing costs time."""
    for kept in shapes:
        without, again = predict(predict_step_ms, kept, (*kept[:3], True))
        where = f"{in_short(kept)}: {without:.4g} ms, and with recompute=True"
        require(
            again != without,
            f"{where} the same: recompute is ignored; it runs each layer's forward again",
        )
        require(again > without, f"{where} {again:.4g}: running a forward again takes time")


def check_recompute_memory(predict_peak_gib, *shapes: tuple):
    """Where activations dominate, recomputing saves memory."""
    for kept in shapes:
        without, again = predict(predict_peak_gib, kept, (*kept[:3], True))
        where = f"{in_short(kept)}: {without:.4g} GiB, and with recompute=True"
        require(
            again != without,
            f"{where} the same: recompute is ignored; the activations of all layers are kept, "
            "where each should keep only its output",
        )
        require(again < without, f"{where} {again:.4g}: it keeps less, and so needs less")


ALONE = """
import json, sys
sys.modules["torch"] = None
from labkit.course.contestant import in_words, watched
with watched() as tried:
    try:
        from labkit.config import ModelConfig
        from labkit.perfmodel import predict_peak_gib, predict_step_ms
        for function in predict_step_ms, predict_peak_gib:
            float(function(ModelConfig.preset("olmoe-1b-7b", n_layers=3), 2, 512, False, "H200"))
        said = ""
    except Exception as error:
        said = in_words(error)
print(json.dumps(tried[0] if tried else said))
"""


def check_alone():
    """In a Python of its own, without torch, `labkit.perfmodel` can be imported and predicts."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60)
    require(done.returncode == 0, f"labkit/perfmodel.py, without torch: {done.stderr[-300:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    if said == MISSING:
        raise NotImplementedError("labkit/perfmodel.py, predict_step_ms and predict_peak_gib")
    require(not said, f"labkit/perfmodel.py: {said}; {PLAIN}")
