"""The checks of C7 fail each usual mistake, in words that name it, and no honest variant."""

import statistics
import time

import pytest
import torch

from labkit.hooks import in_backward
from labkit.stages import Clock, StageTimes, loss_of, mean_times, stage_modules, times_of_step
from labkit.timers import stage_times
from tests.hidden import test_c7_stage_times as hidden
from tests.public import test_c7_stage_times as public
from tests.unit.wrong_solutions import WrongSolutions, assert_named, assert_passes

wrong = WrongSolutions()


class Solution:
    """A right solution in pieces, each of which a wrong one may replace."""

    always_call = True
    waits_after_each_step = False
    ends_with_step = False  # the backward's mark comes after optimizer.step()

    def __init__(self):
        self.clock = Clock()

    def mark(self):
        return self.clock.mark()

    def entered(self, name, module, args):
        if in_backward():
            self.step["recompute", name] = [self.mark()]

    def left(self, name, module, args, output):
        if in_backward():
            self.step["recompute", name].append(self.mark())
            return
        self.step["forward", name] = self.mark()
        output.register_hook(lambda grad: self.gradient_known(name))

    def gradient_known(self, name):
        self.step["backward", name] = self.mark()

    def hook(self, modules):
        handles = []
        for name, module in modules.items():
            enter = lambda *a, name=name: self.entered(name, *a)  # noqa: E731
            leave = lambda *a, name=name: self.left(name, *a)  # noqa: E731
            handles += [
                module.register_forward_pre_hook(enter),
                module.register_forward_hook(leave, always_call=self.always_call),
            ]
        return handles

    def one_step(self, optimizer, compute_loss):
        self.step = {"start": self.mark()}
        loss = compute_loss()
        self.step["loss"] = self.mark()
        loss.backward()
        self.step["optimizer"] = self.mark()
        optimizer.step()
        if self.ends_with_step:
            self.step["optimizer"] = self.mark()
        optimizer.zero_grad()
        self.step["end"] = self.mark()
        if self.waits_after_each_step:
            self.clock.wait()
        return self.step

    def counted(self, taken, warmup):
        return taken[warmup:]

    def times(self, step):
        return times_of_step(self.clock, step)

    def result(self, steps):
        return mean_times(steps)

    def unhook(self, handles):
        for handle in handles:
            handle.remove()

    def __call__(self, model, optimizer, batch=None, warmup=2, steps=5, *, stages=None, loss=None):
        compute_loss = loss or loss_of(model, batch)
        handles = self.hook(stage_modules(model, stages))
        try:
            taken = [self.one_step(optimizer, compute_loss) for _ in range(warmup + steps)]
        finally:
            self.unhook(handles)
        self.clock.wait()
        return self.result([self.times(step) for step in self.counted(taken, warmup)])


def as_function(kind: type[Solution]):
    def solution(*arguments, **options):
        return kind()(*arguments, **options)

    solution.__name__ = kind.__name__
    return solution


def mistake(says: str):
    """Register a class of Solution as a wrong `stage_times`, with words that a check must say."""
    return lambda kind: wrong("stage_times", says)(as_function(kind)) and kind


class Reworked(Solution):
    """A right table, changed at the end."""

    def change(self, forward, backward, recompute):
        return forward, backward, recompute

    def result(self, steps):
        stages, optimizer_ms = mean_times(steps)
        return StageTimes({k: self.change(*v) for k, v in stages.items()}, optimizer_ms)


@mistake("recomputation is counted as backward")
class RecomputeAsBackward(Solution):
    def entered(self, *_):
        pass

    def left(self, name, module, args, output):
        if not in_backward():
            super().left(name, module, args, output)


@mistake("recomputation is counted twice")
class RecomputeTwice(Reworked):
    def change(self, forward, backward, recompute):
        return forward, backward + recompute, recompute


@mistake("recomputation is counted as forward")
class RecomputeAsForward(Reworked):
    def change(self, forward, backward, recompute):
        return forward + recompute, backward, 0.0


@mistake("stage_times raised .*|takes .* recompute")
class NoQuestionOfBackward(Solution):
    """Recomputed forwards overwrite the marks of the first ones."""

    def entered(self, *_):
        pass

    def left(self, name, module, args, output):
        self.step["forward", name] = self.mark()
        if output is not None:
            output.register_hook(lambda grad: self.gradient_known(name))


@mistake("always_call=True")
class HooksInRecomputedForwards(Solution):
    """A tensor hook on the output of a recomputed forward, which is None."""

    def left(self, name, module, args, output):
        output.register_hook(lambda grad: self.gradient_known(name))
        kind = "recompute" if in_backward() else "forward"
        if kind == "recompute":
            self.step[kind, name].append(self.mark())
        else:
            self.step[kind, name] = self.mark()


@mistake("always_call=True")
class PlainHooks(Solution):
    always_call = False


@mistake("waits for the GPU .* between stages")
class SynchronizesPerStage(Solution):
    def mark(self):
        torch.cuda.synchronize()
        return super().mark()


@mistake(r"between steps \(torch.cuda.synchronize\(\)\)")
class SynchronizesPerStep(Solution):
    waits_after_each_step = True


class HostClock(Clock):
    def __init__(self):
        self.on_gpu = False


@mistake("the CPU's clock does not see the GPU")
class WallClock(Solution):
    def __init__(self):
        self.clock = HostClock()


@mistake("waits for the GPU")
class WallClockSynchronized(WallClock):
    def mark(self):
        torch.cuda.is_available() and torch.cuda.synchronize()
        return time.perf_counter()


@mistake("CUDA was used on a machine without a GPU")
class EventsOnly(Solution):
    def __init__(self):
        self.clock = Clock()
        self.clock.on_gpu = True


@mistake("read before the GPU had passed both marks")
class NeverWaits(Solution):
    def __init__(self):
        super().__init__()
        self.clock.wait = lambda: None


@mistake("still is a hook on embed, layers.0")
class HooksLeft(Solution):
    def unhook(self, handles):
        pass


@mistake("after an exception in a forward there still is a hook")
class HooksLeftAfterAnError(Solution):
    def __call__(self, model, optimizer, batch=None, warmup=2, steps=5, *, stages=None, loss=None):
        handles = self.hook(stage_modules(model, stages))
        compute_loss = loss or loss_of(model, batch)
        taken = [self.one_step(optimizer, compute_loss) for _ in range(warmup + steps)]
        self.unhook(handles)
        self.clock.wait()
        return self.result([self.times(step) for step in self.counted(taken, warmup)])


@mistake("swallowed it")
class Swallows(Solution):
    def one_step(self, *arguments):
        try:
            return super().one_step(*arguments)
        except RuntimeError:
            return {}

    def times(self, step):
        return super().times(step) if step else StageTimes({"embed": (0.0,) * 3}, 0.0)


def shifted(found: StageTimes, column: int, by: int) -> StageTimes:
    rows = list(found.stages.values())
    moved = [row[column] for row in rows]
    moved = [*moved[by:], 0.0] if by > 0 else [0.0, *moved[:by]]
    rows = [
        (*row[:column], new, *row[column + 1 :]) for row, new in zip(rows, moved, strict=True)
    ]  # fmt: skip
    return StageTimes(dict(zip(found.stages, rows, strict=True)), found.optimizer_ms)


@mistake("has the backward of the one after it")
class BackwardOfTheNext(Solution):
    def result(self, steps):
        return shifted(mean_times(steps), 1, 1)


@mistake("has the backward of the one before it")
class BackwardOfTheOneBefore(Solution):
    def result(self, steps):
        return shifted(mean_times(steps), 1, -1)


@mistake("has the forward of the one before it")
class ForwardOfTheOneBefore(Solution):
    def result(self, steps):
        return shifted(mean_times(steps), 0, -1)


@mistake("forward and backward are swapped")
class Swapped(Reworked):
    def change(self, forward, backward, recompute):
        return backward, forward, recompute


@mistake("optimizer's time is in the last backward")
class OptimizerInBackward(Solution):
    ends_with_step = True


@mistake("optimizer's time is not measured")
class NoOptimizer(Solution):
    def result(self, steps):
        return StageTimes(mean_times(steps).stages, 0.0)


@mistake("warm-up steps are in the mean")
class WarmUpCounted(Solution):
    def counted(self, taken, warmup):
        return taken


@mistake("times of the first steps: the warm-up steps were timed")
class FirstSteps(Solution):
    def counted(self, taken, warmup):
        return taken[: len(taken) - warmup]


@mistake("the last step alone")
class LastStep(Solution):
    def counted(self, taken, warmup):
        return taken[-1:]


@mistake("[0-9] forward passes .*: are the warm-up steps missing")
class NoWarmUp(Solution):
    def __call__(self, *arguments, warmup=2, **options):
        return super().__call__(*arguments, warmup=0, **options)


@mistake("seconds: return ms")
class Seconds(Solution):
    def times(self, step):
        found = super().times(step)
        stages = {name: tuple(ms / 1e3 for ms in row) for name, row in found.stages.items()}
        return StageTimes(stages, found.optimizer_ms / 1e3)


@mistake("sums over the steps")
class Sums(Solution):
    def result(self, steps):
        mean = mean_times(steps)
        stages = {k: tuple(len(steps) * ms for ms in v) for k, v in mean.stages.items()}
        return StageTimes(stages, len(steps) * mean.optimizer_ms)


@mistake("that is the median")
class Median(Solution):
    def result(self, steps):
        middle = lambda values: statistics.median(values)  # noqa: E731
        stages = {
            name: tuple(middle([step.stages[name][i] for step in steps]) for i in range(3))
            for name in steps[0].stages
        }
        return StageTimes(stages, middle([step.optimizer_ms for step in steps]))


@mistake("no stage head .* after the last layer")
class NoHead(Solution):
    def result(self, steps):
        stages, optimizer_ms = mean_times(steps)
        return StageTimes({k: v for k, v in stages.items() if k != "head"}, optimizer_ms)


@mistake("head has .* half of it in the loss")
class LossNotInTheHead(Solution):
    """The marks are at the logits, not at the loss."""

    def one_step(self, optimizer, compute_loss):
        known = {}

        def loss():
            return compute_loss()

        def logits_known(module, args, output):
            if not in_backward():
                known["forward"] = self.mark()
                output.register_hook(lambda grad: known.update(backward=self.mark()))

        step = None
        handle = self.lm_head.register_forward_hook(logits_known)
        try:
            step = super().one_step(optimizer, loss)
        finally:
            handle.remove()
        return step | {"logits": known["forward"], "logits known": known["backward"]}

    def hook(self, modules):
        return super().hook(modules)

    def times(self, step):
        found = super().times(step)
        names = list(found.stages)
        last = step["forward", names[-2]]
        forward = self.clock.ms(last, step["logits"])
        backward = self.clock.ms(step["logits known"], step["backward", names[-2]])
        return StageTimes(found.stages | {"head": (forward, backward, 0.0)}, found.optimizer_ms)

    def __call__(self, model, *arguments, **options):
        self.lm_head = model.lm_head
        return super().__call__(model, *arguments, **options)


@mistake("parts sum to .* nothing between two stages is lost")
class OwnTimesOnly(Solution):
    """From the start of a stage's forward, so that what is between two stages is lost."""

    def entered(self, name, module, args):
        super().entered(name, module, args)
        if not in_backward():
            self.step["entered", name] = self.mark()

    def times(self, step):
        found = super().times({k: v for k, v in step.items() if k[0] != "entered"})
        stages = {
            name: (self.clock.ms(step["entered", name], step["forward", name]), *row[1:])
            for name, row in found.stages.items()
            if name != "head"
        }
        return StageTimes(stages | {"head": found.stages["head"]}, found.optimizer_ms)


@mistake("optimizer.zero_grad")
class GradientsLeft(Solution):
    def one_step(self, optimizer, compute_loss):
        optimizer.zero_grad = lambda: None
        return super().one_step(optimizer, compute_loss)


@mistake("is the return missing")
class NoReturn(Solution):
    def result(self, steps):
        return None


@mistake("a dict, not a StageTimes")
class OnlyADict(Solution):
    def result(self, steps):
        return mean_times(steps).stages


HONEST = [stage_times, as_function(Solution)]


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("name", wrong)
def test_wrong_solution_is_named(name, module, monkeypatch):
    assert_named(module, wrong[name], monkeypatch)


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("function", HONEST, ids=["the library's", "another"])
def test_honest_variant_passes(function, module, monkeypatch):
    assert_passes(module, "stage_times", function, monkeypatch)


@pytest.mark.parametrize(
    "name", [name for name in vars(public) if name.startswith("test_") and "real" not in name]
)
def test_an_open_exercise_stays_open(name, monkeypatch):
    def not_written(*arguments, **options):
        raise NotImplementedError("Coding Exercise 7: labkit/timers.py, stage_times")

    monkeypatch.setattr(public, "stage_times", not_written)
    with pytest.raises(NotImplementedError):
        getattr(public, name)()
