"""Calibration finds constants again, says how sure it is, and refuses what it cannot know."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.config import ModelConfig
from labkit.devices import spec
from labkit.errors import UserError
from labkit.experiments.sweep import Grid
from labkit.experiments.table import SWEEP, Table
from labkit.predictor import calibrate as fitting
from labkit.predictor.calibrate import calibrate, calibrate_files, configurations
from labkit.predictor.constants import NAMES, Constants
from labkit.predictor.known import SHIPPED, constants_of, read_table
from labkit.predictor.predict import peak_gib
from labkit.predictor.steptime import step_time
from labkit.predictor.unseen import from_spec

TRUE = SHIPPED["H200 SXM"]
GRID = Grid("olmoe-1b-7b", (1, 2, 4), (1, 4), (256, 1024, 4096), repeats=2)


def rows_of(constants: Constants, grid: Grid = GRID, scatter: float = 0.0, device="NVIDIA H200"):
    """A sweep of a machine that has exactly these constants, as a DataFrame."""
    noise = np.random.default_rng(0)
    rows = []
    for place, key in enumerate(grid.keys()):
        cfg = ModelConfig.preset(key["model"], n_layers=key["layers"])
        shape = key["micro_batch_size"], key["seqlen"], key["recompute"] == "yes"
        found = step_time(cfg, *shape, constants)
        ms = float(found) * (1 + scatter * noise.standard_normal())
        kinds = found.by("group")
        rows.append(key | {
            "position": place, "tokens": shape[0] * shape[1], "step_ms": ms, "p10_ms": 0.999 * ms,
            "p90_ms": 1.001 * ms, "peak_gib": float(peak_gib(cfg, *shape, spec("H200"))),
            **{f"{kind}_ms": kinds.get(kind, 0.0) for kind in fitting.KINDS},
            "status": "ok", "device": device, "dtype": "bfloat16",
        })  # fmt: skip
    return pd.DataFrame(rows)


def shaken(factor: float = 1.2) -> Constants:
    """The true constants, each too high or too low by a factor."""
    values = {n: getattr(TRUE, n) * factor ** (-1) ** i for i, n in enumerate(NAMES)}
    return Constants(**values)


@pytest.fixture(scope="module")
def fitted():
    return calibrate(rows_of(TRUE, scatter=0.002), shaken())


def test_errors_of_steps_left_out_are_those_of_the_scatter(fitted):
    errors = fitted.errors["error"].abs()
    assert len(errors) == 36 and errors.median() < 0.005 and errors.max() < 0.03


def test_what_a_sweep_tells_is_found_again_and_known_well(fitted):
    assert abs(fitted.constants.optimizer_gbs / TRUE.optimizer_gbs - 1) < 0.01
    assert fitted.sd["optimizer_gbs"] < 0.01
    for name in NAMES:  # the rest is where the sweep and Part 1, which was shaken, meet
        assert abs(np.log(getattr(fitted.constants, name) / getattr(TRUE, name))) < 0.25, name


def test_the_table_says_what_each_constant_means(fitted):
    table = fitted.table().set_index("constant")
    assert list(table.index) == list(NAMES)
    assert table.loc["gemm_tflops", "unit"] == "TFLOP/s"
    assert (table["± %"] > 0).all() and table["what it is"].str.len().min() > 10


def test_a_fit_that_many_constants_serve_is_refused():
    few = replace(
        GRID, layers=(2,), seqlens=(4096,), micro_batch_sizes=(1, 2, 3, 4, 5, 6), repeats=1
    )
    with pytest.raises(
        UserError, match=r"do not tell attention_tflops .*other numbers of layers, seq"
    ):
        calibrate(rows_of(TRUE, few), from_spec(spec("H200")), measured=False)


@pytest.mark.parametrize("bad", [float("nan"), -1.0, 0.0, float("inf")])
@pytest.mark.parametrize("column", ["step_ms", "p90_ms", "peak_gib", "layers"])
def test_a_value_that_is_no_measurement_is_named(column, bad):
    rows = rows_of(TRUE)
    rows[column] = rows[column].astype(float)
    rows.loc[3, column] = bad
    with pytest.raises(UserError, match=f"{column}={bad}"):
        configurations(rows)


def test_too_few_rows_and_two_devices_are_refused():
    rows = rows_of(TRUE)
    with pytest.raises(UserError, match="4 configurations are too few for 13 constants"):
        configurations(rows.drop_duplicates(["layers", "micro_batch_size", "seqlen"]).head(4))
    rows.loc[0, "device"] = "NVIDIA L40"
    with pytest.raises(UserError, match=r"NVIDIA H200.*NVIDIA L40"):
        configurations(rows)


def test_repeats_count_by_their_median():
    rows = rows_of(TRUE)
    first = rows.iloc[0]
    same = (rows[["layers", "micro_batch_size", "seqlen", "recompute"]] == first[
        ["layers", "micro_batch_size", "seqlen", "recompute"]]).all(axis=1)  # fmt: skip
    rows.loc[same, "step_ms"] = [1.0, 3.0]
    assert configurations(rows)["step_ms"].min() == 2.0


def test_a_sweep_without_a_column_is_named(tmp_path):
    (tmp_path / "sweep.csv").write_text("model,layers\nolmoe-1b-7b,2\n")
    with pytest.raises(UserError, match=r"lacks the columns .*step_ms"):
        calibrate_files(tmp_path)


def test_the_command_writes_constants_that_predictions_then_use(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slow = replace(TRUE, optimizer_gbs=TRUE.optimizer_gbs / 2)
    facts = {"date": None, "device": "NVIDIA H200", "dtype": "bfloat16", "torch": "2.13.0",
             "driver": None}  # fmt: skip
    table = Table(tmp_path, SWEEP, facts)
    for row in rows_of(slow).to_dict("records"):
        table.append({name: row[name] for name in row if name not in ("device", "dtype")})
    monkeypatch.setattr(fitting, "_start", lambda *args, **kwargs: (shaken(), True))
    done = CliRunner().invoke(app, ["calibrate", str(tmp_path)])
    assert done.exit_code == 0 and "optimizer_gbs" in done.output and "median error" in done.output
    found = constants_of(spec("H200"))
    assert abs(found.optimizer_gbs / slow.optimizer_gbs - 1) < 0.02
    assert "36 configurations" in found.source
    monkeypatch.chdir(tmp_path.parent)
    assert constants_of(spec("H200")) == TRUE


def test_constants_of_other_devices_stay_in_the_file(tmp_path):
    path = tmp_path / "constants.toml"
    fitting.write(path, "One", TRUE)
    fitting.write(path, "Two", replace(TRUE, gemm_tflops=1.0))
    found = read_table(path)
    assert found["One"].gemm_tflops == TRUE.gemm_tflops and found["Two"].gemm_tflops == 1.0


def test_a_damaged_constants_file_is_named(tmp_path):
    path = tmp_path / "constants.toml"
    path.write_text('["H200 SXM"]\ngemm_tflops = 800\n')
    with pytest.raises(UserError, match=r"constants.toml: the constants lack \['grouped_tflops'"):
        read_table(path)
    path.write_text("gemm = ")
    with pytest.raises(UserError, match="cannot be read as TOML"):
        read_table(path, 1)
    with pytest.raises(UserError, match=r"gemm_tflops=-1"):
        replace(TRUE, gemm_tflops=-1)
