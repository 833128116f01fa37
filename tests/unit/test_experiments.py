"""The experiments of Part 1: what they measure, and that nothing measured is ever lost."""

import io
import os
import stat

import pandas as pd
import pytest
import torch

from labkit import devices
from labkit.ceilings import Ceilings
from labkit.config import PRESETS, ModelConfig
from labkit.errors import NotThisMachine, UserError
from labkit.experiments import EXPERIMENTS, gemm, measured_ceilings, ops, regimes, run_experiment
from labkit.experiments.machine import Machine, _steadily_on_gpu, with_reached
from labkit.experiments.progress import steps
from labkit.experiments.table import GEMM, OPS, REGIMES, SUSTAINED, Table, read
from labkit.perfmodel import gemm_bytes, gemm_flops, roofline_tflops
from tests.public.simulated_cuda import SimulatedCuda

FACTS = {"date": "2026-11-01T12:00:00+00:00", "device": "a GPU", "dtype": "bfloat16",
         "torch": "2.13", "driver": "595.71"}  # fmt: skip
KEY = {"shape": "router", "M": 1, "k": 2048, "n": 64}


def row(**changes) -> dict:
    return {**KEY, "ms": 0.5, "tflops": 1.5, **changes}


# ------------------------------------------------------------------------------------------ table


def test_what_is_appended_is_read_back(tmp_path):
    table = Table(tmp_path, GEMM, FACTS)
    table.append(row(ms=1 / 3, spread=None, throttle="power cap, thermal"))
    table.append(row(M=2, status="out of\nmemory"))
    frame = read(tmp_path / "gemm.csv", GEMM)
    assert list(frame.columns) == list(GEMM.columns)
    first, second = frame.to_dict("records")
    assert first["ms"] == pytest.approx(1 / 3, rel=1e-5)
    assert first["throttle"] == "power cap, thermal" and pd.isna(first["spread"])
    assert second["status"] == "out of memory" and second["M"] == 2
    assert {first[name] for name in FACTS} == set(FACTS.values())


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path):
    Table(tmp_path, GEMM, FACTS).append(row())
    table = Table(tmp_path, GEMM, FACTS)
    assert table.has(**KEY) and not table.has(**KEY | {"M": 2})
    table.append(row(M=2))
    assert list(table.frame()["M"]) == [1, 2]


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_was_cut_short_is_measured_again(tmp_path, cut):
    table = Table(tmp_path, GEMM, FACTS)
    table.append(row())
    table.append(row(M=2))
    data = table.path.read_bytes()
    table.path.write_bytes(data[:-cut])
    assert list(read(table.path, GEMM)["M"]) == [1]
    again = Table(tmp_path, GEMM, FACTS)
    assert not again.has(**KEY | {"M": 2})
    again.append(row(M=2))
    assert table.path.read_bytes() == data


def test_a_file_cut_within_its_head_starts_anew(tmp_path):
    (tmp_path / "gemm.csv").write_text("shape,M,k")
    table = Table(tmp_path, GEMM, FACTS)
    table.append(row())
    assert len(table.frame()) == 1


def test_a_full_run_repeats_what_was_quick_and_a_quick_one_keeps_what_was_full(tmp_path):
    Table(tmp_path, GEMM, FACTS, quick=True).append(row(ms=1.0))
    full = Table(tmp_path, GEMM, FACTS)
    assert not full.has(**KEY), "a quick row stands in for a full one"
    full.append(row(ms=2.0))
    assert list(full.frame()["ms"]) == [2.0], "the last measurement should be the one that counts"
    assert Table(tmp_path, GEMM, FACTS, quick=True).has(**KEY)


def test_a_failure_is_tried_again_and_an_out_of_memory_is_not(tmp_path):
    table = Table(tmp_path, GEMM, FACTS)
    table.append({**KEY, "status": "failed: the weather"})
    table.append({**KEY, "M": 2, "status": "out of memory"})
    again = Table(tmp_path, GEMM, FACTS)
    assert not again.has(**KEY) and again.has(**KEY | {"M": 2})


@pytest.mark.parametrize("name", ["device", "dtype"])
def test_rows_of_two_machines_are_never_mixed(tmp_path, name):
    Table(tmp_path, GEMM, FACTS).append(row())
    with pytest.raises(UserError, match=rf"gemm\.csv .*{name} .*{FACTS[name]}.*another.*mv "):
        Table(tmp_path, GEMM, FACTS | {name: "another"})
    assert len(read(tmp_path / "gemm.csv", GEMM)) == 1


def test_a_replaced_series_is_whole_and_leaves_nothing_beside_it(tmp_path):
    table = Table(tmp_path, SUSTAINED, FACTS, quick=True)
    table.replace([{"t_s": 0.1, "tflops": 1.0}, {"t_s": 0.2, "tflops": 2.0}])
    table.replace([{"t_s": 0.3, "tflops": 3.0}])
    assert list(table.frame()["tflops"]) == [3.0]
    assert [path.name for path in tmp_path.iterdir()] == ["gemm_sustained.csv"]
    assert not Table(tmp_path, SUSTAINED, FACTS), "a quick series stands in for a full one"


def _csv(change) -> bytes:
    frame = pd.DataFrame([{**row(), **FACTS, "quick": "no", "status": "ok", "schema": 1}])
    text = io.StringIO()
    change(frame.reindex(columns=list(GEMM.columns))).to_csv(text, index=False)
    return text.getvalue().encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (_csv(lambda frame: frame.drop(columns="tflops")), r"lacks the columns \['tflops'\]"),
        (_csv(lambda frame: frame.assign(weather=1)), r"unknown columns \['weather'\]"),
        (_csv(lambda frame: frame.assign(ms="fast")), r"column 'ms' holds 'fast'"),
        (_csv(lambda frame: frame) + b"a,b\n", r"line 3: 2 cells"),
        (b"\xff\xfe\x00\n", "cannot be read"),
        (b"a diary without an end of line", "cannot be read"),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused_and_kept(tmp_path, data, says):
    path = tmp_path / "gemm.csv"
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"gemm\.csv.*{says}"):
        read(path, GEMM)
    if "fast" not in says:  # a table that is opened to go on with does not read its numbers
        with pytest.raises(UserError, match=says):
            Table(tmp_path, GEMM, FACTS)
    assert path.read_bytes() == data


def test_a_file_that_is_not_there_names_the_command_that_writes_it(tmp_path):
    with pytest.raises(UserError, match=r"gemm_sustained\.csv .*`labkit experiment gemm`"):
        read(SUSTAINED.path(tmp_path), SUSTAINED)


# ------------------------------------------------------------------------------------ experiments


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(gemm, "MAX_M", 4)
    monkeypatch.setattr(gemm, "_sustain", lambda machine, n, quick: [{"t_s": 0.1, "n": n}])
    monkeypatch.setattr(ops, "LARGEST_ON_CPU", 2**19)


@pytest.fixture
def no_clock(monkeypatch):
    """Calls each function once instead of timing it; says how many were called."""
    timed = []

    def time(machine, fn, budget_s, flush_l2):
        timed.append(fn())
        return {"ms": 1.0, "calls": 1}

    monkeypatch.setattr(Machine, "time", time)
    return timed


def test_shapes_are_those_of_the_model_merged():
    assert gemm.shapes(ModelConfig.preset("olmoe-1b-7b")) == {
        (2048, 2048): "q/k/v/o_proj",
        (2048, 64): "router",
        (2048, 1024): "expert gate/up_proj",
        (1024, 2048): "expert down_proj",
        (2048, 50304): "lm_head",
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_every_weight_of_a_model_has_its_shape(preset):
    from labkit.model import Transformer

    cfg = ModelConfig.preset(preset, n_layers=1)
    with torch.device("meta"):
        model = Transformer(cfg)
    weights = {
        tuple(weight.shape[-2:])[::-1]
        for name, weight in model.named_parameters()
        if weight.ndim > 1 and "embed" not in name
    }
    found = set(gemm.shapes(cfg))
    assert found == weights, f"{preset}: {found ^ weights} are only in one of the two"


def test_gemm_rows_follow_the_performance_model(tmp_path, small):
    frame = gemm.run(tmp_path, quick=True, device="cpu", model="olmoe-tiny", progress=False)
    assert set(frame["status"]) == {"ok"} and set(frame["M"]) == {1, 4}
    for line in frame.to_dict("records"):
        sizes = int(line["M"]), int(line["k"]), int(line["n"])
        intensity = gemm_flops(*sizes) / gemm_bytes(*sizes, 4)
        assert line["intensity_flop_per_byte"] == pytest.approx(intensity, rel=1e-5)
        assert line["tflops"] == pytest.approx(gemm_flops(*sizes) / line["ms"] / 1e9, rel=1e-4)
        assert line["gbs"] == pytest.approx(line["tflops"] * 1e3 / intensity, rel=1e-4)
        assert line["bound_tflops"] == pytest.approx(roofline_tflops(intensity, "cpu"), rel=1e-5)
    for name in ("gemm.csv", "gemm_sustained.csv", "roofline.png", "gemm_sustained.png"):
        assert (tmp_path / name).stat().st_size > 0, name


def test_a_sustained_multiply_is_a_series_of_intervals():
    machine = Machine.here("cpu")
    rows = pd.DataFrame(gemm.sustain(machine, quick=True))
    assert 2.0 <= rows["t_s"].iloc[-1] < 4.0, f"it ended after {rows['t_s'].iloc[-1]:.2f} s"
    assert rows["t_s"].is_monotonic_increasing
    spent_s = (rows["ms"] * rows["calls"]).sum() / 1e3
    assert spent_s == pytest.approx(rows["t_s"].iloc[-1], rel=1e-6), "intervals leave gaps"
    assert rows[["sm_clock_mhz", "power_w"]].isna().all(axis=None), "a CPU has no such counters"


def test_an_interrupted_run_loses_only_the_row_in_flight(tmp_path, small, no_clock, monkeypatch):
    measure = Machine.time

    def interrupted(*arguments, **named):
        if len(no_clock) == 3:
            raise KeyboardInterrupt
        return measure(*arguments, **named)

    monkeypatch.setattr(Machine, "time", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ops.run(tmp_path, device="cpu", progress=False)
    assert len(read(tmp_path / "ops.csv", OPS)) == 3
    monkeypatch.setattr(Machine, "time", measure)
    frame = ops.run(tmp_path, device="cpu", progress=False)
    assert len(frame) == len(no_clock) == 4 * 3, f"{len(no_clock)} calls for {len(frame)} rows"
    assert not list(tmp_path.glob(".*")), "drafts are left behind"


def test_ops_count_the_bytes_of_one_ideal_kernel(tmp_path, small, no_clock):
    frame = ops.run(tmp_path, quick=True, device="cpu", progress=False)
    found = {op: moved for op, moved in zip(frame["op"], frame["moved_bytes"], strict=True)}
    largest = frame["tensor_bytes"].max()
    assert found == {
        op: tensors * largest
        for op, tensors in {"copy": 2, "add": 3, "silu(x)·y": 3, "RMSNorm": 2}.items()
    }
    assert set(frame["cache"]) == {"warm"}


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("copy", lambda x: x),
        ("add", lambda x, y: x + y),
        ("silu(x)·y", lambda x, y: x * torch.sigmoid(x) * y),
        ("RMSNorm", lambda x, w: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w),
    ],
)
def test_an_operation_computes_what_it_is_called_after(monkeypatch, op, expected):
    drawn, random = [], Machine.random

    def record(*arguments):
        drawn.append(random(*arguments))
        return drawn[-1]

    monkeypatch.setattr(Machine, "random", record)
    result = ops._operation(Machine.here("cpu"), op, 4 * ops.DIM)()
    torch.testing.assert_close(result, expected(*drawn))
    assert len(drawn) + 1 >= ops.MOVED_TENSORS[op]


def test_regimes_run_without_counters_and_say_that_the_regime_is_predicted(tmp_path):
    frame = regimes.run(tmp_path, quick=True, device="cpu", progress=False)
    assert list(frame["workload"].str.split().str[0]) == ["launch", "large", "add", "small"]
    assert set(frame["regime_by"]) == {"roofline"} and set(frame["status"]) == {"ok"}
    assert list(frame["regime"][:3]) == ["overhead-bound", "compute-bound", "memory-bound"]
    assert frame["kernel_pct"].isna().all(), "a CPU has no such counter"
    assert measured_ceilings(tmp_path).launch_us == pytest.approx(frame["ms"][0] * 1e3, rel=1e-4)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        # L40 and RTX 5090, which have NVML's two percentages only
        ({"kernel_pct": 100, "memory_busy_pct": 16}, "compute-bound"),
        ({"kernel_pct": 100, "memory_busy_pct": 31}, "compute-bound"),
        ({"kernel_pct": 92, "memory_busy_pct": 92}, "memory-bound"),
        ({"kernel_pct": 82, "memory_busy_pct": 0}, "overhead-bound"),
        # H200 with GPM
        ({"kernel_pct": 100, "memory_busy_pct": 30, "sm_active_pct": 84, "dram_pct": 16},
         "compute-bound"),
        ({"kernel_pct": 100, "memory_busy_pct": 90, "sm_active_pct": 95, "dram_pct": 79},
         "memory-bound"),
        ({"kernel_pct": 99, "memory_busy_pct": 1, "sm_active_pct": 25, "dram_pct": 3},
         "overhead-bound"),
        # what cannot be told is not told
        ({"kernel_pct": None, "memory_busy_pct": None}, None),
        ({"kernel_pct": 100, "memory_busy_pct": None}, None),
        ({"kernel_pct": 40, "memory_busy_pct": None}, "overhead-bound"),
        ({"kernel_pct": None, "memory_busy_pct": 20}, None),
    ],
)  # fmt: skip
def test_a_regime_follows_from_the_counters(seen, expected):
    assert regimes.regime(seen) == expected


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "out of memory"),
        (RuntimeError("cuBLAS is unwell\nat line 3"), "failed: cuBLAS is unwell"),
    ],
)
def test_a_failed_configuration_is_a_row(tmp_path, small, monkeypatch, error, status):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(Machine, "time", fails)
    frame = ops.run(tmp_path, quick=True, device="cpu", progress=False)
    assert set(frame["status"]) == {status} and frame["ms"].isna().all()
    assert (tmp_path / "ops.png").stat().st_size > 0


def test_an_exercise_that_is_open_is_no_failed_row(tmp_path, small, monkeypatch):
    def is_open(*_):
        raise NotImplementedError("Coding Exercise 2")

    monkeypatch.setattr(gemm, "gemm_bytes", is_open)
    with pytest.raises(NotImplementedError, match="Exercise 2"):
        gemm.run(tmp_path, quick=True, device="cpu", progress=False)
    assert read(tmp_path / "gemm.csv", GEMM).empty


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path, name, no_clock
):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"file.*cannot be written.*--output"):
        run_experiment(name, output=tmp_path / "file" / "results", device="cpu", progress=False)
    assert not no_clock


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(UserError, match="Permission denied"):
        Table(tmp_path, GEMM, FACTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_device_that_is_not_here_is_refused(tmp_path, name):
    with pytest.raises(NotThisMachine, match="cuda:99"):
        run_experiment(name, output=tmp_path, device="cuda:99")
    assert not list(tmp_path.iterdir())


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(UserError, match="no experiment 'gem'; there are gemm, ops, regimes"):
        run_experiment("gem")
    with pytest.raises(UserError, match="no preset 'gpt'"):
        gemm.run(tmp_path, model="gpt")


# -------------------------------------------------------------------------------------- ceilings


def test_ceilings_are_the_best_of_what_the_files_have(tmp_path):
    assert measured_ceilings(tmp_path) == Ceilings()
    table = Table(tmp_path, GEMM, FACTS)
    for M, tflops in ((1, 5.0), (2, 700.0), (4, 600.0)):
        table.append(row(M=M, tflops=tflops))
    table.append({**KEY, "M": 8, "status": "out of memory"})
    table = Table(tmp_path, OPS, FACTS)
    for op, size, cache, gbs in (("copy", 2**20, "warm", 9000.0), ("copy", 2**30, "warm", 4100.0),
                                 ("copy", 2**20, "cold", 800.0), ("copy", 2**30, "cold", 4000.0),
                                 ("add", 2**30, "cold", 4200.0)):  # fmt: skip
        table.append({"op": op, "tensor_bytes": size, "cache": cache, "gbs": gbs})
    Table(tmp_path, REGIMES, FACTS).append({"workload": "launch", "ms": 0.0045})
    found = measured_ceilings(tmp_path)
    assert found == Ceilings(copy_gbs=4000.0, gemm_tflops=700.0, launch_us=pytest.approx(4.5))
    spec = with_reached(devices.spec("H200"), found)
    assert spec.measured == found and spec.peak_tflops == devices.spec("H200").peak_tflops


def test_ceilings_of_two_machines_are_not_mixed(tmp_path):
    Table(tmp_path, GEMM, FACTS).append(row())
    Table(tmp_path, REGIMES, FACTS | {"device": "another"}).append({"workload": "launch"})
    with pytest.raises(UserError, match=r"'a GPU', 'another'"):
        measured_ceilings(tmp_path)


# -------------------------------------------------------------------------------------- progress


def test_progress_reports_every_piece_and_the_end():
    heard = []
    with steps("test", 2, lambda *told: heard.append(told)) as step:
        step("one")
        step("two")
    assert heard == [(0, 2, "one"), (1, 2, "two"), (2, 2, "")]


def test_nothing_is_printed_where_nobody_watches(tmp_path, small, no_clock, capfd):
    ops.run(tmp_path, quick=True, device="cpu")
    assert capfd.readouterr() == ("", "")


# -------------------------------------------------------------------------------- simulated GPU


def steadily(kernel_ms: float, seconds: float = 2.0, calls: int = 36) -> tuple[list[float], int]:
    """When the intervals of a steady run on a simulated GPU ended, and the calls in each."""
    cuda = SimulatedCuda()
    with cuda.installed(_steadily_on_gpu):
        ends_s = _steadily_on_gpu(lambda: cuda.launch(kernel_ms), seconds, calls)
    return ends_s, calls


def test_a_steady_run_keeps_the_gpu_busy_and_ends_in_time():
    ends_s, calls = steadily(1.4)
    ms = ends_s[-1] * 1e3 / len(ends_s) / calls
    assert ms == pytest.approx(1.4, rel=2e-3), f"a kernel of 1.4 ms took {ms:.4f}: the GPU waited"
    assert 1.9 < ends_s[-1] < 2.2, f"2 s were asked for, {ends_s[-1]:.2f} were run"


def test_a_steady_run_of_small_kernels_takes_what_launching_takes():
    ends_s, calls = steadily(0.004, calls=5000)
    ms = ends_s[-1] * 1e3 / len(ends_s) / calls
    assert ms == pytest.approx(0.010, rel=2e-2), f"a launch of 0.010 ms took {ms:.4f}"


# ------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
def test_no_cold_point_is_above_the_datasheet(tmp_path):
    frame = ops.run(tmp_path, quick=True, device="cuda", progress=False)
    cold = frame[(frame["cache"] == "cold") & (frame["status"] == "ok")]
    bandwidth = devices.current("cuda").bandwidth_gbs
    assert cold["gbs"].max() < 1.02 * bandwidth, cold.loc[cold["gbs"].idxmax()].to_dict()
    largest = cold[cold["op"] == "copy"].sort_values("tensor_bytes").iloc[-1]
    assert largest["gbs"] > 0.6 * bandwidth, largest.to_dict()


@pytest.mark.gpu
def test_gemms_stay_under_the_roofline_and_a_held_one_has_its_counters(tmp_path):
    frame = gemm.run(tmp_path, quick=True, device="cuda", progress=False)
    reached = frame["tflops"] / frame["bound_tflops"]
    assert reached.max() < 1.05, frame.loc[reached.idxmax()].to_dict()
    held = read(SUSTAINED.path(tmp_path), SUSTAINED)
    assert held["power_w"].notna().mean() > 0.9
    longest_s = held["t_s"].diff().max()
    assert longest_s < 3 * held["t_s"].diff().median(), f"an interval took {longest_s:.3f} s"


@pytest.mark.gpu
def test_the_counters_tell_the_regimes_apart(tmp_path):
    frame = regimes.run(tmp_path, device="cuda", progress=False)
    found = dict(zip(frame["workload"].str.split().str[0], frame["regime"], strict=True))
    assert found == {
        "launch": "overhead-bound", "large": "compute-bound",
        "add": "memory-bound", "small": "overhead-bound",
    }, frame.to_string()  # fmt: skip
    assert set(frame["regime_by"]) == {"counters"}


@pytest.mark.gpu
def test_an_allocation_that_is_too_large_is_a_row_and_leaves_memory_free():
    machine = Machine.here("cuda")
    free = machine.free_bytes()
    outcome = machine.attempt(lambda: {"x": machine.empty(2 * free)})
    assert outcome == {"status": "out of memory"}
    assert machine.free_bytes() > 0.95 * free
