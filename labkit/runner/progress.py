"""How `labkit run` shows on a terminal what it does, and in a log what it did."""

from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from labkit.runner.batch import Observer
from labkit.runner.pages import duration
from labkit.runner.summary import STATUSES, NotebookResult, exit_code

STYLES = {"ok": "green", "failed": "bold red", "interrupted": "yellow"}


class ConsoleObserver(Observer):
    """A line a notebook; while one runs, a live line with its cell and time, on a terminal only.

    Use it as a context manager around the run, so that the live line ends with it.
    """

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self.live = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeElapsedColumn(table_column=Column(min_width=7, no_wrap=True)),
            TextColumn("{task.fields[source]}", "dim", markup=False, table_column=Column(ratio=1)),
            expand=True,
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = None

    def __enter__(self) -> "ConsoleObserver":
        self.live.start()
        return self

    def __exit__(self, *exception):
        self.live.stop()

    def started(self, path: str, number: int, total: int):
        self.task = self.live.add_task(f"{number}/{total} {path}", total=None, source="")
        if not self.console.is_terminal:
            self._line(f"{'running':<12}{path} ({number} of {total})")

    def cell(self, number: int, cells: int, source: str):
        first = next(line.strip() for line in source.splitlines() if line.strip())
        self.live.update(self.task, completed=number, total=cells, source=first)

    def finished(self, result: NotebookResult):
        if self.task is not None:
            self.live.remove_task(self.task)
            self.task = None
        word = "kept" if result.reused else result.status if result.ok else result.status.upper()
        style = STYLES.get(result.status, "")
        line = f"{result.path}  {duration(result.seconds)}"
        self._line(Text.assemble((f"{word:<12}", style), line))
        if failure := result.failure:
            for text in filter(None, (failure.where, failure.error)):
                self._line(f"{'':12}{text}")

    def note(self, message: str):
        self._line(Text(f"{'note':<12}{message}", style="yellow"))

    def summary(self, results: list[NotebookResult], output):
        """The last lines of a run: how many succeeded, where to look, how to go on."""
        counts = Counter(result.status for result in results)
        found = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
        self._line(f"{found}; see {output}/index.html")
        if exit_code(results):
            self._line("labkit run --resume runs what is missing, and keeps what succeeded")

    def _line(self, text):
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
