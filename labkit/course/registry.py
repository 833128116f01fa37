"""The exercises of the course, read from exercises.toml."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labkit.errors import UserError

KINDS = {"C": "Coding", "E": "Experiment", "Q": "Question"}
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Exercise:
    """One exercise; exercises.toml says what the fields mean."""

    id: str
    title: str
    notebook: str
    points: int
    file: str | None = None
    functions: tuple[str, ...] = ()
    hidden_points: int = 0
    tests: str | None = None

    def __post_init__(self):
        if self.id[:1] not in KINDS or not self.id[1:].isdecimal():
            raise UserError(f"exercise id {self.id!r} must be one of C, E, Q and a number")
        if min(self.points, self.hidden_points) < 0:
            raise UserError(f"exercise {self.id} has negative points")
        if (self.kind == "Coding") != bool(self.file and self.functions and self.tests):
            raise UserError(
                f"exercise {self.id}: a coding exercise has file, functions and tests; "
                "others have no file and no functions"
            )

    @property
    def kind(self) -> str:
        return KINDS[self.id[0]]

    @property
    def name(self) -> str:
        """As score tables print it: "Coding 1"."""
        return f"{self.kind} {self.id[1:]}"

    def worth(self, hidden: bool = False) -> int:
        return self.hidden_points if hidden else self.points

    def test_file(self, root: Path, hidden: bool = False) -> Path | None:
        """Its tests in this checkout, or None if it has none here."""
        if self.tests is None:
            return None
        path = root / "tests" / ("hidden" if hidden else "public") / self.tests
        return path if path.is_file() else None


def parse(text: str) -> tuple[Exercise, ...]:
    """The exercises of a registry's text, validated. UserError: what is wrong with it."""
    try:
        rows = tomllib.loads(text).get("exercise", [])
        exercises = tuple(Exercise(**row | _tuples(row)) for row in rows)
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise UserError(f"exercises.toml cannot be read: {error}") from error
    ids = [exercise.id for exercise in exercises]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise UserError(f"exercises.toml lists {', '.join(twice)} more than once")
    return exercises


def _tuples(row: dict) -> dict:
    return {key: tuple(value) for key, value in row.items() if isinstance(value, list)}


@cache
def exercises() -> tuple[Exercise, ...]:
    """All exercises of the course, in the registry's order."""
    return parse((Path(__file__).parent / "exercises.toml").read_text(encoding="utf-8"))


def find(exercise_id: str) -> Exercise:
    """The exercise called "C1", "c1" or "Coding 1". UserError: there is none, with the ids."""
    wanted = "".join(str(exercise_id).split()).lower()
    for exercise in exercises():
        if wanted in (exercise.id.lower(), exercise.name.replace(" ", "").lower()):
            return exercise
    ids = [exercise.id for exercise in exercises()]
    if alike := [name for name in ids if name[1:] == wanted]:
        raise UserError(f"exercise {exercise_id!r} could be {', '.join(alike)}: name one")
    raise UserError(f"no exercise {exercise_id!r}; there are {', '.join(ids)}")


def select(ids: Iterable[str] | None = None) -> tuple[Exercise, ...]:
    """The exercises named, each once and in the registry's order; None is all of them."""
    if ids is None:
        return exercises()
    wanted = {find(name) for name in ([ids] if isinstance(ids, str) else ids)}
    return tuple(exercise for exercise in exercises() if exercise in wanted)


def repository_root() -> Path:
    """The course repository: around the working directory, or where labkit is installed from."""
    here = Path.cwd()
    for folder in (here, *here.parents, _PACKAGE_ROOT):
        if (folder / "tests" / "public").is_dir() and (folder / "labkit" / "course").is_dir():
            return folder
    raise UserError(
        f"{here} is not inside the course repository (a folder with tests/public and labkit); "
        "change to it and try again"
    )
