"""The leaderboard: it ranks what works, says what is wrong with the rest, and survives it."""

import csv
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console

from labkit.course import leaderboard
from labkit.course.leaderboard import COLUMNS, TRUTH, measured_steps, rank, render, write_csv
from labkit.errors import UserError
from labkit.experiments.table import SWEEP

REPOSITORY = Path(__file__).parents[2]
PLAIN = """
def predict_step_ms(cfg, micro_batch_size, seqlen, recompute=False, device=None):
    return {scale} * cfg.n_layers * (4.0 + micro_batch_size * seqlen * (3 + recompute) / 2500)

def predict_peak_gib(cfg, micro_batch_size, seqlen, recompute=False, device=None):
    return 1.6 + 3.13 * cfg.n_layers
"""


@pytest.fixture
def handin(tmp_path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


def only(path, **options):
    (standing,) = rank([path], **options)
    return standing


def step_ms(body: str, before: str = "") -> str:
    """A hand-in whose function of time has this body, and whose other is fine."""
    lines = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    head = "def predict_step_ms(cfg, micro_batch_size, seqlen, recompute=False, device=None):"
    return f"{before}\n{PLAIN.format(scale=1)}\n{head}\n{lines}\n"


def test_the_best_is_the_first_whatever_form_it_was_handed_in_in(handin, tmp_path):
    handin("anna/perfmodel.py", PLAIN.format(scale=3))
    handin("ben/labkit/perfmodel.py", PLAIN.format(scale=2))
    handin("carl.py", "from labkit.devices import spec\n" + PLAIN.format(scale=1))
    handins = [tmp_path / "anna", tmp_path / "ben", tmp_path / "carl.py", REPOSITORY]
    standings = rank(handins)
    assert [one.name for one in standings] == [REPOSITORY.name, "carl", "ben", "anna"]
    assert not any(one.problem for one in standings), standings
    best = standings[0].cells(1)
    assert best["time_median_pct"] < 1.5 and best["memory_median_pct"] < 0.3, best
    assert best["steps_within_15_pct"] >= 0.95 * best["steps"] == 0.95 * len(measured_steps())


def test_errors_are_those_of_the_predictions(handin):
    standing = only(handin("flat.py", step_ms("return 50.0")))
    expected = [abs(50 / ms - 1) for ms in measured_steps()["step_ms"]]
    assert max(abs(a - b) for a, b in zip(standing.time, expected, strict=True)) < 1e-12
    row = standing.cells(3)
    assert row["place"] == 3
    assert row["time_worst_pct"] == pytest.approx(100 * max(expected), abs=1e-3)
    assert row["steps_within_15_pct"] == sum(error <= 0.15 for error in expected)


def test_a_hand_in_with_a_labkit_of_its_own_uses_nothing_of_ours(handin, tmp_path):
    handin("dora/labkit/__init__.py", "")
    handin("dora/labkit/config.py", """
        class ModelConfig:
            def preset(name, n_layers):
                found = ModelConfig()
                found.n_layers = n_layers
                return found
    """)  # fmt: skip
    handin("dora/labkit/perfmodel.py", PLAIN.format(scale=1))
    standing = only(tmp_path / "dora")
    assert standing.ranked and not standing.problem, standing


FAILS = {
    "endless": (step_ms("while True: pass"), "did not finish within 1 s"),
    "endless at import": ("while True: pass", "did not finish within 1 s"),
    "exit": (step_ms("import os; os._exit(0)"), "left before the end"),
    "exit status": (step_ms("import os; os._exit(3)"), "exit status 3"),
    "sys.exit": (step_ms("raise SystemExit(0)"), "SystemExit: 0"),
    "segfault": (step_ms("import ctypes; ctypes.string_at(0)"), "Segmentation fault"),
    "real-time signal": (step_ms("import signal; signal.raise_signal(40)"), "ended Python with"),
    "stops itself": (step_ms("import signal; signal.raise_signal(19)"), "did not finish"),
    "syntax": ("def predict_step_ms(:", "SyntaxError"),
    "missing": ("x = 1", "AttributeError.*predict_step_ms"),
    "raises": (step_ms("return 1 / 0"), "predict_step_ms, [0-9]+ of [0-9]+: ZeroDivisionError"),
    "not written": (step_ms("raise NotImplementedError('C9')"), "not written yet"),
    "none": (step_ms("return None"), "returned a NoneType, not a number"),
    "nan": (step_ms("return float('nan')"), "nan is no prediction"),
    "infinite": (step_ms("return float('inf')"), "inf is no prediction"),
    "negative": (step_ms("return -1"), "-1.0 is no prediction"),
    "a great number": (step_ms("return 10 ** 400"), "OverflowError"),
    "memory": (step_ms("return len(bytearray(10 ** 11))"), "MemoryError"),
    "recursion": (step_ms("return predict_step_ms(cfg, 1, 1)"), "RecursionError"),
    "imports torch": (step_ms("return 1", before="import torch"), "imports torch"),
    "reference": (
        step_ms("return 1", before="from labkit.predictor.steptime import step_time"),
        "imports labkit.predictor.steptime, which is not its own",
    ),
    "itself": (
        step_ms("return 1", before="from labkit.perfmodel import predict_step_ms as theirs"),
        "ImportError: cannot import name 'predict_step_ms'",
    ),
    "program": (step_ms("import os; os.system('sleep 60')"), "calls os.system"),
    "process": (step_ms("import os; os.fork()"), "calls os.fork"),
    "network": (
        step_ms("import socket; socket.create_connection(('127.0.0.1', 9))"),
        "calls socket.getaddrinfo",
    ),
    "C": (step_ms("import ctypes; ctypes.CDLL(None).open(b'x', 0)"), "calls ctypes.dlsym"),
    "writes": (step_ms("open('x', 'w')"), "writes the file x"),
    "own rows": (
        step_ms("import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'[[[[')\n"
                "    except OSError: pass\nreturn 1"),
        "wrote into its report",
    ),
    "floods its report": (
        step_ms("import os\nwhile True:\n    for fd in range(3, 64):\n"
                "        try: os.write(fd, b'x' * 99999)\n        except OSError: pass"),
        "did not finish",
    ),
    "escapes": (step_ms("raise ValueError('\\x1b[31m' + 10000 * 'x')"), "ValueError: .31mx{99}"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILS)
def test_what_fails_is_a_row_with_the_reason(name, handin):
    text, says = FAILS[name]
    began = time.monotonic()
    standing = only(handin("eve.py", text), limit_s=1)
    assert time.monotonic() - began < 8
    assert re.search(says, standing.problem), standing.problem
    assert not standing.ranked and standing.cells(1)["place"] is None, standing
    assert standing.problem.isprintable() and len(standing.problem) < 700


def test_what_fails_is_below_what_works_and_the_command_goes_on(handin, tmp_path):
    bad = [handin(f"{name}.py", FAILS[name][0]) for name in ("endless", "segfault", "syntax")]
    good = handin("good.py", PLAIN.format(scale=1))
    standings = rank([*bad, tmp_path / "absent", tmp_path, good], limit_s=1)
    assert [one.ranked for one in standings] == [True, *[False] * 5]
    problems = {one.name: one.problem for one in standings}
    assert "does not exist" in problems["absent"]
    assert problems[tmp_path.name] == "it has no perfmodel.py"


def test_some_missing_predictions_do_not_spoil_the_others(handin):
    body = "if seqlen == 256: raise KeyError(seqlen)\nreturn 100.0"
    standing = only(handin("fay.py", step_ms(body)))
    n = int((measured_steps()["seqlen"] == 256).sum())
    assert standing.ranked and sum(error == float("inf") for error in standing.time) == n
    assert f"{n} of {len(standing.time)}: KeyError: 256" in standing.problem


def test_a_hand_in_cannot_read_what_was_measured(handin):
    for path in (TRUTH, REPOSITORY / "tests/hidden/truth/h200.csv", "/proc/self/environ"):
        standing = only(handin("gil.py", step_ms(f"return len(open({str(path)!r}).read())")))
        assert standing.problem == f"it reads the file {Path(path).name}", standing
    caught = f"try: return len(open({str(TRUTH)!r}).read())\nexcept BaseException: return 60.0"
    assert not only(handin("gil.py", step_ms(caught))).ranked


def test_links_and_detours_hide_no_file(handin, tmp_path):
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "data.py").symlink_to(TRUTH)
    detour = tmp_path / "__pycache__" / os.path.relpath(TRUTH, tmp_path / "__pycache__")
    for path in (tmp_path / "data.py", detour):
        standing = only(handin("gil.py", step_ms(f"return len(open({str(path)!r}).read())")))
        assert standing.problem == f"it reads the file {TRUTH.name}", f"{path}: {standing}"
    body = f"import os\nos.link({str(TRUTH)!r}, {str(tmp_path / 'hard.py')!r})\nreturn 60.0"
    assert only(handin("gil.py", step_ms(body))).problem == "it calls os.link"


def test_a_hand_in_is_not_told_what_was_measured(handin, monkeypatch):
    tasks = []
    monkeypatch.setattr(leaderboard, "_run", lambda task, *_: tasks.append(task) or "")
    only(handin("gil.py", PLAIN.format(scale=1)))
    text, steps = json.dumps(tasks[0]), measured_steps()
    numbers = {repr(number) for name in ("step_ms", "peak_gib") for number in steps[name]}
    assert len(numbers) > len(steps) and not [number for number in numbers if number in text]
    assert len(tasks[0]["configurations"]) == len(steps)


def test_no_process_and_no_file_is_left(handin, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    only(handin("hal.py", step_ms("while True: pass")), limit_s=1)
    monkeypatch.setattr("tempfile.tempdir", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hal.py"], list(tmp_path.iterdir())
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    assert not children.exists() or not children.read_text().split()


def test_names_that_are_the_same_are_told_apart(handin, tmp_path):
    paths = [handin(f"{one}/ida.py", PLAIN.format(scale=1)) for one in ("a", "b")]
    assert {one.name for one in rank(paths)} == {str(path) for path in paths}


def test_the_table_and_the_file(handin, tmp_path):
    standings = rank([
        handin("[red]jo.py", PLAIN.format(scale=1)), handin("kim.py", "x = '[bold]'; 1 / 0"),
    ])  # fmt: skip
    console = Console(width=150)
    with console.capture() as capture:
        console.print(render(standings))
    text = capture.get()
    for words in ("1  [red]jo", f"of {len(measured_steps())}", "–  kim", "ZeroDivisionError"):
        assert words in text, text
    write_csv(standings, tmp_path / "standings.csv")
    with (tmp_path / "standings.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["predictor"] for row in rows] == ["[red]jo", "kim"]
    assert tuple(rows[0]) == COLUMNS and float(rows[0]["time_median_pct"]) > 0
    assert rows[1]["place"] == rows[1]["time_median_pct"] == ""
    with pytest.raises(UserError, match="cannot be written"):
        write_csv(standings, tmp_path / "standings.csv" / "x.csv")


def sweep(path: Path, *rows: dict) -> Path:
    usual = dict.fromkeys(SWEEP.columns, "") | {
        "model": "olmoe-1b-7b", "layers": 2, "micro_batch_size": 2, "seqlen": 512,
        "recompute": "no", "micro_batches": 1, "repeat": 0, "step_ms": 10, "peak_gib": 8,
        "status": "ok", "device": "NVIDIA H200", "dtype": "bfloat16", "schema": 1,
    }  # fmt: skip
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, SWEEP.columns)
        writer.writeheader()
        writer.writerows(usual | row for row in rows)
    return path


def test_repeats_count_by_their_median_and_only_what_ran(tmp_path):
    rows = [{"repeat": i, "step_ms": ms} for i, ms in enumerate((10, 30, 11))]
    rows += [{"seqlen": 4096, "status": "out of memory", "step_ms": "", "peak_gib": ""}]
    steps = measured_steps(sweep(tmp_path / "a.csv", *rows))
    assert steps["step_ms"].tolist() == [11.0] and steps["recompute"].tolist() == [False]


def test_several_truths_are_one(tmp_path, handin):
    paths = [
        sweep(tmp_path / "a.csv", {"step_ms": 10}),
        sweep(tmp_path / "b.csv", {"step_ms": 40, "device": "NVIDIA L40", "layers": 3}),
    ]
    body = "return {'NVIDIA H200': 11.0, 'NVIDIA L40': 44.0}[device]"
    standing = only(handin("lea.py", step_ms(body)), truth=paths)
    assert standing.time == pytest.approx((0.1, 0.1))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"device": "Abacus 3"}, "'Abacus 3', which is not in the table"),
        ({"step_ms": -1}, "step_ms=-1"),
        ({"status": "failed: x"}, "no step that was measured"),
    ],
)
def test_a_truth_that_is_none_is_named(row, says, tmp_path, handin):
    with pytest.raises(UserError, match=says):
        rank([handin("max.py", PLAIN)], [sweep(tmp_path / "a.csv", row)])
    with pytest.raises(UserError, match="does not exist"):
        rank([handin("max.py", PLAIN)], [tmp_path / "nothing.csv"])


def test_the_command(handin, tmp_path):
    good, bad = handin("nia.py", PLAIN.format(scale=1)), handin("ole.py", "1 / 0")
    command = [sys.executable, "-m", "labkit.cli", "leaderboard", good, bad, "--csv", "all.csv"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and not done.stderr, done
    assert "nia" in done.stdout and "ZeroDivisionError" in done.stdout, done.stdout
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 3
    done = subprocess.run(
        [*command[:4], good, "--truth", "nothing.csv"],
        capture_output=True, text=True, cwd=tmp_path, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: nothing.csv does not exist")
