"""What the widgets say and show, without a browser; tests/browser has one."""

import gc
import io
import subprocess
import sys
import time
import weakref

import ipywidgets
import pandas as pd
import pytest
from PIL import Image

from labkit import widgets
from labkit.devices import spec
from labkit.errors import UserError
from labkit.experiments import table
from labkit.widgets import picture, point
from labkit.widgets.measured import Measured
from labkit.widgets.point import gemm_point


@pytest.fixture
def explorer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no results here
    return widgets.roofline_explorer("L40")


@pytest.fixture
def gemm_csv(tmp_path):
    """One multiply, measured on an L40 at twice its bound."""
    row = dict.fromkeys(table.GEMM.columns, "")
    row |= {"shape": "q_proj", "M": 16, "k": 2048, "n": 2048, "ms": 0.01972, "tflops": 6.8}
    row |= {"intensity_flop_per_byte": 15.75, "quick": "no", "status": "ok", "schema": 1}
    row |= {"device": "NVIDIA L40", "dtype": "bfloat16", "date": "2026-11-01", "torch": "2.13"}
    path = tmp_path / "gemm.csv"
    pd.DataFrame([row]).to_csv(path, index=False)
    return path


# ------------------------------------------------------------------------------------- the point


def test_a_projection_of_sixteen_tokens_is_memory_bound():
    p = gemm_point(16, 2048, 2048, "L40")
    assert (p.flops, p.bytes) == (134_217_728, 8_519_680)
    assert p.intensity == pytest.approx(15.75, abs=0.01), f"{p.intensity} FLOP/B"
    assert p.bound_us == pytest.approx(9.86, abs=0.005), f"{p.bound_us} µs"
    assert p.tflops == pytest.approx(13.6, abs=0.02), f"{p.tflops} TFLOP/s"
    assert p.regime == "memory-bound"
    assert "9.86 µs" in p.why, p.why


def test_the_regimes_follow_the_number_of_tokens():
    assert gemm_point(4096, 2048, 2048, "L40").regime == "compute-bound"
    small = gemm_point(1, 256, 256, "L40")
    assert small.regime == "overhead-bound"
    assert "assumed" in small.why, f"nobody measured the launch cost here: {small.why}"


def test_a_measured_launch_cost_replaces_the_assumed_one():
    slow = spec("L40").with_measured(launch_us=20.0)
    p = gemm_point(16, 2048, 2048, slow)
    assert p.regime == "overhead-bound", f"{p.bound_us} µs against a launch of 20 µs: {p.regime}"
    assert "20 µs (measured here)" in p.why, p.why


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8"])
@pytest.mark.parametrize("name", ["L40", "H200 SXM"])
def test_the_bound_changes_sides_at_the_ridge_rows(name, dtype):
    rows = gemm_point(1, 8192, 4096, name, dtype).ridge_rows
    below, above = (gemm_point(M, 8192, 4096, name, dtype) for M in (int(rows), int(rows) + 1))
    assert below.memory_us >= below.compute_us, f"M = {below.M} of {rows}"
    assert above.memory_us <= above.compute_us, f"M = {above.M} of {rows}"


def test_a_thin_matrix_is_never_compute_bound():
    p = gemm_point(65536, 2048, 64, "L40")
    assert p.ridge_rows is None
    assert "no M" in p.why, p.why


def test_another_dtype_has_its_own_peak_and_its_own_bytes():
    device = spec("L40").with_measured(gemm_tflops=150.0, copy_gbs=700.0)
    wide = gemm_point(16, 2048, 2048, device, "float32")
    assert wide.bytes == 2 * gemm_point(16, 2048, 2048, device).bytes
    assert wide.device.peak_tflops == device.peak("float32")
    assert wide.device.measured.gemm_tflops is None, "a bfloat16 rate passes for float32's"
    assert wide.device.measured.copy_gbs == 700.0


@pytest.mark.parametrize(
    ("sizes", "device", "dtype", "named"),
    [((0, 8, 8), "L40", None, "M=0"), ((8, 8, 8), "L41", None, "L41"),
     ((8, 8, 8), "T4", "bfloat16", "bfloat16"), ((8, 8, 8), "L40", "int3", "int3")],
)  # fmt: skip
def test_bad_input_is_named(sizes, device, dtype, named):
    with pytest.raises(UserError, match=named):
        gemm_point(*sizes, device, dtype)


def test_the_rows_of_an_expert_are_tokens_times_its_share():
    from labkit.config import ModelConfig

    words = point.expert_rows(64, ModelConfig.preset("olmoe-1b-7b"))
    assert "T = 512 tokens" in words, f"64 rows · 64 experts / 8 a token = 512: {words}"


def test_the_point_needs_no_torch():
    code = "import sys, labkit.widgets.point; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0, "torch was imported"


# ----------------------------------------------------------------------------------- the explorer


def test_moving_a_control_moves_words_and_picture(explorer):
    before = explorer.image.value
    assert explorer.summary.startswith("M = 16: memory-bound on L40."), explorer.summary
    explorer.M.value = 4096
    assert explorer.summary.startswith("M = 4,096: compute-bound on L40."), explorer.summary
    assert explorer.image.value != before
    assert Image.open(io.BytesIO(explorer.image.value)).size == (792, 506)


def test_a_layer_sets_the_sizes_and_a_size_of_ones_own_leaves_the_layer(explorer):
    explorer.layer.value = "olmoe-1b-7b: expert down_proj"
    assert (explorer.k.value, explorer.n.value) == (1024, 2048)
    assert "T = 128 tokens" in explorer.summary, explorer.summary
    explorer.k.value = 1000
    assert explorer.layer.value == "other sizes"
    assert "expert" not in explorer.summary, explorer.summary


def test_a_change_draws_once(explorer, monkeypatch):
    drawn = []
    monkeypatch.setattr(explorer, "_show", drawn.append)
    explorer.layer.value = "olmoe-1b-7b: lm_head"  # changes k and n as well
    explorer.device.value = "T4"  # changes the dtype as well
    assert len(drawn) == 2, f"{len(drawn)} drawings for two changes"


def test_every_layer_dtype_and_device_of_the_menus_has_a_point(explorer, monkeypatch):
    monkeypatch.setattr(explorer, "_show", lambda points: None)  # their pictures take seconds
    for control in (explorer.layer, explorer.device, explorer.dtype, explorer.compare):
        for value in control.options:
            control.value = value
            assert "-bound on" in explorer.summary, f"{value}: {explorer.summary}"


def test_a_second_device_without_the_dtype_is_said_to_have_no_rate(explorer):
    explorer.compare.value = "T4"
    assert "T4 has no known bfloat16 rate" in explorer.summary, explorer.summary
    explorer.dtype.value = "float16"
    assert "no known" not in explorer.summary, explorer.summary
    assert "T4" in explorer.words.value


def test_a_move_is_drawn_within_a_tenth_of_a_second(explorer):
    times_s = []
    for M in picture.ROWS[:20]:
        start = time.perf_counter()
        explorer.M.value = M
        times_s.append(time.perf_counter() - start)
    typical_ms = 1e3 * sorted(times_s)[10]
    assert typical_ms < 100, f"{typical_ms:.0f} ms a move"


def test_old_pictures_are_freed(explorer):
    old = weakref.ref(explorer._picture.figure)
    explorer.k.value = 512
    gc.collect()
    assert old() is None, "the figure before the change is still there"


def test_an_open_exercise_is_named_in_the_widget(explorer, monkeypatch):
    def unwritten(*sizes):
        raise NotImplementedError("Coding Exercise 2: labkit/perfmodel.py, gemm_flops")

    monkeypatch.setattr(point, "gemm_flops", unwritten)
    explorer.M.value = 64
    assert explorer.summary == "Coding Exercise 2: labkit/perfmodel.py, gemm_flops"
    assert explorer.image.layout.display == "none", "a picture that does not belong to the words"
    monkeypatch.setattr(point, "gemm_flops", lambda M, k, n: None)
    explorer.M.value = 128
    assert "TypeError" in explorer.summary, explorer.summary
    monkeypatch.undo()
    explorer.M.value = 16
    assert explorer.image.layout.display is None
    assert "memory-bound" in explorer.summary, explorer.summary


def test_a_measurement_stands_beside_the_bound(gemm_csv):
    explorer = widgets.roofline_explorer("L40", gemm_csv)
    assert "Measured: 19.7 µs, 2 × the bound." in explorer.summary, explorer.summary
    explorer.M.value = 64
    assert "Measured" not in explorer.summary, explorer.summary
    explorer.device.value = "T4"
    assert "Measured so far: NVIDIA L40 in bfloat16." in explorer.summary, explorer.summary


def test_a_table_that_cannot_be_used_is_explained_in_the_widget(gemm_csv, tmp_path):
    pd.read_csv(gemm_csv).drop(columns="tflops").to_csv(gemm_csv, index=False)
    for path, said in ((gemm_csv, "tflops"), (tmp_path / "no.csv", "labkit experiment gemm")):
        explorer = widgets.roofline_explorer("L40", path)
        assert "memory-bound" in explorer.summary, explorer.summary
        assert said in explorer.summary, explorer.summary
        with pytest.raises(UserError, match=said):
            widgets.roofline_static(device="L40", gemm_csv=path)


def test_the_figure_shows_what_the_explorer_shows(gemm_csv):
    figure = widgets.roofline_static(16, 2048, 2048, "L40", "H200 SXM", gemm_csv=gemm_csv)
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    for part in ("L40", "H200 SXM", "2,048 × 2,048", "measured"):
        assert any(part in text for text in texts), f"no {part} in {texts}"
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert Measured.read(gemm_csv).completed(spec("L40")).measured.gemm_tflops == 6.8


# --------------------------------------------------------------------------------------- the quiz

QUESTION = ("What bounds `x @ w`?", ["its <FLOPs>", "its bytes"], "its bytes", "`w` is read once.")


def answer(quiz, choice) -> str:
    quiz.choice.value = choice
    quiz.button.click()
    return quiz.feedback.value


def test_the_reason_comes_after_an_answer():
    quiz = widgets.quiz(*QUESTION)
    quiz.button.click()
    assert "Choose" in quiz.feedback.value and "read once" not in quiz.feedback.value
    assert "Not this one" in answer(quiz, "its <FLOPs>")
    assert "<code>w</code> is read once." in quiz.feedback.value
    quiz.choice.value = "its bytes"
    assert quiz.feedback.value == "", "the verdict on another answer still stands"
    assert "Right" in answer(quiz, "its bytes")


def test_quizzes_do_not_know_of_each_other():
    first, second = widgets.quiz(*QUESTION), widgets.quiz(*QUESTION)
    answer(first, "its bytes")
    assert (second.choice.value, second.feedback.value) == (None, "")


def test_without_a_browser_the_question_is_text():
    text = widgets.quiz(*QUESTION)._repr_mimebundle_()["text/plain"]
    assert text == "What bounds `x @ w`?\n( ) its <FLOPs>\n( ) its bytes"


def test_markup_in_a_question_is_text():
    quiz = widgets.quiz("Is <b> a tag?", ["a", "b"], "a", "<script>")
    assert "&lt;b&gt;" in quiz.children[0].value
    assert "&lt;script&gt;" in answer(quiz, "a")


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"answer": "its time"}, "its time"), ({"options": ["one"]}, "two or more"),
     ({"options": ["a", "a"]}, "different"), ({"options": "ab"}, "list"),
     ({"options": 3}, "3"), ({"options": ["its bytes", ""]}, "texts"),
     ({"options": ["its bytes", 3]}, "3"), ({"question": " "}, "question"), ({"why": None}, "why")],
)  # fmt: skip
def test_arguments_that_make_no_quiz_are_named(changed, named):
    arguments = dict(zip(("question", "options", "answer", "why"), QUESTION, strict=True))
    with pytest.raises(UserError, match=named):
        widgets.quiz(**arguments | changed)


# ---------------------------------------------------------------------------------------- without


def test_without_ipywidgets_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    for make in (lambda: widgets.quiz(*QUESTION), widgets.roofline_explorer):
        with pytest.raises(UserError, match=r"labkit\[notebook\]"):
            make()


def test_an_executed_notebook_keeps_the_widgets():
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    source = "from labkit import widgets\nwidgets.roofline_explorer('L40')"
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(nb, kernel_name="python3", timeout=60, store_widget_state=True).execute()
    states = nb.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    pictures = [state["buffers"] for state in states if state["model_name"] == "ImageModel"]
    assert len(pictures) == 1 and pictures[0], f"{len(pictures)} pictures in the widgets' state"
    (output,) = nb.cells[0].outputs
    assert "memory-bound" in output.data["text/plain"], output.data
    page, _ = HTMLExporter().from_notebook_node(nb)
    assert "application/vnd.jupyter.widget-view+json" in page


def test_widgets_are_ipywidgets(explorer):
    assert isinstance(explorer, ipywidgets.Widget)
    assert all(control.description and control.tooltip for control in explorer.controls)
