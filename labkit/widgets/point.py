"""Where a matrix multiply stands on the roofline, in numbers and in words. No widgets, no torch.

[M, k] @ [k, n] → [M, n]: M rows (tokens) times a weight matrix. Times are in µs.
"""

from dataclasses import dataclass, replace

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec, resolve
from labkit.errors import UserError
from labkit.perfmodel import gemm_bytes, gemm_flops, roofline_tflops

LAUNCH_US = 5.0  # a call of PyTorch and its launch, where nobody has measured `launch_us`
BYTES = {
    "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1,
}  # fmt: skip


@dataclass(frozen=True)
class GemmPoint:
    """One matrix multiply on one device; `device.peak_tflops` is the rate in the point's dtype."""

    M: int
    k: int
    n: int
    device: DeviceSpec
    flops: int
    bytes: float
    tflops: float  # attainable under the roofline

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes

    @property
    def compute_us(self) -> float:
        return self.flops / (self.device.peak_tflops * 1e6)

    @property
    def memory_us(self) -> float:
        return self.bytes / (self.device.bandwidth_gbs * 1e3)

    @property
    def bound_us(self) -> float:
        """No implementation can be faster: the longer of the arithmetic and the traffic."""
        return max(self.compute_us, self.memory_us)

    @property
    def launch_us(self) -> float:
        """What starting the kernel costs: measured on this device, else `LAUNCH_US`."""
        return self._measured_launch_us or LAUNCH_US

    @property
    def _measured_launch_us(self) -> float | None:
        return self.device.measured and self.device.measured.launch_us

    @property
    def regime(self) -> str:
        """Either "overhead-bound", "memory-bound" or "compute-bound"."""
        if self.bound_us < self.launch_us:
            return "overhead-bound"
        return "memory-bound" if self.memory_us > self.compute_us else "compute-bound"

    @property
    def ridge_rows(self) -> float | None:
        """The M at which this weight matrix becomes compute-bound; None if it never does.

        Solves 2·M·k·n = ridge · bytes(M) for M, where bytes(M) = b·(M·k + k·n + M·n).
        """
        traffic = self.device.ridge * BYTES[self.device.dtype]
        gain = 2 * self.k * self.n - traffic * (self.k + self.n)
        return traffic * self.k * self.n / gain if gain > 0 else None

    @property
    def why(self) -> str:
        """The reason for the regime, in a sentence or two."""
        work, traffic = duration(self.compute_us), duration(self.memory_us)
        if self.regime == "overhead-bound":
            known = "measured here" if self._measured_launch_us else "assumed, not measured here"
            return (
                f"At best the work takes {duration(self.bound_us)}, less than launching a kernel: "
                f"about {self.launch_us:.3g} µs ({known}). Neither ceiling is near."
            )
        if self.regime == "compute-bound":
            return f"Its arithmetic takes {work} at peak, moving its bytes only {traffic}."
        rows = self.ridge_rows
        change = (
            f"From about M = {rows:,.0f} on, it is compute-bound."
            if rows
            else "k and n are so small that no M makes it compute-bound."
        )
        return f"Moving its bytes takes {traffic}, its arithmetic at peak only {work}. {change}"


def gemm_point(M: int, k: int, n: int, device=None, dtype=None) -> GemmPoint:
    """The point of [M, k] @ [k, n] on a device (a DeviceSpec, a name, None: the one in use).

    `dtype` None is the one that the device trains in. Raises UserError for a size that is not a
    whole number above 0, an unknown device, and a dtype that the device has no known rate for.
    """
    device = in_dtype(resolve(device), dtype)
    flops = gemm_flops(M, k, n)
    moved = gemm_bytes(M, k, n, BYTES[device.dtype])
    return GemmPoint(M, k, n, device, flops, moved, roofline_tflops(flops / moved, device))


def in_dtype(device: DeviceSpec, dtype=None) -> DeviceSpec:
    """The device with its dense peak in `dtype` (a name or a torch.dtype) as `peak_tflops`."""
    name = str(dtype or device.dtype).removeprefix("torch.")
    if name not in BYTES:
        raise UserError(f"dtype={name!r}: the explorer knows {', '.join(BYTES)}")
    if name == device.dtype:
        return device
    measured = device.measured and replace(device.measured, gemm_tflops=None)  # of another dtype
    return replace(device, dtype=name, peak_tflops=device.peak(name), measured=measured)


def expert_rows(M: int, model: ModelConfig) -> str:
    """What M rows of an expert's matrix mean for the batch, in a sentence.

    A router that spreads T tokens evenly, K of E experts for each, gives an expert T·K/E rows.
    """
    E, K = model.n_experts, model.experts_per_token
    return (
        f"M = {M:,} rows for each expert = T·K/E: a batch of T = {M * E / K:,.0f} tokens, "
        f"K = {K} of E = {E} experts a token, evenly spread."
    )


def duration(us: float) -> str:
    """A time to three digits: "9.86 µs", "1.38 ms"."""
    for unit, factor in (("µs", 1), ("ms", 1e3)):
        if us < 1e3 * factor:
            return f"{us / factor:.3g} {unit}"
    return f"{us / 1e6:,.3g} s"


def amount(number: float, unit: str) -> str:
    """A count to three digits, with a decimal prefix: "134 MFLOP", "8.52 MB"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def rate(number: float) -> str:
    """A rate to three digits, never in powers of ten: "15.8", "1,979"."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
