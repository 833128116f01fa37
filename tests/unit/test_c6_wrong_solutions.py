"""The checks of C6 fail each usual mistake, in words that name it, and no honest variant."""

import pytest
import torch

from labkit.data import NO_TARGET, MicroBatch
from labkit.errors import UserError
from labkit.train import accumulated_step, lm_loss
from tests.hidden import test_c6_accumulated_step as hidden
from tests.public import test_c6_accumulated_step as public
from tests.public.checks_c6 import together
from tests.unit.wrong_solutions import WrongSolutions, assert_named, assert_passes

wrong = WrongSolutions()


def global_count(mb, batches):
    return sum(int(one.n_targets()) for one in batches) or 1


def own_count(mb, batches=None):
    return int(mb.n_targets())


def solution(
    model,
    optimizer,
    micro_batches,
    *,
    count=global_count,
    scale=1.0,
    each=lambda optimizer: None,
    before=lambda optimizer: None,
    end=lambda optimizer: (optimizer.step(), optimizer.zero_grad()),
    reported=lambda losses: sum(losses),
):
    """A right solution with places where it can be made wrong."""
    batches = list(micro_batches)
    if not batches:
        raise UserError("no micro batches")
    losses = []
    for mb in batches:
        before(optimizer)
        loss = lm_loss(model(mb.tokens, mb.seqs), mb.targets, count(mb, batches)) * scale
        loss.backward()
        losses.append(loss.detach())
        del loss
        each(optimizer)
    end(optimizer)
    return reported(losses)


@wrong("accumulated_step", "gradient .* mean of the micro batches' means")
def mean_of_means(model, optimizer, batches):
    return solution(
        model, optimizer, batches, count=own_count, scale=1 / max(len(batches), 1)
    )  # fmt: skip


@wrong("accumulated_step", r"loss is 2\.389, and 2\.657 is right: that is the mean of the micro")
def mean_of_means_of_one_and_six(model, optimizer, batches):
    return mean_of_means(model, optimizer, batches)


@wrong("accumulated_step", "each micro batch is divided by its own tokens")
def own_tokens(model, optimizer, batches):
    return solution(model, optimizer, batches, count=own_count)


@wrong("accumulated_step", "loss is nan: was it divided by 0 tokens")
def nothing_by_nothing(model, optimizer, batches):
    return solution(
        model, optimizer, batches, count=lambda mb, batches: sum(map(own_count, batches))
    )  # fmt: skip


@wrong("accumulated_step", "divided by the number of micro batches as well")
def divided_again(model, optimizer, batches):
    return solution(model, optimizer, batches, scale=1 / max(len(batches), 1))


@wrong("accumulated_step", "number of micro batches, not of tokens")
def micro_batches_counted(model, optimizer, batches):
    return solution(model, optimizer, batches, count=lambda mb, batches: len(batches))


@wrong("accumulated_step", "not divided by the number of tokens")
def summed(model, optimizer, batches):
    return solution(model, optimizer, batches, count=lambda mb, batches: 1)


@wrong("accumulated_step", r"tokens without a target are counted; batch.n_targets\(\)")
def masked_tokens_counted(model, optimizer, batches):
    return solution(
        model, optimizer, batches, count=lambda mb, batches: len(together(batches).tokens)
    )  # fmt: skip


@wrong("accumulated_step", "its own tokens, those without a target as well")
def own_masked_tokens_counted(model, optimizer, batches):
    return solution(model, optimizer, batches, count=lambda mb, batches: len(mb.tokens))


@wrong("accumulated_step", "stepped [3457] times for [3457] micro batches")
def a_step_each(model, optimizer, batches):
    return solution(
        model, optimizer, batches,
        each=lambda optimizer: optimizer.step(), end=lambda optimizer: optimizer.zero_grad(),
    )  # fmt: skip


@wrong("accumulated_step", r"only the last micro batch is in it.*zero_grad\(\) comes once")
def zeroed_in_between(model, optimizer, batches):
    return solution(
        model, optimizer, batches, before=lambda optimizer: optimizer.zero_grad(),
    )  # fmt: skip


@wrong("accumulated_step", "only the first micro batch is in it")
def first_only(model, optimizer, batches):
    def count(mb, batches):
        return global_count(mb, batches) if mb is batches[0] else 1e12

    return solution(model, optimizer, batches, count=count)


@wrong("accumulated_step", r"gradients were gone.* zero_grad\(\) comes after step\(\)")
def zeroed_before_the_step(model, optimizer, batches):
    return solution(
        model, optimizer, batches, end=lambda optimizer: (optimizer.zero_grad(), optimizer.step())
    )  # fmt: skip


@wrong("accumulated_step", "parameters still have a gradient")
def never_zeroed(model, optimizer, batches):
    return solution(model, optimizer, batches, end=lambda optimizer: optimizer.step())


@wrong("accumulated_step", "never stepped")
def no_step(model, optimizer, batches):
    return solution(model, optimizer, batches, end=lambda optimizer: optimizer.zero_grad())


@wrong("accumulated_step", "twice too large")
def two_backwards(model, optimizer, batches):
    return solution(model, optimizer, batches, scale=2.0)


@wrong("accumulated_step", "loss is .* only the last micro batch is in it")
def last_loss_reported(model, optimizer, batches):
    return solution(model, optimizer, batches, reported=lambda losses: losses[-1])


@wrong("accumulated_step", "loss is .* divided by the number of micro batches as well")
def mean_loss_reported(model, optimizer, batches):
    return solution(model, optimizer, batches, reported=lambda losses: sum(losses) / len(losses))


@wrong("accumulated_step", "is the return missing")
def no_return(model, optimizer, batches):
    solution(model, optimizer, batches)


@wrong("accumulated_step", "returned a list")
def all_losses(model, optimizer, batches):
    return solution(model, optimizer, batches, reported=lambda losses: losses)


def one_backward(model, optimizer, batches, keep=True):
    """Add the losses up, and go backward once."""
    if not batches:
        raise UserError("no micro batches")
    total = sum(
        lm_loss(model(mb.tokens, mb.seqs), mb.targets, global_count(mb, batches)) for mb in batches
    )
    total.backward()
    optimizer.step()
    optimizer.zero_grad()
    return total if keep else total.detach()


@wrong("accumulated_step", r"activations of those before it are still alive: call backward\(\)")
def one_backward_at_the_end(model, optimizer, batches):
    return one_backward(model, optimizer, batches, keep=False)


@wrong("accumulated_step", "still holds a graph")
def graph_returned(model, optimizer, batches):
    return one_backward(model, optimizer, batches)


@wrong("accumulated_step", "still alive: .* without retain_graph")
def retained_graph(model, optimizer, batches):
    if not batches:
        raise UserError("no micro batches")
    losses = []
    for mb in batches:
        loss = lm_loss(model(mb.tokens, mb.seqs), mb.targets, global_count(mb, batches))
        loss.backward(retain_graph=True)
        losses.append(loss)
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses).detach()


@wrong("accumulated_step", "the model ran 1 times for")
def all_in_one(model, optimizer, batches):
    if not batches:
        raise UserError("no micro batches")
    return solution(model, optimizer, [together(batches)])


@wrong("accumulated_step", "raised RuntimeError: ")
def same_graph_twice(model, optimizer, batches):
    total = 0.0
    for mb in batches:
        total = (
            total + lm_loss(model(mb.tokens, mb.seqs), mb.targets, global_count(mb, batches)).exp()
        )  # an operation that keeps its output
        total.backward()
    optimizer.step()
    return total


@wrong("accumulated_step", "a UserError should be raised")
def nothing_taken(model, optimizer, batches):
    return solution(model, optimizer, batches) if batches else torch.zeros(())


@wrong("accumulated_step", "an empty list raised ZeroDivisionError")
def empty_list_divides(model, optimizer, batches):
    return sum(map(len, batches)) / len(batches) if not batches else solution(
        model, optimizer, batches
    )  # fmt: skip


def zeroed_first_as_well(model, optimizer, batches):
    optimizer.zero_grad()
    return solution(model, optimizer, batches)


def gradient_scaled_at_the_end(model, optimizer, batches):
    """Sum, and divide the gradient by the tokens before the step."""

    def end(optimizer):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= global_count(None, batches)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return solution(
        model, optimizer, batches, count=lambda mb, batches: 1, end=end,
        reported=lambda losses: sum(losses) / global_count(None, batches),
    )  # fmt: skip


def a_number_returned(model, optimizer, batches):
    return solution(model, optimizer, batches, reported=lambda losses: sum(losses).item())


def logits_kept(model, optimizer, batches):
    """As train_step has it: the names `logits` and `loss` live on into the next forward."""
    if not batches:
        raise UserError("no micro batches")
    total = torch.zeros(())
    for mb in batches:
        logits = model(mb.tokens, mb.seqs)
        loss = lm_loss(logits, mb.targets, global_count(mb, batches))
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


HONEST = [
    accumulated_step, solution, zeroed_first_as_well, gradient_scaled_at_the_end,
    a_number_returned, logits_kept,
]  # fmt: skip
PUBLIC_ONLY = "mean_of_means_of_one_and_six"


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("name", [name for name in wrong if name != PUBLIC_ONLY])
def test_wrong_solution_is_named(name, module, monkeypatch):
    assert_named(module, wrong[name], monkeypatch)


def test_one_and_six_tokens(monkeypatch):
    """The losses that the public check names: 2.657 is right, and 2.389 a mean of means."""
    assert_named(public, wrong[PUBLIC_ONLY], monkeypatch)


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("function", HONEST, ids=lambda function: function.__name__)
def test_honest_variant_passes(function, module, monkeypatch):
    assert_passes(module, "accumulated_step", function, monkeypatch)


@pytest.mark.parametrize("name", [name for name in vars(public) if name.startswith("test_")])
def test_an_open_exercise_stays_open(name, monkeypatch):
    def not_written(model, optimizer, micro_batches):
        raise NotImplementedError("Coding Exercise 6: labkit/train.py, accumulated_step")

    monkeypatch.setattr(public, "accumulated_step", not_written)
    with pytest.raises(NotImplementedError):
        getattr(public, name)()


def test_the_checks_pack_sequences_as_the_library_does():
    parts = [MicroBatch.from_sequences([ids]) for ids in ([1, 2, 3], [4, 5], [6, 7, 8, 9])]
    whole = MicroBatch.from_sequences([[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    packed = together(parts)
    assert packed.tokens.tolist() == whole.tokens.tolist()
    assert packed.targets.tolist() == whole.targets.tolist() and NO_TARGET not in whole.targets
    assert packed.seqs.cu_seqlens.tolist() == whole.seqs.cu_seqlens.tolist()
