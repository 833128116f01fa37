"""The best that large operations reach on this machine, measured once and kept.

Where no maker's document says what a device can do (every CPU, a GPU that the table lacks), the
roofline stands on these two measurements instead: a large copy and a large matrix multiply.
"""

import hashlib
import json
import os
import platform
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from labkit.files import whole_file

BUDGET_S = 0.4  # of repetitions, for each of the two measurements


@dataclass(frozen=True)
class Ceilings:
    """What was reached; None where nobody measured. `copy_gbs` counts bytes read and written."""

    copy_gbs: float | None = None
    gemm_tflops: float | None = None
    launch_us: float | None = None


def measured(device, dtype, cache_dir=None) -> Ceilings:
    """Ceilings of a torch.device, for matrix multiplies in `dtype`; about a second the first time.

    They are kept in the user's cache directory, one file for each processor, thread count, dtype
    and torch version. A damaged file is measured anew; without a place to write, nothing is kept.
    """
    import torch

    key = (processor(device), torch.get_num_threads(), str(dtype), torch.__version__)
    return _measured(key, device, dtype, Path(cache_dir or user_cache_dir()))


@lru_cache
def _measured(key: tuple, device, dtype, folder: Path) -> Ceilings:
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    path = folder / f"ceilings-{digest}.json"
    kept = _read(path)
    if kept is None:
        kept = Ceilings(copy_gbs=_copy_gbs(device), gemm_tflops=_gemm_tflops(device, dtype))
        _write(path, {"measured_on": list(key), "ceilings": asdict(kept)})
    return kept


def processor(device) -> str:
    """What the system calls the processor behind a torch.device: "AMD EPYC 9454, 16 cores"."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {cores()} cores"


def cores() -> int:
    """CPU cores that this process may run on; a Slurm job often has fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory_gib() -> float:
    """Memory of the host in GiB, or the limit of the container or Slurm job if that is lower."""
    import psutil

    total = psutil.virtual_memory().total
    for limit in _memory_limits():
        with suppress(OSError, ValueError):  # absent, or the word "max"
            total = min(total, int(limit.read_text()))
    return total / 2**30


def _memory_limits(proc=Path("/proc/self/cgroup"), root=Path("/sys/fs/cgroup")) -> list[Path]:
    """Files with the limits of this process's control groups, outer ones too: cgroups(7), v1, v2.

    A Slurm job's limit is on a group far inside, a container's most often on the outermost.
    """
    files = []
    with suppress(OSError):
        for line in proc.read_text().splitlines():
            _, controllers, inside = line.split(":", 2)
            if not controllers:
                top, name = root, "memory.max"
            elif "memory" in controllers.split(","):
                top, name = root / "memory", "memory.limit_in_bytes"
            else:
                continue
            group = Path(inside.strip("/"))
            files += [top / folder / name for folder in (group, *group.parents)]
    return files


def user_cache_dir() -> Path:
    """labkit's folder in the user's cache directory (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "labkit"


def home() -> Path:
    """The home directory; for a user that has none, a path under which nothing can exist."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)


def user_files(name: str) -> list[Path]:
    """The user's files of that name that there are: the home's, then the working directory's.

    What the later one says counts.
    """
    places = (home() / ".config/labkit" / name, Path(f"labkit-{name}"))
    return [path for path in places if os.path.isfile(path)]


def cpu_model() -> str:
    """What the system calls the CPU."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


def _copy_gbs(device) -> float:
    import torch

    n = 2**28 if device.type == "cuda" else 2**26  # float32: far beyond any cache
    source = torch.rand(n, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * n / _best_s(lambda: target.copy_(source), device) / 1e9


def _gemm_tflops(device, dtype) -> float:
    import torch

    n = 8192 if device.type == "cuda" else 2048
    # Random numbers: zeros draw less power and run faster than any real work.
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / _best_s(lambda: a @ b, device) / 1e12


def _best_s(fn, device) -> float:
    """The fastest of three or more calls after a warm-up: other programs only ever slow one."""
    import torch

    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda _: None)
    times, start = [], time.perf_counter()
    while len(times) < 4 or time.perf_counter() - start < BUDGET_S:
        synchronize(device)
        began = time.perf_counter()
        fn()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _read(path: Path) -> Ceilings | None:
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = Ceilings(**json.loads(path.read_text())["ceilings"])
        if all(0 < value < float("inf") for value in (kept.copy_gbs, kept.gemm_tflops)):
            return kept
    return None


def _write(path: Path, content: dict) -> None:
    """Keep the content for the next process, if there is a place for it."""
    with suppress(OSError), whole_file(path) as draft:
        draft.write_text(json.dumps(content, indent=1))
