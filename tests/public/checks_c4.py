"""What the tests of Coding Exercise 4 look for, as functions of an implementation.

Each check annotates a small model while `Ranges` is replaced by one that keeps a log, and raises
an AssertionError that names the mistake.
"""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import nn

from tests.public.judging import require
from tests.public.recorded_ranges import NO_ANNOTATION, Block, Broken, annotated
from tests.public.watched_steps import one_thread

PREFIX = "recompute."
AGAIN = ". PyTorch ends a recomputed forward by an exception. Register with always_call=True"


def guarded(run: Callable, *arguments):
    """What `run` returns. An error that is not Broken means that hooks have spoiled a call."""
    try:
        return run(*arguments)
    except Broken:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise AssertionError(
            f"the annotated model raised {said}. A hook that returns something replaces the "
            "arguments or the output, so return nothing; a pre-hook is called with "
            "(module, args), a forward hook with (module, args, output)"
        ) from error


def require_no_prefix(names: list[str]):
    early = [name for name in names if PREFIX in name]
    require(
        not early,
        f"the range {', '.join(early[:1])} was opened before the backward pass: `{PREFIX}` is for "
        "ranges that open while in_backward() is true",
    )


def require_paths(found: list[str], model: nn.Module, expected: list[str]):
    """No name of a class, and no path without its beginning."""
    classes = {type(module).__name__ for module in model.modules()}
    ends = {name.rpartition(".")[2]: name for name in expected if "." in name}
    for name in found:
        require(
            name not in classes,
            f"a range is named by its class, {name}; a name is a path, such as {expected[-1]}",
        )
        require(
            name not in ends or name in expected,
            f"a range is named {name}; a name is the whole path, such as {ends.get(name)}",
        )


@one_thread()
def check_names(annotate, model: nn.Module, run: Callable, expected: list[str]):
    """One range for each of the submodules that are called, named by its path."""
    with annotated(annotate, model) as (log, _):
        guarded(run, model)
    found = log.names("open")
    require(found, "no range was opened: push one in a forward pre-hook of every submodule")
    require("" not in found, "the model itself got a range without a name: leave its path, '', out")
    require_no_prefix(found)
    require_paths(found, model, expected)
    extra = [name for name in found if name not in expected]
    require(not extra, f"ranges that no module of that path has: {', '.join(extra[:4])}")
    missing = [name for name in expected if name not in found]
    containers = all(any(other.startswith(f"{name}.") for other in expected) for name in missing)
    only = "; modules that have children need one as well" if missing and containers else ""
    require(not missing, f"no range for {', '.join(missing[:4])}{only}")
    twice = sorted({name for name in found if found.count(name) > expected.count(name)})
    require(not twice, f"a call opened more than one range: {', '.join(twice[:4])}")


def check_nesting(annotate, model: Block, calls: dict[str, int]):
    """Ranges lie around the forward of their module; `calls` says how often each is called."""
    with annotated(annotate, model) as (log, _):
        guarded(model, torch.randn(2, 4))
        open_now = [""]
        for entry in log.entries:
            if entry.kind == "open":
                open_now.append(entry.name)
            elif entry.kind == "close":
                require(len(open_now) > 1, "a range was closed when none was open")
                open_now.pop()
            else:
                require(
                    open_now[-1] == entry.name,
                    f"while {entry.name or 'the model'} ran, the innermost range was "
                    f"{open_now[-1] or 'none'}: open it in a forward pre-hook, and close it in a "
                    "forward hook",
                )
        log.check_balance(". Each push needs its pop")
    for name, right in calls.items():
        found = log.names("open").count(name)
        require(found == right, f"{name} is called {right} times, and has {found} ranges")


def check_exception(annotate, model: Block):
    """An exception in a forward comes through, and leaves no range open."""
    with annotated(annotate, model) as (log, _):
        for _ in range(2):
            came_through = False
            try:
                guarded(model, torch.randn(2, 4))
            except Broken:
                came_through = True
            require(came_through, "the model raised an exception, and annotate swallowed it")
            log.check_balance(
                ". After an exception in a forward plain forward hooks are not called: register "
                "with always_call=True"
            )
        require(log.names("open"), "no range was opened")


def check_recomputation(annotate, model: Block, again: list[str]):
    """A recomputed forward has its own ranges, `recompute.` and the path, and closes them all."""
    with annotated(annotate, model) as (log, _):
        x = torch.randn(2, 4, requires_grad=True)
        guarded(lambda: model(x).sum().backward())
        require(log.names("open"), "no range was opened")
        require_no_prefix(log.names("open", backward=False))
        late = log.names("open", backward=True)
        plain = [name for name in late if not name.startswith(PREFIX)]
        require(
            not plain,
            f"the range {', '.join(plain[:1])} was opened during a backward pass: it is a "
            f"recomputation, and its name starts with `{PREFIX}` (ask in_backward() each time)",
        )
        right = [PREFIX + name for name in again]
        require(late == right, f"the recomputation's ranges are {late}, and should be {right}")
        log.check_balance(AGAIN)


def check_unchanged(annotate, model: nn.Module):
    """Outputs and gradients are the same, bit for bit, with and without ranges."""
    x = torch.randn(3, 4, requires_grad=True)
    results = []
    for with_ranges in (False, True):
        one = deepcopy(model)
        if with_ranges:
            with annotated(annotate, one):
                output = guarded(one, x)
        else:
            output = one(x)
        results.append((output, one))
    (plain, before), (output, after) = results
    require(torch.is_tensor(output), f"annotated, the model returns a {type(output).__name__}")
    require(torch.equal(plain, output), "the output changes: hooks must return nothing")
    require(output.requires_grad, "the output has no gradient any more: hooks must return nothing")
    for one, out in ((before, plain), (after, output)):
        out.square().sum().backward()
        require(all(p.grad is not None for p in one.parameters()), "a parameter has no gradient")
    for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True):
        require(torch.equal(a.grad, b.grad), f"the gradient of {name} changes")


def check_removal(annotate, model: Block):
    """remove() leaves the modules as they were; it may be called twice."""
    before = fingerprint(model)
    with annotated(annotate, model) as (log, annotation):
        guarded(model, torch.randn(2, 4))
        require(log.names("open"), "no range was opened")
        for _ in range(2):
            annotation.remove()
        del log.entries[:]
        guarded(model, torch.randn(2, 4))
        found = log.names("open")
        left = {name for name, state in fingerprint(model).items() if state != before[name]}
        what = ", ".join(sorted(left)) or ", ".join(found)
        require(
            not (left or found),
            f"after remove() there still is something on {what}: put what each register_… returns "
            "into annotation.hooks, and leave the modules' forward alone",
        )


def fingerprint(model: nn.Module) -> dict[str, tuple]:
    """What annotating may change in each module: its hooks, and a forward of its own."""
    return {
        path: (
            len(module._forward_hooks), len(module._forward_pre_hooks),
            len(module._backward_hooks), "forward" in vars(module),
        )
        for path, module in model.named_modules()
    }  # fmt: skip


@one_thread()
def check_profiler(annotate, model: nn.Module, run: Callable, expected: dict[str, int]):
    """With the real Ranges: how often torch.profiler sees each name."""
    annotation = annotate(model)
    require(annotation is not None, NO_ANNOTATION)
    with annotation, torch.profiler.profile() as profiler:
        guarded(run, model)
    counts = {event.key: event.count for event in profiler.key_averages()}
    for name, right in expected.items():
        found = counts.get(name, 0)
        require(found == right, f"torch.profiler saw the range {name} {found} times, not {right}")
