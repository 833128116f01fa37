"""The model's edges: empty experts, short sequences, isolation, recomputation, bad input."""

import pytest
import torch

from labkit import attention
from labkit.config import PRESETS, ModelConfig
from labkit.data import NO_TARGET, MicroBatch, Seqs, random_micro_batch
from labkit.errors import UserError
from labkit.model import Experts, Transformer
from labkit.train import lm_loss, make_optimizer, train_step

MOE = ModelConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=16,
    n_experts=8, experts_per_token=2, qk_norm=True, max_seqlen=64,
)  # fmt: skip
DENSE = ModelConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=1, ffn_dim=48)


def build(cfg, seed=0, **attributes):
    torch.manual_seed(seed)
    model = Transformer(cfg)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def gradients(model, batch):
    model.zero_grad()
    lm_loss(model(batch.tokens, batch.seqs), batch.targets, batch.n_targets()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("cfg", [MOE, DENSE], ids=["moe", "dense"])
def test_a_sequence_does_not_see_its_neighbours(cfg):
    model = build(cfg)
    ids = [torch.randint(64, (n + 1,)).tolist() for n in (5, 1, 9)]
    batch = MicroBatch.from_sequences(ids)
    together = model(batch.tokens, batch.seqs).split(batch.seqs.lengths)
    for sequence, packed in zip(ids, together, strict=True):
        alone = MicroBatch.from_sequences([sequence])
        error = (model(alone.tokens, alone.seqs) - packed).abs().max().item()
        assert error < 1e-5, f"a sequence of {len(sequence) - 1} changes by {error:.1e} in company"


def test_a_token_does_not_see_what_follows():
    model, batch = build(MOE), random_micro_batch(MOE, 1, 12)
    changed = batch.tokens.clone()
    changed[7] = (changed[7] + 1) % 64
    before = model(batch.tokens, batch.seqs)
    after = model(changed, batch.seqs)
    assert torch.allclose(before[:7], after[:7], atol=1e-6)
    assert not torch.allclose(before[7:], after[7:], atol=1e-3)


@pytest.mark.parametrize("n_tokens", [1, 3, 40])
def test_naive_and_grouped_agree_also_when_experts_are_empty(n_tokens):
    batch = random_micro_batch(MOE, 1, n_tokens)
    grouped = gradients(build(MOE), batch)
    naive = gradients(build(MOE, moe_impl="naive"), batch)
    for name, expected in naive.items():
        error = (grouped[name] - expected).abs().max().item()
        assert error < 1e-5, f"{name}: {error:.1e}"
    unused = [e for e in range(8) if not naive["layers.0.ffn.experts.down_proj"][e].any()]
    if n_tokens == 1:
        assert len(unused) == 6, "one token and two choices leave six of eight experts unused"
    for expert in unused:
        assert not grouped["layers.0.ffn.experts.gate_proj"][expert].any()


def test_every_token_to_one_expert():
    model, batch = build(MOE), random_micro_batch(MOE, 2, 6)
    with torch.no_grad():
        for layer in model.layers:
            layer.ffn.router.gate.weight.zero_()  # ties: topk takes the same two for all
    expected = model(batch.tokens, batch.seqs)
    model.moe_impl = "naive"
    assert torch.allclose(model(batch.tokens, batch.seqs), expected, atol=1e-5)


@pytest.mark.parametrize("cfg", [MOE, DENSE], ids=["moe", "dense"])
def test_all_targets_masked(cfg):
    model = build(cfg)
    batch = random_micro_batch(cfg, 2, 4)
    batch = MicroBatch(batch.tokens, torch.full_like(batch.targets, NO_TARGET), batch.seqs)
    optimizer = make_optimizer(model)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    before = [p.clone() for p in model.parameters()]
    assert train_step(model, optimizer, batch).item() == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("cfg", [MOE, DENSE], ids=["moe", "dense"])
def test_recomputation_changes_no_bit_of_the_gradients(cfg):
    batch = random_micro_batch(cfg, 2, 16)
    kept, recomputed = (gradients(build(cfg, recompute=r), batch) for r in (False, True))
    for name, expected in kept.items():
        assert torch.equal(recomputed[name], expected), name


def test_presets_are_what_their_names_say():
    counts = {}
    for name, cfg in PRESETS.items():
        with torch.device("meta"):
            counts[name] = sum(p.numel() for p in Transformer(cfg).parameters())
    assert counts["olmoe-1b-7b"] == 6_919_161_856
    assert 120e6 < counts["small"] < 130e6, counts
    assert 320e6 < counts["medium"] < 370e6, counts


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_heads": 5}, "n_heads=5 does not divide dim=2048"),
        ({"n_kv_heads": 5}, "n_kv_heads=5 does not divide n_heads=16"),
        ({"dim": 48, "n_heads": 16}, "head_dim=3 must be even"),
        ({"n_layers": 0}, "n_layers=0 must be a whole number of at least 1"),
        ({"n_layers": "4"}, "n_layers='4' must be a whole number"),
        ({"dim": 2048.0}, "dim=2048.0 must be a whole number"),
        ({"n_experts": -1}, "n_experts=-1 must be a whole number of at least 0"),
        ({"head_dim": -2}, "head_dim=-2 must be a whole number of at least 0"),
        ({"norm_eps": float("nan")}, "norm_eps=nan must be a number above 0"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4' must be a number above 0"),
        ({"experts_per_token": 65}, "experts_per_token=65 exceeds n_experts=64"),
        ({"experts_per_token": 0}, "both above 0"),
        ({"ffn_dim": 12}, "ffn_dim=12 is not a multiple of 8"),
        ({"layers": 4}, "unknown fields ['layers']"),
    ],
)
def test_bad_configs_are_named(fields, words):
    with pytest.raises(UserError) as error:
        ModelConfig.preset("olmoe-1b-7b", **fields)
    assert words in str(error.value)


def test_an_unknown_preset_lists_those_there_are():
    with pytest.raises(UserError, match="no preset 'olmoe'; there are tiny, small"):
        ModelConfig.preset("olmoe")


@pytest.mark.parametrize(
    ("tokens", "lengths", "words"),
    [
        ([1, 2, 64], [3], "token id 64 is outside the vocabulary 0…63"),
        ([1, -1, 2], [3], "token id -1 is outside"),
        ([1, 2, 3], [2], "cu_seqlens end at 2"),
        ([1] * 65, [65], "longer than the model's 64 positions"),
    ],
)
def test_bad_tokens_are_named(tokens, lengths, words):
    with pytest.raises(UserError, match=words):
        build(MOE)(torch.tensor(tokens), Seqs.from_lengths(lengths))


def test_an_unknown_moe_impl_is_an_error():
    with pytest.raises(UserError, match="'grouped' or 'naive'"):
        build(MOE).moe_impl = "fast"
    assert build(MOE, moe_impl="naive").moe_impl == "naive"
    assert build(DENSE).moe_impl == "grouped"


def test_expert_weights_start_like_linear_layers():
    experts = next(m for m in build(MOE).modules() if isinstance(m, Experts))
    assert experts.gate_proj.abs().max() <= 32**-0.5
    assert experts.down_proj.std().item() == pytest.approx(16**-0.5 / 3**0.5, rel=0.1)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "runs"),
    [
        ((9, 0), torch.bfloat16, 128, True),
        ((8, 0), torch.float16, 256, True),
        ((8, 0), torch.float32, 128, False),
        ((7, 0), torch.float16, 128, False),
        ((9, 0), torch.bfloat16, 36, False),
        ((9, 0), torch.bfloat16, 264, False),
    ],
)
def test_flash_attention_is_asked_for_what_it_does(monkeypatch, capability, dtype, head_dim, runs):
    monkeypatch.setattr(attention, "varlen_attn", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chosen = attention._has_varlen.__wrapped__(torch.device("cuda", 0), dtype, head_dim)
    assert chosen is runs, f"{capability}, {dtype}, heads of {head_dim}: {chosen}"
