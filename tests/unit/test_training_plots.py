"""The figure of micro batches shows what was measured, and what did not fit."""

import pandas as pd
import pytest

from labkit import plots
from labkit.errors import UserError
from tests.public import checks_e4


def rows(on_gpu=True) -> pd.DataFrame:
    frame = pd.DataFrame(checks_e4.expected(on_gpu))
    size = frame["micro_batch_size"]
    return frame.assign(tokens_per_s=1e4 * size, peak_gib=10.0 + size, status="ok")


def test_both_panels_have_units_and_both_curves():
    figure = plots.micro_batches(rows())
    throughput, memory = figure.axes
    assert throughput.get_ylabel() == "tokens a second"
    assert memory.get_ylabel() == "peak memory (GiB)"
    for ax in figure.axes:
        drawn = [line.get_xdata().tolist() for line in ax.lines if line.get_marker() == "o"]
        assert drawn == [[1, 2, 4, 8, 16]] * 2, drawn


def test_what_did_not_fit_is_a_cross_and_only_the_last_shape_is_drawn():
    frame = rows()
    frame.loc[0, ["tokens_per_s", "peak_gib"]] = float("nan")
    frame.loc[0, "status"] = "out of memory"
    figure = plots.micro_batches(pd.concat([frame.assign(layers=2), frame], ignore_index=True))
    crosses = [line.get_xdata().tolist() for line in figure.axes[0].lines
               if line.get_marker() == "x"]  # fmt: skip
    assert crosses == [[16], []], crosses


def test_nothing_measured_says_why_and_a_missing_column_is_named():
    none = rows().assign(tokens_per_s=float("nan"), status="out of memory")
    texts = [text.get_text() for text in plots.micro_batches(none).axes[0].texts]
    assert any("out of memory" in text for text in texts), texts
    with pytest.raises(UserError, match="peak_gib"):
        plots.micro_batches(rows().drop(columns="peak_gib"))
