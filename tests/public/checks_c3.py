"""What the tests of Coding Exercise 3 look for, as functions of an implementation.

Each check compares with the model itself, and raises an AssertionError that names the mistake: it
looks for a usual slip (slips_c3.py) that gives the numbers found.
"""

from numbers import Real

from labkit.config import PRESETS, ModelConfig
from labkit.devices import resolve
from tests.public import slips_c3 as slips
from tests.public.judging import as_text, close, judge, require


def check_params(param_count, *cfgs: ModelConfig):
    """Exactly the parameters of the model that each configuration makes."""
    check_counts(param_count, slips.params, slips.param_slips, *[(cfg,) for cfg in cfgs])


def check_active(active_params, *cfgs: ModelConfig):
    """Exactly the weights that one token is multiplied by."""
    check_counts(active_params, slips.active_weights, slips.active_slips, *[(cfg,) for cfg in cfgs])


def check_flops(flops_per_token, *cases: tuple[ModelConfig, int]):
    """Exact FLOPs of a forward pass, a token, for each (cfg, seqlen)."""
    check_counts(flops_per_token, slips.flops, slips.flops_slips, *cases)


def check_rows(rows_per_expert, *cases: tuple[ModelConfig, int]):
    """The mean rows of an expert, for each (cfg, n_tokens)."""
    check_counts(rows_per_expert, slips.rows, slips.rows_slips, *cases)


def check_counts(function, right, wrong, *cases: tuple):
    results = []
    for case in cases:
        call, found = answer(function, *case)
        is_number = isinstance(found, Real) and not isinstance(found, bool)
        require(is_number, f"{call} returned a {type(found).__name__}, not a number")
        results.append((call, found, right(*case), wrong(*case)))
    judge(results, exactly=True)


def check_floors(forward_floor_ms, *cases: tuple):
    """Both floors for each (cfg, micro_batch_size, seqlen, device)."""
    computes, memories = [], []
    for *sizes, device in cases:
        call, found = answer(forward_floor_ms, *sizes, device)
        here = resolve(device)
        right = slips.floors(*sizes, here)
        require_pair(call, found, right)
        wrong = slips.compute_slips(*sizes, here) | slips.floors_elsewhere(*sizes, which=0)
        computes.append((f"compute_ms of {call}", found[0], right[0], wrong))
        wrong = slips.memory_slips(*sizes, here) | slips.floors_elsewhere(*sizes, which=1)
        memories.append((f"memory_ms of {call}", found[1], right[1], wrong))
    judge(computes)
    judge(memories)


def require_pair(call: str, found, right: tuple[float, float]):
    """Two numbers, in the right order."""
    words = {"larger": max, "smaller": min, "sum": sum}
    if isinstance(found, Real):
        which = [word for word, of in words.items() if close(found, of(right))]
        one = f"the {which[0]} of the two" if which else "one number"
        raise AssertionError(
            f"{call} returned {one}, {found:.5g}; return both: (compute_ms, memory_ms)"
        )
    pair = isinstance(found, (tuple, list)) and len(found) == 2
    require(
        pair and all(isinstance(ms, Real) for ms in found),
        f"{call} returned {found!r}, not two numbers (compute_ms, memory_ms)",
    )
    swapped = close(found[0], right[1]) and close(found[1], right[0])
    require(
        not swapped or close(*right),
        f"{call}: the two are swapped; compute_ms comes first, then memory_ms",
    )


def answer(function, *arguments) -> tuple[str, object]:
    """The call as text and what it returns; an AssertionError if it returns nothing."""
    call = f"{function.__name__}({', '.join(map(shown, arguments))})"
    try:
        found = function(*arguments)
    except NotImplementedError:
        raise
    except Exception as error:
        raise AssertionError(
            f"{call} raised {type(error).__name__}: {error}{hint(error)}"
        ) from error
    require(found is not None, f"{call} returned None: is the return missing?")
    return call, found


def hint(error: Exception) -> str:
    if isinstance(error, ZeroDivisionError):
        return ". n_experts and experts_per_token are 0 in a dense model (cfg.is_moe is False)"
    if isinstance(error, AttributeError) and not isinstance(error.obj, ModelConfig):
        return ". `device` may be a DeviceSpec, a name or None; resolve(device) is a DeviceSpec"
    return ""


def shown(argument) -> str:
    """A configuration by its preset and what differs from that, or by all that matters."""
    if not isinstance(argument, ModelConfig):
        return as_text(argument)
    fields = argument.to_dict()
    differing = {
        name: [f"{key}={value}" for key, value in fields.items() if value != preset[key]]
        for name, preset in ((name, cfg.to_dict()) for name, cfg in PRESETS.items())
    }
    name, changes = min(differing.items(), key=lambda item: len(item[1]))
    return f"<{', '.join([name, *changes])}>"
