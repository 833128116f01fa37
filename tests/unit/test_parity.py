"""The model against transformers' reference implementations, in float32 at 1e-5."""

import copy

import pytest
import torch
import torch.nn.functional as F

from labkit.checkpoint import load_hf, save_hf
from labkit.data import MicroBatch
from labkit.train import lm_loss

transformers = pytest.importorskip("transformers")

LENGTHS = (7, 1, 19, 12)
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 24,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "pad_token_id": None, "eos_token_id": None, "bos_token_id": None, "use_cache": False,
}  # fmt: skip
MODELS = {
    "olmoe": lambda: transformers.OlmoeConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=4, num_experts=8, num_experts_per_tok=3
    ),
    "olmoe-gqa": lambda: transformers.OlmoeConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=3
    ),
    "llama-gqa": lambda: transformers.LlamaConfig(
        **SIZES, num_attention_heads=8, num_key_value_heads=2
    ),
    "llama-wide-heads": lambda: transformers.LlamaConfig(
        **SIZES, num_attention_heads=2, num_key_value_heads=1, head_dim=24
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def reference(request):
    """A random model in which norms, routing and every weight matter to the result."""
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(
        MODELS[request.param](), attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
            elif "mlp.gate.weight" in name:
                weight.mul_(40)
            else:
                weight.mul_(4)
    return model


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(5)
    return MicroBatch.from_sequences(
        [torch.randint(97, (n + 1,), generator=generator).tolist() for n in LENGTHS]
    )


def converted(reference, folder):
    reference.save_pretrained(folder)
    return load_hf(folder, device="cpu")


def with_gradients_as_weights(model):
    """A copy whose weights are the gradients, so that they go through the same name mapping."""
    shadow = copy.deepcopy(model)
    with torch.no_grad():
        for weight, original in zip(shadow.parameters(), model.parameters(), strict=True):
            weight.copy_(original.grad)
    return shadow


def reference_logits(reference, batch):
    """One sequence at a time: transformers needs no padding and no packing then."""
    return torch.cat(
        [reference(tokens[None]).logits[0] for tokens in batch.tokens.split(batch.seqs.lengths)]
    )


@pytest.mark.parametrize("moe_impl", ["grouped", "naive"])
@pytest.mark.parametrize("recompute", [False, True])
def test_logits_and_every_gradient(reference, batch, tmp_path, moe_impl, recompute):
    model = converted(reference, tmp_path / "weights")
    model.moe_impl, model.recompute = moe_impl, recompute

    expected = reference_logits(reference, batch)
    logits = model(batch.tokens, batch.seqs)
    error = (logits - expected).abs().max().item()
    assert error < 1e-5 * expected.abs().max(), f"logits differ by {error:.2e}"

    reference.zero_grad()
    F.cross_entropy(expected, batch.targets).backward()
    lm_loss(logits, batch.targets, batch.n_targets()).backward()
    wanted = converted(with_gradients_as_weights(reference), tmp_path / "gradients").state_dict()
    assert len(wanted) == len(list(model.parameters()))
    for name, weight in model.named_parameters():
        scale = wanted[name].abs().max().clamp(min=1e-3)
        error = ((weight.grad - wanted[name]).abs().max() / scale).item()
        assert error < 5e-5, f"gradient of {name} differs by {error:.2e} of its largest"


def test_save_and_load_in_transformers_is_exact(reference, tmp_path):
    ours = converted(reference, tmp_path / "theirs")
    save_hf(ours, tmp_path / "ours", max_shard_bytes=30_000)
    shards = list((tmp_path / "ours").glob("model-*.safetensors"))
    assert len(shards) > 2, "the test wants several shards"

    back, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    theirs = reference.state_dict()
    for name, weight in back.state_dict().items():
        assert torch.equal(weight, theirs[name]), name
    again = load_hf(tmp_path / "ours", device="cpu").state_dict()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, again[name]), name


@pytest.mark.parametrize(
    "mistake", ["renormalised", "gate and up swapped", "eps", "interleaved RoPE", "no qk-norm"]
)
def test_the_comparison_sees_the_usual_mistakes(reference, batch, tmp_path, monkeypatch, mistake):
    """The tolerance is only worth something if each known mistake breaks it by far."""
    model = converted(reference, tmp_path)
    expected = model(batch.tokens, batch.seqs).detach()
    if not _make_mistake(model, mistake, monkeypatch):
        pytest.skip("a dense model has none of this")
    error = (model(batch.tokens, batch.seqs) - expected).abs().max().item()
    bound = 1e-5 * expected.abs().max().item()
    assert error > 20 * bound, f"{mistake} moves logits by {error:.1e}, the bound is {bound:.1e}"


def _make_mistake(model, mistake, monkeypatch) -> bool:
    import labkit.model as module

    experts = [m for m in model.modules() if isinstance(m, module.Experts)]
    if mistake == "interleaved RoPE":
        rotate = module.rotate

        def interleaved(x, cos, sin):
            half = x.shape[-1] // 2
            pairs = x.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)
            return rotate(pairs, cos, sin).unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)

        monkeypatch.setattr(module, "rotate", interleaved)
    elif mistake == "eps":
        for norm in (m for m in model.modules() if isinstance(m, torch.nn.RMSNorm)):
            norm.eps = 1e-3
    elif not experts:
        return False
    elif mistake == "renormalised":
        forward = module.Router.forward

        def renormalised(self, x):
            weights, chosen = forward(self, x)
            return weights / weights.sum(-1, keepdim=True), chosen

        monkeypatch.setattr(module.Router, "forward", renormalised)
    elif mistake == "gate and up swapped":
        for m in experts:
            m.gate_proj, m.up_proj = m.up_proj, m.gate_proj
    elif mistake == "no qk-norm":
        for layer in model.layers:
            layer.attn.q_norm = layer.attn.k_norm = torch.nn.Identity()
    return True
