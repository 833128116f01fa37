"""Checkpoints that are whole load; every way of not being whole is named, and nothing is lost."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit.checkpoint import INDEX, SINGLE, CheckpointError, load_hf, load_tokenizer, save_hf
from labkit.config import ModelConfig
from labkit.doctor import SHIPPED
from labkit.errors import UserError
from labkit.model import Transformer

CFG = ModelConfig(
    vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=16,
    n_experts=4, experts_per_token=2, qk_norm=True, max_seqlen=64, rope_theta=5000.0,
)  # fmt: skip


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Transformer(CFG)


@pytest.fixture
def single(model, tmp_path):
    save_hf(model, tmp_path / "single")
    return tmp_path / "single"


@pytest.fixture
def sharded(model, tmp_path):
    save_hf(model, tmp_path / "sharded", max_shard_bytes=20_000)
    return tmp_path / "sharded"


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    config |= changes
    (path / "config.json").write_text(json.dumps(config))


def error_of(path, **options) -> str:
    with pytest.raises(CheckpointError) as error:
        load_hf(path, "cpu", **options)
    return str(error.value)


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_what_is_saved_is_what_is_loaded(layout, model, request):
    again = load_hf(request.getfixturevalue(layout), "cpu")
    assert again.cfg == CFG
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_published_tensor_names(single):
    names = load_file(single / SINGLE)
    assert len(names) == 3 + CFG.n_layers * (4 + 2 + 2 + 1 + 3 * CFG.n_experts)
    assert names["model.layers.1.mlp.experts.3.gate_proj.weight"].shape == (16, 32)
    assert names["model.layers.0.mlp.gate.weight"].shape == (4, 32)
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= names.keys()
    assert "model.layers.0.self_attn.q_norm.weight" in names


def test_numbers_are_converted_on_loading(single):
    assert load_hf(single, "cpu", torch.bfloat16).embed.weight.dtype == torch.bfloat16


def test_a_missing_shard_is_named(sharded):
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    victim.unlink()
    assert victim.name in error_of(sharded) and "download" in error_of(sharded)


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.999])
def test_a_truncated_file_is_named(single, keep):
    file = single / SINGLE
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    assert f"{SINGLE} is truncated or damaged" in error_of(single)


def test_missing_unknown_and_misshapen_tensors_are_named(single):
    tensors = load_file(single / SINGLE)
    weight = tensors.pop("model.norm.weight")
    save_file(tensors, single / SINGLE)
    assert "lacks 1 tensors: model.norm.weight" in error_of(single)
    extra = {"model.norm.weight": weight, "extra.bias": weight.clone()}
    save_file(tensors | extra, single / SINGLE)
    assert "has unknown 1 tensors: extra.bias" in error_of(single)
    save_file({**tensors, "model.norm.weight": weight[:8].clone()}, single / SINGLE)
    assert "model.norm.weight has shape [8], config.json makes it [32]" in error_of(single)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"model_type": None}, "model_type=None"),
        ({"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "RoPE of type 'yarn'"),
        ({"num_attention_heads": 5}, "n_heads=5"),
        ({"num_experts": 8}, "config.json makes it [8, 32]"),
        ({"num_hidden_layers": 3}, "lacks 21 tensors"),
        ({"vocab_size": "many"}, "config.json: vocab_size='many'"),
        ({"vocab_size": None}, "config.json: vocab_size=None"),
        ({"rope_theta": "far"}, "config.json: rope_theta='far'"),
        ({"rope_scaling": "linear"}, "RoPE settings 'linear' are not a table"),
    ],
)
def test_another_architecture_is_named(single, changes, words):
    edit_config(single, **changes)
    with pytest.raises(UserError) as error:
        load_hf(single, "cpu")
    assert words in str(error.value)


def test_a_folder_that_is_no_checkpoint(single, tmp_path):
    assert "config.json is not there" in error_of(tmp_path / "nowhere")
    (single / SINGLE).unlink()
    assert f"neither {SINGLE} nor {INDEX}" in error_of(single)
    (single / INDEX).write_text('{"weights": 1}')
    assert "not an index of shards" in error_of(single)
    (single / "config.json").write_text("{")
    assert "config.json is not JSON" in error_of(single)
    (single / "config.json").write_text("[1]")
    assert "config.json holds a list" in error_of(single)
    (single / "config.json").write_text('{"model_type": "llama"}')
    assert "config.json lacks" in error_of(single)
    (single / "config.json").unlink()
    (single / "config.json").mkdir()
    assert "config.json cannot be read: Is a directory" in error_of(single)


def test_saving_overwrites_nothing_and_leaves_nothing_half_done(model, single, tmp_path):
    before = (single / SINGLE).read_bytes()
    with pytest.raises(UserError, match="not an empty folder"):
        save_hf(model, single)
    assert (single / SINGLE).read_bytes() == before
    model.cfg = ModelConfig.preset("tiny", qk_norm=True)
    with pytest.raises(UserError, match="no Hugging Face format"):
        save_hf(model, tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["single"]


def test_a_failing_disk_leaves_no_checkpoint(model, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("labkit.checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_hf(model, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_tied_embeddings_fill_the_head(tmp_path):
    dense = Transformer(ModelConfig(vocab_size=64, dim=32, n_layers=1, n_heads=4, n_kv_heads=2,
                                    ffn_dim=16))  # fmt: skip
    save_hf(dense, tmp_path / "tied")
    tensors = load_file(tmp_path / "tied" / SINGLE)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "tied" / SINGLE)
    assert "lacks 1 tensors: lm_head.weight" in error_of(tmp_path / "tied")
    edit_config(tmp_path / "tied", tie_word_embeddings=True)
    model = load_hf(tmp_path / "tied", "cpu")
    assert torch.equal(model.lm_head.weight, dense.embed.weight)


def test_the_shipped_model(tmp_path):
    size = sum(file.stat().st_size for file in SHIPPED.iterdir())
    assert size <= 20e6, f"{size / 1e6:.1f} MB"
    model, tokenizer = load_hf(SHIPPED, "cpu"), load_tokenizer(SHIPPED)
    assert model.cfg == ModelConfig.preset("olmoe-tiny")
    assert tokenizer.get_vocab_size() == model.cfg.vocab_size
    text = "To be, or not to be: that is the question."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with pytest.raises(CheckpointError, match="came without its tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_the_shipped_model_has_learned():
    """Its loss on the play that it never saw is what its README says."""
    from itertools import islice

    from labkit.data import sample_text, text_micro_batches
    from labkit.train import lm_loss

    model, tokenizer = load_hf(SHIPPED, "cpu"), load_tokenizer(SHIPPED)
    ids = tokenizer.encode(sample_text()).ids
    with torch.no_grad():
        losses = [
            lm_loss(model(b.tokens, b.seqs), b.targets, b.n_targets()).item()
            for b in islice(text_micro_batches(ids, 8, 256, seed=1), 3)
        ]
    mean = sum(losses) / len(losses)
    assert 3.8 < mean < 4.4, f"{mean:.2f} nats a token; chance is {8.3:.1f}"
