"""The usual slips in accumulating a gradient, and which of them explains what was found."""

from collections.abc import Sequence

from torch import Tensor

from labkit.data import MicroBatch


def slips(batches: Sequence[MicroBatch]) -> dict[str, list[float]]:
    """What is wrong → the weight that it gives the sum of each micro batch's cross-entropies."""
    M = len(batches)
    own = [int(batch.n_targets()) for batch in batches]
    tokens = [len(batch.tokens) for batch in batches]
    N = max(sum(own), 1)
    more = "in a small one a token weighs more. Divide by the global batch's tokens"
    wrong = {
        f"that is the mean of the micro batches' means: {more}":
            [1 / (M * max(n, 1)) for n in own],
        f"each micro batch is divided by its own tokens: {more}": [1 / max(n, 1) for n in own],
        "it is divided by the number of micro batches as well; with the global batch's n_tokens "
        "the losses add up by themselves": [1 / (N * M)] * M,
        "tokens without a target are counted; batch.n_targets() counts those that have one":
            [1 / sum(tokens)] * M,
        "it is divided by its own tokens, those without a target as well": [1 / t for t in tokens],
        "that is a mean of means, over tokens without a target as well":
            [1 / (M * t) for t in tokens],
        "it is not divided by the number of tokens": [1.0] * M,
        "it is divided by the number of micro batches, not of tokens": [1 / M] * M,
        "it is twice too large: was backward called twice?": [2 / N] * M,
        "it is negated": [-1 / N] * M,
    }  # fmt: skip
    for place, which in (("first", 0), ("last", M - 1)):
        only = f"only the {place} micro batch is in it; add all of them up"
        wrong[only] = [(i == which) / N for i in range(M)]
        only += ", and divide by the global batch's tokens"
        wrong[only] = [(i == which) / max(own[which], 1) for i in range(M)]
    return wrong


def explain(found: Tensor, parts: list[Tensor], wrong: dict[str, list[float]]) -> str:
    """The slip that gives what was found, in words."""
    for words, factors in wrong.items():
        if near(found, sum(factor * part for factor, part in zip(factors, parts, strict=True))):
            return words
    return "it should be that of train_step on the same sequences"


def near(found: Tensor, right: Tensor) -> bool:
    scale = max(right.abs().max().item(), 1e-6)
    return (found - right).abs().max().item() <= 1e-4 * scale
