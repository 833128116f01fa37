"""The batch runner: only a notebook that ran to its end succeeds, and nothing is lost or left."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import nbformat
import psutil
import pytest
from rich.console import Console

from labkit import runner
from labkit.errors import UserError
from labkit.runner.batch import _place
from labkit.runner.progress import ConsoleObserver
from labkit.runner.summary import NotebookResult, exit_code, read_summary

PARAMETERS = 'profile = "auto"\nsteps = 3'


def notebook(*sources, parameters=PARAMETERS, tags=(), **metadata):
    """A notebook of these cells, the first tagged "parameters", the last tagged with `tags`."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    if cells and tags:
        cells[-1].metadata["tags"] = list(tags)
    if parameters is not None:
        tagged = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
        cells.insert(0, tagged)
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def write(folder, **notebooks):
    """Write the notebooks (or raw text) to `folder/notebooks`; "__" in a name is a folder."""
    for name, content in notebooks.items():
        path = folder / "notebooks" / (name.replace("__", "/") + ".ipynb")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else nbformat.writes(content))


def outputs(output, place):
    """All text that the executed notebook shows."""
    nb = nbformat.read(output / place, as_version=4)
    return "".join(o.get("text", "") for cell in nb.cells for o in cell.get("outputs", ()))


class Watcher(runner.Observer):
    def __init__(self):
        self.events = []

    def started(self, path, number, total):
        self.events.append(("started", path))

    def cell(self, number, cells, source):
        self.events.append(("cell", number, cells))

    def finished(self, result):
        self.events.append(("finished", result.path, result.status, result.reused))

    def note(self, message):
        self.events.append(("note", message))


# ── notebooks that must fail, each with its message: one run for all ──

NOWHERE = {"name": "nowhere", "language": "python", "display_name": "Nowhere"}
R = {"name": "ir", "language": "R", "display_name": "R"}
EXIT = "import sys; sys.exit(0)"
OS_EXIT = "import os, subprocess; subprocess.Popen(['sleep', '612.5']); os._exit(0)"
KILL, SLEEP = "import os\nos.kill(os.getpid(), 9)", "import time; time.sleep(60)"
HIDE = "get_ipython().showtraceback = lambda *args, **options: None"
INNER = "get_ipython().run_cell('1 / 0')"
NO_CELLS = '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}}'
BAD_CELL = '{"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": [{}]}'
BROKEN = {
    # name: (notebook, what the error says, the first line of the cell that it names)
    "raises": (notebook("x = 1\n1 / 0"), "ZeroDivisionError: division by zero", "x = 1"),
    "syntax": (notebook("x = ("), "SyntaxError", "x = ("),
    "sys_exit": (notebook(EXIT, "1"), "SystemExit: 0", EXIT),
    "raise_exit": (notebook("raise SystemExit"), "SystemExit", "raise SystemExit"),
    "quit_last": (notebook("quit()"), "ended the kernel", "quit()"),
    "exit_first": (notebook("exit()", "1"), "ended the kernel", "exit()"),
    "os_exit": (notebook(OS_EXIT, "1"), "exit code 0", OS_EXIT),
    "killed": (notebook(KILL), "SIGKILL, most often because memory ran out", "import os"),
    "hidden": (notebook(HIDE, "1 / 0", "1"), "ZeroDivisionError", "1 / 0"),
    "shown": (notebook(INNER), "ZeroDivisionError", INNER),
    "slow": (notebook(SLEEP), "longer than 5 s", SLEEP),
    "asks": (notebook("input()"), "StdinNotImplementedError", "input()"),
    "no_tag": (notebook("1", parameters=None), 'no cell has the tag "parameters"', ""),
    "no_profile": (notebook("1", parameters="a = 3"), "no parameter profile; the notebook has", ""),
    "bad_parameters": (notebook("1", parameters="profile = ("), "not Python", ""),
    "other_language": (notebook("1", kernelspec=R), "written in R", ""),
    "empty": ("", "the file is empty", ""),
    "no_json": ("hello", "no notebook", ""),
    "a_list": ("[]", "no notebook", ""),
    "no_cells": (NO_CELLS, "missing an expected key: cells", ""),
    "bad_cell": (BAD_CELL, "no notebook", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """All broken notebooks, and one good one after them, run once."""
    root = tmp_path_factory.mktemp("broken")
    write(root, **{name: content for name, (content, *_) in BROKEN.items()}, z=notebook("1"))
    children = set(psutil.Process().children(recursive=True))
    results = runner.run_notebooks(root=root, output=root / "results", timeout=5)
    left = set(psutil.Process().children(recursive=True)) - children
    return root, {result.path: result for result in results}, left


@pytest.mark.parametrize("name", BROKEN)
def test_failure_is_reported(broken, name):
    _, message, source = BROKEN[name]
    result = broken[1][f"notebooks/{name}.ipynb"]
    assert result.status == "failed", f"{name} counts as {result.status}"
    assert message in result.failure.error, f"{name} says {result.failure.error!r}"
    assert result.failure.source == source, f"{name} points to {result.failure.where!r}"


def test_failures_do_not_stop_the_others(broken):
    root, results, _ = broken
    assert results["notebooks/z.ipynb"].ok, f"the last one: {results['notebooks/z.ipynb']}"
    assert exit_code(list(results.values())) == 1
    recorded = read_summary(root / "results")
    assert recorded == results, f"the summary differs: {recorded.keys() ^ results.keys()}"


def test_failure_names_the_line_and_keeps_the_traceback(broken):
    failure = broken[1]["notebooks/raises.ipynb"].failure
    assert (failure.cell, failure.line, failure.code) == (3, 2, "1 / 0"), failure.where
    assert "ZeroDivisionError" in failure.traceback
    assert "\x1b" not in failure.traceback, f"terminal codes: {failure.traceback!r}"


def test_no_process_is_left(broken):
    assert not broken[2], f"left behind: {broken[2]}"
    sleeping = [p for p in psutil.process_iter(["cmdline"]) if "612.5" in (p.info["cmdline"] or ())]
    assert not sleeping, f"left behind by the kernel that died: {sleeping}"


# ── notebooks that succeed ──


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course of good notebooks, run once with a parameter, under a misleading kernelspec."""
    root = tmp_path_factory.mktemp("course")
    kernels = root / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    spec = {"argv": ["/bin/false"], "display_name": "not this one", "language": "python"}
    (kernels / "kernel.json").write_text(json.dumps(spec))
    where = "import os, sys; print(sys.executable, os.getcwd(), os.environ['IPYTHONDIR'])"
    slider = "import ipywidgets; ipywidgets.IntSlider(value=7)"
    write(
        root,
        a=notebook(where, "print(profile, steps)", kernelspec=NOWHERE),
        sub__a=notebook("1 / 0", tags=["raises-exception"]),
    )  # fmt: skip
    figure = "import labkit; labkit.record('GEMM', 1.4, 'ms')"
    write(root, **{"sub__b{x} #1": notebook(slider, figure)})
    write(root, **{".ipynb_checkpoints__a": "", "sub__.hidden__b": ""})
    before = {path: path.read_bytes() for path in root.rglob("notebooks/**/*.ipynb")}
    watcher = Watcher()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(root / "jupyter"))
        options = {"profile": "cpu", "parameters": {"steps": 4}, "observer": watcher}
        results = runner.run_notebooks(root=root, output=root / "results", **options)
    after = {path: path.read_bytes() for path in before}
    return root, results, watcher, before == after


def test_course_succeeds_in_order(course):
    names = [result.path for result in course[1]]
    assert names == [f"notebooks/{name}.ipynb" for name in ("a", "sub/a", "sub/b{x} #1")]
    assert exit_code(course[1]) == 0, [result.failure for result in course[1]]
    assert all(result.cells_run == result.cells > 0 for result in course[1]), course[1]


def test_kernel_is_this_python_in_the_notebooks_folder(course):
    root = course[0]
    python, cwd, ipython = outputs(root / "results", "notebooks/a.ipynb").split()[:3]
    assert (python, cwd) == (sys.executable, str(root / "notebooks"))
    assert ipython.startswith(tempfile.gettempdir()), f"IPYTHONDIR is {ipython}"
    assert not os.path.exists(ipython), f"{ipython} is left behind"


def test_parameters_arrive(course):
    shown = outputs(course[0] / "results", "notebooks/a.ipynb")
    assert shown.endswith("cpu 4\n"), f"the notebook saw {shown!r}"


def test_results_are_not_taken_for_notebooks(course):
    root = course[0]
    (root / "results").rename(root / "notebooks" / "results")
    found = [path.name for path in runner.find_notebooks(root)]
    (root / "notebooks" / "results").rename(root / "results")
    assert found == ["a.ipynb", "a.ipynb", "b{x} #1.ipynb"], found


def test_sources_are_not_modified(course):
    assert course[3], "a source notebook has changed"


def test_executed_notebook_keeps_widgets_and_key_figures(course):
    output, result = course[0] / "results", course[1][2]
    nb = nbformat.read(output / result.executed, as_version=4)
    assert "7" in json.dumps(nb.metadata.widgets), "the slider's state is not stored"
    assert [str(figure) for figure in result.figures] == ["GEMM: 1.4 ms"]


def test_observer_hears_of_every_cell(course):
    events = course[2].events
    assert events[:2] == [("started", "notebooks/a.ipynb"), ("cell", 1, 4)], events[:2]
    assert events[5] == ("finished", "notebooks/a.ipynb", "ok", False), events[5]


# ── resume ──


def test_resume_runs_only_what_is_new_or_changed(tmp_path):
    write(tmp_path, a=notebook("1"), b=notebook("1"), c=notebook("1 / 0"))
    options = {"root": tmp_path, "output": tmp_path / "results", "resume": True}

    def statuses(**more):
        results = runner.run_notebooks(**options, **more)
        return [(result.status, result.reused) for result in results]

    first = statuses()
    assert first == [("ok", False), ("ok", False), ("failed", False)], first
    write(tmp_path, b=notebook("2"), c=notebook("1"))
    second = statuses()
    assert second == [("ok", True), ("ok", False), ("ok", False)], second
    other = statuses(parameters={"steps": 5}, paths=[tmp_path / "notebooks" / "a.ipynb"])
    assert other == [("ok", False)], f"another parameter: {other}"
    assert len(read_summary(tmp_path / "results")) == 3, "running one notebook lost the others"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"notebooks": [{"path": "a"}]}', "\xff"])
def test_unreadable_summary_is_set_aside(tmp_path, text):
    write(tmp_path, a="")
    output = tmp_path / "results"
    output.mkdir()
    (output / "summary.json").write_text(text, encoding="latin-1")
    watcher = Watcher()
    results = runner.run_notebooks(root=tmp_path, output=output, resume=True, observer=watcher)
    assert results[0].status == "failed", results
    assert (output / "summary.unreadable.json").read_text(encoding="latin-1") == text
    assert watcher.events[0][0] == "note", f"nobody was told: {watcher.events}"
    assert len(read_summary(output)) == 1


# ── interrupts and kernels that do not start ──

RUN = """
import sys
from labkit import runner
from labkit.runner.progress import ConsoleObserver
with ConsoleObserver() as observer:
    results = runner.run_notebooks(root=sys.argv[1], output=sys.argv[2], observer=observer)
observer.summary(results, sys.argv[2])
sys.exit(runner.exit_code(results))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_results_and_leaves_no_process(tmp_path, number):
    child = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    wait = "open('waits', 'w').close(); import time; time.sleep(600)"
    write(tmp_path, a=notebook("print('done')", child, wait), b=notebook("1"))
    command = [sys.executable, "-c", RUN, str(tmp_path), str(tmp_path / "results")]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "notebooks" / "waits").exists():
        assert time.monotonic() < deadline and run.poll() is None, "the cell never ran"
        time.sleep(0.05)
    started = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(number)
    text, _ = run.communicate(timeout=60)
    assert len(started) == 2, f"kernel and sleep expected: {started}"
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not alive, f"left behind: {alive}"
    assert run.returncode == 130, text
    assert "--resume" in text and "Traceback" not in text, text
    result = read_summary(tmp_path / "results")["notebooks/a.ipynb"]
    assert (result.status, result.cells_run, result.failure.cell) == ("interrupted", 4, 5), result
    assert outputs(tmp_path / "results", result.executed) == "done\n"


def test_killed_run_has_saved_the_cells_before(tmp_path):
    kill = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    write(tmp_path, a=notebook("print('kept')", kill))
    command = [sys.executable, "-c", RUN, str(tmp_path), str(tmp_path / "results")]
    scratch = {**os.environ, "TMPDIR": str(tmp_path)}  # what is killed cannot tidy up
    code = subprocess.run(command, stdout=subprocess.DEVNULL, env=scratch, timeout=60).returncode
    assert code == -signal.SIGKILL, f"the run ended with {code}"
    result = read_summary(tmp_path / "results")["notebooks/a.ipynb"]
    assert result.status == "unfinished", result
    assert outputs(tmp_path / "results", result.executed) == "kept\n"


def test_kernel_that_does_not_start(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho No module named ipykernel >&2\nexit 1\n")
    python.chmod(0o755)
    write(tmp_path, a=notebook("1"))
    monkeypatch.setattr(sys, "executable", str(python))
    [result] = runner.run_notebooks(root=tmp_path, output=tmp_path / "results")
    assert "the kernel did not start" in result.failure.error, result
    assert "No module named ipykernel" in result.failure.traceback, result.failure


def test_kernel_that_does_not_start_is_tried_again(tmp_path, monkeypatch):
    python = tmp_path / "python"
    again = f'[ -e "$0.tried" ] && exec {sys.executable} "$@"'
    python.write_text(f'#!/bin/sh\n{again}\ntouch "$0.tried"\nexit 1\n')
    python.chmod(0o755)
    write(tmp_path, a=notebook("1"))
    monkeypatch.setattr(sys, "executable", str(python))
    [result] = runner.run_notebooks(root=tmp_path, output=tmp_path / "results")
    assert result.ok and (tmp_path / "python.tried").exists(), result.failure


def test_temporary_folder_with_a_long_name(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 120)  # too long for a socket file
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    write(tmp_path, a=notebook("1"))
    [result] = runner.run_notebooks(root=tmp_path, output=tmp_path / "results")
    assert result.ok, result.failure


# ── what is refused before anything runs ──


@pytest.mark.parametrize(
    "options, message",
    [
        ({"paths": ["nowhere.ipynb"]}, "nowhere.ipynb does not exist"),
        ({"paths": ["notes.txt"]}, "does not end in .ipynb"),
        ({"paths": ["bare"]}, "no notebook below bare"),
        ({"paths": []}, "no notebook to run"),
        ({"profile": "tpu"}, "no profile 'tpu'; there are auto, cpu, gpu"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"output": "notes.txt"}, "cannot be written"),
        ({"output": "."}, "would mix results and notebooks"),
        ({"output": "notebooks/results"}, "would mix results and notebooks"),
    ],
)
def test_refused(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, a=notebook("1"))
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError) as refusal:
        runner.run_notebooks(**options)
    assert message in str(refusal.value), f"it says {refusal.value}"


def test_executed_notebooks_never_share_a_place(tmp_path):
    paths = ["notebooks/a.ipynb", "a.ipynb", "notebooks/elsewhere/a.ipynb", "elsewhere/a.ipynb"]
    places = [_place(tmp_path / path, tmp_path) for path in paths]
    places.append(_place(tmp_path.parent / "a.ipynb", tmp_path))
    assert len(set(places)) == 5, places


def test_log_has_no_control_characters(capsys):
    with ConsoleObserver(Console(force_terminal=False, width=40)) as observer:
        observer.started("notebooks/[red]a.ipynb", 1, 2)
        observer.cell(1, 3, "\nx = 1")
        observer.finished(NotebookResult("notebooks/[red]a.ipynb", "ok", seconds=61))
    text = capsys.readouterr().out
    assert text.isprintable() or set(filter(lambda c: not c.isprintable(), text)) == {"\n"}, text
    assert text.splitlines()[-1] == "ok          notebooks/[red]a.ipynb  1 min 01 s", text
