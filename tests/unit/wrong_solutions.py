"""Solutions that stand in for a student's: each wrong one must be named, each honest one pass."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Wrong:
    """A solution of `name` (a function or class), and words that a failed check must say."""

    name: str
    solution: Callable
    says: str


class WrongSolutions(dict[str, Wrong]):
    """Wrong solutions by their own names; `@wrong("gemm_flops", "words")` adds one."""

    def __call__(self, name: str, says: str):
        def add(solution):
            assert solution.__name__ not in self, f"{solution.__name__} is there twice"
            self[solution.__name__] = Wrong(name, solution, says)
            return solution

        return add


def failures(module: ModuleType, name: str, solution, monkeypatch) -> list[str]:
    """Messages of the module's checks that fail when `solution` stands in for `name`.

    Checks called test_real_… measure this machine, and are left out.
    """
    monkeypatch.setattr(module, name, solution)
    messages = []
    for key, test in vars(module).items():
        if key.startswith("test_") and not key.startswith("test_real"):
            try:
                test()
            except AssertionError as error:
                messages.append(str(error))
    return messages


def assert_named(module: ModuleType, wrong: Wrong, monkeypatch):
    messages = failures(module, wrong.name, wrong.solution, monkeypatch)
    assert any(re.search(wrong.says, message) for message in messages), (
        f"no message says {wrong.says!r}; the checks said {messages or 'nothing: it passes'}"
    )


def assert_passes(module: ModuleType, name: str, solution, monkeypatch):
    messages = failures(module, name, solution, monkeypatch)
    assert not messages, f"{solution.__name__} is right, and the checks said {messages}"
