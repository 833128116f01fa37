"""A notebook's cells: made ready to run, watched while they run, explained when they fail."""

import ast
import re
import signal
from pathlib import Path

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert.filters import strip_ansi
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from labkit.errors import UserError
from labkit.runner.summary import Failure, write_text


def prepare(source: bytes, parameters: dict):
    """A notebook with its parameters set, ready to run. Raises UserError for one that cannot."""
    if not source.strip():
        raise UserError("the file is empty")
    invalid = {}
    try:
        nb = nbformat.reads(source.decode(), as_version=4, capture_validation_error=invalid)
        nb = load_notebook_node(nb)
    except Exception as error:  # a parser may raise anything for a file that is no notebook
        raise UserError(f"this is no notebook: {_first_line(error)}") from None
    if invalid:
        raise UserError(f"this is no valid notebook: {_first_line(*invalid.values())}")
    kernelspec = nb.metadata.get("kernelspec", {})
    language = kernelspec.get("language") or nb.metadata.get("language_info", {}).get("name")
    if language not in (None, "python"):
        raise UserError(f"the notebook is written in {language}; labkit runs Python")
    _check_parameters(nb, parameters)
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return parameterize_notebook(nb, parameters, kernel_name="python3", language="python")


def _first_line(error) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _check_parameters(nb, parameters: dict):
    """Each parameter must be defined in the cell tagged for it: papermill would inject any."""
    cells = [cell for cell in nb.cells if "parameters" in cell.metadata.get("tags", ())]
    if not cells:
        raise UserError('no cell has the tag "parameters"; tag the one with profile = "auto"')
    try:
        statements = ast.parse(cells[0].source).body
    except (SyntaxError, ValueError) as error:
        raise UserError(f"the cell tagged parameters is not Python: {error}") from None
    names = [
        target.id
        for statement in statements
        for target in getattr(statement, "targets", [getattr(statement, "target", None)])
        if isinstance(target, ast.Name)
    ]
    if unknown := sorted(parameters.keys() - names):
        known = ", ".join(names) or "none"
        raise UserError(f"no parameter {', '.join(unknown)}; the notebook has {known}")


def code_cells(nb) -> list:
    """The cells that a run executes: code that is neither blank nor tagged "skip-execution"."""
    return [
        cell
        for cell in nb.cells
        if cell.cell_type == "code"
        and cell.source.strip()
        and "skip-execution" not in cell.metadata.get("tags", ())
    ]


class CellWatch:
    """Where a notebook is on its way through the kernel; `before` and `after` are its hooks.

    After each cell the notebook is saved, so that a killed run keeps what it had.
    """

    def __init__(self, nb, observer, target: Path):
        self.nb, self.observer, self.target = nb, observer, target
        self.cells = code_cells(nb)
        self.running = None  # the cell that runs, or ran last
        self.done = 0  # cells that the kernel has answered
        self.failure = None
        self.interrupted = False

    @property
    def started(self) -> bool:
        return self.running is not None

    def save(self):
        write_text(self.target, nbformat.writes(self.nb))

    def before(self, cell, cell_index: int):
        self.running = cell
        self.observer.cell(self.done + 1, len(self.cells), cell.source)

    def after(self, cell, cell_index: int, execute_reply: dict):
        self.done += 1
        self.save()
        problem = _problem(cell, execute_reply["content"])
        if problem and not self.failure:
            self.failure = self.failed(*problem)
            # The reply may say "ok" (exit(), a hidden error): end the run all the same.
            raise CellExecutionError("", problem[0], "")

    def failed(self, error: str, traceback: str = "") -> Failure:
        """The failure of the cell that runs, or of the kernel when none does yet."""
        cell = self.running
        if cell is None:
            return Failure(error, traceback=traceback)
        number = self.cells.index(cell) + 1
        lines = cell.source.splitlines()
        match = re.search(rf"Cell In\[{cell.execution_count}\], line (\d+)", traceback)
        line = int(match[1]) if match and int(match[1]) <= len(lines) else None
        return Failure(
            error=error,
            cell=cell.execution_count or number,
            cell_id=cell.get("id", ""),
            source=next(text.strip() for text in lines if text.strip()),
            line=line,
            code=lines[line - 1].strip() if line else "",
            traceback=traceback,
        )

    def left_out(self) -> Failure | None:
        """The failure of a run that ended well in appearance, though cells did not run."""
        silent = [cell for cell in self.cells if cell.execution_count is None]
        if not silent:
            return None
        self.running = silent[0]
        return self.failed(f"{len(silent)} of {len(self.cells)} cells did not run")


def _problem(cell, reply: dict) -> tuple[str, str] | None:
    """(error, traceback) of an executed cell; None when all is well, or the error was expected.

    The reply counts as well as the outputs: code can keep an error from being shown.
    """
    if any(item.get("source") == "ask_exit" for item in reply.get("payload", ())):
        return "exit() ended the kernel; a notebook must run to its last cell", ""
    if "raises-exception" in cell.metadata.get("tags", ()):
        return None
    errors = [output for output in cell.outputs if output.output_type == "error"]
    if reply["status"] != "ok":
        errors.append(reply)
    if not errors:
        return None
    error = errors[0]
    name, value = error.get("ename", "Error"), error.get("evalue", "")
    traceback = strip_ansi("\n".join(error.get("traceback", ())))
    if name == "SystemExit":
        value += " (a notebook must run to its last cell: take the exit out)"
    first, *_ = strip_ansi(value).strip().splitlines() or [""]
    return f"{name}: {first}".rstrip(": "), traceback


def explain(error: BaseException, watch: CellWatch, kernel, timeout: int | None) -> Failure:
    """Why the run of a notebook ended by an exception. Notes an interrupt in `watch`."""
    if isinstance(error, KeyboardInterrupt):
        watch.interrupted = True
        by = f" by {error}" if str(error) else ""
        return watch.failed(f"interrupted{by}; --resume goes on from here")
    if not watch.started:
        why = str(error).strip() or type(error).__name__
        return watch.failed(f"the kernel did not start: {why}", kernel.log_tail)
    if isinstance(error, DeadKernelError):
        return watch.failed(f"the kernel died: {_death(kernel.exit_code)}", kernel.log_tail)
    if isinstance(error, CellTimeoutError) and "IOPub" not in str(error):
        return watch.failed(f"the cell ran longer than {timeout} s; --timeout gives it more")
    return watch.failed(f"{type(error).__name__}: {error}", kernel.log_tail)


def _death(code: int | None) -> str:
    if code is None:
        return "its process has gone"
    if code >= 0:
        return f"its process ended by itself, with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if name == "SIGKILL":
        return "killed by SIGKILL, most often because memory ran out; ask for more, or use less"
    return f"killed by {name}"
