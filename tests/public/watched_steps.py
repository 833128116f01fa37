"""What the checks of C4 to C6 share: random sequences, and the activations that a step keeps."""

from collections.abc import Sequence
from contextlib import contextmanager
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from labkit.config import ModelConfig


def random_sequences(cfg: ModelConfig, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Sequences of token ids with one id more than each length, so that each token has a target."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(cfg.vocab_size, (length + 1,), generator=generator).tolist()
        for length in lengths
    ]


@contextmanager
def one_thread():
    """Small matrices are no work for several threads, which would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class SavedActivations:
    """Bytes that autograd keeps now (`alive`) and kept at most (`peak`); weights do not count.

    A tensor that two operations keep counts once, as it takes memory once.
    """

    def __init__(self, model: nn.Module):
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.users: dict[int, int] = {}
        self.alive = self.peak = 0

    @contextmanager
    def watched(self):
        with saved_tensors_hooks(self._pack, lambda kept: kept.tensor):
            yield self

    def _pack(self, tensor: Tensor) -> "_Kept":
        kept, storage = _Kept(tensor), tensor.untyped_storage()
        key, n_bytes = storage.data_ptr(), storage.nbytes()
        if key not in self.weights:
            if not self.users.get(key):
                self.alive += n_bytes
            self.users[key] = self.users.get(key, 0) + 1
            self.peak = max(self.peak, self.alive)
            finalize(kept, self._release, key, n_bytes)
        return kept

    def _release(self, key: int, n_bytes: int):
        self.users[key] -= 1
        if not self.users[key]:
            self.alive -= n_bytes


class _Kept:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor
