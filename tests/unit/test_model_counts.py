"""Parameters and FLOPs of a model: against the model itself, and against torch's own counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from labkit import perfmodel
from labkit.config import PRESETS, ModelConfig
from labkit.data import random_micro_batch
from labkit.errors import UserError
from labkit.model import Transformer

OLMOE = ModelConfig.preset("olmoe-1b-7b")
SMALL = {
    "moe": ModelConfig.preset("olmoe-tiny", n_layers=2),
    "moe-gqa": ModelConfig.preset("olmoe-tiny", n_layers=1, n_kv_heads=2),
    "dense-gqa": ModelConfig.preset("tiny", n_layers=3),
    "wide-heads": ModelConfig.preset("tiny", n_layers=1, head_dim=64),
}


@pytest.mark.parametrize("cfg", [*PRESETS.values(), *SMALL.values()])
def test_parameters_are_those_of_the_model(cfg):
    with torch.device("meta"):
        model = Transformer(cfg)
    assert perfmodel.param_count(cfg) == sum(p.numel() for p in model.parameters())


def test_olmoe_exactly():
    assert perfmodel.param_count(OLMOE) == 6_919_161_856
    assert perfmodel.active_params(OLMOE) == 1_178_861_568
    assert perfmodel.rows_per_expert(OLMOE, 512) == 64


def grouped_mm_flops(a_shape, b_shape, *args, **kwargs):
    """FLOPs of [R, k] @ [E, k, n]: each row meets one expert, so E does not enter."""
    return 2 * a_shape[0] * b_shape[-2] * b_shape[-1]


@pytest.mark.parametrize("seqlen", [1, 32, 129])
@pytest.mark.parametrize("name", SMALL)
def test_flops_are_those_that_torch_counts(name, seqlen):
    cfg, n_sequences = SMALL[name], 3
    model, batch = Transformer(cfg), random_micro_batch(SMALL[name], 3, seqlen)
    mapping = {torch.ops.aten._grouped_mm: grouped_mm_flops}
    with (
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False, custom_mapping=mapping) as counter,
    ):
        model(batch.tokens, batch.seqs)
    # torch multiplies the whole square of queries and keys, and masks; we count the causal half.
    pairs = n_sequences * seqlen * seqlen - n_sequences * seqlen * (seqlen + 1) // 2
    masked = 4 * cfg.head_dim * cfg.n_heads * cfg.n_layers * pairs
    expected = counter.get_total_flops() - masked
    ours = n_sequences * seqlen * perfmodel.flops_per_token(cfg, seqlen)
    assert ours == expected, f"{ours:,} by formula, {expected:,} counted"


@pytest.mark.parametrize("cfg", [OLMOE, *SMALL.values()])
def test_the_parts_sum_to_the_whole(cfg):
    parts = perfmodel.flops_breakdown(cfg, 256, micro_batch_size=4)
    assert sum(parts.values()) == 4 * 256 * perfmodel.flops_per_token(cfg, 256)


def test_floors_on_an_l40():
    """One sequence of 512 tokens is bound by reading the weights, 32 of them by arithmetic."""
    compute, memory = perfmodel.forward_floor_ms(OLMOE, 1, 512, "L40")
    assert memory == pytest.approx(2 * 6_919_161_856 / 864e6, rel=1e-12)
    assert compute < memory, (compute, memory)
    compute_32, memory_32 = perfmodel.forward_floor_ms(OLMOE, 32, 512, "L40")
    assert compute_32 == pytest.approx(32 * compute) and memory_32 == memory
    assert compute_32 > memory_32, (compute_32, memory_32)


def test_training_state_and_its_optimizer_on_an_l40():
    """Two layers: 7.79 GiB; all sixteen: 51.5 GiB, more than the card has."""
    two = ModelConfig.preset("olmoe-1b-7b", n_layers=2)
    assert perfmodel.state_bytes(two) / 2**30 == pytest.approx(7.79, abs=0.005)
    assert perfmodel.state_bytes(OLMOE) / 2**30 == pytest.approx(51.55, abs=0.01)
    assert perfmodel.state_bytes(two, 4) == 2 * perfmodel.state_bytes(two)
    assert perfmodel.optimizer_floor_ms(two, "L40") == pytest.approx(16.94, abs=0.01)


def test_mfu_of_a_step_at_peak_is_one():
    tokens, seqlen = 8192, 2048
    at_peak_ms = 3 * tokens * perfmodel.flops_per_token(OLMOE, seqlen) / (989e12) * 1e3
    assert perfmodel.mfu(OLMOE, tokens, seqlen, at_peak_ms, "H200") == pytest.approx(1, rel=1e-3)
    half = perfmodel.mfu(OLMOE, tokens, seqlen, 2 * at_peak_ms, "H200")
    assert half == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: perfmodel.flops_per_token(OLMOE, 0), "seqlen=0"),
        (lambda: perfmodel.rows_per_expert(OLMOE, -1), "n_tokens=-1"),
        (lambda: perfmodel.forward_floor_ms(OLMOE, 0, 5, "L40"), "micro_batch_size=0"),
        (lambda: perfmodel.forward_floor_ms(OLMOE, 1, 5, "L41"), "L40"),
        (lambda: perfmodel.mfu(OLMOE, 10, 5, 0, "L40"), "step_ms=0"),
    ],
)
def test_bad_sizes_are_named(call, words):
    with pytest.raises(UserError, match=words):
        call()
