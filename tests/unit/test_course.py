"""The registry, and a score that only right code can earn."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from pathlib import Path

import pytest
from rich.console import Console

from labkit.course.checks import check
from labkit.course.process import CheckProcess
from labkit.course.registry import exercises, find, parse, repository_root, select
from labkit.course.score import run_checks
from labkit.course.tables import render, to_frame
from labkit.errors import UserError

REPOSITORY = Path(__file__).parents[2]


# ------------------------------------------------------------------------------------- registry


def test_points_are_those_of_the_course():
    points = defaultdict(int)
    for one in exercises():
        points[one.kind] += one.points
    assert points == {"Coding": 100, "Experiment": 30, "Question": 70}, dict(points)
    hidden = sum(one.hidden_points for one in exercises())
    assert hidden == 100, f"hidden tests are worth {hidden}"


@pytest.mark.parametrize("name", ["C1", "c1", "Coding 1", " c 1 ", "coding1"])
def test_find_understands(name):
    assert find(name).functions == ("cuda_time",)


@pytest.mark.parametrize(("name", "says"), [("1", "C1, E1, Q1"), ("C10", "C1, C2"), ("", "C1")])
def test_find_lists_what_there_is(name, says):
    with pytest.raises(UserError, match=says):
        find(name)


def test_select_keeps_the_order_and_drops_repetitions():
    assert [one.id for one in select(["E2", "c3", "C3", "C1"])] == ["C1", "C3", "E2"]


ROW = '[[exercise]]\nid = "Q1"\ntitle = "t"\nnotebook = "01"\npoints = 1\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ROW + ROW, "Q1 more than once"),
        (ROW.replace("Q1", "X1"), "X1"),
        (ROW.replace("Q1", "C1"), "file, functions and tests"),
        (ROW.replace("= 1", "= -1"), "negative"),
        (ROW + "colour = 3\n", "colour"),
        (ROW + "=", "cannot be read"),
    ],
)
def test_a_bad_registry_is_refused(text, says):
    assert parse(ROW)[0].id == "Q1"
    with pytest.raises(UserError, match=says):
        parse(text)


def test_tests_are_worth_what_the_registry_says():
    """Points of the collected tests, exercise by exercise, public and hidden."""
    files = {
        path: one.worth(hidden)
        for one in exercises()
        for hidden in (False, True)
        if (path := one.test_file(REPOSITORY, hidden))
    }
    with CheckProcess(REPOSITORY, list(files), "--collect-only") as process:
        (record,) = [r for r in process.records(60) if r["event"] == "collected"]
    found = dict.fromkeys(files, 0)
    for row in record["checks"]:
        path = REPOSITORY / row["test"].partition("::")[0]
        found[path] += row["points"]
        assert row["exercise"].lower() in path.name, f"{row['test']} is marked {row['exercise']}"
    assert found == files, f"points of tests and registry differ: {found}"


# ---------------------------------------------------------------------------------------- score

TESTS = """
    import pytest
    from labkit.timers import cuda_time

    @pytest.mark.exercise("{id}", points={first})
    def test_one():
        '''It returns one.'''
        assert cuda_time() == 1, "it did not return 1"

    @pytest.mark.exercise("{id}", points={second})
    def test_two():
        '''It returns one again.'''
        assert cuda_time() == 1, "it did not return 1"
"""
PYPROJECT = '[tool.pytest.ini_options]\nmarkers = ["exercise(id, points): a check"]\n'


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A small course repository around the working directory; call it with a student's code."""
    shutil.copytree(REPOSITORY / "labkit" / "course", tmp_path / "labkit" / "course")
    for name in ("__init__.py", "errors.py"):
        shutil.copy(REPOSITORY / "labkit" / name, tmp_path / "labkit" / name)
    tests = tmp_path / "tests" / "public"
    tests.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    text = textwrap.dedent(TESTS)
    (tests / "test_c1_cuda_time.py").write_text(text.format(id="C1", first=6, second=7))
    monkeypatch.chdir(tests)

    def write(timers: str, other: str | None = None):
        (tmp_path / "labkit" / "timers.py").write_text(textwrap.dedent(timers))
        if other is not None:
            (tmp_path / "labkit" / "other.py").write_text(textwrap.dedent(other))
            c2 = text.format(id="C2", first=2, second=2).replace("timers", "other")
            (tests / "test_c2_roofline.py").write_text(c2)
        return tmp_path

    return write


RIGHT = "def cuda_time(): return 1\n"


def test_right_code_earns_all_points(course):
    root = course(RIGHT)
    assert repository_root() == root
    score = run_checks(["C1", "C2"])
    assert score.ok and (score.earned, score.possible) == (13, 13), to_frame(score).to_string()
    assert [one.exercise.id for one in score.present] == ["C1"]


FORGED = """
    import json, os
    def cuda_time():
        test = "tests/public/test_c1_cuda_time.py::test_one"
        line = json.dumps({"event": "finished", "test": test, "outcome": "passed",
                           "message": "", "seconds": 0})
        print(line)
        for descriptor in range(3, 64):
            try: os.write(descriptor, f"{'0' * 64} {line}\\n{line}\\n".encode())
            except OSError: pass
        os._exit(0)
"""
CHEATS = {
    "wrong": ("def cuda_time(): return 2", "it did not return 1"),
    "raises": ("def cuda_time(): return 1 / 0", r"ZeroDivisionError.*labkit/timers.py, line 1"),
    "missing": ("x = 1", "ImportError.*cuda_time"),
    "syntax": ("def cuda_time(: return 1", "SyntaxError"),
    "sys.exit": ("def cuda_time(): import sys; sys.exit(0)", "SystemExit: 0"),
    "os._exit": ("def cuda_time(): import os; os._exit(0)", "ended Python with exit status 0"),
    "exit at import": ("import sys; sys.exit(0)", "ended Python|SystemExit"),
    "_exit at import": ("import os; os._exit(0)", "ended Python with exit status 0"),
    "segfault": ("def cuda_time(): import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "endless": ("def cuda_time():\n    while True: pass", "did not finish within 1.5 s"),
    "endless at import": ("while True: pass", "did not finish within 1.5 s"),
    "skips": ("def cuda_time(): import pytest; pytest.skip('no')", "no"),
    "xfails": ("def cuda_time(): import pytest; pytest.xfail('no')", "no"),
    "stops pytest": ("def cuda_time(): import pytest; pytest.exit('no', 0)", "ended Python"),
    "forges": (FORGED, "ended Python with exit status 0"),
    "open": (
        "def cuda_time(): raise NotImplementedError('Coding Exercise 1: labkit/timers.py, f')",
        "^not implemented yet: labkit/timers.py, f$",
    ),
    "open, no words": (
        "def cuda_time(): raise NotImplementedError",
        "^not implemented yet: labkit/timers.py, cuda_time$",
    ),
}


@pytest.mark.parametrize("name", CHEATS)
def test_anything_else_earns_nothing(name, course):
    body, says = CHEATS[name]
    course(body)
    (one,) = run_checks(["C1"], limit_s=1.5).exercises
    messages = [one.problem, *(check.message for check in one.checks)]
    assert one.state == "FAIL" and (one.earned, one.possible) == (0, 13), f"{one}"
    assert any(re.search(says, message or "") for message in messages), messages


BREAKS = ["os._exit", "_exit at import", "exit at import", "endless", "syntax", "forges"]


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_exercise_does_not_take_another_with_it(name, course):
    course(CHEATS[name][0], other=RIGHT)
    c1, c2 = run_checks(["C1", "C2"], limit_s=1.5).exercises
    assert (c1.state, c1.earned) == ("FAIL", 0), f"{c1}"
    assert (c2.state, c2.earned) == ("OK", 4), f"{c2}"


def test_the_first_exercise_is_not_blamed_for_the_second(course):
    course(RIGHT, other="import sys; sys.exit(0)")
    c1, c2 = run_checks(["C1", "C2"]).exercises
    assert (c1.state, c2.state) == ("OK", "FAIL"), f"{c1}, {c2}"


def test_points_add_up_by_test(course):
    course("calls = []\ndef cuda_time(): calls.append(1); return len(calls)")
    (one,) = run_checks(["C1"]).exercises
    assert (one.state, one.earned) == ("FAIL", 6), f"the first test passes alone: {one}"


def test_no_process_is_left_behind(course, tmp_path):
    course(
        "import subprocess\n"
        "def cuda_time():\n"
        f"    child = subprocess.Popen(['sleep', '61'])\n"
        f"    open({str(tmp_path / 'pids')!r}, 'a').write(f'{{child.pid}} ')\n"
        "    return 1\n"
    )
    assert run_checks(["C1"]).ok
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    for _ in range(100):
        alive = [pid for pid in pids if os.path.exists(f"/proc/{pid}") and not zombie(pid)]
        if not alive:
            break
        time.sleep(0.02)
    assert len(pids) == 2 and not alive, f"{alive} of {pids} still run"


def zombie(pid) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_results_come_as_they_are_made(course):
    course(RIGHT)
    seen = []
    run_checks(["C1"], on_check=seen.append)
    assert [check.outcome for check in seen] == ["passed", "passed"]


def test_an_interrupted_run_leaves_nothing(course):
    """An exception from the caller's side, as Ctrl-C is, ends the process too."""
    course(RIGHT)

    def interrupt(check):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_checks(["C1"], on_check=interrupt)


def test_outside_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("labkit.course.registry._PACKAGE_ROOT", tmp_path)
    with pytest.raises(UserError, match="course repository"):
        run_checks(["C1"])


# --------------------------------------------------------------------------------------- tables


def shown(score) -> str:
    console = Console(width=90)
    with console.capture() as capture:
        console.print(render(score))
    return capture.get()


def test_score_table(course):
    course("def cuda_time(): return 2", other=RIGHT)
    text = shown(run_checks())
    for line in ("Coding 1 FAIL 0/13", "Coding 2 OK 4/4", "Total 4/17", "2 passed, 2 failed in"):
        assert line in " ".join(text.split()), text
    assert "Not in this release: Coding 3–9, Experiment 2–7" in text, text
    assert "it did not return 1" in text, text


def test_report_of_a_check(course):
    course("def cuda_time(): raise ValueError('<b>')")
    report = check("c1")
    assert not report
    html, text = report._repr_html_(), repr(report)
    for wanted in ("It returns one again.", "0/13"):
        assert wanted in html and wanted in text, text
    assert "&lt;b&gt;" in html and "<b>" in text, "messages are escaped in HTML, and only there"
    course(RIGHT)
    assert check("C1"), "the file was mended, and the check still fails"


def test_check_of_what_has_no_checks(course):
    course(RIGHT)
    with pytest.raises(UserError, match="Question 1"):
        check("Q1")
    assert not check("C5") and "not part of this release" in repr(check("C5"))


def test_the_course_package_is_light():
    """Neither torch nor pandas nor pytest is needed to list exercises or print a score."""
    code = (
        "import sys, labkit.course.tables, labkit.course.checks\n"
        "print(sorted({'torch', 'pandas', 'pytest', 'matplotlib'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]", f"imported: {out.stdout}"
