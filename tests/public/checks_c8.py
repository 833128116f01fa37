"""What the tests of Coding Exercise 8 look for, as functions of an implementation.

Each check counts a model's parameters by making one, and raises an AssertionError that names the
mistake: it looks for a usual slip that gives the numbers found.
"""

from numbers import Real

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec, resolve, spec
from tests.public.checks_c3 import hint, shown
from tests.public.judging import judge, require
from tests.public.slips_c3 import active_weights, params, weights


def check_state(state_bytes, *cases: tuple[ModelConfig, int | None]):
    """Exactly four tensors a parameter, for each (cfg, bytes_per_element); None is the default."""
    results = []
    for cfg, size in cases:
        given = {} if size is None else {"bytes_per_element": size}
        call, found = number(state_bytes, cfg, **given)
        right = 4 * (size or 2) * params(cfg)
        results.append((call, found, right, state_slips(cfg, size or 2)))
    judge(results, exactly=True)


def state_slips(cfg: ModelConfig, size: int) -> dict[str, float]:
    """What is wrong → the number that it gives; likewise below."""
    n = params(cfg)
    right = 4 * size * n
    return {
        "that counts three tensors a parameter; there are weight, gradient and two moments":
            3 * size * n,
        "that counts five tensors a parameter; there is no float32 master copy, and nothing else":
            5 * size * n,
        "that is the weights alone": size * n,
        "that is weights and gradients; AdamW keeps two moments as well": 2 * size * n,
        "that counts elements, not bytes": 4 * n,
        "the moments are counted in float32; here they have the weights' dtype": (2 * size + 8) * n,
        "a float32 master copy of the weights is counted; there is none here": (4 * size + 4) * n,
        "that is mixed precision's 16 bytes a parameter; here all four are in one dtype": 16 * n,
        "bytes_per_element is ignored: two bytes were taken": 8 * n,
        "bytes_per_element is ignored: four bytes were taken": 16 * n,
        "only the active parameters are counted; every expert has its state, chosen or not":
            4 * size * active_weights(cfg),
        "the embedding is missing; it is trained as well":
            4 * size * (n - weights(cfg)["embed"]),
        "that is in GiB; the function returns bytes": right / 2**30,
        "that is in GB; the function returns bytes": right / 1e9,
    }  # fmt: skip


def check_floor(optimizer_floor_ms, *cases: tuple[ModelConfig, DeviceSpec | str | None]):
    """Seven elements a parameter at the device's bandwidth, for each (cfg, device)."""
    results = []
    for cfg, device in cases:
        call, found = number(optimizer_floor_ms, cfg, device)
        here = resolve(device)
        results.append((call, found, floor_ms(cfg, here), floor_slips(cfg, here)))
    judge(results)


def floor_ms(cfg: ModelConfig, device: DeviceSpec, elements: float = 7, n=None) -> float:
    size = {"float32": 4}.get(device.dtype, 2)
    return elements * size * (n or params(cfg)) / (device.bandwidth_gbs * 1e6)


def floor_slips(cfg: ModelConfig, device: DeviceSpec) -> dict[str, float]:
    right = floor_ms(cfg, device)
    others = {name: spec(name) for name in ("L40", "H100 SXM", "H200", "A100 SXM 80GB")}
    by_elements = {
        "that moves four elements a parameter, 8 bytes in bfloat16: weight and moments are read "
        "*and* written": 4,
        "that counts the writes alone; all four are read first": 3,
        "that is eight elements a parameter; the gradient is read, and not written back": 8,
        "that is six elements a parameter; the gradient has to be read": 6,
        "that is five elements a parameter; both moments are read and written": 5,
        "that reads and writes the weight alone; the moments are updated too": 2,
        "that counts one element a parameter": 1,
        "that multiplies the 14 bytes of bfloat16 by the size of an element again": 14,
    }
    size = {"float32": 4}.get(device.dtype, 2)
    return {
        **{words: floor_ms(cfg, device, elements) for words, elements in by_elements.items()},
        "the moments are counted in float32; here they have the weights' dtype":
            floor_ms(cfg, device, (3 * size + 16) / size),
        "only the active parameters are counted; the optimizer updates every expert":
            floor_ms(cfg, device, n=active_weights(cfg)),
        f"this device trains in {device.dtype}: the elements have another size":
            right * (2 if size == 2 else 0.5),
        "that takes a GB for a GiB; bandwidths are in 1e9 bytes a second": right * 1e9 / 2**30,
        "it is in seconds; the function returns ms": right / 1e3,
        "it is in µs; the function returns ms": right * 1e3,
        "that divides by the peak, not by the bandwidth":
            right * device.bandwidth_gbs / (device.peak_tflops * 1e3),
        **{f"this is the bandwidth of the {name}: is `device` ignored?":
           right * device.bandwidth_gbs / other.bandwidth_gbs for name, other in others.items()},
    }  # fmt: skip


def number(function, *arguments, **keywords) -> tuple[str, float]:
    """The call as text and the number that it gives; an AssertionError if it gives none."""
    said = [shown(one) for one in arguments] + [f"{k}={v!r}" for k, v in keywords.items()]
    call = f"{function.__name__}({', '.join(said)})"
    try:
        found = function(*arguments, **keywords)
    except NotImplementedError:
        raise
    except Exception as error:
        raise AssertionError(
            f"{call} raised {type(error).__name__}: {error}{hint(error)}"
        ) from error
    require(found is not None, f"{call} returned None: is the return missing?")
    is_number = isinstance(found, Real) and not isinstance(found, bool)
    require(is_number, f"{call} returned a {type(found).__name__}, not a number")
    return call, found
