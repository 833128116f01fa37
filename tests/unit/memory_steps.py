"""What the tests of memory share: small models, and a step of them with its timeline."""

from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.memory import record_timeline
from labkit.model import Transformer
from labkit.train import accumulated_step, make_optimizer, train_step

GIB = 2**30
MIB = 2**20
MOE = ModelConfig(
    vocab_size=256, dim=64, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=32,
    n_experts=8, experts_per_token=4, qk_norm=True,
)  # fmt: skip
DENSE = ModelConfig(
    vocab_size=512, dim=64, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=160
)  # fmt: skip


def trained(cfg, recompute=False, micro_batch_size=2, seqlen=32):
    """A model with its optimizer's state, and a micro batch."""
    model = Transformer(cfg)
    model.recompute = recompute
    optimizer = make_optimizer(model)
    micro_batch = random_micro_batch(cfg, micro_batch_size, seqlen)
    train_step(model, optimizer, micro_batch)
    return model, optimizer, micro_batch


def step_timeline(cfg, recompute=False, sizes=(4,), seqlen=64):
    """One accumulated step on micro batches of these sizes."""
    model, optimizer, _ = trained(cfg, recompute)
    batches = [random_micro_batch(cfg, size, seqlen, seed=i) for i, size in enumerate(sizes)]
    for batch in batches:
        _ = batch.seqs.positions  # kept with the batch, not by the model
    return record_timeline(lambda: accumulated_step(model, optimizer, batches), model, optimizer)
