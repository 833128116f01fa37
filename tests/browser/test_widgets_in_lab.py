"""The widgets in a real JupyterLab, worked by keyboard."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "notebooks/02_roofline.ipynb"
expect = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install it").expect
pytestmark = pytest.mark.browser
EXPLORER = "from labkit import widgets\nwidgets.roofline_explorer('L40')"
STEPS = "from labkit import widgets\nwidgets.step_explorer('H200')"
QUIZ = """from labkit import widgets
widgets.quiz("What bounds {}?", ["its arithmetic", "its bytes"], "its bytes", "Read `w` once.")"""


def press(lab, key: str) -> None:
    lab.page.keyboard.press(key)


def test_the_arrow_keys_move_the_point_of_the_explorer(lab):
    lab.open_and_run(lab.write("explorer.ipynb", EXPLORER))
    assert lab.errors() == []
    expect(lab.words).to_contain_text("M = 16: memory-bound on L40.")
    picture = lab.page.locator(".widget-image")
    before = picture.get_attribute("src")

    lab.page.get_by_label("Layer").focus()
    press(lab, "Tab")
    press(lab, "ArrowRight")
    expect(lab.words).to_contain_text("M = 24: memory-bound on L40.")
    expect(picture).not_to_have_attribute("src", before)
    press(lab, "End")
    expect(lab.words).to_contain_text("M = 65,536: compute-bound on L40.")
    assert picture.count() == 1, f"{picture.count()} pictures: each move left one behind"
    assert lab.errors() == []


def test_a_layer_a_second_device_and_a_mistyped_size(lab):
    lab.open_and_run(lab.write("explorer.ipynb", EXPLORER))
    lab.page.get_by_label("Layer").select_option("olmoe-1b-7b: expert down_proj")
    expect(lab.words).to_contain_text("T = 128 tokens")
    lab.page.get_by_label("Compare").select_option("H200 SXM")
    expect(lab.words).to_contain_text("overhead-bound on H200 SXM")
    lab.page.get_by_label("k", exact=True).fill("-5")
    press(lab, "Tab")
    expect(lab.page.get_by_label("Layer")).to_have_value("other sizes")
    expect(lab.words.last).not_to_contain_text("rows for each expert")
    assert lab.errors() == []


def test_the_explorer_is_legible_in_the_dark_theme(lab):
    plugin = "apputils-extension/themes"
    lab.server.set(plugin, {"theme": "JupyterLab Dark"})
    try:
        lab.open_and_run(lab.write("dark.ipynb", EXPLORER))
    finally:
        lab.server.set(plugin, {"theme": "JupyterLab Light"})
    colors = lab.words.evaluate(
        """words => [getComputedStyle(words).color,
                     getComputedStyle(document.querySelector('.jp-Notebook')).backgroundColor]"""
    )
    text, ground = (sum(map(float, c[c.index("(") + 1 : -1].split(",")[:3])) for c in colors)
    assert text - ground > 400, f"the text is {colors[0]} on {colors[1]}"


def test_the_sliders_of_the_step_explorer_move_its_prediction(lab):
    lab.open_and_run(lab.write("steps.ipynb", STEPS))
    assert lab.errors() == []
    words, picture = lab.page.locator("[role=status]"), lab.page.locator(".widget-image")
    expect(words).to_contain_text("ms a step on H200 SXM")
    expect(words).to_contain_text("Measured: ")
    said, before = words.locator("p").first.inner_text(), picture.get_attribute("src")

    lab.page.get_by_role("slider").first.focus()
    for layers in ("6", "8"):
        press(lab, "ArrowRight")
        expect(lab.page.locator(".widget-readout").first).to_have_text(layers)
    expect(words).not_to_contain_text(said)
    expect(picture).not_to_have_attribute("src", before)
    lab.page.get_by_label("Device").select_option("RTX 5090")
    expect(words).to_contain_text("RTX 5090 has 31.8")
    expect(words.locator("b")).to_contain_text("needs")
    assert picture.count() == 1, f"{picture.count()} pictures: each move left one behind"
    assert lab.errors() == []


def test_quizzes_answer_each_for_itself(lab):
    lab.open_and_run(lab.write("quiz.ipynb", QUIZ.format("one"), QUIZ.format("two")))
    assert lab.page.get_by_text("Read w once.").count() == 0, "the reason shows before an answer"
    first = lab.page.locator(".jp-OutputArea-output").first
    for answer, verdict in (("its arithmetic", "Not this one"), ("its bytes", "Right")):
        first.get_by_label(answer).focus()
        press(lab, "Space")
        first.get_by_role("button", name="Check").focus()
        press(lab, "Enter")
        expect(lab.feedback).to_contain_text([verdict])
        expect(lab.feedback).to_contain_text(["Read w once."])
    chosen = lab.page.get_by_role("radio", checked=True)
    assert chosen.count() == 1, f"{chosen.count()} answers chosen; the second quiz has none"


@pytest.mark.skipif(not NOTEBOOK.exists(), reason="notebooks/02_roofline.ipynb is not there")
def test_the_roofline_notebook_runs_and_its_explorer_moves(lab):
    lab.open_and_run("notebooks/02_roofline.ipynb", timeout_s=90)
    assert lab.errors() == []
    expect(lab.words).to_contain_text("M = 16:")
    before = lab.page.locator(".widget-image").first.get_attribute("src")
    slider = lab.page.get_by_role("slider").first
    slider.scroll_into_view_if_needed()
    slider.focus()
    press(lab, "ArrowRight")
    expect(lab.words).to_contain_text("M = 24:")
    expect(lab.page.locator(".widget-image").first).not_to_have_attribute("src", before)
