"""The doctor: each fact is true, each probe is alone, and nothing is left behind."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit import doctor
from labkit.doctor import Fact, examine, healthy, render


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of the right form: config.json, an index and two shards."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "intermediate_size", "max_position_embeddings",
             "num_experts", "num_experts_per_tok")  # fmt: skip
    config = dict.fromkeys(sizes, 1) | {"model_type": "olmoe", "rms_norm_eps": 1e-5}
    config |= {"hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 16}
    (folder / "config.json").write_text(json.dumps(config))
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, shard in enumerate(shards):
        save_file({f"t{i}": torch.zeros(1000)}, folder / shard)
    index = {"weight_map": {"t0": shards[0], "t1": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def program(folder: Path, monkeypatch, script: str) -> None:
    """Put an `nsys` of our own on the PATH."""
    path = folder / "nsys"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def by_name(facts):
    return {fact.name: fact for fact in facts}


def test_this_machine_is_examined_in_full(checkpoint, tmp_path):
    facts = by_name(examine(checkpoint, tmp_path / "results"))
    assert healthy(facts.values()), render(facts.values()).plain
    for name in ("Python", "PyTorch", "CPU", "checkpoint", "results folder", "Jupyter"):
        assert facts[name].status == "ok", facts[name]
    assert not (tmp_path / "results").exists(), "the check left its folder behind"


def test_lines_show_status_and_hang_hints_below():
    facts = [Fact("A", "ok", "[there]", "unseen"), Fact("B", "FAIL", "no", "do\nthis"),
             Fact("C", "--", "none", "fine")]  # fmt: skip
    expected = "[ok] A: [there]\n[FAIL] B: no\n     do\n     this\n[--] C: none\n     fine"
    assert render(facts).plain == expected, render(facts).plain


def test_only_what_is_required_decides():
    assert healthy([Fact("A", "ok", "", required=True), Fact("B", "--", ""), Fact("C", "FAIL", "")])
    for status in ("FAIL", "--"):
        assert not healthy([Fact("A", status, "", required=True)]), status


PROBES = {
    "slurm": "Slurm", "python": "Python", "pytorch": "PyTorch", "cpu": "CPU", "gpu": "GPU",
    "driver": "driver", "gpm": "GPM counters", "nsight": "Nsight Systems",
    "checkpoint_fact": "checkpoint", "results_fact": "results folder", "jupyter": "Jupyter",
}  # fmt: skip


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_that_breaks_is_a_line_and_the_others_go_on(monkeypatch, tmp_path, probe):
    def broken(*args):
        raise RuntimeError("boom\nand more")

    monkeypatch.setattr(doctor, probe, broken)
    facts = by_name(examine(tmp_path, tmp_path))
    assert len(facts) == len(PROBES), f"found {list(facts)}"
    fact = facts[PROBES[probe]]
    assert fact.status == ("FAIL" if fact.required else "--"), fact
    assert "RuntimeError: boom" in fact.text and "\n" not in fact.text, fact


def test_slurm_is_told_from_its_environment(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert doctor.slurm().status == "--"
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "interactive")
    fact = doctor.slurm()
    assert (fact.status, fact.text) == ("ok", "inside job 4711, partition interactive")


def test_a_missing_torch_is_one_failure_and_no_crash(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = by_name(examine(tmp_path, tmp_path))
    assert facts["PyTorch"].status == "FAIL" and "pip install 'torch>=2.11" in facts["PyTorch"].hint
    assert facts["results folder"].status == "ok" and not healthy(facts.values())


@pytest.mark.parametrize(
    ("found", "status"),
    [("2.10.1", "FAIL"), ("2.11.0+cu130", "ok"), ("2.14.1", "ok"), ("2.15.0.dev1", "FAIL")],
)
def test_the_versions_of_torch_that_are_taken(monkeypatch, found, status):
    fake = SimpleNamespace(__version__=found, version=SimpleNamespace(cuda="13.0"))
    monkeypatch.setitem(sys.modules, "torch", fake)
    fact = doctor.pytorch()
    assert fact.status == status and found in fact.text and "CUDA 13.0" in fact.text, fact


def test_the_versions_of_torch_are_those_of_the_package():
    text = (Path(doctor.__file__).parents[1] / "pyproject.toml").read_text()
    stated = re.search(r'"torch(>=.*?)"', text)[1]
    found = f">={doctor._dotted(doctor.TORCH_FROM)},<{doctor._dotted(doctor.TORCH_BEFORE)}"
    assert found == stated, f"doctor takes {found}, pyproject.toml {stated}"


@pytest.mark.parametrize(
    ("cuda", "driver", "hint"),
    [
        (None, "--", "Everything runs on the CPU"),
        (None, "ok", "install a torch build for CUDA"),
        ("13.0", "--", "its driver is missing"),
        ("13.0", "ok", "torch needs 13.0"),
    ],
)
def test_without_a_gpu_the_hint_fits_the_cause(monkeypatch, cuda, driver, hint):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor, "driver", lambda: Fact("driver", driver, ""))
    fact = doctor.gpu()
    assert fact.status == "--" and not fact.required and hint in fact.hint, fact
    assert (f"CUDA {cuda}" if cuda else "CPUs only") in fact.text, fact


def test_a_gpu_that_does_not_compute_is_a_failure(monkeypatch):
    import torch

    def no_kernel(*args, **kwargs):
        raise RuntimeError("CUDA error: no kernel image is available\nfor execution")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old GPU")
    monkeypatch.setattr(torch, "ones", no_kernel)
    fact = doctor.gpu()
    assert fact.status == "FAIL" and fact.required, fact
    assert "Old GPU" in fact.text and "no kernel image" in fact.text, fact


SCRIPTS = {
    "echo 'NVIDIA Nsight Systems version 2026.2.1'": ("ok", "2026.2.1"),
    "echo broken >&2; exit 3": ("--", "status 3: broken"),
    "exit 0": ("--", "status 0"),
    "exec sleep 30": ("--", "did not answer"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_nsight_is_asked_and_may_fail_in_its_own_ways(monkeypatch, tmp_path, script):
    status, text = SCRIPTS[script]
    program(tmp_path, monkeypatch, script)
    monkeypatch.setattr(doctor, "PROGRAM_TIMEOUT_S", 0.5 if "sleep" in script else 30)
    fact = doctor.nsight()
    assert fact.status == status and text in fact.text, fact


def test_no_nsight_is_no_failure(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.nsight().status == "--"


def test_a_whole_checkpoint_is_told_with_its_size(checkpoint):
    fact = doctor.checkpoint_fact(checkpoint)
    size = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")) / 1e6
    assert fact.status == "ok" and f"({size:.1f} MB)" in fact.text, fact


SHARD = "model-00002-of-00002.safetensors"
DAMAGES = {
    "shard missing": lambda folder: (folder / SHARD).unlink(),
    "shard cut short": lambda folder: os.truncate(folder / SHARD, 2000),
    "shard empty": lambda folder: os.truncate(folder / SHARD, 0),
    "pointer, not file": lambda folder: (folder / SHARD).write_text("version https://git-lfs\n"),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "config of nonsense": lambda folder: (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"hidden_size": 8', '"hidden_size": 7')
    ),
    "index broken": lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
    "index missing": lambda folder: (folder / "model.safetensors.index.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_fails_and_is_named(checkpoint, damage):
    DAMAGES[damage](checkpoint)
    fact = doctor.checkpoint_fact(checkpoint)
    assert fact.status == "FAIL" and fact.required, f"{damage}: {fact}"
    assert str(checkpoint) in fact.text and fact.hint, f"{damage}: {fact}"
    assert SHARD in fact.text or "shard" not in damage, f"{damage}: {fact}"


def test_a_checkpoint_folder_that_is_not_there_fails(tmp_path):
    fact = doctor.checkpoint_fact(tmp_path / "no-such")
    assert fact.status == "FAIL" and "no-such" in fact.text, fact


def test_results_are_really_written_and_removed(tmp_path):
    (tmp_path / "mine.csv").write_text("1")
    assert doctor.results_fact(tmp_path).status == "ok"
    assert doctor.results_fact(tmp_path / "new" / "deeper").status == "ok"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"], list(tmp_path.iterdir())


def test_a_results_folder_that_cannot_be_written_fails_with_a_hint(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        fact = doctor.results_fact(folder)
        assert fact.status == "FAIL" and str(folder) in fact.text and fact.hint, fact

    def read_only(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor.tempfile, "NamedTemporaryFile", read_only)
    fact = doctor.results_fact(tmp_path)
    assert fact.status == "FAIL" and "Read-only file system" in fact.text, fact


def test_a_full_disk_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    fact = doctor.results_fact(tmp_path)
    assert fact.status == "FAIL" and "0.0 GB free" in fact.text, fact


def test_a_missing_notebook_extra_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "ipykernel" else name)
    fact = doctor.jupyter()
    assert fact.status == "--" and fact.text.startswith("ipykernel not installed"), fact
    assert fact.hint == "pip install 'labkit[notebook]'"
