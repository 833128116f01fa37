"""What the checks share: a failure in words, and the usual slip that explains a wrong number."""

from labkit.devices import DeviceSpec


def require(condition, message: str):
    if not condition:
        raise AssertionError(message)


def as_text(argument) -> str:
    if isinstance(argument, DeviceSpec):
        return f"<{argument.name}>"
    return f"{argument:.5g}" if isinstance(argument, float) else repr(argument)


def judge(results: list[tuple[str, float, float, dict[str, float]]], exactly: bool = False):
    """Fail on the first wrong result (call, found, right, slips), and name what explains it.

    A slip that explains all results is better than one that fits the first wrong one by chance.
    """
    wrong = [one for one in results if one[1] != one[2] and (exactly or not close(*one[1:3]))]
    if not wrong:
        return
    call, found, right, slips = wrong[0]
    fits_first = [words for words, value in slips.items() if close(found, value)]
    fits_all = [
        words for words in fits_first
        if all(close(found, slips.get(words, found)) for _, found, _, slips in results)
    ]  # fmt: skip
    what = (fits_all or fits_first or ["see its docstring"])[0]
    shown, expected = (f"{value:,}" if exactly else f"{value:.5g}" for value in (found, right))
    raise AssertionError(f"{call} returned {shown}, not {expected}: {what}")


def close(found: float, value: float) -> bool:
    return abs(found - value) <= 1e-6 * abs(value)
