"""Load and save checkpoints in Hugging Face's format: config.json and sharded safetensors.

Tensors go one by one from the file to where the model lives, so that loading 14 GB onto a GPU
takes no second copy in host memory. Two architectures are known: OLMoE and Llama.
"""

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from labkit.config import ModelConfig
from labkit.devices import pick, training_dtype
from labkit.errors import UserError
from labkit.model import Transformer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(UserError):
    """A checkpoint that cannot be used as it is; the message names the file and what is wrong."""


# ------------------------------------------------------------------------------------ config.json

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_dim",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_seqlen",
    "num_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token",
}
_OPTIONAL = {"head_dim": 0, "num_experts": 0, "num_experts_per_tok": 0}
# What our model does not do; another value in a config.json would give wrong numbers silently.
_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "clip_qkv": None,
    "norm_topk_prob": False,
}


def read_config(path: Path) -> ModelConfig:
    """The ModelConfig of a checkpoint directory; raises CheckpointError if it is another model."""
    file = Path(path) / "config.json"
    try:
        hf = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{file} is not there: is {path} a checkpoint directory?") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(hf, dict):
        raise CheckpointError(f"{file} holds a {type(hf).__name__}, not a table of settings")
    model_type = hf.get("model_type")
    if model_type not in ("olmoe", "llama"):
        raise CheckpointError(f"{file}: model_type={model_type!r}; labkit reads 'olmoe', 'llama'")
    for key, value in _REQUIRED.items():
        if hf.get(key, value) != value:
            raise CheckpointError(f"{file}: {key}={hf[key]!r} is not supported, only {value!r}")
    if missing := sorted(_SIZES.keys() - hf.keys() - _OPTIONAL.keys()):
        raise CheckpointError(f"{file} lacks {', '.join(missing)}")
    sizes = {ours: hf.get(theirs) or _OPTIONAL.get(theirs) for theirs, ours in _SIZES.items()}
    rope_theta = _rope_theta(hf, file)
    try:
        return ModelConfig(**sizes, qk_norm=model_type == "olmoe", rope_theta=rope_theta)
    except UserError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _rope_theta(hf: dict, file: Path) -> float:
    """transformers 5 writes `rope_parameters`; older files have `rope_theta` and `rope_scaling`."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{file}: RoPE settings {rope!r} are not a table")
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise CheckpointError(f"{file}: RoPE of type {kind!r} is not supported, only 'default'")
    return rope.get("rope_theta", hf.get("rope_theta", 10000.0))


def _hf_config(cfg: ModelConfig, dtype: torch.dtype) -> dict:
    if cfg.is_moe != cfg.qk_norm:
        raise UserError(
            f"n_experts={cfg.n_experts} with qk_norm={cfg.qk_norm} has no Hugging Face format: "
            "OLMoE has both, Llama neither"
        )
    name, model_type = ("Olmoe", "olmoe") if cfg.is_moe else ("Llama", "llama")
    sizes = {theirs: getattr(cfg, ours) for theirs, ours in _SIZES.items()}
    if not cfg.is_moe:
        del sizes["num_experts"], sizes["num_experts_per_tok"]
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "rope_theta": cfg.rope_theta,
        "tie_word_embeddings": False,
        **sizes,
        **_REQUIRED,
    }


# ---------------------------------------------------------------------------------------- tensors

_RENAMED = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn": "self_attn",
    "ffn": "mlp",
    "router": "",  # its gate hangs from `mlp` directly
}


def hf_tensors(model: Transformer) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its published name, as a view into the model's weights."""
    views = {}
    for name, weight in model.state_dict().items():
        *path, last = name.split(".")
        prefix = "model." if path[0] == "layers" else ""
        prefix += ".".join(filter(None, (_RENAMED.get(part, part) for part in path)))
        if path[-1] == "experts":  # one tensor here, one an expert in the file
            views |= {f"{prefix}.{e}.{last}.weight": matrix for e, matrix in enumerate(weight)}
        else:
            views[f"{prefix}.{last}"] = weight
    return views


def shards(path: Path) -> list[Path]:
    """The files that hold the tensors; every one that the index names must be there."""
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    index = path / INDEX
    if not index.is_file():
        raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of shards: {error!r}") from None
    if missing := [name for name in names if not (path / name).is_file()]:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(names)} shards: {', '.join(missing)}; "
            "download them again"
        )
    return [path / name for name in names]


# ------------------------------------------------------------------------------------ load, save


def load_hf(path: str | Path, device=None, dtype: torch.dtype | None = None) -> Transformer:
    """A Transformer with the weights of a checkpoint directory.

    device: as in `devices.pick`; dtype: the device's training dtype unless given (the file's
    numbers are converted). Raises CheckpointError for a missing or truncated shard, another
    architecture, and missing, unknown or misshapen tensors, by name.
    """
    path, device = Path(path), pick(device)
    cfg, files = read_config(path), shards(path)
    with torch.device("meta"):
        model = Transformer(cfg)
    model = model.to(dtype or training_dtype(device)).to_empty(device=device)
    views = hf_tensors(model)
    unknown, loaded = [], set()
    for shard in files:
        for name, tensor in _read(shard, device):
            if name not in views:
                unknown.append(name)
                continue
            if tensor.shape != views[name].shape:
                raise CheckpointError(
                    f"{shard}: {name} has shape {list(tensor.shape)}, "
                    f"config.json makes it {list(views[name].shape)}"
                )
            views[name].copy_(tensor)
            loaded.add(name)
    missing = views.keys() - loaded
    if missing == {"lm_head.weight"} and _is_tied(path):
        views["lm_head.weight"].copy_(views["model.embed_tokens.weight"])
        missing = set()
    for what, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            raise CheckpointError(f"{path} {what} {len(names)} tensors: {_some(sorted(names))}")
    return model


def _is_tied(path: Path) -> bool:
    return bool(json.loads((path / "config.json").read_text()).get("tie_word_embeddings"))


def _read(shard: Path, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(shard, framework="pt", device=str(device)) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(
            f"{shard} is truncated or damaged ({error}); download it again"
        ) from None


def _some(names: list[str], limit: int = 4) -> str:
    more = f", … and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def save_hf(model: Transformer, path: str | Path, max_shard_bytes: int = 4 * 2**30) -> None:
    """Write a checkpoint directory that transformers (and `load_hf`) can read.

    It appears whole or not at all: shards are written beside it first. An existing directory with
    anything in it is an error, so nothing is overwritten. At most one shard is held in host memory.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty folder; choose another, or remove it")
    config = _hf_config(model.cfg, next(model.parameters()).dtype)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    partial.mkdir(parents=True)
    try:
        _write_shards(hf_tensors(model), partial, max_shard_bytes)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        with suppress(FileNotFoundError):
            path.rmdir()
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(views: dict[str, Tensor], folder: Path, max_shard_bytes: int) -> None:
    groups, size = [[]], 0
    for name, view in views.items():
        size += view.nbytes
        if size > max_shard_bytes and groups[-1]:
            groups.append([])
            size = view.nbytes
        groups[-1].append(name)
    weight_map = {}
    for number, names in enumerate(groups, 1):
        file = SINGLE
        if len(groups) > 1:
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        # A clone each: safetensors refuses tensors that share memory, as an expert's slices do.
        shard = {name: views[name].detach().to("cpu", copy=True).contiguous() for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": sum(view.nbytes for view in views.values())},
            "weight_map": weight_map,
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer.json of a checkpoint directory."""
    file = Path(path) / "tokenizer.json"
    if not file.parent.is_dir():
        raise CheckpointError(f"{path} is not a folder: give a checkpoint directory")
    if not file.is_file():
        raise CheckpointError(f"{file} is not there: the checkpoint came without its tokenizer")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{file} is not a tokenizer: {error}") from None
