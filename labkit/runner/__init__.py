"""Notebooks run as a batch: `run_notebooks` executes them, and writes a report that shows all."""

from labkit.runner.batch import Observer, find_notebooks, run_notebook, run_notebooks
from labkit.runner.summary import Failure, NotebookResult, exit_code

__all__ = [
    "Failure",
    "NotebookResult",
    "Observer",
    "exit_code",
    "find_notebooks",
    "run_notebook",
    "run_notebooks",
]
