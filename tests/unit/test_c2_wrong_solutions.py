"""The checks of C2 fail each usual mistake, in words that name it, and no honest variant."""

import re

import pytest

from labkit import perfmodel
from labkit.devices import resolve
from tests.hidden import test_c2_roofline as hidden
from tests.public import test_c2_roofline as public

WRONG = {}


def wrong(function: str, says: str):
    """Register a wrong solution of `function`, with words that a failed check must say."""
    return lambda solution: WRONG.setdefault(solution.__name__, (function, solution, says))[1]


@wrong("gemm_flops", "counts multiply-adds")
def multiply_adds(M, k, n):
    return M * k * n


@wrong("gemm_flops", "the first add counts")
def one_add_less(M, k, n):
    return M * n * (2 * k - 1)


@wrong("gemm_flops", "adds the sizes")
def sizes_added(M, k, n):
    return 2 * (M * k + k * n + M * n)


@wrong("gemm_flops", "rounded")
def floats(M, k, n):
    return 2.0 * M * k * n


@wrong("gemm_flops", "overflowed 32 bits")
def int32(M, k, n):
    return (2 * M * k * n + 2**31) % 2**32 - 2**31


@wrong("gemm_flops", "overflowed 64 bits")
def int64(M, k, n):
    return (2 * M * k * n + 2**63) % 2**64 - 2**63


@wrong("gemm_flops", "in GFLOP")
def gflop(M, k, n):
    return 2 * M * k * n / 1e9


@wrong("gemm_flops", "is the return missing")
def no_return(M, k, n):
    2 * M * k * n


@wrong("gemm_flops", "a tuple, not a number")
def all_three(M, k, n):
    return 2, M, k * n


@wrong("gemm_bytes", "C is missing")
def without_the_output(M, k, n, bytes_per_element=2):
    return bytes_per_element * (M * k + k * n)


@wrong("gemm_bytes", "B alone")
def weights_only(M, k, n, bytes_per_element=2):
    return bytes_per_element * k * n


@wrong("gemm_bytes", "C is counted twice")
def output_read_as_well(M, k, n, bytes_per_element=2):
    return bytes_per_element * (M * k + k * n + 2 * M * n)


@wrong("gemm_bytes", "inputs are counted twice")
def inputs_twice(M, k, n, bytes_per_element=2):
    return bytes_per_element * (2 * M * k + 2 * k * n + M * n)


@wrong("gemm_bytes", "A is counted twice")
def a_twice(M, k, n, bytes_per_element=2):
    return bytes_per_element * (2 * M * k + k * n + M * n)


@wrong("gemm_bytes", "B is counted twice")
def b_twice(M, k, n, bytes_per_element=2):
    return bytes_per_element * (M * k + 2 * k * n + M * n)


@wrong("gemm_bytes", "every multiply-add")
def no_caches(M, k, n, bytes_per_element=2):
    return bytes_per_element * (2 * M * k * n + M * n)


@wrong("gemm_bytes", "elements, not bytes")
def elements(M, k, n, bytes_per_element=2):
    return M * k + k * n + M * n


@wrong("gemm_bytes", "bytes_per_element is ignored: two")
def always_bfloat16(M, k, n, bytes_per_element=2):
    return 2 * (M * k + k * n + M * n)


@wrong("gemm_bytes", "bytes_per_element is ignored: four")
def always_float32(M, k, n, bytes_per_element=2):
    return 4 * (M * k + k * n + M * n)


@wrong("gemm_bytes", "in bits")
def bits(M, k, n, bytes_per_element=2):
    return 8 * bytes_per_element * (M * k + k * n + M * n)


@wrong("gemm_bytes", "bytes_per_element was rounded")
def whole_bytes(M, k, n, bytes_per_element=2):
    return int(bytes_per_element) * (M * k + k * n + M * n)


@wrong("gemm_bytes", "the result was rounded")
def rounded(M, k, n, bytes_per_element=2):
    return int(bytes_per_element * (M * k + k * n + M * n))


@wrong("gemm_bytes", "multiplies the sizes")
def product(M, k, n, bytes_per_element=2):
    return bytes_per_element * M * k * n


def bounds(device):
    """Peak in TFLOP/s, and bandwidth in TB/s."""
    return resolve(device).peak_tflops, resolve(device).bandwidth_gbs / 1e3


@wrong("roofline_tflops", "the lower one is what limits")
def larger_bound(intensity, device=None):
    peak, bandwidth = bounds(device)
    return max(peak, intensity * bandwidth)


@wrong("roofline_tflops", "are GFLOP/s, and the peak")
def gigabytes(intensity, device=None):
    peak, bandwidth = bounds(device)
    return min(peak, 1e3 * intensity * bandwidth)


@wrong("roofline_tflops", "a factor of a million")
def a_thousand_too_little(intensity, device=None):
    peak, bandwidth = bounds(device)
    return min(peak, intensity * bandwidth / 1e3)


@wrong("roofline_tflops", "above the ridge the peak")
def no_roof(intensity, device=None):
    return intensity * bounds(device)[1]


@wrong("roofline_tflops", "above the ridge the peak")
def peak_in_flops(intensity, device=None):
    peak, bandwidth = bounds(device)
    return min(peak * 1e12, intensity * bandwidth)


@wrong("roofline_tflops", "bound, and in GFLOP/s")
def no_roof_in_gflops(intensity, device=None):
    return 1e3 * intensity * bounds(device)[1]


@wrong("roofline_tflops", "below the ridge the bandwidth limits")
def no_slope(intensity, device=None):
    return bounds(device)[0]


@wrong("roofline_tflops", "it is in GFLOP/s")
def all_in_gflops(intensity, device=None):
    peak, bandwidth = bounds(device)
    return 1e3 * min(peak, intensity * bandwidth)


@wrong("roofline_tflops", "it is in FLOP/s")
def all_in_flops(intensity, device=None):
    peak, bandwidth = bounds(device)
    return 1e12 * min(peak, intensity * bandwidth)


@wrong("roofline_tflops", "sparse")
def sparse_peak(intensity, device=None):
    peak, bandwidth = bounds(device)
    return min(2 * peak, intensity * bandwidth)


@wrong("roofline_tflops", "not in GiB")
def gibibytes(intensity, device=None):
    peak, bandwidth = bounds(device)
    return min(peak, intensity * bandwidth * 2**30 / 1e9)


@wrong("roofline_tflops", "that of float32")
def float32_peak(intensity, device=None):
    peak, bandwidth = bounds(device)
    return min(resolve(device).peaks.get("float32", peak), intensity * bandwidth)


@wrong("roofline_tflops", "added up")
def times_added(intensity, device=None):
    peak, bandwidth = bounds(device)
    return 1 / (1 / peak + 1 / (intensity * bandwidth)) if intensity else 0.0


@wrong("roofline_tflops", "ridge point")
def ridge(intensity, device=None):
    return resolve(device).ridge


@wrong("roofline_tflops", "`device` ignored")
def always_an_l40(intensity, device=None):
    return perfmodel.roofline_tflops(intensity, "L40")


@wrong("roofline_tflops", r"<an? \w+ device>\) raised UserError: no device.*resolve\(device\) is")
def names_only(intensity, device=None):
    return perfmodel.roofline_tflops(intensity, getattr(device, "name", str(device)))


@wrong("roofline_tflops", r"raised AttributeError: 'str'.*resolve\(device\) is")
def specs_only(intensity, device=None):
    return min(device.peak_tflops, intensity * device.bandwidth_gbs / 1e3)


def float_when_exact(M, k, n):
    flops = 2 * M * k * n
    return float(flops) if float(flops) == flops else flops


def element_by_element(M, k, n, bytes_per_element=2):
    return sum(rows * columns * bytes_per_element for rows, columns in ((M, k), (k, n), (M, n)))


def from_times(intensity, device=None):
    """FLOPs over the longer of the two times, for one byte."""
    device = resolve(device)
    seconds = max(intensity / (device.peak_tflops * 1e12), 1 / (device.bandwidth_gbs * 1e9))
    return intensity / seconds / 1e12


HONEST = {
    "gemm_flops": (perfmodel.gemm_flops, float_when_exact),
    "gemm_bytes": (perfmodel.gemm_bytes, element_by_element),
    "roofline_tflops": (perfmodel.roofline_tflops, from_times),
}


def failures(module, function, solution, monkeypatch) -> list[str]:
    """Messages of the checks that fail when `solution` stands in for `function`."""
    monkeypatch.setattr(module, function, solution)
    messages = []
    for test in [test for name, test in vars(module).items() if name.startswith("test_")]:
        try:
            test()
        except AssertionError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_solution_is_named(name, module, monkeypatch):
    function, solution, says = WRONG[name]
    messages = failures(module, function, solution, monkeypatch)
    assert any(re.search(says, message) for message in messages), (
        f"{name}: no message says {says!r}; the checks said {messages or 'nothing: it passes'}"
    )


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("function", HONEST)
def test_honest_variants_pass(function, module, monkeypatch):
    for solution in HONEST[function]:
        messages = failures(module, function, solution, monkeypatch)
        assert not messages, f"{solution.__name__} is right, and the checks said {messages}"


def test_an_open_exercise_stays_open(monkeypatch):
    def not_written(*arguments, **keywords):
        raise NotImplementedError("Coding Exercise 2: labkit/perfmodel.py, gemm_flops")

    monkeypatch.setattr(public, "gemm_flops", not_written)
    with pytest.raises(NotImplementedError):
        public.test_flops()
