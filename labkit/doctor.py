"""What this machine has of what labkit needs: a list of facts, each found by one isolated probe."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

PYTHON_FROM = (3, 11)
TORCH_FROM, TORCH_BEFORE = (2, 11), (2, 15)
SHIPPED = Path(__file__).parent / "assets" / "olmoe-tiny"
MIN_FREE_GB = 1
PROGRAM_TIMEOUT_S = 30  # a program on a slow network file system still starts in this time


@dataclass(frozen=True)
class Fact:
    """`status` is "ok", "FAIL" (wrong; if `required`, labkit will not work) or "--" (absent)."""

    name: str
    status: str
    text: str
    hint: str = ""
    required: bool = False


def examine(checkpoint=None, results="results") -> list[Fact]:
    """Every fact, in the order to read them. Never raises: what a probe trips over is its fact."""
    return [
        _probe("Slurm", slurm),
        _probe("Python", python, required=True),
        _probe("PyTorch", pytorch, required=True),
        _probe("CPU", cpu),
        _probe("GPU", gpu),
        _probe("driver", driver),
        _probe("GPM counters", gpm),
        _probe("Nsight Systems", nsight),
        _probe("checkpoint", lambda: checkpoint_fact(checkpoint), required=True),
        _probe("results folder", lambda: results_fact(results), required=True),
        _probe("Jupyter", jupyter),
    ]


def healthy(facts: list[Fact]) -> bool:
    """Whether everything that labkit cannot do without is there."""
    return all(fact.status == "ok" for fact in facts if fact.required)


def render(facts: list[Fact]):
    """A rich Text of one line a fact, hints indented below; `.plain` is the same without colour."""
    from rich.text import Text

    text = Text()
    for fact in facts:
        style = {"ok": "green", "FAIL": "bold red", "--": "yellow"}[fact.status]
        text.append(f"[{fact.status}]", style).append(f" {fact.name}: {fact.text}\n")
        if fact.hint and fact.status != "ok":
            text.append("".join(f"     {line}\n" for line in fact.hint.splitlines()), "dim")
    text.rstrip()
    return text


def _probe(name: str, find: Callable[[], Fact], required: bool = False) -> Fact:
    try:
        return find()
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        status = "FAIL" if required else "--"
        return Fact(name, status, f"could not look ({text})", required=required)


def slurm() -> Fact:
    """Inside a Slurm job or not."""
    if job := os.environ.get("SLURM_JOB_ID"):
        where = os.environ.get("SLURM_JOB_PARTITION", "")
        where = f", partition {where}" if where else ""
        return Fact("Slurm", "ok", f"inside job {job}{where}")
    hint = "Right on your own machine. On a cluster's login node, run this inside a job."
    return Fact("Slurm", "--", "not inside a job", hint)


def python() -> Fact:
    """The version of this Python, and where it is."""
    text = f"{platform.python_version()} ({sys.executable})"
    wanted = ".".join(map(str, PYTHON_FROM))
    status = "ok" if sys.version_info >= PYTHON_FROM else "FAIL"
    return Fact("Python", status, text, f"labkit needs Python {wanted} or later.", required=True)


def pytorch() -> Fact:
    """Whether torch imports, its version, and what it was built for."""
    wanted = f">={_dotted(TORCH_FROM)},<{_dotted(TORCH_BEFORE)}"
    hint = f"pip install 'torch{wanted}'"
    try:
        import torch
    except Exception as error:  # absent, or its libraries do not load
        text = f"cannot be imported ({type(error).__name__}: {error})".splitlines()[0]
        return Fact("PyTorch", "FAIL", text, hint, required=True)
    release = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    build = "for CPUs only"
    if toolkit := torch.version.cuda or getattr(torch.version, "hip", None):
        build = f"for {'CUDA' if torch.version.cuda else 'ROCm'} {toolkit}"
    status = "ok" if TORCH_FROM <= release < TORCH_BEFORE else "FAIL"
    return Fact("PyTorch", status, f"{torch.__version__}, a build {build}", hint, required=True)


def cpu() -> Fact:
    """The processor, its cores and the memory that this process may have."""
    from labkit import ceilings

    processor = f"{ceilings.cpu_model()}, {ceilings.cores()} cores"
    return Fact("CPU", "ok", f"{processor}, {ceilings.host_memory_gib():.1f} GiB")


def gpu() -> Fact:
    """The GPU in use, after it has really added two numbers."""
    import torch

    from labkit import devices

    if problem := devices.cuda_problem():
        return Fact("GPU", "--", f"none in use: {problem}", _without_gpu(torch.version.cuda))
    try:
        torch.ones(1, device="cuda").add(1).item()
    except Exception as error:  # a GPU too old or too new for this build, or one in a bad state
        text = f"{torch.cuda.get_device_name()} does not compute ({error})".splitlines()[0]
        hint = "Take a torch build for this GPU, or hide it with CUDA_VISIBLE_DEVICES=''."
        return Fact("GPU", "FAIL", text, hint, required=True)
    props = torch.cuda.get_device_properties(torch.cuda.current_device())
    text = f"{props.name}, {props.total_memory / 2**30:.1f} GiB"
    if (count := torch.cuda.device_count()) > 1:
        text += f", the first of {count}"
    if found := devices.lookup(props.name):
        text += f"; {found.peak_tflops:g} TFLOP/s {found.dtype}, {found.bandwidth_gbs:g} GB/s"
    else:
        text += "; not in the table of devices, so its ceilings are measured at first use"
    return Fact("GPU", "ok", text)


def _without_gpu(cuda: str | None) -> str:
    has_driver = _probe("driver", driver).status == "ok"
    if has_driver and cuda:
        return (
            "The driver sees a GPU that torch does not. Either the driver is too old (nvidia-smi\n"
            f"names its CUDA, torch needs {cuda}), or CUDA_VISIBLE_DEVICES hides the GPU."
        )
    if has_driver:
        return "The driver sees a GPU: install a torch build for CUDA to use it."
    if cuda:
        return "If this machine has a GPU, its driver is missing. Without one, the CPU does it all."
    return "Everything runs on the CPU, at small sizes."


def driver() -> Fact:
    """The NVIDIA driver, and whether NVML answers."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        hint = "No counters while a workload runs; on a machine without a GPU that is right."
        return Fact("driver", "--", f"NVML does not answer ({error})", hint)
    try:
        release, count = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetCount()
        text = f"NVIDIA {release}; NVML answers for {count} {'GPU' if count == 1 else 'GPUs'}"
        return Fact("driver", "ok", text)
    finally:
        pynvml.nvmlShutdown()


def gpm() -> Fact:
    """Whether NVML's performance counters (Hopper and later) can be read."""
    from labkit.monitor import identify
    from labkit.nvml import NvmlSampler

    without = "The monitor leaves out SM, tensor-core and DRAM activity; the rest works."
    found = identify()
    if not found:
        return Fact("GPM counters", "--", "no GPU", without)
    sampler = NvmlSampler(found)
    try:
        if sampler.has_gpm:
            return Fact("GPM counters", "ok", "SM, tensor-core and DRAM activity can be read")
        return Fact("GPM counters", "--", sampler.notes[-1], without)
    finally:
        sampler.close()


def nsight() -> Fact:
    """Whether Nsight Systems is on the PATH, and its version."""
    hint = "Only the recordings of a whole timeline need it; torch.profiler serves for the rest."
    if not (program := shutil.which("nsys")):
        return Fact("Nsight Systems", "--", "no nsys on the PATH", hint)
    try:
        done = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=PROGRAM_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        text = f"{program} did not answer within {PROGRAM_TIMEOUT_S} s"
        return Fact("Nsight Systems", "--", text, hint)
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    if done.returncode or not said:
        text = f"{program} --version ended with status {done.returncode}: {' '.join(said[:1])}"
        return Fact("Nsight Systems", "--", text, hint)
    return Fact("Nsight Systems", "ok", said[0].removeprefix("NVIDIA Nsight Systems version "))


def checkpoint_fact(folder=None) -> Fact:
    """A checkpoint that `load_hf` can take: its config.json, and every shard of its full size."""
    from safetensors import SafetensorError, safe_open

    from labkit.checkpoint import read_config, shards
    from labkit.errors import UserError

    path = Path(folder or SHIPPED)
    hint = "Give the folder that holds config.json and the .safetensors files."
    if folder is None:
        hint = "The small one comes with labkit: install labkit again."
    try:
        if not path.is_dir():
            raise UserError("no such folder")
        read_config(path)
        for shard in (files := shards(path)):
            with safe_open(shard, framework="pt"):  # holds the header against the file's size
                pass
    except UserError as error:
        text = str(error) if str(path) in str(error) else f"{path}: {error}"
        return Fact("checkpoint", "FAIL", text, hint, required=True)
    except SafetensorError as error:
        text = f"{shard} is truncated or damaged ({error})"
        return Fact("checkpoint", "FAIL", text, "Download it again.", required=True)
    size_gb = sum(shard.stat().st_size for shard in files) / 1e9
    size = f"{size_gb:.1f} GB" if size_gb >= 0.1 else f"{size_gb * 1e3:.1f} MB"
    return Fact("checkpoint", "ok", f"{path} ({size})", required=True)


def results_fact(folder) -> Fact:
    """Whether results can be kept: a file is really written, and nothing is left behind."""
    path = Path(folder).resolve()
    made = [parent for parent in (path, *path.parents) if not parent.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".labkit-check-") as file:
            file.write(b"x" * 2**16)
            file.flush()
            os.fsync(file.fileno())
        free_gb = shutil.disk_usage(path).free / 1e9
    except OSError as error:
        hint = "Choose a folder that you may write to."
        text = f"{path} cannot be written to ({error.strerror or error})"
        return Fact("results folder", "FAIL", text, hint, required=True)
    finally:
        for folder_made in made:
            with suppress(OSError):  # not there, or not empty: then it is not ours to remove
                folder_made.rmdir()
    text = f"{path} is writable, {free_gb:.1f} GB free"
    status = "ok" if free_gb >= MIN_FREE_GB else "FAIL"
    return Fact("results folder", status, text, "Make room on that disk.", required=True)


def jupyter() -> Fact:
    """Whether notebooks can run with this Python."""
    hint = "pip install 'labkit[notebook]'"
    if missing := [
        name for name in ("ipykernel", "jupyterlab", "papermill") if not find_spec(name)
    ]:
        text = f"{', '.join(missing)} not installed, so notebooks cannot run"
        return Fact("Jupyter", "--", text, hint)
    text = f"JupyterLab {version('jupyterlab')}, kernel {version('ipykernel')} of this Python"
    return Fact("Jupyter", "ok", text)


def _dotted(release: tuple) -> str:
    return ".".join(map(str, release))
