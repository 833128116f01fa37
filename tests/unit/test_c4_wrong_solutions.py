"""The checks of C4 fail each usual mistake, in words that name it, and no honest variant."""

from functools import partial

import pytest
import torch

from labkit import hooks
from labkit.hooks import Annotation, annotate, in_backward
from tests.hidden import test_c4_annotate as hidden
from tests.public import test_c4_annotate as public
from tests.unit.wrong_solutions import WrongSolutions, assert_named, assert_passes, failures

pytestmark = pytest.mark.filterwarnings("ignore:module forward hook with")
wrong = WrongSolutions()


def name_of(path, module):
    return f"recompute.{path}" if in_backward() else path


def solution(
    model,
    *,
    named=name_of,
    which=lambda path, module: path,
    opens="pre",
    closes="post",
    always_call=True,
    returns=lambda *arguments: None,
):
    """A right solution with places where it can be made wrong."""
    ranges = hooks.Ranges()
    annotation = Annotation(ranges)

    def open_range(path, module, *arguments):
        ranges.push(named(path, module))

    def close_range(module, *arguments):
        ranges.pop()
        return returns(*arguments)

    for path, module in model.named_modules():
        if which(path, module):
            before, after = module.register_forward_pre_hook, module.register_forward_hook
            if always_call:
                after = partial(after, always_call=True)
            kinds = {"pre": before, "post": after}
            annotation.hooks.append(kinds[opens](partial(open_range, path)))
            annotation.hooks.append(kinds[closes](close_range))
    return annotation


@wrong("annotate", "no range was opened")
def nothing(model):
    return Annotation(hooks.Ranges())


@wrong("annotate", "annotate returned None")
def no_return(model):
    solution(model)


@wrong("annotate", "After an exception in a forward.*always_call=True")
def plain_hooks(model):
    return solution(model, always_call=False)


@wrong("annotate", "8 ranges were opened and 6 closed.*recomputed forward.*always_call=True")
def plain_hooks_under_recomputation(model):
    return solution(model, always_call=False)


@wrong("annotate", "open it in a forward pre-hook, and close it in a forward hook")
def closed_in_a_pre_hook(model):
    return solution(model, closes="pre")


@wrong("annotate", "open it in a forward pre-hook, and close it in a forward hook")
def opened_in_a_forward_hook(model):
    return solution(model, opens="post")


@wrong("annotate", "left open: ")
def never_closed(model):
    annotation = solution(model)
    for hook in annotation.hooks[1::2]:
        hook.remove()
    return annotation


@wrong("annotate", "it is a recomputation, and its name starts with `recompute.`")
def no_prefix(model):
    return solution(model, named=lambda path, module: path)


@wrong("annotate", "ask in_backward\\(\\) each time")
def asked_once(model):
    prefix = "recompute." if in_backward() else ""
    return solution(model, named=lambda path, module: prefix + path)


@wrong("annotate", "was opened before the backward pass")
def prefix_everywhere(model):
    return solution(model, named=lambda path, module: f"recompute.{path}")


@wrong("annotate", "was opened before the backward pass")
def prefix_wherever_gradients_are_on(model):
    prefix = {True: "recompute.", False: ""}
    return solution(model, named=lambda path, module: prefix[torch.is_grad_enabled()] + path)


@wrong("annotate", "the recomputation's ranges are")
def prefix_at_the_end(model):
    return solution(
        model, named=lambda path, module: "recompute." * in_backward() + path + "!" * in_backward()
    )


@wrong("annotate", "modules that have children need one as well")
def leaves_only(model):
    return solution(model, which=lambda path, module: not list(module.children()))


@wrong("annotate", "no range for")
def children_only(model):
    return solution(model, which=lambda path, module: path and "." not in path)


@wrong("annotate", "the model itself got a range")
def root_as_well(model):
    return solution(model, which=lambda path, module: True)


@wrong("annotate", "named by its class")
def class_names(model):
    return solution(model, named=lambda path, module: type(module).__name__)


@wrong("annotate", "a name is the whole path")
def last_names(model):
    return solution(model, named=lambda path, module: name_of(path, module).rpartition(".")[2])


@wrong("annotate", "no module of that path has")
def with_a_prefix_of_its_own(model):
    return solution(model, named=lambda path, module: f"model.{path}")


@wrong("annotate", "opened more than one range")
def hooks_twice(model):
    first, second = solution(model), solution(model)
    second.hooks += first.hooks
    return second


@wrong("annotate", "after remove\\(\\) there still is something on")
def hooks_left(model):
    annotation = solution(model)
    annotation.hooks = []
    return annotation


@wrong("annotate", "after remove\\(\\) there still is something on")
def half_of_the_hooks_left(model):
    annotation = solution(model)
    del annotation.hooks[::2]
    return annotation


@wrong("annotate", "returns something replaces|the output has no gradient")
def detaches_the_output(model):
    return solution(model, returns=lambda args, output=None: output.detach())


@wrong("annotate", "returns something replaces")
def returns_true(model):
    return solution(model, returns=lambda *arguments: True)


@wrong("annotate", "the output changes")
def casts_the_output(model):
    return solution(
        model,
        returns=lambda args, output=None: (
            output.bfloat16().float() if torch.is_tensor(output) else None
        ),
    )


@wrong("annotate", "returns something replaces")
def hook_of_two_arguments(model):
    ranges = hooks.Ranges()
    annotation = Annotation(ranges)
    for path, module in model.named_modules():
        if path:
            pre = module.register_forward_pre_hook(lambda module: ranges.push(""))
            annotation.hooks.append(pre)
    return annotation


def wrapping(model, *, swallow=False, restore=False):
    """Replace each submodule's forward."""
    ranges = hooks.Ranges()
    annotation = Annotation(ranges)

    def wrapper(path, module, forward):
        def call(*arguments):
            ranges.push(name_of(path, module))
            try:
                return forward(*arguments)
            except Exception as error:
                if not swallow or type(error).__module__.startswith("torch"):
                    raise
                return arguments[0]
            finally:
                ranges.pop()

        return call

    for path, module in model.named_modules():
        if path:
            module.forward = wrapper(path, module, module.forward)
            if restore:
                annotation.hooks.append(Restore(module))
    return annotation


class Restore:
    def __init__(self, module):
        self.module = module

    def remove(self):
        del self.module.forward


@wrong("annotate", "after remove\\(\\) .* leave the modules' forward alone")
def wrapped_forward(model):
    return wrapping(model)


@wrong("annotate", "annotate swallowed it")
def swallowed_exception(model):
    return wrapping(model, swallow=True)


def wrapped_and_restored(model):
    return wrapping(model, restore=True)


def hooks_with_keywords(model):
    """Hooks that take keyword arguments as well."""
    ranges = hooks.Ranges()
    annotation = Annotation(ranges)
    for path, module in model.named_modules():
        if path:
            annotation.hooks += [
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, path=path: ranges.push(name_of(path, module)),
                    with_kwargs=True,
                ),
                module.register_forward_hook(
                    lambda module, args, kwargs, output: ranges.pop(),
                    with_kwargs=True,
                    always_call=True,
                ),
            ]
    return annotation


HONEST = [annotate, solution, hooks_with_keywords, wrapped_and_restored]


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("name", [name for name in wrong if "under_recomputation" not in name])
def test_wrong_solution_is_named(name, module, monkeypatch):
    assert_named(module, wrong[name], monkeypatch)


def test_a_recomputation_tells_how_many_ranges_are_open(monkeypatch):
    """The public case: eight are opened, and plain hooks close six."""
    assert_named(public, wrong["plain_hooks_under_recomputation"], monkeypatch)


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("function", HONEST, ids=lambda function: function.__name__)
def test_honest_variant_passes(function, module, monkeypatch):
    assert_passes(module, "annotate", function, monkeypatch)


def test_an_open_exercise_stays_open(monkeypatch):
    def not_written(model):
        raise NotImplementedError("Coding Exercise 4: labkit/hooks.py, annotate")

    with pytest.raises(NotImplementedError):
        failures(public, "annotate", not_written, monkeypatch)
