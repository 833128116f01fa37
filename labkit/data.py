"""What goes through a model in one pass: flat tokens, and where each sequence starts and ends.

Shapes: T tokens in the micro batch, over all of its sequences. Nothing is padded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.errors import UserError, whole_number

NO_TARGET = -100


@dataclass(frozen=True, eq=False)
class Seqs:
    """Where the sequences lie in T flat tokens: sequence i is rows cu_seqlens[i]:cu_seqlens[i + 1].

    cu_seqlens: int32 `[n_sequences + 1]`, from 0 to T. max_seqlen: at least the longest length.
    Building one from a CUDA tensor waits for the GPU, once, to copy the lengths to the host;
    `from_lengths` and `.to` do not.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    lengths: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self):
        if self.lengths:
            return
        ends = self.cu_seqlens.tolist()
        if self.cu_seqlens.ndim != 1 or len(ends) < 2 or ends[0] != 0:
            raise UserError(f"cu_seqlens={ends} must start at 0 and name at least one sequence")
        lengths = tuple(end - start for start, end in pairwise(ends))
        if min(lengths) < 1:
            raise UserError(f"cu_seqlens={ends} must increase: a sequence has at least one token")
        if max(lengths) > self.max_seqlen:
            raise UserError(f"max_seqlen={self.max_seqlen} is below the longest, {max(lengths)}")
        object.__setattr__(self, "cu_seqlens", self.cu_seqlens.int())
        object.__setattr__(self, "lengths", lengths)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device=None) -> "Seqs":
        """`from_lengths([3, 5, 2])` has cu_seqlens [0, 3, 8, 10] and max_seqlen 5."""
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(cu_seqlens, max(lengths, default=0)).to(device)

    def to(self, device) -> "Seqs":
        return Seqs(self.cu_seqlens.to(device, non_blocking=True), self.max_seqlen, self.lengths)

    @property
    def n_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """`[T]`: the place of each token in its own sequence, from 0."""
        cu = self.cu_seqlens
        starts = cu[:-1].repeat_interleave(cu.diff(), output_size=self.n_tokens)
        return torch.arange(self.n_tokens, device=cu.device) - starts


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The sequences of one forward and backward pass: tokens `[T]`, targets `[T]`, and `Seqs`.

    A target is the token that follows, or −100 where there is none to learn.
    """

    tokens: Tensor
    targets: Tensor
    seqs: Seqs

    def __post_init__(self):
        if not len(self.tokens) == len(self.targets) == self.seqs.n_tokens:
            raise UserError(
                f"{len(self.tokens)} tokens and {len(self.targets)} targets, "
                f"but cu_seqlens end at {self.seqs.n_tokens}"
            )

    @classmethod
    def from_sequences(cls, sequences: Sequence[Sequence[int]], device=None) -> "MicroBatch":
        """Pack sequences of n + 1 token ids, each into n tokens and their n targets."""
        if short := [i for i, ids in enumerate(sequences) if len(ids) < 2]:
            raise UserError(f"sequence {short[0]} has under 2 tokens: there is nothing to predict")
        tokens = torch.tensor([token for ids in sequences for token in ids[:-1]])
        targets = torch.tensor([token for ids in sequences for token in ids[1:]])
        seqs = Seqs.from_lengths([len(ids) - 1 for ids in sequences])
        return cls(tokens, targets, seqs).to(device)

    def to(self, device) -> "MicroBatch":
        """The same micro batch on another device; the copy does not wait for the GPU."""
        return MicroBatch(
            self.tokens.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.seqs.to(device),
        )

    def n_targets(self) -> Tensor:
        """The number of trainable tokens, as a scalar on the device, so that nobody waits."""
        return (self.targets != NO_TARGET).sum()


def random_micro_batch(
    cfg: ModelConfig, micro_batch_size: int, seqlen: int, device=None, seed: int = 0
) -> MicroBatch:
    """`micro_batch_size` sequences of `seqlen` uniformly random tokens; the same on any device."""
    whole_number("micro_batch_size", micro_batch_size)
    whole_number("seqlen", seqlen)
    generator = torch.Generator().manual_seed(seed)
    shape = (micro_batch_size, seqlen + 1)
    ids = torch.randint(cfg.vocab_size, shape, generator=generator)
    seqs = Seqs.from_lengths([seqlen] * micro_batch_size)
    return MicroBatch(ids[:, :-1].flatten(), ids[:, 1:].flatten(), seqs).to(device)


def text_micro_batches(
    ids: Sequence[int], micro_batch_size: int, seqlen: int, device=None, seed: int = 0
) -> Iterator[MicroBatch]:
    """Endless micro batches of random windows of a tokenized text.

    A bad request is a UserError at once, not at the first micro batch.
    """
    whole_number("micro_batch_size", micro_batch_size)
    whole_number("seqlen", seqlen)
    ids = torch.as_tensor(ids)
    if len(ids) < seqlen + 1:
        raise UserError(f"the text has {len(ids)} tokens; seqlen={seqlen} needs one more than that")
    return _windows(ids, Seqs.from_lengths([seqlen] * micro_batch_size, device), seed)


def _windows(ids: Tensor, seqs: Seqs, seed: int) -> Iterator[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    n_sequences, seqlen = len(seqs.lengths), seqs.max_seqlen
    offsets = torch.arange(seqlen + 1)
    while True:
        starts = torch.randint(len(ids) - seqlen, (n_sequences, 1), generator=generator)
        windows = ids[starts + offsets].to(seqs.cu_seqlens.device)
        yield MicroBatch(windows[:, :-1].flatten(), windows[:, 1:].flatten(), seqs)


def sample_text() -> str:
    """The play that ships with labkit; the shipped model has never seen it."""
    return files("labkit").joinpath("assets/text/sample.txt").read_text(encoding="utf-8")
