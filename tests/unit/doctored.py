"""Result files that were changed after they were measured: each change must be named."""

import re
from collections.abc import Callable
from types import ModuleType

import pandas as pd

from labkit.experiments.table import Schema, read


class Cheats(dict):
    """Changes by their own names; `@cheat(schema or file, "words")` adds one.

    A change takes the rows of that file as a DataFrame, and returns those to write in their place.
    """

    def __call__(self, file: Schema | str, says: str):
        def add(change: Callable):
            assert change.__name__ not in self, f"{change.__name__} is there twice"
            self[change.__name__] = (file, change, says)
            return change

        return add


def failures(checks: ModuleType, folder) -> list[str]:
    """Messages of the module's checks that fail on a folder."""
    messages = []
    for name, check in vars(checks).items():
        own = getattr(check, "__module__", "") == checks.__name__
        if name.startswith("check_") and own:
            try:
                check(folder)
            except AssertionError as error:
                messages.append(str(error))
    return messages


def assert_named(checks: ModuleType, cheat: tuple, folder):
    file, change, says = cheat
    path = folder / file if isinstance(file, str) else file.path(folder)
    frame = pd.read_csv(path) if isinstance(file, str) else read(path, file)
    change(frame).to_csv(path, index=False)
    messages = failures(checks, folder)
    assert any(re.search(says, message) for message in messages), (
        f"no message says {says!r}; the checks said {messages or 'nothing: they pass'}"
    )
