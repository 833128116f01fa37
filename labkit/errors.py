"""The errors that a user can fix, and the checks that go with them."""

import math
import operator


class UserError(ValueError):
    """Bad input. The message names the value and the way out; the CLI prints it by itself."""


class NotThisMachine(UserError):
    """The input is fine, but this machine lacks what it needs (a GPU, a driver, a program)."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a tensor found no room, on a GPU or on the host."""
    # The CPU's allocator has no error class of its own.
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def whole_number(name: str, value, least: int = 1) -> int:
    """The value as Python's integer, which does not overflow as numpy's do.

    UserError: it is no whole number (2.0 and True are none), or below `least`.
    """
    try:
        whole = operator.index(value)
    except TypeError:
        whole = None
    if whole is None or isinstance(value, bool) or whole < least:
        raise UserError(f"{name}={value!r} must be a whole number of at least {least}")
    return whole


def positive_number(name: str, value) -> float:
    """The value as it is. UserError: it is no number, or not above 0 and finite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
        raise UserError(f"{name}={value!r} must be a number above 0")
    return value
