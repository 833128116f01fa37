"""A step that nobody ran: its predicted time and memory, as a figure and in words. No widgets."""

from dataclasses import dataclass
from itertools import chain
from math import inf
from numbers import Real
from pathlib import Path
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit import perfmodel, plots
from labkit.config import ModelConfig
from labkit.devices import DeviceSpec, lookup, resolve
from labkit.errors import UserError, whole_number
from labkit.experiments.table import SWEEP, read
from labkit.plots.predictor import draw_terms
from labkit.predictor.constants import OVERHEAD

TRUTH = Path(__file__).parents[1] / "assets/truth"
PLACES = ("results/sweep.csv", "../results/sweep.csv")
NUMBERS = ["step_ms", "peak_gib"]
STEP = ["device", "model", "layers", "recompute", "micro_batches", "micro_batch_size", "seqlen"]
NEAR = 1.5  # times the tokens, or a part of them
RED = "#b00020"


@dataclass(frozen=True)
class Step:
    """A step, and what `labkit.perfmodel` says of it: None, and why, where it says nothing."""

    model: str
    layers: int
    micro_batch_size: int
    seqlen: int
    micro_batches: int
    recompute: bool
    device: DeviceSpec
    ms: float | None = None
    gib: float | None = None
    problem: str = ""

    @classmethod
    def predicted(cls, **choice) -> "Step":
        """A step by its fields; what its functions find wrong with it becomes its `problem`.

        UserError: a size that no step has, an unknown model.
        """
        step = cls(**choice)
        for name in ("micro_batch_size", "seqlen", "micro_batches"):
            whole_number(name, getattr(step, name))
        gib, no_memory = step._ask(perfmodel.predict_peak_gib)
        ms, no_time = step._ask(perfmodel.predict_step_ms)
        full = gib is not None and not step._fits(gib)
        if full and ms is not None:
            ms, no_time = None, f"the step needs {float(gib):.3g} GiB, and {step._room}"
        return cls(**choice, ms=ms, gib=gib, problem=no_time or no_memory)

    @property
    def cfg(self) -> ModelConfig:
        return ModelConfig.preset(self.model, n_layers=self.layers)

    @property
    def tokens(self) -> int:
        return self.micro_batches * self.micro_batch_size * self.seqlen

    def _ask(self, function) -> tuple:
        """(what a function says, "") or (None, why it says nothing)."""
        shape = self.cfg, self.micro_batch_size, self.seqlen, self.recompute, self.device
        try:
            found = function(*shape, micro_batches=self.micro_batches)
        except NotImplementedError as error:
            exercise, _, where = str(error).partition(": ")
            return None, f"{exercise} first: {where}"
        except UserError as error:
            return None, str(error)
        if not isinstance(found, Real) or not 0 < found < inf:
            return None, f"{function.__name__} returned {found!r}, and not a number above 0"
        return found, ""

    def _fits(self, gib: float) -> bool:
        return gib <= self.device.memory_gib

    @property
    def _room(self) -> str:
        return f"{self.device.name} has {self.device.memory_gib:.3g}"

    def words(self) -> list[str]:
        """Throughput, what limits it, and memory, in sentences; a problem first."""
        said = [self.problem] if self.problem else []
        if self.ms is not None:
            used = perfmodel.mfu(self.cfg, self.tokens, self.seqlen, float(self.ms), self.device)
            said += [
                f"{float(self.ms):.4g} ms a step on {self.device.name}: "
                f"{1e3 * self.tokens / self.ms:,.0f} tokens a second, MFU {100 * used:.1f} %.",
                self._limit(),
            ]
        if self.gib is not None:
            moment = getattr(self.gib, "note", "") and f" {self.gib.note}"
            said.append(f"{float(self.gib):.3g} GiB at most{moment}; {self._room}.")
        return said

    def _limit(self) -> str:
        if not hasattr(self.ms, "by"):
            return "One number does not say what limits it; a labkit.predictor.Prediction does."
        shares = {name: ms / self.ms for name, ms in self.ms.by("bound").items()}
        waiting = self.ms.by().get("waiting for Python", 0.0) / self.ms
        said = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
        most = max(shares, key=shares.get)
        if most == OVERHEAD and waiting > shares[OVERHEAD] / 2:
            return f"Python limits it: the GPU waits {100 * waiting:.0f} % of the step ({said})."
        return f"Most of it is bound by {most}: {said}."


class Measured:
    """Steps that were measured: those that ship, and the user's own, which go first."""

    def __init__(self, sweep_csv=None):
        self.problem = ""
        places = PLACES if sweep_csv is None else [sweep_csv]
        own = next((place for place in map(Path, places) if place.exists()), sweep_csv)
        frames = []
        for path in chain([own] if own is not None else [], sorted(TRUTH.glob("*.csv"))):
            try:
                frames.append(_medians(read(path, SWEEP)))
            except UserError as error:
                self.problem = f"No measurements: {error}"
        self.rows = pd.concat(frames).drop_duplicates(STEP)

    def beside(self, step: Step) -> tuple:
        """(the row of this very step or None, up to four of nearly as many tokens)."""
        rows = self.rows
        same = rows["device"] == step.device.name
        for name, value in (
            ("model", step.model), ("layers", step.layers), ("micro_batches", step.micro_batches),
            ("recompute", "yes" if step.recompute else "no"),
        ):  # fmt: skip
            same &= rows[name] == value
        rows = rows[same]
        off = np.log(rows["micro_batches"] * rows["micro_batch_size"] * rows["seqlen"]
                     / step.tokens).abs()  # fmt: skip
        exact = (rows["seqlen"] == step.seqlen) & (off == 0)
        near = off[~exact & (off <= np.log(NEAR))].nsmallest(4).index
        found = rows[exact].to_dict("records")
        return (found[0] if found else None), rows.loc[near].to_dict("records")


def _medians(frame) -> pd.DataFrame:
    """A row for each step that fitted, with the table's name of its device."""
    names = {name: getattr(lookup(name), "name", name) for name in frame["device"].unique()}
    rows = frame[frame["status"] == "ok"].assign(device=frame["device"].map(names))
    return rows.groupby(STEP, as_index=False)[NUMBERS].median()


def words(step: Step, measured: Measured) -> list[str]:
    """What the figure shows, in sentences; the first is red if `step.problem` is its text."""
    exact, near = measured.beside(step)
    said = step.words()
    if exact:
        said.append(f"Measured: {_off(exact, step)}.")
    elif near:
        shapes = (f"{row['micro_batch_size']} × {row['seqlen']}: {_off(row)}" for row in near)
        said.append(f"Measured nearby: {'; '.join(shapes)}.")
    return said + [measured.problem] * bool(measured.problem)


def _off(row: dict, step: Step | None = None) -> str:
    """The measured numbers, and how far the step's predictions are from them."""
    said = []
    for name, unit in (("ms", "ms"), ("gib", "GiB")):
        number = row["step_ms" if name == "ms" else "peak_gib"]
        guess = getattr(step, name, None)
        error = f" (predicted {100 * (guess / number - 1):+.2g} %)" if guess is not None else ""
        said.append(f"{number:.4g} {unit}{error}")
    return ", ".join(said)


def figure(step: Step, measured: Measured):
    """Two bars, time and memory, with what was measured below them: faint where it is nearby."""
    exact, near = measured.beside(step)
    drawn, (time, memory) = plots.new_figure(2, 1, size=(8.4, 4.6))
    drawn.set_layout_engine("none")  # its search for margins takes most of a drawing's time
    _bar(time, step.ms, "step_ms", "ms", exact, near)
    _bar(memory, step.gib, "peak_gib", "GiB", exact, near)
    if step.ms is None:
        time.text(0.5, 0.5, fill(step.problem, 70), ha="center", va="center", color=RED,
                  fontsize=9, transform=time.transAxes)  # fmt: skip
    room = step.device.memory_gib
    low, high = memory.get_xlim()
    if step.gib is not None and room < 2 * high:
        memory.set_xlim(low, max(high, 1.1 * room))
        memory.axvline(room, color=RED, lw=1.5, ls="--")
        memory.annotate(step.device.name, (room, -0.5), (-3, -2), textcoords="offset points",
                        ha="right", va="top", fontsize=8, color=RED)  # fmt: skip
    time.set_position((0.03, 0.61, 0.76, 0.36))
    memory.set_position((0.03, 0.11, 0.76, 0.36))
    return drawn


def _bar(ax, guess, column: str, unit: str, exact, near: list[dict]) -> None:
    if guess is None:
        ax.set_axis_off()
        return
    handles = draw_terms(ax, [("", guess)], [exact[column] if exact else None], unit)
    numbers = [row[column] for row in near]
    ax.plot(numbers, [0.42] * len(numbers), "^", color="black", alpha=0.25, ms=8, mew=0)
    ax.set_xlim(0, max([ax.get_xlim()[1], *(1.05 * number for number in numbers)]))
    ax.yaxis.set_visible(False)  # one bar needs no names, and an axis takes time to draw
    _key(ax, handles)


def _key(ax, handles: list) -> None:
    """A legend to the right, in a third of the time that matplotlib's takes."""
    style = {"transform": ax.transAxes, "clip_on": False}
    for i, handle in enumerate(handles):
        y, label = 1 - 0.077 * i, handle.get_label()
        if isinstance(handle, Patch):
            ax.add_line(Line2D([1.03], [y], marker="s", color=handle.get_facecolor(), **style))
        elif label == "measured":
            ax.add_line(Line2D([1.03], [y], marker="^", color="black", **style))
        x, weight = (1.02, "bold") if label.endswith(":") else (1.05, "normal")
        ax.text(x, y, label, fontsize=7, va="center", weight=weight, **style)


def static(model, layers, micro_batch_size, seqlen, micro_batches, recompute, device, sweep_csv):
    """See `labkit.widgets.step_static`."""
    measured = Measured(sweep_csv)
    if measured.problem:
        raise UserError(measured.problem)
    step = Step.predicted(
        model=model, layers=layers, micro_batch_size=micro_batch_size, seqlen=seqlen,
        micro_batches=micro_batches, recompute=bool(recompute), device=resolve(device),
    )  # fmt: skip
    return figure(step, measured)
