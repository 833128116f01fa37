"""Figures of recordings, and the parts that they divide a step into; on a real GPU's trace too.

tests/data/tiny_train_h200.trace.json.gz: one training step of olmoe-tiny with two layers and
recomputation, recorded on an H200 with torch 2.11.
"""

import io
from pathlib import Path

import pandas as pd
import pytest

from labkit import plots
from labkit.errors import UserError
from labkit.plots.profile import IDLE
from labkit.plots.timeline import _depth
from labkit.profiling import Recording
from labkit.profiling.parts import part_of, part_times
from labkit.profiling.trace import read_trace

TRACE = Path(__file__).parents[1] / "data" / "tiny_train_h200.trace.json.gz"


@pytest.fixture(scope="module")
def h200():
    return Recording(read_trace(TRACE), steps=1, before_ms=21.8, during_ms=38.3)


def ranges(**own_ms) -> pd.DataFrame:
    names = ["step", *(name.replace("__", ".") for name in own_ms)]
    own = [0.0, *own_ms.values()]
    return pd.DataFrame({"range": names, "own_ms": own, "span_ms": [sum(own) + 5, *own[1:]]})


# --------------------------------------------------------------------------- a real GPU's recording


def test_a_gpus_own_times_sum_to_what_it_was_busy(h200):
    busy = h200.events.work["busy_us"].sum() / 1e3
    table = h200.ranges.set_index("range")
    assert table["own_ms"].sum() == pytest.approx(busy, rel=1e-6)
    assert table.loc["step", "busy_ms"] == pytest.approx(busy, rel=1e-6)
    assert h200.kernels["ms"].sum() == pytest.approx(busy, rel=1e-6)
    assert h200.gaps["busy_ms"] == pytest.approx(busy, rel=1e-6)
    assert table.loc["step", "ops"] == len(h200.events.work) == 371


def test_autograds_kernels_are_credited_to_the_range_around_backward(h200):
    table = h200.ranges.set_index("range")["busy_ms"]
    recomputed = sum(table[name] for name in table.index if name == "recompute.layers.*")
    credit = (table["backward"] - recomputed) / table["(backward)"]
    assert 0.95 <= credit <= 1.001, f"backward is credited with {credit:.1%} of (backward)"


def test_recomputation_has_rows_of_its_own_in_autograds_thread(h200):
    table = h200.ranges.set_index("range")
    for part in ("", ".attn", ".ffn", ".ffn.experts", ".ffn.router"):
        again, first = table.loc[f"recompute.layers.*{part}"], table.loc[f"layers.*{part}"]
        assert again["instances"] == first["instances"] == 2, part
        assert 0.8 < again["busy_ms"] / first["busy_ms"] < 1.05, (part, again, first)
    threads = h200.events.ranges.groupby(h200.events.ranges["name"].str.startswith("recompute"))
    (main,), (autograd,) = (set(frame["thread"]) for _, frame in threads)
    assert main == h200.events.main_thread != autograd


def test_a_gpus_kernels_are_told_apart_by_name(h200):
    shares = h200.kernels.groupby("class")["share_pct"].sum()
    assert shares.get("other", 0.0) < 5, shares
    assert {"gemm", "attention", "norm", "sort", "optimizer", "index"} <= set(shares.index), shares
    counts = h200.kernels.groupby("class")["count"].sum()
    assert counts["optimizer"] == 1, "one fused AdamW a step"


# ------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("layers.*.attn.q_norm", "norms"), ("layers.*.attn_norm", "norms"), ("norm", "norms"),
        ("layers.*.attn.q_proj", "attention"), ("layers.*.attn", "attention"),
        ("layers.*.ffn.router.gate", "router"), ("layers.*.ffn.experts", "experts"),
        ("layers.*.ffn.down_proj", "ffn"), ("embed", "embedding"), ("lm_head", "lm_head"),
        ("recompute.layers.*.attn", "recompute"), ("backward", "backward"),
        ("Optimizer.step#AdamW.step", "optimizer"), ("step", "rest"),
        ("model.layers.*.self_attn.o_proj", "attention"), ("model.layers.*.mlp.gate", "router"),
        ("model.layers.*.input_layernorm", "norms"), ("model.embed_tokens", "embedding"),
        ("transformer.h.*.ln_1", "norms"), ("transformer.wte", "embedding"),
        ("layer1.*.conv2", "conv2"), ("features.*", "features"),
    ],
)  # fmt: skip
def test_a_range_belongs_to_a_part(path, part):
    assert part_of(path) == part


def test_parts_sum_to_the_step_and_keep_their_order(h200):
    parts = part_times(h200.ranges)
    assert parts.sum() == pytest.approx(h200.ranges["own_ms"].sum())
    assert list(parts.index) == ["attention", "experts", "router", "norms", "embedding", "lm_head",
                                 "recompute", "backward", "optimizer", "rest"]  # fmt: skip


def test_another_models_parts_are_the_last_words_of_its_paths():
    table = ranges(stem=4.0, layer1=1.0, layer1__conv1=3.0, layer1__conv2=2.0, pool=0.5, fc=0.25)
    assert part_times(table).to_dict() == {"stem": 4, "conv1": 3, "conv2": 2, "rest": 1.75}


# ----------------------------------------------------------------------------------------- figures


def bars(ax) -> list[tuple[float, float]]:
    return [(bar.get_x(), bar.get_width()) for bar in ax.patches]


def test_a_steps_bar_ends_where_an_unrecorded_step_ends(h200):
    figure = plots.step_bar({"train": h200}, {"train": (0.5, 0.2)})
    *parts, idle, compute, memory = bars(figure.axes[0])
    assert sum(width for _, width in parts) == pytest.approx(h200.ranges["own_ms"].sum())
    assert idle == pytest.approx((parts[-1][0] + parts[-1][1], 21.8 - sum(w for _, w in parts)))
    assert (compute, memory) == ((0, 0.5), (0, 0.2))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[-2:] == ["rest", IDLE]
    texts = [text.get_text().strip() for text in figure.axes[0].texts]
    assert "21.8 ms" in texts and "compute floor 0.5" in texts, texts


def test_a_table_of_ranges_has_the_recorded_step_unless_told():
    table = ranges(lm_head=2.0, embed=1.0)
    assert bars(plots.step_bar({"a": table}).axes[0])[-1] == (3.0, 5.0)
    assert bars(plots.step_bar({"a": table}, step_ms={"a": 4.0}).axes[0])[-1] == (3.0, 1.0)


@pytest.mark.parametrize(("longer", "shared"), [(2, True), (20, False)])
def test_steps_of_similar_length_share_an_axis(longer, shared):
    tables = {"a": ranges(lm_head=10.0), "b": ranges(lm_head=10.0 * longer)}
    first, second = (ax.get_xlim() for ax in plots.step_bar(tables).axes)
    assert (first == second) == shared, (first, second)


def test_kernel_classes_show_time_and_count(h200):
    figure = plots.kernel_classes({"train": h200})
    times, counts = figure.axes
    expected = h200.kernels.groupby("class")[["ms", "count"]].sum()
    assert sum(width for _, width in bars(times)) == pytest.approx(expected["ms"].sum())
    assert sum(width for _, width in bars(counts)) == pytest.approx(371)
    names = [label.get_text() for label in times.get_yticklabels()]
    assert names[-1] == expected["ms"].idxmax(), "the largest is on top"
    assert "(ms)" in times.get_xlabel()


def drawn(ax) -> int:
    return sum(len(collection.get_paths()) for collection in ax.collections)


def test_a_timeline_has_every_range_and_operation_of_a_step(h200):
    figure = plots.timeline(h200)
    above, below = figure.axes
    assert drawn(above) == len(h200.events.ranges) and drawn(below) == len(h200.events.work)
    assert [label.get_text() for label in above.get_yticklabels()] == ["Python", "autograd"]
    words = [text.get_text() for text in above.texts]
    assert {"step", "forward", "backward", "layers.0", "attn"} <= set(words), words
    assert figure.axes[1].get_xlabel() == "time since the step began (ms)"
    figure.savefig(io.BytesIO(), format="png")


def test_a_timeline_zooms_into_what_it_is_told(h200):
    whole, part = plots.timeline(h200), plots.timeline(h200, first_ms=5, last_ms=12)
    assert part.axes[0].get_xlim() == (5, 12)
    for ax, all_of_it in zip(part.axes, whole.axes, strict=True):
        assert 0 < drawn(ax) < drawn(all_of_it)
    assert "router" in [text.get_text() for text in part.axes[0].texts]


def test_depth_is_how_many_intervals_one_lies_in():
    starts, ends = [0, 1, 2, 5, 9], [9, 4, 3, 8, 12]
    assert list(_depth(starts, ends)) == [0, 1, 2, 1, 0]


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda r: plots.timeline(r, 50, 60), "lasts from 0 to 37.94"),
        (lambda r: plots.timeline(r, 9, 3), "first_ms=9, last_ms=3"),
        (lambda r: plots.timeline(r, step=3), "step=3: the recording has 1 steps"),
        (lambda r: plots.step_bar({}), "at least one recording"),
        (lambda r: plots.kernel_classes([r]), "at least one recording"),
        (lambda r: plots.step_bar({"a": pd.DataFrame({"range": []})}), "own_ms"),
        (lambda r: plots.routing(pd.DataFrame({"layer": []}), None), "expert"),
    ],
)
def test_bad_input_is_named(h200, draw, says):
    with pytest.raises(UserError, match=says):
        draw(h200)
