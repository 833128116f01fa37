"""The checks of E2 pass honest results and fail each doctored one, in words that name it."""

import random
import re
from types import SimpleNamespace

import pandas as pd
import pytest

from labkit.config import ModelConfig
from labkit.devices import DeviceSpec, spec
from labkit.experiments import gemm, ops, regimes
from labkit.experiments.table import COUNTERS, GEMM, OPS, REGIMES, SUSTAINED, Table, read
from tests.public import checks_e2, result_files

CHECKS = [
    checks_e2.check_gemm,
    checks_e2.check_sustained,
    checks_e2.check_ops,
    checks_e2.check_regimes,
    checks_e2.check_one_machine,
]
CPU = DeviceSpec("Some CPU, 8 cores", 0.5, 40, 32, dtype="float32")
UNKNOWN = DeviceSpec("Some GPU", 100, 1000, 24)


class Lab:
    """A simulated machine that measures: `efficiency` of its ceilings, and a launch at least."""

    def __init__(
        self, spec: DeviceSpec, folder, on_gpu=True, quick=False, efficiency=0.75, nvml=True
    ):
        self.spec, self.folder, self.quick, self.efficiency = spec, folder, quick, efficiency
        self.on_gpu, self.nvml = on_gpu, nvml
        self.size = 4 if spec.dtype == "float32" else 2
        self.machine = SimpleNamespace(
            on_gpu=self.on_gpu, dtype=SimpleNamespace(itemsize=self.size)
        )
        self.facts = {
            "date": "2026-10-01T12:00:00+00:00", "device": spec.name, "dtype": spec.dtype,
            "torch": "2.13.0", "driver": "580.95" if self.on_gpu and nvml else None,
        }  # fmt: skip
        self.draw = random.Random(7)

    def ms(self, flops: float, moved: float, cached=False) -> float:
        memory = moved / (self.spec.bandwidth_gbs * (3 if cached else 1)) / 1e6
        bound = max(flops / self.spec.peak_tflops / 1e9, memory)
        return max(bound / self.efficiency, 0.004) * self.draw.uniform(1, 1.02)

    def rated(self, flops: float, moved: float, **options) -> dict:
        ms = self.ms(flops, moved, **options)
        return {"ms": ms, "tflops": flops / ms / 1e9, "gbs": moved / ms / 1e6}

    def table(self, schema):
        return Table(self.folder, schema, self.facts, self.quick)

    def measure(self):
        self.gemm()
        self.sustained()
        self.ops()
        self.regimes()
        return self.folder

    def gemm(self):
        rows = []
        for key in gemm.grid(self.machine, ModelConfig.preset("olmoe-1b-7b"), self.quick):
            M, k, n = key["M"], key["k"], key["n"]
            flops, moved = 2 * M * k * n, self.size * (M * k + k * n + M * n)
            rows.append(key | self.rated(flops, moved))
        self.table(GEMM).replace(rows)

    def sustained(self):
        n, t_s, rows = 8192 if self.on_gpu else 1024, 0.0, []
        least_ms = self.ms(2 * n**3, 1)
        calls = max(1, round(50 / least_ms))
        while t_s < (6 if self.on_gpu else 2):
            ms = self.ms(2 * n**3, 1)
            t_s += calls * ms / 1e3
            rows.append({"t_s": t_s, "n": n, "calls": calls, "ms": ms,
                         "tflops": 2 * n**3 / ms / 1e9})  # fmt: skip
        self.table(SUSTAINED).replace(rows)

    def ops(self):
        powers = range(17, 33 if self.on_gpu else 27, 2 if self.quick else 1)
        rows = []
        for op, tensors in ops.MOVED_TENSORS.items():
            for cache in ("cold", "warm") if self.on_gpu else ("warm",):
                for power in powers:
                    moved = tensors * 2**power
                    rate = self.rated(1, moved, cached=cache == "warm" and moved < 4e7)
                    rate["moved_bytes"] = moved
                    del rate["tflops"]
                    rows.append({"op": op, "tensor_bytes": 2**power, "cache": cache} | rate)
        self.table(OPS).replace(rows)

    def regimes(self):
        busy = dict.fromkeys(COUNTERS)
        counted = {"compute-bound": (99, 15), "memory-bound": (98, 92), "overhead-bound": (51, 1)}
        rows = []
        for work in regimes.workloads(self.machine):
            rate = self.rated(work.flops, work.moved_bytes)
            calls = round((3000 if self.on_gpu else 700) / rate["ms"])
            launch_ms = rows[0]["ms"] if rows else rate["ms"]
            regime = regimes.predicted_regime(work, self.spec, launch_ms * 1.3)
            kernel, memory = counted[regime] if self.nvml and self.on_gpu else (None, None)
            rows.append(busy | rate | {
                "workload": work.name, "calls": calls, "kernel_pct": kernel,
                "memory_busy_pct": memory, "regime": regime, "regime_by": "counters",
            })  # fmt: skip
        self.table(REGIMES).replace(rows)


def failures(folder) -> list[str]:
    messages = []
    for check in CHECKS:
        try:
            check(folder)
        except AssertionError as error:
            messages.append(str(error))
    return messages


HONEST = {
    "an H200": lambda to: Lab(spec("H200"), to),
    "an L40": lambda to: Lab(spec("L40"), to),
    "a boosting RTX 5090": lambda to: Lab(spec("RTX 5090"), to, efficiency=1.04),
    "a GPU that the table lacks, without NVML": lambda to: Lab(UNKNOWN, to, nvml=False),
    "a GPU before bfloat16": lambda to: Lab(spec("T4"), to),
    "a CPU": lambda to: Lab(CPU, to, on_gpu=False),
    "a CPU in a hurry": lambda to: Lab(CPU, to, on_gpu=False, quick=True),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_results_pass(name, tmp_path):
    messages = failures(HONEST[name](tmp_path).measure())
    assert not messages, f"{name}: {messages}"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return Lab(spec("H200"), tmp_path_factory.mktemp("h200")).measure()


@pytest.fixture
def h200(measured, tmp_path):
    """A copy of an H200's honest results, to be doctored."""
    for path in measured.glob("*.csv"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


CHEATS = {}


def cheat(schema, says: str):
    """Register a change of one file's rows, with the words that a failed check must say."""
    return lambda change: CHEATS.setdefault(change.__name__, (schema, change, says))[1]


def set_times(frame, rows, ms):
    """New times, with rates that follow from them: a careful cheat."""
    factor = frame.loc[rows, "ms"] / ms
    for rate in {"tflops", "gbs"} & set(frame):
        frame.loc[rows, rate] *= factor
    frame.loc[rows, "ms"] = ms


@cheat(GEMM, r"lacks 16 of 80 rows, the first: shape lm_head, M 1,.*goes on where it stopped")
def a_shape_left_out(frame):
    return frame[frame["shape"] != "lm_head"]


@cheat(GEMM, r"lacks 5 of 80 rows.*M 32768")
def large_ones_left_out(frame):
    return frame[frame["M"] < 32768]


@cheat(GEMM, "tflops says .* but its sizes .* Coding Exercise 2")
def multiply_adds_counted(frame):
    frame["tflops"] /= 2
    return frame


@cheat(GEMM, "tflops .* is more than a H200 SXM can do")
def twice_the_peak(frame):
    set_times(frame, frame["M"] == 32768, frame["ms"] / 3)
    return frame


@cheat(GEMM, "gbs .* was the cache flushed")
def weights_from_the_cache(frame):
    set_times(frame, (frame["shape"] == "lm_head") & (frame["M"] == 1), 0.02)
    return frame


@cheat(GEMM, r"the times do not grow with M")
def times_shuffled(frame):
    for _, rows in frame.groupby("shape"):
        set_times(frame, rows.index, rows["ms"].to_numpy()[::-1])
    return frame


@cheat(GEMM, "has the very times of expert down_proj: a copy")
def a_shape_copied(frame):
    source = frame[frame["shape"] == "expert down_proj"]["ms"].to_numpy()
    set_times(frame, frame["shape"] == "expert gate/up_proj", source)
    return frame


@cheat(GEMM, "80 rows have 4 different times")
def times_rounded_up(frame):
    set_times(frame, frame.index, frame["ms"].map(lambda ms: 10.0 ** len(f"{ms * 1e3:.0f}")))
    return frame


@cheat(GEMM, "80 rows have 1 different times")
def one_time_for_all(frame):
    set_times(frame, frame.index, 9.0)
    return frame


@cheat(GEMM, "no time that a call can take")
def impossible_time(frame):
    set_times(frame, frame.index[:1], 1e-6)
    return frame


@cheat(GEMM, "no time that a call can take")
def negative_time(frame):
    set_times(frame, frame.index[:1], -1.0)
    return frame


@cheat(GEMM, "no time that a call can take")
def no_time(frame):
    frame.loc[3, "ms"] = None
    return frame


@cheat(GEMM, "1 rows are from --quick.*without it")
def quick_on_a_gpu(frame):
    frame.loc[0, "quick"] = "yes"
    return frame


@cheat(GEMM, r"mixes device \['H200 SXM', 'L40'\]")
def two_devices(frame):
    frame.loc[40:, "device"] = "L40"
    return frame


@cheat(GEMM, "different devices")
def a_file_of_another_device(frame):
    return frame.assign(device="NVIDIA B200")


@cheat(GEMM, "different dtypes")
def a_file_of_another_dtype(frame):
    return frame.assign(dtype="float16")


@cheat(GEMM, "device is empty")
def no_device(frame):
    return frame.assign(device=None)


@cheat(GEMM, "has not come yet")
def tomorrow(frame):
    return frame.assign(date="2999-01-01T00:00:00+00:00")


@cheat(GEMM, "is no date")
def yesterday_in_words(frame):
    return frame.assign(date="yesterday")


@cheat(GEMM, "status 'failed: illegal memory access'; .*tries it again")
def a_failed_row(frame):
    frame.loc[5, "status"] = "failed: illegal memory access"
    return frame


@cheat(GEMM, "40 of 80 rows ran out of memory")
def out_of_memory(frame):
    frame.loc[40:, ["status", "ms"]] = ["out of memory", None]
    return frame


@cheat(SUSTAINED, "at least 10 of them, and 5.5 s")
def too_short(frame):
    return frame[frame["t_s"] < 3]


@cheat(SUSTAINED, "are not the .* since the row before")
def stretched(frame):
    return frame.assign(t_s=frame["t_s"] * 2)


@cheat(SUSTAINED, "different times")
def held_perfectly(frame):
    set_times(frame, frame.index, frame["ms"].iloc[0])
    return frame


@cheat(SUSTAINED, "the same multiply takes")
def from_a_faster_machine(frame):
    set_times(frame, frame.index, frame["ms"] * 2.5)
    return frame.assign(calls=1, t_s=(frame["ms"] / 1e3).cumsum())


@cheat(OPS, "lacks 32 of 128 rows, the first: op add")
def an_op_left_out(frame):
    return frame[frame["op"] != "add"]


@cheat(OPS, "lacks .* cache cold")
def only_warm(frame):
    return frame[frame["cache"] == "warm"]


@cheat(OPS, "lacks .* tensor_bytes 33554432")
def only_small(frame):
    return frame[frame["tensor_bytes"] < 2**25]


@cheat(OPS, "add, warm has the very times of add, cold")
def cold_copied_as_warm(frame):
    cold = frame[(frame["op"] == "add") & (frame["cache"] == "cold")]["ms"].to_numpy()
    set_times(frame, (frame["op"] == "add") & (frame["cache"] == "warm"), cold)
    return frame


@cheat(OPS, "gbs .* is more than a H200 SXM can do .* was the cache flushed")
def faster_than_memory(frame):
    large = (frame["cache"] == "cold") & (frame["tensor_bytes"] >= 2**28)
    set_times(frame, large, frame["ms"] / 2)
    return frame


@cheat(OPS, "gbs says")
def rates_alone(frame):
    return frame.assign(gbs=4000.0)


@cheat(REGIMES, "lacks 1 of 4 rows, the first: workload small GEMM")
def a_regime_left_out(frame):
    return frame[~frame["workload"].str.startswith("small")]


@cheat(REGIMES, "kernel_pct is 140 %")
def more_than_always(frame):
    frame.loc[1, "kernel_pct"] = 140
    return frame


@cheat(REGIMES, "it says compute-bound, and its counters memory-bound")
def regime_renamed(frame):
    frame.loc[frame["workload"].str.startswith("add"), "regime"] = "compute-bound"
    return frame


@cheat(REGIMES, "too short for the counters")
def run_once(frame):
    return frame.assign(calls=1)


@cheat(REGIMES, "is slower than the small one")
def small_one_fast(frame):
    set_times(frame, frame["workload"].str.startswith("large"), 900.0)
    return frame


@pytest.mark.parametrize("name", CHEATS)
def test_doctored_results_are_named(name, h200):
    schema, change, says = CHEATS[name]
    path = schema.path(h200)
    change(read(path, schema)).to_csv(path, index=False)
    messages = failures(h200)
    assert any(re.search(says, message) for message in messages), (
        f"{name}: no message says {says!r}; the checks said {messages or 'nothing: it passes'}"
    )


def test_nothing_run_yet_says_what_to_run(tmp_path):
    messages = failures(tmp_path)
    assert len(messages) == 5, messages
    for command in ("gemm", "ops", "regimes"):
        assert any(f"not run yet: `labkit experiment {command}`" in one for one in messages)


def test_a_column_that_is_missing_and_a_file_without_rows(h200):
    pd.read_csv(h200 / "ops.csv").drop(columns="gbs").to_csv(h200 / "ops.csv", index=False)
    head = (h200 / "regimes.csv").read_text().splitlines()[0]
    (h200 / "regimes.csv").write_text(head + "\n")
    messages = failures(h200)
    assert any("lacks the columns ['gbs']" in one for one in messages), messages
    assert any("has no rows yet" in one for one in messages), messages


def test_a_cut_last_line_and_a_few_rows_out_of_memory_are_honest(h200):
    frame = read(h200 / "ops.csv", OPS)
    frame.loc[frame["tensor_bytes"] == 2**32, ["status", "ms", "gbs"]] = ["out of memory"] + [
        None
    ] * 2
    frame.to_csv(h200 / "ops.csv", index=False)
    with (h200 / "gemm.csv").open("a") as file:
        file.write("lm_head,1,2048,503")
    messages = failures(h200)
    assert not messages, messages


def test_results_are_looked_for_in_both_places(monkeypatch, tmp_path):
    monkeypatch.setattr(result_files, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert str(result_files.folder()) == "results"
    (tmp_path / "results" / "cpu").mkdir(parents=True)
    (tmp_path / "results" / "cpu" / "gemm.csv").touch()
    assert str(result_files.folder()) == "results/cpu"
    (tmp_path / "results" / "ops.csv").touch()
    assert str(result_files.folder()) == "results"
