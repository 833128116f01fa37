"""The same model on a CUDA GPU: the same numbers, and nothing that waits for the GPU."""

import copy

import pytest
import torch

from labkit.config import ModelConfig
from labkit.data import MicroBatch, random_micro_batch
from labkit.generate import generate
from labkit.model import Transformer
from labkit.train import accumulated_step, lm_loss, make_optimizer, train_step

pytestmark = pytest.mark.gpu

MOE = ModelConfig.preset("olmoe-tiny")
DENSE = ModelConfig.preset("tiny")


def build(cfg, dtype=torch.float32):
    torch.manual_seed(0)
    return Transformer(cfg).to("cuda", dtype)


def ragged(cfg, lengths=(200, 1, 37, 64)):
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(cfg.vocab_size, (n + 1,), generator=generator).tolist() for n in lengths]
    return MicroBatch.from_sequences(ids)


@pytest.mark.parametrize("cfg", [MOE, DENSE], ids=["moe", "dense-gqa"])
def test_float32_agrees_with_the_cpu(cfg):
    model, batch = build(cfg), ragged(cfg)
    expected = copy.deepcopy(model).cpu()(batch.tokens, batch.seqs)
    on_gpu = batch.to("cuda")
    error = (model(on_gpu.tokens, on_gpu.seqs).cpu() - expected).abs().max().item()
    assert error < 2e-3, f"logits differ by {error:.1e}"


@pytest.mark.parametrize("cfg", [MOE, DENSE], ids=["moe", "dense-gqa"])
def test_bfloat16_agrees_within_its_rounding(cfg):
    """FlashAttention and grouped GEMMs against SDPA: gradients point the same way."""
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        model, batch = build(cfg, dtype), ragged(cfg).to("cuda")
        lm_loss(model(batch.tokens, batch.seqs), batch.targets, batch.n_targets()).backward()
        grads.append({n: p.grad.float().flatten() for n, p in model.named_parameters()})
    for name, expected in grads[0].items():
        cosine = torch.cosine_similarity(expected, grads[1][name], dim=0).item()
        assert cosine > 0.97, f"gradient of {name}: cosine {cosine:.4f}"


def test_naive_and_grouped_agree():
    model, batch = build(MOE, torch.bfloat16), ragged(MOE).to("cuda")
    grouped = model(batch.tokens, batch.seqs)
    model.moe_impl = "naive"
    error = (model(batch.tokens, batch.seqs) - grouped).abs().max().item()
    assert error < 0.05 * grouped.abs().max().item(), f"logits differ by {error:.1e}"


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_never_waits_for_the_gpu(recompute):
    model = build(MOE, torch.bfloat16)
    model.recompute = recompute
    optimizer = make_optimizer(model)
    batches = [random_micro_batch(MOE, 2, 64, "cuda", seed) for seed in range(3)]
    train_step(model, optimizer, batches[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(model, optimizer, batches[0])
        accumulated_step(model, optimizer, batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cached_and_uncached_generation_agree():
    model = build(MOE)
    prompts = [[5, 6, 7, 8], [9], [10, 11]]
    assert generate(model, prompts, 12) == generate(model, prompts, 12, use_cache=False)
