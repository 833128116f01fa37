"""A score as a table: for a terminal, for pandas and for a notebook."""

from collections import Counter
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from labkit.course.registry import Exercise
from labkit.course.score import ABSENT, OK, Check, ExerciseScore, Score

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Group

SIGNS = {"passed": "✓", "failed": "✗", "open": "○", "skipped": "–"}
COLOURS = {"✓": "#2e9e4f", "✗": "#d1433f", "○": "#c98a00", "–": "#888888"}


def render(score: Score) -> "Group":
    """The score table for rich: a line an exercise, the total, and what went wrong."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(min_width=12)
    table.add_column()
    table.add_column(justify="right")
    for one in score.present:
        style = "green" if one.state == OK else "red"
        points = f"{one.earned}/{one.possible}" if one.possible else "no points"
        table.add_row(one.exercise.name, Text(one.state, style=style), points)
    table.add_row(Text("Total", style="bold"), "", f"{score.earned}/{score.possible}")
    notes = [Text(line) for one in score.present if one.state != OK for line in notes_on(one)]
    absent = [one.exercise for one in score.exercises if one.state == ABSENT]
    if absent:
        notes.append(Text(f"Not in this release: {ranges(absent)}", style="dim"))
    return Group(table, *notes, Text(counts(score), style="dim"))


def notes_on(one: ExerciseScore) -> list[str]:
    """What keeps an exercise from being OK, each message once."""
    if one.problem:
        return [f"{one.exercise.name}: {one.problem}"]
    bad = [check for check in one.checks if not check.good]
    if len({check.message for check in bad}) == 1 and len(bad) > 1:
        return [f"{one.exercise.name}: {bad[0].message}"]
    return [f"{one.exercise.name}: ✗ {check.what}\n  {check.message}" for check in bad]


def counts(score: Score) -> str:
    """ "6 passed, 1 failed, 1 skipped in 4.2 s"."""
    found = Counter("failed" if c.outcome == "open" else c.outcome for c in score.checks)
    found["failed"] += sum(one.problem is not None for one in score.present)
    parts = [f"{found['passed']} passed", f"{found['failed']} failed"]
    parts += [f"{found['skipped']} skipped"] if found["skipped"] else []
    return f"{', '.join(parts)} in {score.seconds:.1f} s"


def ranges(exercises: list[Exercise]) -> str:
    """ "Coding 2–9, Experiment 4": runs of neighbouring numbers put together."""
    runs: list[list[Exercise]] = []
    for one in exercises:
        last = runs[-1][-1] if runs else None
        if last and last.kind == one.kind and int(one.id[1:]) == int(last.id[1:]) + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    return ", ".join(run[0].name + (f"–{run[-1].id[1:]}" if len(run) > 1 else "") for run in runs)


def to_frame(score: Score) -> "pd.DataFrame":
    """A row an exercise: exercise, title, state, points, possible_points, problem."""
    import pandas as pd

    rows = [
        {
            "exercise": one.exercise.id,
            "title": one.exercise.title,
            "state": one.state,
            "points": one.earned,
            "possible_points": one.possible,
            "problem": "; ".join(notes_on(one)) if one.present and one.state != OK else "",
        }
        for one in score.exercises
    ]
    columns = ["exercise", "title", "state", "points", "possible_points", "problem"]
    return pd.DataFrame(rows, columns=columns)


def to_html(one: ExerciseScore, headline: str) -> str:
    """An exercise's checks for a notebook: a headline, and a row a check."""
    rows = "".join(_html_row(check, message) for check, message in messages_once(one))
    problem = f"<p>{escape(one.problem)}</p>" if one.problem else ""
    table = f"<table style='border-collapse:collapse;color:inherit'>{rows}</table>" if rows else ""
    return f"<div><p><b>{escape(headline)}</b></p>{problem}{table}</div>"


def _html_row(check: Check, message: str) -> str:
    sign = SIGNS[check.outcome]
    cell = "style='text-align:left;vertical-align:top;padding:2px 12px 2px 0"
    narrow = f"{cell};white-space:nowrap"
    said = f"<br><span style='opacity:.75'>{escape(message)}</span>" if message else ""
    points = f"{check.points} point{'' if check.points == 1 else 's'}" if check.points else ""
    return (
        f"<tr><td {cell};color:{COLOURS[sign]};font-weight:bold'>{sign}</td>"
        f"<td {cell}'>{escape(check.what)}{said}</td>"
        f"<td {narrow}'>{points}</td><td {narrow};opacity:.75'>{seconds(check)}</td></tr>"
    )


def to_text(one: ExerciseScore, headline: str) -> str:
    """The same in plain text."""
    lines = [headline] + ([one.problem] if one.problem else [])
    for check, message in messages_once(one):
        lines.append(f"  {SIGNS[check.outcome]} {check.what}  {seconds(check)}".rstrip())
        lines += [f"      {message}"] if message else []
    return "\n".join(lines)


def messages_once(one: ExerciseScore) -> Iterator[tuple[Check, str]]:
    """The checks with their messages, a repeated message being left out."""
    seen = set()
    for check in one.checks:
        yield check, "" if check.message in seen else check.message
        seen.add(check.message)


def seconds(check: Check) -> str:
    """ "0.02 s"; nothing for a check that took no time or did not run."""
    return f"{check.seconds:.2f} s" if check.seconds and check.seconds >= 0.005 else ""
