"""How long a call takes: GPU events where there is a GPU, a clock where there is none."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from labkit.benchmark import Benchmark, benchmark, check_callable
from labkit.errors import UserError, whole_number
from labkit.hooks import in_backward
from labkit.stages import (
    Clock,
    StageTimes,
    first_tensor,
    loss_of,
    mean_times,
    stage_modules,
    times_of_step,
)

__all__ = ["Benchmark", "StageTimes", "benchmark", "cuda_time", "stage_times"]


def cuda_time(fn: Callable[[], object], warmup: int = 10, repeat: int = 20) -> list[float]:
    """Run `fn()` `warmup` times untimed, then `repeat` times timed; the time of each timed call.

    Returns a list of `repeat` floats in milliseconds, in the order of the calls. `fn` takes no
    arguments, its result is dropped, and it runs exactly `warmup + repeat` times.

    With a GPU (`torch.cuda.is_available()`), each time is the GPU's own, from two CUDA events:

    - Every timed call has its own pair of `torch.cuda.Event(enable_timing=True)`, one recorded
      just before the call and one just after it. Create all pairs before the first timed call.
    - From the first timed call to the last, nothing waits for the GPU and nothing is read:
      the GPU must have the next call in its queue when it finishes one.
    - After the last call, wait for the GPU once (`torch.cuda.synchronize()`). Only then has it
      reached every event, and `start.elapsed_time(end)` can say how many milliseconds apart
      the two are.

    Without a GPU a call has finished when it returns: read `time.perf_counter()`, which counts
    in seconds, just before and just after each timed call.

    An exception of `fn` comes through. UserError: `fn` cannot be called, `warmup < 0`,
    `repeat < 1`.
    """
    check_callable(fn)
    whole_number("warmup", warmup, 0)
    whole_number("repeat", repeat)
    ### BEGIN SOLUTION
    for _ in range(warmup):
        fn()
    if not torch.cuda.is_available():
        times = []
        for _ in range(repeat):
            began = time.perf_counter()
            fn()
            times.append((time.perf_counter() - began) * 1e3)
        return times
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeat)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeat)]
    for start, end in zip(starts, ends, strict=True):
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
    ### END SOLUTION


def stage_times(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batch=None,
    warmup: int = 2,
    steps: int = 5,
    *,
    stages: list[str] | None = None,
    loss: Callable[[], Tensor] | None = None,
    device: torch.device | str | None = None,
) -> StageTimes:
    """Where a training step's time goes: forward, backward and recompute of every stage.

    The stages are the embedding, each layer, and "head", which is what comes after the last layer:
    final norm, lm_head and the loss. `stages` names others, in any model (a module's path each);
    `loss` computes the loss of such a model, in place of `lm_loss` on `micro_batch`. `device` is
    the one that the model is on; None is the GPU in use, or the CPU.

    Runs `warmup` steps untimed and `steps` timed; each is a forward, a backward and an optimizer
    step. `stages.Clock` takes the times:

    - A stage's forward is from the end of the stage before it to the end of its own.
    - Its backward is from the moment that the gradient of its output is known to the moment that
      the gradient of its input is, which is the output of the stage before it. A tensor hook on a
      stage's output tells. The first stage's backward ends with the whole backward.
    - A forward that runs while a backward does (`hooks.in_backward`) is a recomputation. It lies
      within the stage's share of the backward, and is taken out of it.
    - Nothing waits between stages or steps: marks are read after the last step.

    The hooks are off the model when this returns, also by an exception, which comes through.
    UserError: a stage that does not exist, does not run, or runs twice in a step.
    """
    whole_number("warmup", warmup, 0)
    whole_number("steps", steps)
    modules, clock = stage_modules(model, stages), Clock(device)
    compute_loss = loss or loss_of(model, micro_batch)
    ### BEGIN SOLUTION
    step = {}

    def entered(name, module, args):
        if in_backward():
            step["recompute", name] = [clock.mark()]

    def left(name, module, args, output):
        if in_backward():
            step["recompute", name].append(clock.mark())
            return
        if ("forward", name) in step:
            raise UserError(f"stage {name!r} runs twice in a step; take stages that run once")
        step["forward", name] = clock.mark()
        if (tensor := first_tensor(output)) is not None:
            tensor.register_hook(partial(gradient_known, name))

    def gradient_known(name, grad):
        step["backward", name] = clock.mark()

    hooks, taken = [], []
    try:
        for name, module in modules.items():
            hooks += [
                module.register_forward_pre_hook(partial(entered, name)),
                module.register_forward_hook(partial(left, name), always_call=True),
            ]
        for number in range(warmup + steps):
            step = {"start": clock.mark()}
            value = compute_loss()
            step["loss"] = clock.mark()
            value.backward()
            del value  # its graph would live on into the next forward
            step["optimizer"] = clock.mark()
            optimizer.step()
            optimizer.zero_grad()
            step["end"] = clock.mark()
            taken += [step] if number >= warmup else []
    finally:
        for hook in hooks:
            hook.remove()
    if absent := [name for name in modules if ("forward", name) not in step]:
        raise UserError(f"stage {absent[0]!r} did not run in the step")
    clock.wait()
    return mean_times([times_of_step(clock, step) for step in taken])
    ### END SOLUTION
