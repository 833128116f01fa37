"""The loss and the step: what is divided by what, and one update a global batch."""

import pytest
import torch
import torch.nn.functional as F

from labkit.config import ModelConfig
from labkit.data import NO_TARGET, MicroBatch
from labkit.errors import UserError
from labkit.model import Transformer
from labkit.train import accumulated_step, lm_loss, make_optimizer, train_step

CFG = ModelConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=16,
    n_experts=4, experts_per_token=2, qk_norm=True,
)  # fmt: skip


def sequences(*lengths):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(64, (n + 1,), generator=generator).tolist() for n in lengths]


def updated(step, *data, lr=1e-2):
    """The weights after one step on a fresh model, and the loss that the step reports."""
    torch.manual_seed(0)
    model = Transformer(CFG)
    loss = step(model, torch.optim.SGD(model.parameters(), lr=lr), *data)
    return [p.detach().clone() for p in model.parameters()], loss.item()


def test_losses_of_micro_batches_add_up():
    logits, targets = torch.randn(10, 7), torch.randint(7, (10,))
    targets[4] = NO_TARGET
    whole = lm_loss(logits, targets, 9)
    assert torch.isclose(whole, F.cross_entropy(logits, targets))
    parts = sum(lm_loss(logits[part], targets[part], 9) for part in (slice(0, 3), slice(3, 10)))
    assert torch.isclose(whole, parts)


@pytest.mark.parametrize("split", [(1, 1, 1, 1), (2, 2), (3, 1), (1, 3)])
def test_the_update_does_not_depend_on_the_split(split):
    ids = sequences(3, 17, 9, 1)
    expected, loss = updated(train_step, MicroBatch.from_sequences(ids))
    parts, start = [], 0
    for size in split:
        parts.append(MicroBatch.from_sequences(ids[start : start + size]))
        start += size
    weights, total = updated(accumulated_step, parts)
    assert total == pytest.approx(loss, rel=1e-5)
    for a, b in zip(weights, expected, strict=True):
        error = (a - b).abs().max().item()
        assert error < 1e-7, f"weights differ by {error:.1e} for micro batches of {split}"


def test_masked_targets_weigh_nothing():
    batch = MicroBatch.from_sequences(sequences(8, 8))
    targets = batch.targets.clone()
    targets[8:] = NO_TARGET
    masked = MicroBatch(batch.tokens, targets, batch.seqs)
    alone = MicroBatch.from_sequences(sequences(8, 8)[:1])
    assert updated(train_step, masked)[1] == pytest.approx(updated(train_step, alone)[1], rel=1e-6)
    nothing = MicroBatch(batch.tokens, torch.full_like(targets, NO_TARGET), batch.seqs)
    with_nothing = updated(accumulated_step, [nothing, alone])
    without = updated(accumulated_step, [alone])
    assert with_nothing[1] == pytest.approx(without[1], rel=1e-6)


def test_one_optimizer_step_and_no_gradient_left():
    model = Transformer(CFG)
    optimizer = make_optimizer(model)
    batches = [MicroBatch.from_sequences([ids]) for ids in sequences(5, 6)]
    accumulated_step(model, optimizer, batches)
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0}
    assert all(p.grad is None for p in model.parameters())
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == parameter.dtype


def test_an_empty_global_batch_is_an_error():
    model = Transformer(CFG)
    with pytest.raises(UserError, match="no micro batches"):
        accumulated_step(model, make_optimizer(model), [])


def test_a_model_learns_a_text_by_heart():
    torch.manual_seed(0)
    model = Transformer(CFG)
    optimizer = make_optimizer(model, lr=1e-2)
    batch = MicroBatch.from_sequences(sequences(30, 20))
    losses = [train_step(model, optimizer, batch).item() for _ in range(60)]
    assert losses[-1] < 0.2 * losses[0], f"from {losses[0]:.2f} to {losses[-1]:.2f}"
