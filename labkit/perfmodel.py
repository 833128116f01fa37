"""The performance model: FLOPs, bytes and the bounds that follow. Plain arithmetic, no torch.

FLOPs count a multiply-add as two. TFLOP/s are 1e12 FLOPs a second.
"""

import operator

from labkit.devices import DeviceSpec, resolve
from labkit.errors import UserError


def gemm_flops(M: int, k: int, n: int) -> int:
    """FLOPs of the matrix multiply [M, k] @ [k, n] → [M, n]; a multiply-add is two.

    Raises UserError for a size that is not a whole number above 0.
    """
    _check_sizes(M=M, k=k, n=n)
    ### BEGIN SOLUTION
    return 2 * M * k * n
    ### END SOLUTION


def gemm_bytes(M: int, k: int, n: int, bytes_per_element: float = 2) -> float:
    """Bytes that [M, k] @ [k, n] → [M, n] must move: inputs read once, the output written once.

    `bytes_per_element` is 2 for bfloat16 and 4 for float32; it may be 0.5 for packed int4.
    Raises UserError for a size that is not a whole number above 0 and for an element of no bytes.
    """
    _check_sizes(M=M, k=k, n=n)
    _check_number(bytes_per_element=bytes_per_element)
    if not bytes_per_element:
        raise UserError("bytes_per_element=0: bfloat16 has 2, float32 has 4")
    ### BEGIN SOLUTION
    return bytes_per_element * (M * k + k * n + M * n)
    ### END SOLUTION


def roofline_tflops(intensity: float, device: DeviceSpec | str | None = None) -> float:
    """The most TFLOP/s that an operation of `intensity` FLOPs a byte can reach on a device.

    The roofline (Williams, Waterman, Patterson 2009): bound by the device's dense peak in the dtype
    that it trains in, `device.peak_tflops`, or by its bandwidth, `device.bandwidth_gbs`, whichever
    is lower. `device` is a DeviceSpec or the name of one; None is the device in use.
    Raises UserError for an intensity below 0 and for a device that is not in the table.
    """
    _check_number(intensity=intensity)
    device = resolve(device)
    ### BEGIN SOLUTION
    return min(device.peak_tflops, intensity * device.bandwidth_gbs * 1e9 / 1e12)
    ### END SOLUTION


def _check_sizes(**sizes) -> None:
    for name, size in sizes.items():
        try:
            whole = operator.index(size)  # takes numpy's integers, refuses 16.0
        except TypeError:
            whole = 0
        if isinstance(size, bool) or whole < 1:
            raise UserError(f"{name}={size!r} must be a whole number of at least 1")


def _check_number(**numbers) -> None:
    for name, value in numbers.items():
        try:
            bad = isinstance(value, (bool, str)) or not float(value) >= 0  # refuses NaN as well
        except (TypeError, ValueError):
            bad = True
        if bad:
            raise UserError(f"{name}={value!r} must be a number of at least 0")
