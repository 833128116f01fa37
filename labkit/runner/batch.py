"""Run notebooks from top to bottom without a browser, and keep what came of each."""

import hashlib
import json
import math
import signal
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from labkit import __version__
from labkit.errors import NotThisMachine, UserError
from labkit.files import writable_folder
from labkit.runner import pages
from labkit.runner.summary import (
    SUMMARY,
    Failure,
    NotebookResult,
    read_summary,
    write_summary,
)

try:
    from labkit.runner.cells import CellWatch, explain, prepare
    from labkit.runner.kernel import ThisPython, execute, transports
except ModuleNotFoundError as error:
    raise NotThisMachine(
        f"running notebooks needs {error.name}, which is not installed; "
        "python -m pip install 'labkit[notebook]' brings it"
    ) from error

PROFILES = ("auto", "cpu", "gpu")


class Observer:
    """What a run tells whoever watches. Every method may be left as it is."""

    def started(self, path: str, number: int, total: int):
        """Notebook `number` of `total` begins."""

    def cell(self, number: int, cells: int, source: str):
        """Code cell `number` of `cells` begins."""

    def finished(self, result: NotebookResult):
        """A notebook has ended, one way or another, or was kept from an earlier run."""

    def note(self, message: str):
        """Something that the user should know, though the run goes on."""


@dataclass(frozen=True)
class _Settings:
    root: Path
    output: Path
    parameters: dict
    timeout: int | None
    observer: Observer


def find_notebooks(root=".") -> list[Path]:
    """All notebooks below `root/notebooks`, or below `root` when it has no such folder, sorted.
    Hidden folders (checkpoints) are left out, and those that hold the results of a run."""
    root = Path(root)
    folder = root / "notebooks" if (root / "notebooks").is_dir() else root
    found = sorted(path.relative_to(folder) for path in folder.rglob("*.ipynb"))
    return [
        folder / path
        for path in found
        if not any(part.startswith(".") for part in path.parts)
        and not any((folder / parent / SUMMARY).exists() for parent in path.parents)
    ]


def run_notebooks(
    paths=None,
    *,
    root=".",
    output="results",
    profile="auto",
    parameters: dict | None = None,
    timeout: float | None = None,
    resume: bool = False,
    observer: Observer | None = None,
) -> list[NotebookResult]:
    """Run notebooks one after the other; one that fails does not stop the others.

    `paths` are notebooks or folders; None is the course below `root`. Each notebook gets `profile`
    and `parameters`, which its cell tagged "parameters" must define, and runs in its own folder.
    `timeout` is in seconds, for one cell. `output` receives the executed notebooks, their pages,
    `index.html` and `summary.json`, rewritten after each notebook. `resume` keeps what succeeded
    before with the same notebook, parameters and labkit. Ctrl-C, SIGTERM and SIGHUP end the run
    early: the last result is then "interrupted".
    Raises UserError, before anything runs, for a path, a setting or an output that cannot be used.
    """
    settings = _settings(root, output, profile, parameters, timeout, observer)
    notebooks = _expand(find_notebooks(root) if paths is None else paths)
    _check_output(notebooks, settings)
    earlier = read_summary(settings.output, settings.observer.note)
    results = []
    with _stoppable():
        for number, path in enumerate(notebooks, 1):
            kept = earlier.get(_name(path, settings.root)) if resume else None
            if kept and _still_holds(kept, path, settings):
                results.append(replace(kept, reused=True))
            else:
                settings.observer.started(_name(path, settings.root), number, len(notebooks))
                results.append(_run(path, settings))
            _publish(results[-1], settings)
            settings.observer.finished(results[-1])
            if results[-1].status == "interrupted":
                break
    return results


def run_notebook(path, **settings) -> NotebookResult:
    """`run_notebooks` for one notebook."""
    return run_notebooks([path], **settings)[0]


def _settings(root, output, profile, parameters, timeout, observer) -> _Settings:
    if profile not in PROFILES:
        raise UserError(f"no profile {profile!r}; there are {', '.join(PROFILES)}")
    if timeout is not None and not 0 < timeout < math.inf:
        raise UserError(f"timeout={timeout} must be a number of seconds above 0")
    return _Settings(
        root=Path(root).resolve(),
        output=Path(output).resolve(),
        parameters={"profile": profile, **(parameters or {})},
        timeout=math.ceil(timeout) if timeout else None,
        observer=observer or Observer(),
    )


def _expand(paths) -> list[Path]:
    """The notebooks that the paths name, each once. Raises UserError for what is none."""
    notebooks = {}
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path} does not exist; give a notebook or a folder of notebooks")
        found = find_notebooks(path) if path.is_dir() else [path]
        if not found:
            raise UserError(f"there is no notebook below {path}")
        if found[0].suffix != ".ipynb":
            raise UserError(f"{path} is no notebook: its name does not end in .ipynb")
        notebooks.update((notebook.resolve(), None) for notebook in found)
    if not notebooks:
        raise UserError("there is no notebook to run; start labkit in the course's folder")
    return list(notebooks)


def _check_output(notebooks: list[Path], settings: _Settings):
    """The output must be writable, and its notebooks must not replace those that run."""
    root, output = settings.root, settings.output
    inside = (root / "notebooks") in (output, *output.parents)
    if inside or any((output / _place(path, root)).resolve() == path for path in notebooks):
        raise UserError(f"output {output} would mix results and notebooks; give another folder")
    writable_folder(output)


def _name(path: Path, root: Path) -> str:
    """How a notebook is called: its path from the course's folder, or all of it."""
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def _place(path: Path, root: Path) -> Path:
    """Where an executed notebook goes, relative to the output; no two notebooks share a place."""
    if not path.is_relative_to(root):
        return Path("outside", *path.parts[1:])
    name = path.relative_to(root)
    return name if name.parts[0] == "notebooks" else "elsewhere" / name


def _fingerprint(source: bytes, parameters: dict) -> str:
    made_by = json.dumps([__version__, parameters], sort_keys=True, default=str)
    return hashlib.sha256(source + made_by.encode()).hexdigest()


def _still_holds(result: NotebookResult, path: Path, settings: _Settings) -> bool:
    """Whether an earlier success came from the same notebook and parameters, and is still there."""
    try:
        fingerprint = _fingerprint(path.read_bytes(), settings.parameters)
    except OSError:
        return False
    there = (settings.output / result.executed).is_file()
    return result.ok and there and result.fingerprint == fingerprint


def _publish(result: NotebookResult, settings: _Settings):
    """Put a result among the others. They are read again: another run may have added some."""
    try:
        records = read_summary(settings.output, settings.observer.note)
        records[result.path] = replace(result, reused=False)
        kept = [records[name] for name in sorted(records) if (settings.root / name).exists()]
        write_summary(settings.output, kept)
        pages.write_index(settings.output, kept)
    except OSError as error:
        raise UserError(f"the report in {settings.output} cannot be written: {error}") from None


@contextmanager
def _stoppable():
    """Let SIGTERM (a job's time is over) and SIGHUP (a terminal has closed) act as Ctrl-C."""

    def stop(number, frame):
        raise KeyboardInterrupt(signal.Signals(number).name)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    signals = [getattr(signal, name) for name in names]
    if threading.current_thread() is not threading.main_thread():
        signals = []  # Python lets only the main thread have handlers
    before = {s: signal.signal(s, stop) for s in signals if signal.getsignal(s) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(path: Path, settings: _Settings) -> NotebookResult:
    """Run one notebook; whatever is wrong with it is in the result."""
    start = time.monotonic()
    result = NotebookResult(
        path=_name(path, settings.root),
        status="unfinished",
        title=path.stem,
        parameters=settings.parameters,
        started=datetime.now().isoformat(timespec="seconds"),
    )
    place = _place(path, settings.root)
    try:
        source = path.read_bytes()
        result = replace(result, fingerprint=_fingerprint(source, settings.parameters))
        nb = prepare(source, settings.parameters)
        watch = CellWatch(nb, settings.observer, settings.output / place)
        watch.save()
    except (OSError, UserError) as error:
        return replace(result, status="failed", failure=Failure(str(error)))
    result = replace(
        result,
        title=pages.title(nb) or path.stem,
        cells=len(watch.cells),
        executed=place.as_posix(),
    )
    _publish(result, settings)
    failure = _execute(nb, path.parent, settings.timeout, watch)
    status = "ok" if failure is None else "interrupted" if watch.interrupted else "failed"
    try:
        written = pages.write_notebook(nb, settings.output, place)
    except OSError as error:
        status, written = "failed", {}
        failure = failure or Failure(f"the executed notebook cannot be written: {error}")
    return replace(
        result,
        status=status,
        failure=failure,
        cells_run=watch.done,
        seconds=round(time.monotonic() - start, 3),
        **written,
    )


def _execute(nb, folder: Path, timeout: int | None, watch: CellWatch) -> Failure | None:
    """Run the cells in a fresh kernel. One that does not start is tried a second time."""
    for transport in transports():
        with tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True) as scratch:
            kernel = ThisPython(Path(scratch), transport)
            try:
                execute(nb, kernel, folder, timeout, watch.before, watch.after)
            except (Exception, KeyboardInterrupt) as error:
                failure = watch.failure or explain(error, watch, kernel, timeout)
            else:
                failure = watch.failure or watch.left_out()
        if watch.started or watch.interrupted:
            break
    return failure
