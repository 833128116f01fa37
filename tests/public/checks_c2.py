"""What the tests of Coding Exercise 2 look for, as functions of an implementation.

Each check compares with the definition, and raises an AssertionError that names the mistake: it
looks for a usual slip that gives the numbers found.
"""

from numbers import Real

from labkit.devices import DeviceSpec, resolve, spec
from tests.public.judging import as_text, judge, require


def check_flops(gemm_flops, *shapes: tuple[int, int, int]):
    """Exactly 2·M·k·n for each shape (M, k, n)."""
    results = []
    for M, k, n in shapes:
        call, found = result("gemm_flops", gemm_flops, M, k, n)
        results.append((call, found, 2 * M * k * n, flops_slips(M, k, n)))
    judge(results, exactly=True)


def flops_slips(M: int, k: int, n: int) -> dict[str, float]:
    """What is wrong → the number that it gives; likewise below."""
    right = 2 * M * k * n
    return {
        "that counts multiply-adds, and each of them is two FLOPs": M * k * n,
        "it is twice too much: a multiply-add is two FLOPs, not four": 2 * right,
        "that is exact, but by convention the first add counts as well": M * n * (2 * k - 1),
        "that adds the sizes of the matrices; there are M·k·n multiply-adds":
            2 * (M * k + k * n + M * n),
        "it was rounded: a float holds 53 bits of a number, an integer all of them": float(right),
        "it overflowed 32 bits; Python's own integers never do": wrapped(right, 32),
        "it overflowed 64 bits; Python's own integers never do": wrapped(right, 64),
        "that is in GFLOP; the function returns FLOPs": right / 1e9,
        "that is in TFLOP; the function returns FLOPs": right / 1e12,
    }  # fmt: skip


def wrapped(number: int, bits: int) -> int:
    half = 2 ** (bits - 1)
    return (number + half) % (2 * half) - half


def check_bytes(gemm_bytes, *cases: tuple[int, int, int, float | None]):
    """Exactly size·(M·k + k·n + M·n) for each (M, k, n, size); size None is the default, 2."""
    results = []
    for M, k, n, size in cases:
        given = {} if size is None else {"bytes_per_element": size}
        call, found = result("gemm_bytes", gemm_bytes, M, k, n, **given)
        right = (size or 2) * (M * k + k * n + M * n)
        results.append((call, found, right, bytes_slips(M, k, n, size or 2)))
    judge(results, exactly=True)


def bytes_slips(M: int, k: int, n: int, size: float) -> dict[str, float]:
    a, b, c = M * k, k * n, M * n
    return {
        "that counts elements, not bytes": a + b + c,
        "bytes_per_element is ignored: two bytes were taken": 2 * (a + b + c),
        "bytes_per_element is ignored: four bytes were taken": 4 * (a + b + c),
        "bytes_per_element was rounded down; packed int4 has half a byte": int(size) * (a + b + c),
        "the result was rounded; half a byte is half a byte": int(size * (a + b + c)),
        "that is in bits: bytes_per_element is in bytes already": 8 * size * (a + b + c),
        "the output C is missing; it has to be written": size * (a + b),
        "the input A is missing": size * (b + c),
        "the weight B is missing": size * (a + c),
        "that is the weight B alone": size * b,
        "the output C is counted twice; it is written, and never read": size * (a + b + 2 * c),
        "the inputs are counted twice; each is read once": size * (2 * a + 2 * b + c),
        "A is counted twice; it is read once": size * (2 * a + b + c),
        "B is counted twice; it is read once": size * (a + 2 * b + c),
        "everything is counted twice; each matrix moves once": 2 * size * (a + b + c),
        "the inputs are read again for every multiply-add; caches exist so that they need not be":
            size * (2 * M * k * n + c),
        "that multiplies the sizes; add up the elements of the three matrices": size * M * k * n,
    }  # fmt: skip


def check_roofline(roofline_tflops, device: DeviceSpec | str | None, *ridges: float):
    """The lower bound on a device, at intensities given in multiples of its ridge."""
    here, results = resolve(device), []
    for intensity in (times * here.ridge for times in ridges):
        call, found = result("roofline_tflops", roofline_tflops, intensity, device)
        right = min(here.peak_tflops, intensity * here.bandwidth_gbs / 1e3)
        results.append((call, found, right, roofline_slips(intensity, here)))
    judge(results)


def roofline_slips(intensity: float, device: DeviceSpec) -> dict[str, float]:
    peak, gflops = device.peak_tflops, intensity * device.bandwidth_gbs
    memory, fp32 = gflops / 1e3, device.peaks.get("float32", peak)
    right = min(peak, memory)
    others = {name: spec(name) for name in ("L40", "H100 SXM", "H200", "A100 SXM 80GB")}
    return {
        "that is the larger of the two bounds; the lower one is what limits": max(peak, memory),
        "GB/s times FLOPs a byte are GFLOP/s, and the peak is in TFLOP/s": min(peak, gflops),
        "GB/s became TFLOP/s by a factor of a million; it is a thousand": min(peak, gflops / 1e6),
        "that is always the peak; below the ridge the bandwidth limits": peak,
        "that is always the bandwidth's bound; above the ridge the peak (in TFLOP/s) limits":
            memory,
        "that is always the bandwidth's bound, and in GFLOP/s": gflops,
        "it is in GFLOP/s; the function returns TFLOP/s": right * 1e3,
        "it is in FLOP/s; the function returns TFLOP/s": right * 1e12,
        "the peak is twice the dense one: a rate for sparse matrices": min(2 * peak, memory),
        "bandwidths are in 1e9 bytes a second, not in GiB": min(peak, memory * 1.024**3),
        f"the peak is that of float32; this device trains in {device.dtype}": min(fp32, memory),
        "the two times are added up; arithmetic and traffic overlap":
            peak * memory / (peak + memory),
        "that is the ridge point, in FLOPs a byte": device.ridge,
        "that is the intensity": intensity,
        **{f"these are the ceilings of the {name}: is `device` ignored?":
           min(other.peak_tflops, intensity * other.bandwidth_gbs / 1e3)
           for name, other in others.items()},
    }  # fmt: skip


def result(name: str, function, *arguments, **keywords) -> tuple[str, float]:
    """The call as text and the number that it gives; an AssertionError if it gives none."""
    shown = [as_text(one) for one in arguments]
    shown += [f"{key}={value!r}" for key, value in keywords.items()]
    call = f"{name}({', '.join(shown)})"
    try:
        found = function(*arguments, **keywords)
    except NotImplementedError:
        raise
    except Exception as error:
        hint = ". `device` may be a DeviceSpec, a name or None; resolve(device) is a DeviceSpec"
        raise AssertionError(
            f"{call} raised {type(error).__name__}: {error}{hint * (name == 'roofline_tflops')}"
        ) from error
    require(found is not None, f"{call} returned None: is the return missing?")
    is_number = isinstance(found, Real) and not isinstance(found, bool)
    require(is_number, f"{call} returned a {type(found).__name__}, not a number")
    return call, found
