"""What the experiments that record passes and steps share: the files of a recording by its name."""

from pathlib import Path

import pandas as pd

from labkit.errors import UserError
from labkit.profiling.recording import Recording, trace_file
from labkit.profiling.trace import read_trace

TABLES = ("ranges", "kernels", "api", "summary")


def files(output, name: str) -> list[Path]:
    """All files of a recording."""
    tables = [Path(output) / f"{name}_{table}.csv" for table in TABLES]
    return [*tables, trace_file(output, name)]


def load(output, name: str, experiment: str) -> Recording:
    """The recording that an experiment left in a folder. Raises UserError if it is not there."""
    trace, told = trace_file(output, name), Path(output) / f"{name}_summary.csv"
    for path in (trace, told):
        if not path.is_file():
            raise UserError(f"{path} does not exist: `labkit experiment {experiment}` writes it")
    said = pd.read_csv(told, index_col="what")["value"]
    number = {key: float(said[key]) for key in ("steps", "before_ms", "during_ms")}
    facts = said.drop([*number, *(key for key in said.index if key.endswith("_ms"))],
                      errors="ignore")  # fmt: skip
    return Recording(
        read_trace(trace), int(number["steps"]), number["before_ms"], number["during_ms"],
        facts.dropna().to_dict(),
    )  # fmt: skip
