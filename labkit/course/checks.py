"""Check one exercise from a notebook: `labkit.check("C1")`."""

from dataclasses import dataclass

from labkit.course.registry import find
from labkit.course.score import OK, ExerciseScore, run_checks
from labkit.course.tables import to_html, to_text
from labkit.errors import UserError


@dataclass(frozen=True, repr=False)
class CheckReport:
    """How an exercise stands; true if all its checks passed. A notebook shows it as a table."""

    score: ExerciseScore
    seconds: float

    def __bool__(self) -> bool:
        return self.score.state == OK

    @property
    def headline(self) -> str:
        one = self.score
        name = f"{one.exercise.name} · {one.exercise.title}"
        if not one.present:
            return f"{name}: its checks are not part of this release"
        points = f", {one.earned}/{one.possible} points" if one.possible else ""
        return f"{name}: {one.state}{points} ({self.seconds:.1f} s)"

    def __repr__(self) -> str:
        return to_text(self.score, self.headline)

    def _repr_html_(self) -> str:
        return to_html(self.score, self.headline)


def check(exercise_id: str) -> CheckReport:
    """Run the public checks of one exercise, on the files as they are saved.

    UserError: an unknown id, a question (a person reads those), or not in the course repository.
    """
    exercise = find(exercise_id)
    if exercise.tests is None:
        how = "a person reads the answer" if exercise.kind == "Question" else "it is not graded"
        raise UserError(f"{exercise.name} has no checks: {how}")
    score = run_checks([exercise.id])
    return CheckReport(score.exercises[0], score.seconds)
