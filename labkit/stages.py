"""What `timers.stage_times` works with: the stages of a model, a clock that nobody waits for."""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn

from labkit.devices import pick
from labkit.errors import UserError


class StageTimes(NamedTuple):
    """Milliseconds of a training step, mean over the timed steps.

    stages: name → (forward, backward, recompute); optimizer_ms. Together they are step_ms, exactly:
    each part ends where the next begins.
    """

    stages: dict[str, tuple[float, float, float]]
    optimizer_ms: float

    @property
    def step_ms(self) -> float:
        return sum(map(sum, self.stages.values())) + self.optimizer_ms

    def table(self):
        """A DataFrame: a row a stage, the columns forward_ms, backward_ms and recompute_ms."""
        import pandas as pd

        columns = ["forward_ms", "backward_ms", "recompute_ms"]
        frame = pd.DataFrame.from_dict(self.stages, orient="index", columns=columns)
        return frame.rename_axis("stage").reset_index()


class Clock:
    """Marks in time: CUDA events in the queue of a GPU, or the CPU's clock.

    device: as in `devices.pick`.
    """

    def __init__(self, device=None):
        self.device = pick(device)
        self.on_gpu = self.device.type == "cuda"

    def mark(self):
        """The present moment of the stream's work; nothing waits for it."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self) -> None:
        """Until every mark has been passed."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def ms(self, start, end) -> float:
        """Milliseconds between two marks; `wait` comes first."""
        return start.elapsed_time(end) if self.on_gpu else 1e3 * (end - start)


def stage_modules(model: nn.Module, names: list[str] | None = None) -> dict[str, nn.Module]:
    """The stages that a step goes through one after the other, by name.

    None: the first embedding, if there is one, and the children of the longest ModuleList.
    UserError: a name that is no submodule, a repeated one, or no ModuleList to find them by.
    """
    if names is None:
        lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        if not lists:
            raise UserError(f"{type(model).__name__} has no ModuleList; say stages=[…] by name")
        path, longest = max(lists, key=lambda found: len(found[1]))
        embeddings = (n for n, m in model.named_modules() if isinstance(m, nn.Embedding))
        names = [next(embeddings, None), *(f"{path}.{i}" for i in range(len(longest)))]
        names = [name for name in names if name]
    known = dict(model.named_modules())
    if unknown := [name for name in names if name not in known]:
        some = ", ".join(list(known)[1:6])
        raise UserError(f"no stage {unknown[0]!r} in {type(model).__name__}; it has {some}, …")
    if len(set(names)) < len(names) or not names or "head" in names:
        raise UserError(f"stages={names}: name each module once; 'head' is what comes after them")
    return {name: known[name] for name in names}


def first_tensor(output) -> Tensor | None:
    """The first tensor with a gradient in a module's output: a tensor, a tuple, a dict …"""
    if isinstance(output, Tensor):
        return output if output.requires_grad else None
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return next((found for part in output if (found := first_tensor(part)) is not None), None)
    return None


def loss_of(model: nn.Module, micro_batch) -> Callable[[], Tensor]:
    """The loss of labkit's own model on a micro batch, as `train_step` computes it."""
    from labkit.train import lm_loss

    def loss() -> Tensor:
        n_tokens = micro_batch.n_targets().clamp(min=1)
        return lm_loss(model(micro_batch.tokens, micro_batch.seqs), micro_batch.targets, n_tokens)

    return loss


def times_of_step(clock: Clock, step: dict) -> StageTimes:
    """A step's marks as times.

    step: "start", "loss", "optimizer" and "end" → the mark at which the forward begins, the
    backward begins, the optimizer begins, and all has ended; ("forward", name) → the end of a
    stage's forward, in the order of the stages; ("backward", name) → its output's gradient is
    known; ("recompute", name) → [begin, end], if it was recomputed.
    """
    names = [key[1] for key in step if key[0] == "forward"]
    ends = [step["forward", name] for name in names] + [step["loss"]]
    forwards = [clock.ms(a, b) for a, b in pairwise([step["start"], *ends])]
    # Without a gradient a stage has no mark: its backward is empty, at the end of the others'.
    begins = [step.get(("backward", name), step["optimizer"]) for name in names] + [step["loss"]]
    backwards = [clock.ms(b, a) for a, b in pairwise([step["optimizer"], *begins])]
    runs_again = [step.get(("recompute", name)) for name in names]
    again = [clock.ms(*marks) if marks else 0.0 for marks in runs_again]
    stages = {
        name: (forward, backward - recompute, recompute)
        for name, forward, backward, recompute in zip(
            [*names, "head"], forwards, backwards, [*again, 0.0], strict=True
        )
    }
    return StageTimes(stages, clock.ms(step["optimizer"], step["end"]))


def mean_times(steps: list[StageTimes]) -> StageTimes:
    """The mean of each time over the steps, so that the parts still sum to the mean step."""
    stages = {
        name: tuple(fmean(step.stages[name][i] for step in steps) for i in range(3))
        for name in steps[0].stages
    }
    return StageTimes(stages, fmean(step.optimizer_ms for step in steps))
