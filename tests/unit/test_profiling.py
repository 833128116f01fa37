"""Recordings: parts sum to the whole, and kernels go to the ranges that launched them."""

import gzip
import json
import sqlite3

import pandas as pd
import pytest
import torch

from labkit import ceilings
from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.doctor import SHIPPED
from labkit.errors import NotThisMachine, UserError
from labkit.model import Transformer
from labkit.profiling import ProfileError, command, nsys, profile, tables
from labkit.profiling.events import Events, make_work
from labkit.profiling.kernels import kernel_class
from labkit.profiling.recording import step_ms
from labkit.profiling.trace import read_trace
from labkit.profiling.workloads import labkit_step, load_target
from labkit.provenance import machine_facts
from labkit.train import make_optimizer, train_step
from tests.public.simulated_cuda import SimulatedCuda

CFG = ModelConfig.preset("olmoe-tiny", n_layers=2)


@pytest.fixture(scope="module")
def recording():
    torch.manual_seed(0)
    model, batch = Transformer(CFG), random_micro_batch(CFG, 1, 32)
    model.recompute = True
    optimizer = make_optimizer(model)
    return profile(lambda: train_step(model, optimizer, batch), model=model, device="cpu")


def test_every_part_of_the_model_has_a_row(recording):
    table = recording.ranges.set_index("range")
    for name in ("embed", "layers.*.attn", "layers.*.ffn.router", "layers.*.ffn.experts", "norm",
                 "lm_head", "forward", "backward", "optimizer", "(backward)"):  # fmt: skip
        assert name in table.index, f"{name} is not among {list(table.index)}"
    assert table.loc["layers.*", "instances"] == table.loc["recompute.layers.*", "instances"] == 2
    assert table.loc["step", "instances"] == 1


def test_own_times_of_operators_sum_to_the_step(recording):
    step = recording.ranges.set_index("range").loc["step"]
    assert step["busy_ms"] <= step["span_ms"]
    assert step["busy_ms"] == pytest.approx(recording.kernels["ms"].sum(), rel=0.02)
    assert recording.kernels["share_pct"].sum() == pytest.approx(100)
    assert recording.ranges["own_ms"].sum() == pytest.approx(step["busy_ms"], rel=1e-6)


def test_outer_ranges_hold_their_parts(recording):
    table = recording.ranges.set_index("range")["busy_ms"]
    parts = table["embed"] + table["layers.*"] + table["norm"] + table["lm_head"]
    assert parts <= table["forward"] * 1.001
    blocks = ("attn_norm", "attn", "ffn_norm", "ffn")
    inner = sum(table[f"layers.*.{block}"] for block in blocks)
    assert 0.8 * table["layers.*"] < inner <= 1.001 * table["layers.*"], (inner, table["layers.*"])
    whole = table[["forward", "optimizer", "(backward)", "recompute.layers.*"]].sum()
    assert whole == pytest.approx(table["step"], rel=1e-6)


def test_files_of_a_recording(recording, tmp_path):
    paths = recording.save(tmp_path / "new", "demo")
    assert {path.name for path in paths} == {
        "demo_ranges.csv", "demo_kernels.csv", "demo_api.csv", "demo_summary.csv",
    }  # fmt: skip
    read = pd.read_csv(tmp_path / "new/demo_ranges.csv")
    pd.testing.assert_frame_equal(read, recording.ranges, rtol=1e-4, check_dtype=False)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        recording.save(tmp_path / "file", "demo")


def test_a_run_that_raises_half_way_is_kept_and_leaves_nothing(tmp_path):
    model, batch = Transformer(CFG), random_micro_batch(CFG, 1, 8)
    calls = []

    def fn():
        calls.append(1)
        model(batch.tokens, batch.seqs)
        if len(calls) == 6:  # 2 to warm up, 2 before, the second while recording
            raise RuntimeError("no more")

    with pytest.raises(ProfileError, match="raised RuntimeError: no more") as error:
        profile(fn, model=model, device="cpu", trace=tmp_path / "t.json.gz")
    assert isinstance(error.value.__cause__, RuntimeError)
    assert len(error.value.recording.ranges) > 10 and (tmp_path / "t.json.gz").exists()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not torch.autograd._profiler_enabled()


def test_bad_requests():
    with pytest.raises(UserError, match="steps=0"):
        profile(lambda: None, steps=0)
    with pytest.raises(UserError, match="not a trace"):
        read_trace(__file__)


# ------------------------------------------------------------------ a GPU's events, made by hand

MAIN, AUTOGRAD = 1, 2


def gpu_events(metrics=None):
    """Two steps of forward and backward. The backward's kernels come from autograd's thread."""
    ranges, api, gpu = [], [], []
    for step in (0, 1000):
        ranges += [
            ("step", step, step + 900, MAIN), ("forward", step + 10, step + 100, MAIN),
            ("layers.0", step + 20, step + 60, MAIN), ("layers.1", step + 60, step + 90, MAIN),
            ("backward", step + 200, step + 800, MAIN),
            ("recompute.layers.1", step + 300, step + 400, AUTOGRAD),
        ]  # fmt: skip
        launches = [  # launch, thread, start, end
            (30, MAIN, 40, 140), (70, MAIN, 140, 190), (95, MAIN, 190, 200),
            (310, AUTOGRAD, 320, 420), (450, AUTOGRAD, 600, 700), (460, AUTOGRAD, 700, 850),
        ]  # fmt: skip
        for i, (launch, thread, start, end) in enumerate(launches):
            number = step + i
            api.append(("cudaLaunchKernel", step + launch, step + launch + 5, thread, number))
            gpu.append(("nvjet_gemm", "kernel", step + start, step + end, 7, number))
        api.append(("cudaStreamSynchronize", step + 45, step + 55, MAIN, step + 99))
    columns = ["name", "kind", "start_us", "end_us", "stream", "correlation"]
    api = pd.DataFrame(api, columns=["name", "start_us", "end_us", "thread", "correlation"])
    work = make_work(pd.DataFrame(gpu, columns=columns), api)
    ranges = pd.DataFrame(ranges, columns=["name", "start_us", "end_us", "thread"])
    return Events(ranges, api, work, MAIN, True, metrics)


def test_a_range_has_the_kernels_launched_inside_not_those_that_ran():
    table = tables.ranges_table(gpu_events(), steps=2).set_index("range")
    assert table.loc["layers.*", "busy_ms"] == pytest.approx(0.150)
    assert table.loc["layers.*", "instances"] == 2 and table.loc["layers.*", "ops"] == 2
    assert table.loc["forward", "span_ms"] == pytest.approx(0.160)


def test_a_range_around_backward_is_credited_with_its_kernels():
    """Another thread launches them, while the main thread waits in backward()."""
    table = tables.ranges_table(gpu_events(), steps=2).set_index("range")
    assert table.loc["backward", "busy_ms"] == pytest.approx(0.350)
    assert table.loc["recompute.layers.*", "busy_ms"] == pytest.approx(0.100)
    assert table.loc["step", "ops"] == 6
    assert table.loc["backward", "own_ms"] == pytest.approx(0.250)
    assert table["own_ms"].sum() == pytest.approx(table.loc["step", "busy_ms"])


def test_gaps_tell_waiting_for_a_launch_from_other_idleness():
    found = tables.gaps(gpu_events(), steps=1)
    # 200→320: launched at 310, the queue was dry. 420→600: launched at 450, dry too.
    # 850→1040: the next step, launched at 1030.
    assert found["idle_ms"] == pytest.approx((120 + 180 + 190 + 120 + 180) / 1e3)
    assert found["launch_bound_ms"] == found["idle_ms"]
    assert found["busy_ms"] + found["idle_ms"] == pytest.approx(found["span_ms"])


def test_api_calls_are_told_by_kind_and_by_the_range_that_makes_them():
    table = tables.api_table(gpu_events(), steps=2)
    sync = table[table["kind"] == "synchronize"].iloc[0]
    assert (sync["call"], sync["range"]) == ("cudaStreamSynchronize", "layers.*")
    assert sync["count"] == 1 and sync["per_instance"] == 0.5
    assert table[table["kind"] == "launch"]["count"].sum() == 6


def test_counters_are_means_over_the_kernels_of_a_range():
    times = [50, 100, 150, 250, 330, 620, 1050, 1100, 1150]
    metrics = pd.DataFrame({"time_us": times, "sm_active_pct": [90, 70, 50, 0, 30, 10, 90, 70, 50]})
    table = tables.ranges_table(gpu_events(metrics), steps=2).set_index("range")
    assert table.loc["layers.*", "sm_active_pct"] == pytest.approx(70)
    assert table.loc["recompute.layers.*", "sm_active_pct"] == pytest.approx(30)
    assert table.loc["forward", "sm_active_pct"] == pytest.approx(70)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "gemm"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x", "gemm"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128", "attention"),
        ("void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add>", "elementwise"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)", "index"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel", "sort"),
        ("void at::native::reduce_kernel<512, 1, sum_functor>", "reduce"),
        ("void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata>", "optimizer"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel", "norm"),
        ("void cunn_SoftMaxForward<4, float>", "softmax"),
        ("something_new", "other"),
    ],
)
def test_kernel_classes(name, expected):
    assert kernel_class(name) == expected
    assert kernel_class(name, "copy") == "copy"


# ---------------------------------------------------------------------------------- Nsight Systems


@pytest.fixture
def export(tmp_path):
    """A small export in the documented schema, with the events of `gpu_events`."""
    path = tmp_path / "small.sqlite"
    events, ns = gpu_events(), 1000
    names = ["cudaLaunchKernel_v7000", "cudaStreamSynchronize_v3020", "nvjet_gemm", "layers.0"]
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(names))
        db.execute("CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT,"
                   " textId INT, globalTid INT)")  # fmt: skip
        for r in events.ranges.itertuples():
            text, number = (None, 3) if r.name == "layers.0" else (r.name, None)
            row = (r.start_us * ns, r.end_us * ns, 59, text, number, r.thread)
            db.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", row)
        db.execute("INSERT INTO NVTX_EVENTS VALUES (5, 6, 34, 'a mark', NULL, 1)")
        db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT,"
                   " correlationId INT, nameId INT)")  # fmt: skip
        for a in events.api.itertuples():
            row = (a.start_us * ns, a.end_us * ns, a.thread, a.correlation, int("Sync" in a.name))
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", row)
        db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, streamId INT,"
                   " correlationId INT, demangledName INT)")  # fmt: skip
        launches = events.api[events.api["name"] == "cudaLaunchKernel"]["correlation"]
        for w, number in zip(events.work.itertuples(), launches, strict=True):
            row = (w.start_us * ns, w.end_us * ns, 7, number, 2)
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?)", row)
        db.execute("CREATE TABLE TARGET_INFO_GPU_METRICS (metricId INT, metricName TEXT)")
        db.execute("INSERT INTO TARGET_INFO_GPU_METRICS VALUES (1, 'SMs Active [Throughput %]')")
        db.execute("CREATE TABLE GPU_METRICS (timestamp INT, metricId INT, value INT)")
        db.execute("INSERT INTO GPU_METRICS VALUES (50000, 1, 80)")
    return path


def test_an_nsight_export_gives_the_same_tables(export):
    ours, theirs = gpu_events(), nsys.read_sqlite(export)
    for make in (tables.ranges_table, tables.kernels_table, tables.api_table):
        expected, found = make(ours, 2), make(theirs, 2)
        pd.testing.assert_frame_equal(found[expected.columns], expected, check_dtype=False)
    table = tables.ranges_table(theirs, 2).set_index("range")
    assert table.loc["layers.*", "sm_active_pct"] == 80
    assert tables.gaps(theirs, 2) == pytest.approx(tables.gaps(ours, 2))


def test_an_export_may_lie_under_any_name(export, tmp_path):
    folder = tmp_path / "50% of #1?"
    folder.mkdir()
    moved = export.rename(folder / "é 1.sqlite")
    assert len(nsys.read_sqlite(moved).work) == len(gpu_events().work)


def test_a_trace_that_was_cut_short_is_named(tmp_path):
    path = tmp_path / "cut.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": []}' * 100)[:-20])
    with pytest.raises(UserError, match="is not a trace"):
        read_trace(path)


def test_exports_that_are_none(export, tmp_path):
    with pytest.raises(UserError, match="is not there"):
        nsys.read_sqlite(tmp_path / "nowhere")
    (tmp_path / "text").write_text("no database at all, " * 50)
    with pytest.raises(UserError, match="not an SQLite export"):
        nsys.read_sqlite(tmp_path / "text")
    with sqlite3.connect(export) as db:
        db.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
    with pytest.raises(UserError, match="holds no kernels"):
        nsys.read_sqlite(export)


def fake_nsys(tmp_path, monkeypatch, script):
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo NVIDIA Nsight Systems version 2021.3.1.54", "2024.5 or later is needed"),
        ("echo hello", "does not say its version"),
    ],
)
def test_an_old_or_strange_nsys_is_named(tmp_path, monkeypatch, script, words):
    fake_nsys(tmp_path, monkeypatch, script)
    with pytest.raises(NotThisMachine, match=words):
        nsys.find_nsys()


def test_an_absent_nsys_names_the_other_recorder(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotThisMachine, match="--backend torch"):
        nsys.find_nsys()


def test_an_nsys_that_fails_says_so(tmp_path, monkeypatch):
    script = """
    case "$1" in --version) echo "version 2026.2.1";; *) echo "cannot attach"; exit 3;; esac"""
    fake_nsys(tmp_path, monkeypatch, script)
    with pytest.raises(UserError, match="status 3: cannot attach"):
        nsys.record(["true"], tmp_path / "report")


def test_without_permission_for_counters_it_records_without(tmp_path, monkeypatch):
    script = """
    case "$*" in --version) echo "version 2026.2.1"; exit;; *gpu-metrics*) exit 1;; esac
    for a in "$@"; do case "$a" in --output=*) echo "$*" > "${a#--output=}";; esac; done"""
    fake_nsys(tmp_path, monkeypatch, script)
    export, note = nsys.record(["true"], tmp_path / "out" / "report")
    assert export == tmp_path / "out" / "report.sqlite" and "no GPU metrics" in note
    again, note = nsys.record(["true"], tmp_path / "out" / "report")
    assert again == export and "no GPU metrics" in note, "the earlier report passed for a success"
    assert {path.name for path in export.parent.iterdir()} == {"report.nsys-rep", "report.sqlite"}


def test_nsys_leaves_its_report_and_nothing_else(tmp_path, monkeypatch):
    """The export is unreadable here: what was only passed on must be gone all the same."""
    script = """
    case "$*" in --version) echo "version 2026.2.1"; exit;; esac
    for a in "$@"; do
      case "$a" in --output=*) echo nothing > "${a#--output=}";; *.times.json) echo {} > "$a";; esac
    done"""
    fake_nsys(tmp_path, monkeypatch, script)
    folder = tmp_path / "out"
    with pytest.raises(UserError, match="not an SQLite export"):
        command._with_nsys(command.Request("demo"), folder)
    assert [path.name for path in folder.iterdir()] == ["demo.nsys-rep"]


def test_the_facts_of_a_machine_cost_no_measurement(monkeypatch):
    monkeypatch.setattr(ceilings, "measured", lambda *_: pytest.fail("a name needs no benchmark"))
    assert machine_facts("cpu")["device"] == ceilings.processor(torch.device("cpu"))


def test_a_step_is_timed_on_the_stream_of_its_own_gpu(monkeypatch):
    cuda, streams = SimulatedCuda(), []
    second = torch.device("cuda", 1)
    with cuda.installed():
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
        monkeypatch.setattr(cuda.Event, "record", lambda self, on=None: streams.append(on))
        monkeypatch.setattr(cuda.Event, "elapsed_time", lambda self, end: 6.0)
        assert step_ms(lambda: None, 2, second) == 3.0
    assert streams == [second, second], f"events were recorded on {streams}"


def test_a_checkpoint_cut_to_some_layers_knows_how_many_it_has():
    work = labkit_step("", layers=2, seqlen=8, device="cpu", checkpoint=SHIPPED)
    assert work.model.cfg.n_layers == len(work.model.layers) == 2
    for layers in (0, -1):
        with pytest.raises(UserError, match=f"n_layers={layers}"):
            labkit_step("", layers=layers, seqlen=8, device="cpu", checkpoint=SHIPPED)


# -------------------------------------------------------------------------------- one's own target


def test_targets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_for_labkit.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "def make_step():\n    return lambda: model(torch.randn(2, 4)), model\n"
        "def make_number():\n    return 3\n"
    )
    work = load_target("mine_for_labkit:make_step")
    recording = profile(work.fn, model=work.model, device="cpu")
    assert recording.ranges["range"].tolist() == ["step"]
    for target, words in {
        "mine_for_labkit": "not of the form",
        "mine_for_labkit:other": "has no function 'other'",
        "no_such_module:f": "no module 'no_such_module'",
        "mine_for_labkit:make_number": "made int",
    }.items():
        with pytest.raises(UserError, match=words):
            load_target(target)


def test_a_hugging_face_model_as_target(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf_for_labkit.py").write_text(
        "import torch, transformers\n"
        "def make_step():\n"
        "    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, vocab_size=64,"
        " num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4)\n"
        "    model = transformers.AutoModelForCausalLM.from_config(config)\n"
        "    ids = torch.randint(64, (1, 16))\n"
        "    return lambda: model(input_ids=ids), model\n"
    )
    work = load_target("hf_for_labkit:make_step")
    table = profile(work.fn, model=work.model, device="cpu").ranges.set_index("range")
    assert table.loc["model.layers.*.self_attn", "instances"] == 3
    assert json.dumps(sorted(table.index)).count("model.layers.*.mlp") >= 3
