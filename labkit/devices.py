"""Devices: what they can do by their makers' documents, what they did here, and which to use.

Rates are dense. TFLOP/s are 1e12 FLOPs a second, GB/s are 1e9 bytes a second; memory is in GiB.
No torch at module level: the performance model reads specs on machines that never load it.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from labkit import ceilings
from labkit.ceilings import Ceilings
from labkit.errors import NotThisMachine, UserError, positive_number

TABLE = Path(__file__).parent / "assets" / "devices.toml"
_VENDOR_WORDS = {"nvidia", "tesla", "geforce", "quadro", "amd", "instinct"}
_TEXTS = {"match", "source"}
_NUMBERS = {"bandwidth_gbs", "memory_gib", "l2_mib", "sms", "tdp_w"}
_DTYPE_ALIASES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32",
    "float": "float32", "fp8": "float8", "float8_e4m3fn": "float8", "float8_e5m2": "float8",
}  # fmt: skip


@dataclass(frozen=True)
class DeviceSpec:
    """Ceilings of one device.

    `peak_tflops` is the dense rate in `dtype`, the one that labkit trains in: bfloat16 where the
    tensor units have it, else float32. `peaks` has the other rates, by torch dtype name and "tf32".
    `measured` keeps what this machine reached beside what the document promises.
    """

    name: str
    peak_tflops: float
    bandwidth_gbs: float
    memory_gib: float
    dtype: str = "bfloat16"
    peaks: Mapping[str, float] = field(default_factory=dict, hash=False)
    l2_mib: float | None = None
    sms: int | None = None
    tdp_w: float | None = None
    source: str = ""
    measured: Ceilings | None = None

    def __post_init__(self):
        for name in ("peak_tflops", "bandwidth_gbs", "memory_gib"):
            positive_number(f"{self.name}: {name}", getattr(self, name))
        object.__setattr__(self, "peaks", {**self.peaks, self.dtype: self.peak_tflops})

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which peak compute and peak bandwidth meet."""
        return self.peak_tflops * 1e12 / (self.bandwidth_gbs * 1e9)

    def peak(self, dtype=None) -> float:
        """Dense TFLOP/s in a dtype (a name, an alias such as "bf16", or a torch.dtype)."""
        name = _dtype_name(dtype or self.dtype)
        if name not in self.peaks:
            known = ", ".join(f"{key} ({rate:g})" for key, rate in self.peaks.items())
            raise UserError(f"{self.name} has no known {name} rate; in TFLOP/s it has {known}")
        return self.peaks[name]

    def with_measured(self, **ceilings) -> "DeviceSpec":
        """A copy that also keeps measured `copy_gbs`, `gemm_tflops` or `launch_us`."""
        try:
            return replace(self, measured=replace(self.measured or Ceilings(), **ceilings))
        except TypeError:
            known = ", ".join(Ceilings.__dataclass_fields__)
            raise UserError(f"no ceiling {sorted(ceilings)}; a device keeps {known}") from None


def spec(name: str) -> DeviceSpec:
    """The device of that name, spelled as a driver reports it or as the table has it.

    A MIG slice gives its whole GPU, and its name says so. Raises UserError for an unknown name.
    """
    if found := lookup(name):
        return found
    raise UserError(_unknown(str(name), known_devices()))


def lookup(name: str) -> DeviceSpec | None:
    """As `spec`, but None for an unknown name."""
    whole, *profile = re.split(r"\s+MIG\s+", str(name), maxsplit=1, flags=re.IGNORECASE)
    users = _users_tables()
    found = next((n for n, entry in users.items() if _is_called(whole, n, entry)), None)
    device = _from_entry(found, users[found]) if found else _shipped_device(whole)
    if device is None or (not found and device.name in users):
        return None
    if not profile:
        return device
    return replace(device, name=f"{device.name} (the whole GPU of MIG {profile[0]})")


def _is_called(name: str, known: str, entry: dict) -> bool:
    return _plain(name) in {_plain(other) for other in (known, *entry.get("match", ()))}


@lru_cache(maxsize=256)
def _shipped_device(name: str) -> DeviceSpec | None:
    found = (n for n, entry in _shipped().items() if _is_called(name, n, entry))
    return next((_from_entry(n, _shipped()[n]) for n in found), None)


def known_devices() -> dict[str, dict]:
    """Every table entry by name, the user's first; see the head of `assets/devices.toml`."""
    users = _users_tables()
    return users | {key: value for key, value in _shipped().items() if key not in users}


def _users_tables() -> dict[str, dict]:
    tables = {}
    for path in ceilings.user_files("devices.toml"):
        tables |= _read_table(path)
    return tables


def resolve(device=None) -> DeviceSpec:
    """The DeviceSpec meant: itself, a name in the table, or None, "cpu", "cuda": what is here."""
    if isinstance(device, DeviceSpec):
        return device
    if device is None or hasattr(device, "type") or _parse(device):
        return current(device)
    return spec(device)


def current(device=None) -> DeviceSpec:
    """The device in use: its entry in the table, with memory and SMs as the driver reports them.

    A CPU, and a GPU that the table lacks, get ceilings that were measured on this machine once
    (about a second) and kept in the user's cache directory. A MIG slice gets its GPU's rates
    scaled by the share of SMs and of memory that it holds.
    """
    import torch

    device = pick(device)
    if device.type == "cpu":
        return _measured_spec(device, ceilings.host_memory_gib())
    props = torch.cuda.get_device_properties(device)
    here = {"memory_gib": props.total_memory / 2**30, "sms": props.multi_processor_count}
    if not (found := lookup(props.name)):
        return _measured_spec(device, **here)
    return _slice(found, **here) if " MIG " in props.name else replace(found, **here)


def pick(device=None):
    """The torch.device to use. None and "auto": CUDA if there is one, else the CPU.

    Raises NotThisMachine for a GPU that is not there, UserError for anything that is no device.
    """
    import torch

    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parsed = _parse(device)
    if not parsed:
        raise UserError(f'device={device!r}: labkit runs on "auto", "cpu", "cuda" or "cuda:1"')
    kind, index = parsed
    if kind == "cpu":
        return torch.device("cpu")
    if problem := cuda_problem():
        raise NotThisMachine(f'device={str(device)!r}: {problem}. To run on the CPU, say "cpu"')
    if index is not None and index >= torch.cuda.device_count():
        there = ", ".join(f"cuda:{i}" for i in range(torch.cuda.device_count()))
        raise NotThisMachine(f"device={str(device)!r}: this machine has {there}")
    return torch.device(kind) if index is None else torch.device(kind, index)


def training_dtype(device=None):
    """The torch.dtype to train in: bfloat16 from compute capability 8.0, else float32.

    Older GPUs and CPUs without matrix units emulate bfloat16, up to 150 times slower than float32.
    """
    import torch

    device = pick(device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return torch.bfloat16
    return torch.float32


def cuda_problem() -> str | None:
    """Why torch cannot use a GPU here, in a sentence without its full stop; None if it can."""
    import torch

    if torch.cuda.is_available():
        return None
    built_for = torch.version.cuda or getattr(torch.version, "hip", None)
    if not built_for:
        return f"torch {torch.__version__} is a build for CPUs only"
    return (
        f"torch {torch.__version__} is built for CUDA {built_for}, but finds no GPU that it can "
        "use: none there, no driver, one too old for this CUDA, or CUDA_VISIBLE_DEVICES hides it"
    )


def _parse(device) -> tuple[str, int | None] | None:
    """("cuda", 1) for "cuda:1", "gpu:1" or that torch.device; None if it names no device here."""
    found = re.fullmatch(r"(cpu|cuda|gpu)(?::(\d+))?", str(device).strip().lower())
    if not found:
        return None
    return found[1].replace("gpu", "cuda"), int(found[2]) if found[2] else None


def _dtype_name(dtype) -> str:
    name = str(dtype).removeprefix("torch.").lower()
    return _DTYPE_ALIASES.get(name, name)


def _plain(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in _VENDOR_WORDS)


def _measured_spec(device, memory_gib: float, sms: int | None = None) -> DeviceSpec:
    dtype = training_dtype(device)
    reached = ceilings.measured(device, dtype)
    return DeviceSpec(
        name=ceilings.processor(device),
        peak_tflops=reached.gemm_tflops,
        bandwidth_gbs=reached.copy_gbs,
        memory_gib=memory_gib,
        dtype=str(dtype).removeprefix("torch."),
        sms=sms,
        source="measured on this machine: a large matrix multiply and a large copy",
        measured=reached,
    )


def _slice(whole: DeviceSpec, memory_gib: float, sms: int) -> DeviceSpec:
    share = sms / whole.sms if whole.sms else 1.0
    return replace(
        whole,
        peak_tflops=whole.peak_tflops * share,
        peaks={dtype: rate * share for dtype, rate in whole.peaks.items()},
        bandwidth_gbs=whole.bandwidth_gbs * min(1.0, memory_gib / whole.memory_gib),
        memory_gib=memory_gib,
        sms=sms,
        source=f"{whole.source}; scaled by the slice's share of SMs and of memory",
    )


def _unknown(name: str, names) -> str:
    plain = {_plain(known): known for known in names}
    close = [known for key, known in plain.items() if _plain(name) and key.startswith(_plain(name))]
    close = close or [plain[key] for key in difflib.get_close_matches(_plain(name), plain, 3, 0.5)]
    hint = f"; the nearest are {', '.join(close)}" if close else ""
    if re.search(r"laptop|max-?q|mobile", name, re.IGNORECASE):
        hint += " (a laptop part runs at other rates than the card)"
    return (
        f"no device {name!r} in the table{hint}. Add it to labkit-devices.toml, in the form of "
        f"{TABLE.name}, or pass a DeviceSpec(name, peak_tflops, bandwidth_gbs, memory_gib)"
    )


@lru_cache(maxsize=1)
def _shipped() -> dict[str, dict]:
    return _read_table(TABLE)


def _read_table(path: Path) -> dict[str, dict]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}") from None
    for name, entry in table.items():
        _check_entry(f"{path}, [{name}]", entry)
    return table


def _check_entry(where: str, entry) -> None:
    if not isinstance(entry, dict):
        raise UserError(f"{where}: a device is a table; see the head of {TABLE.name}")
    if unknown := sorted(entry.keys() - _TEXTS - _NUMBERS - {"tflops"}):
        raise UserError(f"{where}: unknown {unknown}; see the head of {TABLE.name}")
    tflops, match = entry.get("tflops"), entry.get("match", [])
    if not isinstance(tflops, dict) or "fp32" not in tflops:
        raise UserError(f"{where}: tflops={tflops!r} must be a table with at least fp32")
    if not (isinstance(match, list) and all(isinstance(name, str) for name in match)):
        raise UserError(f"{where}: match={match!r} must be a list of names")
    needed = {"bandwidth_gbs": None, "memory_gib": None}
    numbers = needed | {key: entry[key] for key in _NUMBERS & entry.keys()} | tflops
    for key, value in numbers.items():
        positive_number(f"{where}: {key}", value)


def _from_entry(name: str, entry: dict) -> DeviceSpec:
    tflops = {_dtype_name(key): rate for key, rate in entry["tflops"].items()}
    dtype = "bfloat16" if "bfloat16" in tflops else "float32"
    stated = {key: value for key, value in entry.items() if key not in ("match", "tflops")}
    return DeviceSpec(name, peak_tflops=tflops[dtype], dtype=dtype, peaks=tflops, **stated)
