"""Memory on a CPU, to the byte: storages, timelines with their categories, named snapshots."""

import gc

import pandas as pd
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from labkit.data import random_micro_batch
from labkit.errors import UserError
from labkit.hooks import span
from labkit.memory import (
    CATEGORIES,
    MemoryTracker,
    record_timeline,
)
from labkit.model import Transformer
from labkit.perfmodel import param_count
from labkit.train import make_optimizer, train_step
from tests.unit.memory_steps import DENSE, GIB, MIB, MOE, step_timeline, trained

# -------------------------------------------------------------------------------------- storages


def changes(fn) -> list[int]:
    """The bytes of each allocation (above 0) and free (below) of a call."""
    gc.collect()
    blocks = record_timeline(fn, device="cpu").blocks
    blocks = blocks[blocks["born"] > 0]
    events = [(row.born, row.bytes) for row in blocks.itertuples()]
    events += [(row.died, -row.bytes) for row in blocks.itertuples()]
    return [size for _, size in sorted(events)]


def test_a_storage_counts_once_whatever_looks_at_it():
    def views():
        x = torch.zeros(1000)
        return x.view(10, 100).T[2:].reshape(-1), x.detach(), x.numpy()

    made = changes(lambda: [t.shape for t in views()])
    assert sorted(made) == [-4000, -3920, 3920, 4000], made  # x, and the copy of 98 rows


def test_an_operation_in_place_allocates_nothing():
    x = torch.ones(1000)
    assert changes(lambda: x.add_(1).mul_(2).copy_(x)) == []


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: torch.zeros(3, 5, dtype=torch.bfloat16), 30),
        (lambda: torch.empty(7, dtype=torch.int64), 56),
        (lambda: torch.tensor([1.0, 2.0]), 8),
        (lambda: torch.ones(4) + 1, 32),
        (lambda: torch.zeros(0), 0),
        (lambda: torch.zeros(2, 2, device="meta"), 0),
        (lambda: torch.eye(2).to_sparse().shape, None),
    ],
)
def test_bytes_are_exact(make, size):
    made = changes(make)
    assert sum(made) == 0, f"{made}: what is gone is not given back"
    if size is not None:
        assert sum(s for s in made if s > 0) == size, made


def test_a_resized_storage_counts_with_its_new_size():
    def grow():
        x = torch.zeros(10)
        x.resize_(1000)

    assert changes(grow) == [40, -40, 4000, -4000]


def test_what_the_graph_keeps_is_alive_until_the_backward():
    w = torch.ones(1000, requires_grad=True)
    lived = record_timeline(lambda: (w.exp().sum() * 2).backward(), device="cpu")
    with_graph = lived.peak_gib * GIB - lived.frame["allocated_gib"].iloc[0] * GIB
    assert with_graph >= 4000, f"{with_graph} bytes at the peak: exp's result is kept"
    w.grad = None


def test_the_peak_is_the_largest_sum_of_live_blocks():
    lived = step_timeline(MOE)
    sums = [
        lived.blocks[(lived.blocks["born"] <= i) & (lived.blocks["died"] > i)]["bytes"].sum()
        for i in range(0, len(lived.t_ms), 7)
    ]
    found = (lived.frame["allocated_gib"] * GIB).round().astype(int)
    assert list(found[::7]) == sums
    assert round(lived.peak_gib * GIB) == found.max() == found[lived.peak_event]
    assert (pd.Series(lived.t_ms).diff().dropna() >= 0).all(), "time runs backwards"


# --------------------------------------------------------------------------------------- timeline


@pytest.mark.parametrize("cfg", [MOE, DENSE], ids=["moe", "dense"])
@pytest.mark.parametrize("recompute", [False, True])
def test_categories_are_exact_and_sum_to_what_is_allocated(cfg, recompute):
    model, optimizer, batch = trained(cfg, recompute)
    lived = record_timeline(lambda: train_step(model, optimizer, batch), model, optimizer)
    assert list(lived.phases["name"]) == ["forward", "backward", "optimizer"]
    n_bytes = 4 * param_count(cfg)
    for at in ("start", "forward", "backward", "peak", "end"):
        found = lived.categories(at)
        allocated = lived.frame["allocated_gib"][lived._event(at)] * GIB
        assert sum(found.values()) == round(allocated), f"{at}: {found} of {allocated}"
        assert found["weights"] == n_bytes, f"{at}: {found['weights']}, not {n_bytes}"
        assert found["moments"] == 2 * n_bytes, f"{at}: {found['moments']}, not {2 * n_bytes}"
    assert lived.categories("backward")["gradients"] == n_bytes
    assert lived.categories("end")["gradients"] == lived.categories("start")["gradients"] == 0
    assert lived.categories("forward")["temporary"] <= 64, "what a forward leaves is activations"
    table = lived.by_category
    assert list(table) == list(CATEGORIES)
    assert (table.sum(axis=1) - lived.frame["allocated_gib"]).abs().max() < 1e-12


def test_the_first_step_makes_the_moments():
    model = Transformer(DENSE)
    optimizer, batch = make_optimizer(model), random_micro_batch(DENSE, 2, 16)
    lived = record_timeline(lambda: train_step(model, optimizer, batch), model, optimizer)
    assert lived.categories("start")["moments"] == 0
    assert lived.categories("end")["moments"] == 8 * param_count(DENSE)


def test_without_spans_gradients_are_known_by_the_optimizer_step():
    model, optimizer, batch = trained(DENSE)

    def step():
        model(batch.tokens, batch.seqs).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    lived = record_timeline(step, model, optimizer)
    most = lived.by_category["gradients"].max() * GIB
    assert round(most) == 4 * param_count(DENSE), f"{most} bytes of gradients"
    assert not len(lived.phases) and lived.categories()["activations"] == 0


def test_recomputing_keeps_at_most_a_quarter_of_the_activations():
    kept = [step_timeline(MOE, rc).categories("forward")["activations"] for rc in (False, True)]
    assert kept[1] <= kept[0] / 4, f"{kept[1]} of {kept[0]} bytes"


def test_small_micro_batches_lower_the_peak_and_keep_the_gradients_between():
    whole, split = step_timeline(MOE, sizes=(8,)), step_timeline(MOE, sizes=(2, 2, 2, 2))
    above = [lived.peak_gib - lived.frame["allocated_gib"][0] for lived in (whole, split)]
    assert above[1] < 0.6 * above[0], f"{above} GiB above the start"
    second = split.phases[split.phases["name"] == "forward"].iloc[1]
    between = split.categories(int(second["first"]) - 1)
    assert between["gradients"] == 4 * param_count(MOE), between
    assert between["activations"] == 0, between


def test_nothing_stays_patched_after_an_exception():
    model, optimizer, batch = trained(DENSE)
    before = len(optimizer._optimizer_step_pre_hooks)

    def fails():
        with span("forward"):
            model(batch.tokens, batch.seqs)
            raise RuntimeError("the weather")

    with pytest.raises(RuntimeError, match="the weather"):
        record_timeline(fails, model, optimizer)
    assert _get_current_dispatch_mode() is None
    assert len(optimizer._optimizer_step_pre_hooks) == before
    lived = record_timeline(lambda: torch.zeros(8))
    assert not len(lived.phases), "a span is still watched"


@pytest.mark.parametrize(("at", "says"), [("noon", "forward"), (-1, "0 to"), (10**9, "0 to")])
def test_a_moment_that_is_not_there_is_named(at, says):
    with pytest.raises(UserError, match=rf"at={at!r}.*{says}"):
        step_timeline(DENSE, seqlen=8).categories(at)


# ---------------------------------------------------------------------------------------- tracker


def test_snapshots_see_weights_activations_and_gradients():
    with MemoryTracker("cpu") as tracker:
        tracker.snapshot("start")
        layer = torch.nn.Linear(512, 512, bias=False)
        tracker.snapshot("model")
        y = layer(torch.ones(64, 512)).relu()
        tracker.snapshot("forward")
        y.sum().backward()
        tracker.snapshot("backward")
    assert tracker.delta("start", "model") * GIB == MIB
    rows = 64 * 512 * 4
    assert tracker.delta("model", "forward") * GIB == 2 * rows, "the input, and relu's output"
    assert tracker.delta("forward", "backward") * GIB == MIB - rows, "a gradient; no more input"
    report = tracker.report()
    assert list(report["name"]) == ["start", "model", "forward", "backward"]
    assert (report["peak_gib"] >= report["allocated_gib"]).all(), report
    numbers = ["allocated_gib", "reserved_gib", "device_used_gib"]
    assert (report[numbers] > 0).all().all(), report


def test_the_peak_is_of_the_interval():
    with MemoryTracker("cpu") as tracker:
        torch.ones(MIB)
        tracker.snapshot("after a tensor that is gone")
        tracker.snapshot("after nothing")
    first, second = tracker.report()["peak_gib"]
    assert (first - second) * GIB == 4 * MIB, f"{first} and {second} GiB"


def test_names_that_are_taken_or_unknown_are_errors_that_list_the_names():
    with MemoryTracker("cpu") as tracker:
        tracker.snapshot("model")
        with pytest.raises(UserError, match=r"'model' already.*\['model'\]"):
            tracker.snapshot("model")
        for a, b in (("model", "modle"), ("modle", "model")):
            with pytest.raises(UserError, match=r"'modle'.*\['model'\]"):
                tracker.delta(a, b)
        with pytest.raises(UserError, match="named by a text"):
            tracker.snapshot("")
    with pytest.raises(UserError, match="closed"):
        tracker.snapshot("later")


def test_a_tracker_that_is_dropped_or_closed_out_of_order_leaves_nothing():
    first, second = MemoryTracker("cpu"), MemoryTracker("cpu")
    first.close()
    second.snapshot("alone")
    x = torch.zeros(1000)
    second.snapshot("more")
    assert second.delta("alone", "more") * GIB == x.nbytes
    del second
    gc.collect()
    assert _get_current_dispatch_mode() is None
