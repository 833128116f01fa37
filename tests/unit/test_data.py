"""Flat tokens: where sequences lie, what follows what, and what cannot be."""

import pytest
import torch

from labkit.config import ModelConfig
from labkit.data import MicroBatch, Seqs, random_micro_batch, text_micro_batches
from labkit.errors import UserError

TINY = ModelConfig.preset("olmoe-tiny")


def test_seqs_from_lengths():
    seqs = Seqs.from_lengths([3, 5, 2])
    assert seqs.cu_seqlens.tolist() == [0, 3, 8, 10]
    assert (seqs.max_seqlen, seqs.n_tokens, seqs.lengths) == (5, 10, (3, 5, 2))
    assert seqs.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1]
    same = Seqs(torch.tensor([0, 3, 8, 10]), 5)
    assert same.lengths == seqs.lengths and same.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize(
    ("cu_seqlens", "max_seqlen", "words"),
    [
        ([1, 3], 3, "must start at 0"),
        ([0], 3, "at least one sequence"),
        ([0, 3, 2], 3, "must increase"),
        ([0, 3, 3], 3, "must increase"),
        ([0, 9], 3, "max_seqlen=3 is below the longest, 9"),
    ],
)
def test_bad_cu_seqlens_are_named(cu_seqlens, max_seqlen, words):
    with pytest.raises(UserError, match=words):
        Seqs(torch.tensor(cu_seqlens), max_seqlen)


def test_targets_are_the_tokens_that_follow():
    batch = MicroBatch.from_sequences([[5, 6, 7], [8, 9]])
    assert batch.tokens.tolist() == [5, 6, 8]
    assert batch.targets.tolist() == [6, 7, 9]
    assert batch.seqs.lengths == (2, 1) and batch.n_targets() == 3


def test_a_micro_batch_whose_parts_disagree_is_an_error():
    with pytest.raises(UserError, match="cu_seqlens end at 3"):
        MicroBatch(torch.ones(4), torch.ones(4), Seqs.from_lengths([3]))
    with pytest.raises(UserError, match="sequence 1 has under 2 tokens"):
        MicroBatch.from_sequences([[1, 2], [3]])


def test_random_micro_batches_depend_on_the_seed_alone():
    a, b, c = (random_micro_batch(TINY, 3, 8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.tokens, b.tokens) and not torch.equal(a.tokens, c.tokens)
    assert torch.equal(a.tokens.view(3, 8)[:, 1:], a.targets.view(3, 8)[:, :-1])
    assert a.seqs.lengths == (8, 8, 8)
    with pytest.raises(UserError, match="micro_batch_size=0"):
        random_micro_batch(TINY, 0, 8)


def test_text_windows_are_windows_of_the_text():
    batch = next(text_micro_batches(range(100), 4, 10, seed=3))
    for window, targets in zip(batch.tokens.view(4, 10), batch.targets.view(4, 10), strict=True):
        assert window.tolist() == list(range(window[0], window[0] + 10))
        assert torch.equal(targets, window + 1)
    with pytest.raises(UserError, match="10 tokens; seqlen=10 needs one more"):
        text_micro_batches(range(10), 1, 10)  # at once, not at the first micro batch
    with pytest.raises(UserError, match="micro_batch_size=0"):
        text_micro_batches(range(10), 0, 4)
