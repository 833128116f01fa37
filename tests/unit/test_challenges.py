"""The worked challenges: the same numbers as what they replace, for less."""

import pytest
import torch

from labkit.challenges.head_loss import chunked_lm_loss, chunked_step
from labkit.challenges.naive_backward import unbound_experts, zero_fills
from labkit.config import ModelConfig
from labkit.data import NO_TARGET, random_micro_batch
from labkit.errors import UserError
from labkit.memory import record_timeline
from labkit.model import Transformer
from labkit.train import lm_loss, make_optimizer, train_step

CFG = ModelConfig(
    vocab_size=512, dim=32, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=16,
    n_experts=8, experts_per_token=2, qk_norm=True,
)  # fmt: skip
T, D, V = 50, 16, 40


def distance(a, b) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("chunks", [1, 3, 8, 50, 1000])
def test_the_chunked_loss_has_the_same_value_and_gradients(chunks):
    hidden, weight = torch.randn(T, D), torch.randn(V, D)
    targets = torch.randint(V, (T,))
    targets[::7] = NO_TARGET
    found = []
    for whole in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if whole:
            loss = lm_loss(h @ w.T, targets, 43)
        else:
            loss = chunked_lm_loss(h, w, targets, torch.tensor(43), chunks)
        loss.backward()
        found.append((loss.detach(), h.grad, w.grad))
    for name, a, b in zip(("loss", "hidden", "weight"), *found, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6), f"{name} differs by {distance(a, b)}"


def test_a_chunked_step_makes_the_same_update_with_a_lower_peak():
    batch = random_micro_batch(CFG, 4, 64)
    weights, peaks = [], []
    for step in (train_step, chunked_step):
        torch.manual_seed(0)
        model = Transformer(CFG)
        step(model, torch.optim.SGD(model.parameters(), lr=1e-2), batch)
        weights.append([p.detach().clone() for p in model.parameters()])
        optimizer = make_optimizer(model)
        step(model, optimizer, batch)
        lived = record_timeline(lambda s=step, m=model, o=optimizer: s(m, o, batch), model)
        start = lived.frame["allocated_gib"][0]
        peaks.append((lived.peak_gib - start) * 2**30)
    off = max(distance(a, b) for a, b in zip(*weights, strict=True))
    assert off < 1e-6, f"weights differ by {off}"
    logits = 4 * 64 * CFG.vocab_size * 4
    assert peaks[0] - peaks[1] > 1.5 * logits, f"{peaks} bytes above the start"


def test_arguments_that_make_no_chunks_are_named():
    hidden, weight, targets = torch.randn(4, 8), torch.randn(5, 8), torch.zeros(4, dtype=torch.long)
    for chunks in (0, -1, 1.5, True):
        with pytest.raises(UserError, match="chunks="):
            chunked_lm_loss(hidden, weight, targets, 4, chunks)
    with pytest.raises(UserError, match="3 targets"):
        chunked_lm_loss(hidden, weight, targets[:3], 4)


def gradients(model, batch):
    model.zero_grad()
    lm_loss(model(batch.tokens, batch.seqs), batch.targets, 1).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_unbound_experts_have_the_same_gradients_without_filling_zeros():
    model, batch = Transformer(CFG), random_micro_batch(CFG, 2, 32)
    model.moe_impl = "naive"
    before = gradients(model, batch)
    fills = zero_fills(lambda: gradients(model, batch), model)
    with unbound_experts(model):
        after = gradients(model, batch)
        fewer = zero_fills(lambda: gradients(model, batch), model)
    off = max(distance(a, b) for a, b in zip(before, after, strict=True))
    assert off < 1e-5, f"gradients differ by {off}"
    expected = 3 * CFG.n_experts * CFG.n_layers
    assert fills == expected, f"{fills} fills; one for each expert's matrix makes {expected}"
    assert fewer == 0, f"{fewer} fills are left of {fills}"


def test_nothing_of_the_fix_is_left_behind():
    model = Transformer(CFG)
    with pytest.raises(RuntimeError, match="the weather"), unbound_experts(model):
        raise RuntimeError("the weather")
    assert not any("_naive" in vars(module) for module in model.modules())
