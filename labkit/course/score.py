"""Run the exercises' tests in a process of their own, and add up what passed."""

import importlib.util
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from labkit.course.process import CheckProcess
from labkit.course.registry import Exercise, repository_root, select
from labkit.errors import NotThisMachine

OK, FAIL, ABSENT = "OK", "FAIL", "not in this release"


@dataclass(frozen=True)
class Check:
    """One test of an exercise. `outcome`: passed, failed, open (not implemented) or skipped."""

    test: str
    exercise: str
    points: int
    what: str
    outcome: str = "failed"
    message: str = "it did not run: Python ended in an earlier check"
    seconds: float | None = None

    @property
    def good(self) -> bool:
        """Passed, or worth nothing and not for this machine."""
        return self.outcome == "passed" or (self.outcome == "skipped" and not self.points)


@dataclass(frozen=True)
class ExerciseScore:
    """What one exercise earned. `problem` is what kept its tests from running at all."""

    exercise: Exercise
    possible: int
    checks: tuple[Check, ...] = ()
    problem: str | None = None
    present: bool = True

    @property
    def earned(self) -> int:
        return sum(check.points for check in self.checks if check.outcome == "passed")

    @property
    def state(self) -> str:
        if not self.present:
            return ABSENT
        return OK if self.checks and all(check.good for check in self.checks) else FAIL


@dataclass(frozen=True)
class Score:
    """Scores of the exercises that were asked for, and the seconds that it took."""

    exercises: tuple[ExerciseScore, ...]
    seconds: float
    hidden: bool = False

    @property
    def present(self) -> tuple[ExerciseScore, ...]:
        return tuple(one for one in self.exercises if one.present)

    @property
    def checks(self) -> tuple[Check, ...]:
        return tuple(check for one in self.present for check in one.checks)

    @property
    def earned(self) -> int:
        return sum(one.earned for one in self.present)

    @property
    def possible(self) -> int:
        return sum(one.possible for one in self.present)

    @property
    def ok(self) -> bool:
        """Whether every exercise that is here is done. False if none is here."""
        return bool(self.present) and all(one.state == OK for one in self.present)


def run_checks(
    ids: Iterable[str] | None = None,
    hidden: bool = False,
    *,
    limit_s: float = 60.0,
    on_check: Callable[[Check], None] | None = None,
) -> Score:
    """Test the exercises named (None: all that have tests), and score them.

    The tests run in a new Python in the course repository, so the files as saved count. An
    exercise whose code ends that process, or shows no progress for `limit_s` seconds, loses that
    check and those after it; the others run in another process. `on_check` is called with each
    result as it comes. Afterwards no process of the run is left.

    Results travel in a file without a name, each line signed with a key that a student's code is
    not given: printing, leaving with status 0 or writing a file earns nothing. It is no sandbox:
    code in the same process can find the key or replace a check in memory, and code can change
    the tests on disk.

    UserError: an unknown id, or not inside the course repository. NotThisMachine: no pytest.
    """
    if importlib.util.find_spec("pytest") is None:
        raise NotThisMachine("pytest is missing; install it: pip install 'labkit[notebook]'")
    began, root = time.monotonic(), repository_root()
    chosen = [one for one in select(ids) if ids is not None or one.tests]
    present = [one for one in chosen if one.test_file(root, hidden)]
    done = {one.id: ExerciseScore(one, 0, present=False) for one in chosen if one not in present}
    groups = [present] if present else []
    while groups:
        group = groups.pop()
        session = _Session(group, hidden, on_check)
        with CheckProcess(root, [one.test_file(root, hidden) for one in group]) as process:
            for record in process.records(limit_s):
                session.take(record)
            scores = session.scores(process.ending())
        done |= scores
        rest = [one for one in group if one.id not in scores]
        groups += ([rest] if scores else [[one] for one in rest]) if rest else []
    return Score(tuple(done[one.id] for one in chosen), time.monotonic() - began, hidden)


class _Session:
    """What one process reported on a group of exercises."""

    def __init__(self, group: list[Exercise], hidden: bool, on_check):
        self.group, self.hidden, self.on_check = group, hidden, on_check
        self.checks: dict[str, Check] | None = None  # by test, in order; None until collected
        self.left: dict[str, Check] = {}  # those without a result
        self.running: str | None = None
        self.problems: dict[str, str] = {}

    def take(self, record: dict):
        if record["event"] == "collected":
            ids = {one.id for one in self.group}
            rows = [row for row in record["checks"] if row["exercise"] in ids]
            self.checks = {row["test"]: Check(**row) for row in rows}
            self.left = dict(self.checks)
        elif record["event"] == "broken":
            self.problems[Path(record["file"]).name] = record["message"]
        elif record["test"] not in (self.checks or ()):
            return  # a test of an exercise that was not asked for
        elif record["event"] == "started":
            self.running = record["test"]
        else:
            self._finish(record)

    def _finish(self, record: dict):
        check = self.checks[record["test"]]
        message = record["message"]
        if record["outcome"] == "open":
            exercise = next(one for one in self.group if one.id == check.exercise)
            where = message.partition(": ")[2] or f"{exercise.file}, {exercise.functions[0]}"
            message = f"not implemented yet: {where}"
        check = replace(
            check, outcome=record["outcome"], message=message, seconds=record["seconds"]
        )
        self.checks[check.test] = check
        self.left.pop(check.test, None)
        self.running = None
        if self.on_check:
            self.on_check(check)

    def scores(self, ending: str) -> dict[str, ExerciseScore]:
        """Scores of the exercises that the process got through, or that ended it."""
        outside = self.running is None and (self.left or not (self.checks or self.problems))
        if outside and len(self.group) > 1:
            return {}  # it ended outside any check: whose fault that is, single runs will tell
        stuck = self.running or next(iter(self.left), None)
        if stuck in self.left:
            self.checks[stuck] = replace(self.checks[stuck], message=ending)
        scores = {}
        for one in self.group:
            checks = tuple(c for c in (self.checks or {}).values() if c.exercise == one.id)
            waiting = any(check.test in self.left for check in checks)
            if waiting and self.checks[stuck].exercise != one.id:
                continue
            problem = self.problems.get(one.tests) or (None if checks else ending)
            scores[one.id] = ExerciseScore(one, one.worth(self.hidden), checks, problem)
        return scores
