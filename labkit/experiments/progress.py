"""Progress of a measurement: a bar on a terminal, a line in a notebook, nothing anywhere else."""

import sys
import time
from collections.abc import Callable
from contextlib import contextmanager

REDRAW_S = 0.2


@contextmanager
def steps(title: str, total: int, progress: Callable | bool | None = None):
    """A context that gives `step(text)`, to call before each of `total` pieces of work.

    `progress` is None for what suits the place, False for silence, or a function that is called
    with the number of pieces done, `total` and the text.
    """
    with _choose(title, total, progress) as show:
        done = -1

        def step(text: str) -> None:
            nonlocal done
            done += 1
            show(done, total, text)

        yield step
        show(total, total, "")


@contextmanager
def _choose(title: str, total: int, progress):
    if callable(progress):
        yield progress
    elif progress is False:
        yield lambda done, total, text: None
    elif _in_notebook():
        yield _NotebookLine(title)
    else:
        with _terminal_bar(title, total) as show:
            yield show


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")


@contextmanager
def _terminal_bar(title: str, total: int):
    """On standard error, and gone when it ends: what a command prints is its result."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[text]}", "dim", markup=False),
    )  # fmt: skip
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=total, text="")
        yield lambda done, total, text: bar.update(task, completed=done, text=text)


class _NotebookLine:
    """One line of plain text that is rewritten in place; a saved notebook keeps its last state."""

    def __init__(self, title: str):
        self.title, self.began, self.shown, self.handle = title, time.perf_counter(), 0.0, None

    def __call__(self, done: int, total: int, text: str) -> None:
        from IPython.display import display, update_display

        now = time.perf_counter()
        if done < total and now - self.shown < REDRAW_S:
            return
        self.shown = now
        blocks = round(20 * done / total) if total else 20
        line = f"{self.title} {'█' * blocks}{'░' * (20 - blocks)} {done}/{total} {text}"
        if done == total:
            line = f"{self.title}: {total} measured in {now - self.began:.0f} s"
            line = line if total else f"{self.title}: nothing left to measure"
        bundle = {"text/plain": line}
        if self.handle is None:
            self.handle = display(bundle, raw=True, display_id=True)
        else:
            update_display(bundle, raw=True, display_id=self.handle.display_id)
