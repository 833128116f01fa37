"""The checks of C8 fail each usual mistake, in words that name it, and no honest variant."""

import pytest

from labkit import perfmodel
from labkit.devices import resolve
from labkit.perfmodel import active_params, param_count
from tests.hidden import test_c8_optimizer as hidden
from tests.public import test_c8_optimizer as public
from tests.unit.wrong_solutions import WrongSolutions, assert_named, assert_passes

wrong = WrongSolutions()


def state(says: str, count):
    """A wrong `state_bytes`: `count(cfg, bytes_per_element)` is what it returns."""

    def solution(cfg, bytes_per_element=2):
        return count(cfg, bytes_per_element)

    solution.__name__ = f"state, {says}"
    wrong("state_bytes", says)(solution)


def floor(says: str, count):
    """A wrong `optimizer_floor_ms`: `count(right, cfg, spec)` is what it returns."""

    def solution(cfg, device=None):
        return count(perfmodel.optimizer_floor_ms(cfg, device), cfg, resolve(device))

    solution.__name__ = f"floor, {says}"
    wrong("optimizer_floor_ms", says)(solution)


def elements(number):
    return lambda right, cfg, device: right * number / 7


def bytes_each(number):
    return lambda right, cfg, device: number * param_count(cfg) / (device.bandwidth_gbs * 1e6)


state("three tensors", lambda cfg, size: 3 * size * param_count(cfg))
state("weights alone", lambda cfg, size: size * param_count(cfg))
state("weights and gradients", lambda cfg, size: 2 * size * param_count(cfg))
state("moments are counted in float32", lambda cfg, size: (2 * size + 8) * param_count(cfg))
state("float32 master copy", lambda cfg, size: (4 * size + 4) * param_count(cfg))
state("only the active", lambda cfg, size: 4 * size * active_params(cfg))
state("ignored: two bytes", lambda cfg, size: 8 * param_count(cfg))
state("mixed precision's 16 bytes", lambda cfg, size: 16 * param_count(cfg))
state("elements, not bytes", lambda cfg, size: 4 * param_count(cfg))
state("in GiB", lambda cfg, size: 4 * size * param_count(cfg) / 2**30)
state("in GB;", lambda cfg, size: 4 * size * param_count(cfg) / 1e9)
state("is the return missing", lambda cfg, size: None)
state("raised TypeError", lambda cfg, size: cfg * size)
state(
    "embedding is missing",
    lambda cfg, size: 4 * size * (param_count(cfg) - cfg.vocab_size * cfg.dim),
)

floor("8 bytes in bfloat16", elements(4))
floor("eight elements", elements(8))
floor("six elements", elements(6))
floor("five elements", elements(5))
floor("the writes alone", elements(3))
floor("the weight alone", elements(2))
floor("by the size of an element again", elements(14))
floor("moments are counted in float32", bytes_each(22))
floor("the elements have another size", bytes_each(14))
floor("only the active", lambda right, cfg, device: right * active_params(cfg) / param_count(cfg))
floor("GB for a GiB", lambda right, cfg, device: right * 1e9 / 2**30)
floor("in seconds", lambda right, cfg, device: right / 1e3)
floor("in µs", lambda right, cfg, device: right * 1e3)
floor("divides by the peak", lambda right, cfg, device: (
    right * device.bandwidth_gbs / device.peak_tflops / 1e3
))  # fmt: skip
floor("bandwidth of the L40", lambda right, cfg, device: right * device.bandwidth_gbs / 864)
floor("is the return missing", lambda right, cfg, device: None)
floor("a tuple, not a number", lambda right, cfg, device: (right, right))


def honest_state(cfg, bytes_per_element=2):
    return sum(bytes_per_element * param_count(cfg) for _ in range(4))


def honest_floor(cfg, device=None):
    device = resolve(device)
    size = 4 if device.dtype == "float32" else 2
    return 1e3 * (4 + 3) * size * param_count(cfg) / (device.bandwidth_gbs * 1e9)


HONEST = [
    ("state_bytes", perfmodel.state_bytes), ("state_bytes", honest_state),
    ("optimizer_floor_ms", perfmodel.optimizer_floor_ms), ("optimizer_floor_ms", honest_floor),
]  # fmt: skip


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("name", wrong)
def test_wrong_solution_is_named(name, module, monkeypatch):
    assert_named(module, wrong[name], monkeypatch)


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize(("name", "function"), HONEST)
def test_honest_variant_passes(name, function, module, monkeypatch):
    assert_passes(module, name, function, monkeypatch)


def test_an_open_exercise_stays_open(monkeypatch):
    def not_written(*arguments, **options):
        raise NotImplementedError("Coding Exercise 8: labkit/perfmodel.py, state_bytes")

    for name in ("state_bytes", "optimizer_floor_ms"):
        monkeypatch.setattr(public, name, not_written)
    for test in (public.test_state, public.test_element, public.test_floor, public.test_device):
        with pytest.raises(NotImplementedError):
            test()
