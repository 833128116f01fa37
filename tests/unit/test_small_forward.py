"""The small forward pass made faster computes the same, and leaves the model as it was."""

import pytest
import torch

from labkit.challenges.small_forward import busiest_rows, compiled_layers, padded_experts
from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.errors import UserError
from labkit.model import Transformer

CFG = ModelConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=16,
    n_experts=8, experts_per_token=2, qk_norm=True,
)  # fmt: skip
BATCH = random_micro_batch(CFG, 2, 24)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Transformer(CFG)


@torch.no_grad()
def logits(model):
    return model(BATCH.tokens, BATCH.seqs)


def chosen(model) -> list:
    """The experts that each layer's router chooses."""
    found = []
    for layer in model.layers:
        hook = lambda module, args, output: found.append(output[1])  # noqa: E731
        layer.ffn.router.register_forward_hook(hook)
    logits(model)
    return found


def differ(a, b) -> float:
    return (a - b).abs().max().item()


@pytest.mark.filterwarnings("ignore:Dynamo detected")
def test_compiled_layers_compute_the_same(model):
    """In bfloat16: what torch.compile knows of grouped multiplies has no other dtype."""
    model.bfloat16()
    before = logits(model)
    with compiled_layers(model, backend="eager"):
        off = differ(logits(model), before)
    assert off < 1e-2 * before.abs().max(), f"logits differ by {off}"
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_padded_experts_compute_the_same_and_have_the_same_gradients(model):
    capacity = max(busiest_rows(experts, CFG.n_experts) for experts in chosen(model))
    results = []
    for rows in (None, capacity, 2 * capacity):
        model.zero_grad()
        if rows is None:
            out = model(BATCH.tokens, BATCH.seqs)
        else:
            with padded_experts(model, rows):
                out = model(BATCH.tokens, BATCH.seqs)
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    for found in results[1:]:
        off = max(differ(a, b) for a, b in zip(results[0], found, strict=True))
        assert off < 1e-5, f"logits or gradients differ by {off}"


def test_rows_that_do_not_fit_are_not_dropped_in_silence(model):
    """A token with a row beyond the capacity is NaN, and every other token is right."""
    experts, x_TD = model.layers[0].ffn.experts, torch.randn(40, CFG.dim)
    weights_TK, experts_TK = torch.rand(40, 2), torch.randint(8, (40, 2))
    right = experts(x_TD, weights_TK, experts_TK)
    with padded_experts(model, 6):
        found = experts(x_TD, weights_TK, experts_TK)
    seen = [0] * CFG.n_experts
    for token, pair in enumerate(experts_TK.tolist()):
        late = [seen[e] + pair[:i].count(e) >= 6 for i, e in enumerate(pair)]
        for e in pair:
            seen[e] += 1
        assert found[token].isnan().all() == any(late), f"token {token}: {found[token]}"
        assert any(late) or differ(found[token], right[token]) < 1e-5, f"token {token}"
    assert max(seen) > 6, f"no expert was full: {seen}"


def test_nothing_of_the_padding_is_left_behind(model):
    before = logits(model)
    with pytest.raises(RuntimeError, match="the weather"), padded_experts(model, 48):
        raise RuntimeError("the weather")
    assert torch.equal(logits(model), before)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.filterwarnings("ignore:Dynamo detected")
def test_both_together(model):
    before = logits(model)
    with padded_experts(model, 48), compiled_layers(model, backend="eager"):
        off = differ(logits(model), before)
    assert off < 1e-5, f"logits differ by {off}"


def test_what_cannot_be_padded_is_named(model):
    with pytest.raises(UserError, match="capacity=0"), padded_experts(model, 0):
        pass
    dense = Transformer(ModelConfig.preset("tiny", n_layers=1))
    with pytest.raises(UserError, match="no mixture"), padded_experts(dense, 8):
        pass
