"""Key figures, and the pages that show a run: complete, self-contained, and safe to open."""

import base64
import io
import re
import subprocess
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import nbformat
import numpy as np
import pytest
import torch
from PIL import Image

import labkit
from labkit import report
from labkit.errors import UserError
from labkit.report import KeyFigure
from labkit.runner import pages
from labkit.runner.summary import STATUSES, Failure, NotebookResult, Picture, write_text

# ── record ──


@pytest.mark.parametrize(
    "value, shown",
    [
        (1.375, "GEMM: 1.375 ms"),
        (1178861568, "GEMM: 1,178,861,568 ms"),
        (2 / 3, "GEMM: 0.6667 ms"),
        (np.float32(0.5), "GEMM: 0.5 ms"),
        (np.int64(7), "GEMM: 7 ms"),
        (torch.tensor([2.5]), "GEMM: 2.5 ms"),
        ("n/a", "GEMM: n/a ms"),
    ],
)
def test_record_takes_numbers_and_words(value, shown):
    assert str(labkit.record("GEMM", value, "ms")) == shown


@pytest.mark.parametrize(
    "arguments",
    [
        ("x", float("nan")),
        ("x", float("inf")),
        ("x", 10**400),
        ("x", True),
        ("x", None),
        ("x", 1 + 2j),
        ("x", [1.0]),
        ("x", np.ones(2)),
        ("x", torch.ones(2)),
        ("x", "a" * 81),
        ("x", "two\nlines"),
        ("x", ""),
        ("", 1),
        (3, 1),
        ("x" * 61, 1),
        ("x", 1, "u" * 21),
        ("x", 1, None),
    ],
)
def test_record_refuses(arguments):
    with pytest.raises(UserError) as refusal:
        labkit.record(*arguments)
    assert len(str(refusal.value)) < 250, f"long message: {refusal.value}"


def test_record_needs_neither_torch_nor_ipython():
    check = "import sys,labkit; labkit.record('x', 1); print({'torch','IPython'} & {*sys.modules})"
    text = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True).stdout
    assert text == "set()\n", f"imported: {text}"


# ── what is found in a notebook ──


def code(*data):
    """A code cell with one display output for each bundle."""
    outputs = [nbformat.v4.new_output("display_data", data=bundle) for bundle in data]
    return nbformat.v4.new_code_cell("pass", outputs=outputs, execution_count=1)


def notebook(*cells):
    """A notebook of code cells, and of markdown cells where a string is given."""
    made = [nbformat.v4.new_markdown_cell(c) if isinstance(c, str) else c for c in cells]
    return nbformat.v4.new_notebook(cells=made)


def png(width=800, height=400) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_key_figures_last_of_each_name_wins_and_junk_is_ignored():
    bundles = [{report.MIME: {"name": "a", "value": value, "unit": "ms"}} for value in (1, 2)]
    junk = [{}, 3, None, {"name": "b"}, {"name": "b", "value": float("nan")}, {"nme": "b"}]
    nb = notebook(code(*bundles), code(*({report.MIME: item} for item in junk)))
    assert report.key_figures(nb) == (KeyFigure("a", 2, "ms"),)


@pytest.mark.parametrize(
    "source, title",
    [
        ("# A `b` *c* [d](e.md)", "A b c d"),
        ("text\n\n## Two ##", "Two"),
        ("```\n# a comment\n```", ""),
        ("#hash", ""),
        ("", ""),
    ],
)
def test_title(source, title):
    assert pages.title(notebook(code(), source)) == title


def test_pictures_are_small_and_broken_ones_are_left_out(tmp_path):
    bundles = [{"image/png": data} for data in (png(), "no picture", png()[:80], "")]
    nb = notebook("# First", code(*bundles), "## Second", code({"image/png": png(100, 50)}))
    written = pages.write_notebook(nb, tmp_path, Path("notebooks/a.ipynb"))
    found = [(picture.caption, picture.width, picture.height) for picture in written["pictures"]]
    assert found == [("First", 480, 240), ("Second", 100, 50)], found
    pages.write_notebook(notebook(), tmp_path, Path("notebooks/a.ipynb"))
    left = list(tmp_path.rglob("*.png"))
    assert not left, f"thumbnails of the earlier run: {left}"


# ── the pages ──


class Page(HTMLParser):
    """The links and sources of a page, its ids, and the tags that were never closed."""

    VOID = ("meta", "link", "img", "br", "hr", "input")

    def __init__(self, text):
        super().__init__()
        self.links, self.ids, self.images, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links += [attrs[name] for name in ("href", "src") if attrs.get(name)]
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.images += [attrs] if tag == "img" else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


EVIL = "<script>alert(1)</script>"
EVIL_NAME = "notebooks/50%/a{b} #1?<i>.ipynb"


@pytest.fixture
def index(tmp_path):
    """The index of one result of each status, with hostile names and texts; and its folder."""
    nb = notebook("# " + EVIL, code({"image/png": png()}))
    written = pages.write_notebook(nb, tmp_path, Path(EVIL_NAME))
    failure = Failure(EVIL, 3, nb.cells[1].id, EVIL, 2, EVIL, EVIL)
    results = [
        NotebookResult(
            path=f"{EVIL_NAME}-{status}",
            status=status,
            title=EVIL,
            parameters={"profile": EVIL},
            seconds=seconds,
            failure=failure if status == "failed" else None,
            **{**written, "figures": (KeyFigure(EVIL, EVIL),)},
        )
        for seconds, status in enumerate(STATUSES)
    ]
    write_text(tmp_path / "summary.json", "")
    pages.write_index(tmp_path, results)
    return tmp_path, (tmp_path / "index.html").read_text()


def test_index_is_well_formed_and_escapes_everything(index):
    page = Page(index[1])
    assert not page.open, f"never closed: {page.open}"
    assert EVIL not in index[1]
    assert all(image["alt"] for image in page.images), page.images


def test_index_links_lead_somewhere_and_nothing_is_fetched(index):
    folder, text = index
    page = Page(text)
    for link in page.links:
        file, _, fragment = link.partition("#")
        assert "://" not in link, f"external: {link}"
        assert (folder / unquote(file)).exists(), f"{link} leads nowhere"
        target = Page(text) if not file else None
        if file.endswith(".html"):
            ids = re.findall(r'id="([^"]+)"', (folder / unquote(file)).read_text())
            assert not fragment or unquote(fragment) in ids, f"{link}: no such cell"
        elif target:
            assert fragment in target.ids, f"{link}: no such place"


@pytest.mark.parametrize("status", STATUSES)
def test_index_says_each_status_in_words(index, status):
    assert pages.STATUS_WORDS[status] in index[1]


def test_index_without_results(tmp_path):
    pages.write_index(tmp_path, [])
    assert "No notebook has run yet" in (tmp_path / "index.html").read_text()


def test_page_asks_the_network_only_for_what_it_shows(tmp_path):
    plain, formula = notebook("# Hello", code({"text/plain": "42"})), notebook("$a^2$")
    for nb, wanted in ((plain, []), (formula, ["mathjax"])):
        pages.write_notebook(nb, tmp_path, Path("notebooks/a.ipynb"))
        text = (tmp_path / "notebooks" / "a.html").read_text()
        scripts = re.findall(r'<script[^>]*src="([^"]+)"', text)
        assert [name for name in scripts if "mathjax" not in name] == [], scripts
        assert len(scripts) == len(wanted), f"{scripts} for {wanted}"
        assert 'href="../index.html"' in text
    assert "async" in re.search(r"<script[^>]*src=[^>]*mathjax[^>]*>", text)[0]


def test_notebook_that_cannot_be_shown_is_still_written(tmp_path, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no template")

    monkeypatch.setattr(pages, "_page", broken)
    written = pages.write_notebook(notebook("# a"), tmp_path, Path("notebooks/a.ipynb"))
    assert written["page"] == "" and (tmp_path / written["executed"]).exists(), written


def test_write_text_replaces_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "file"
    write_text(path, "old")

    def full(*arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr("labkit.runner.summary.os.replace", full)
    with pytest.raises(OSError):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path], "a draft is left behind"


def test_lone_surrogates_survive_in_a_notebook(tmp_path):
    nb = notebook(code({"text/plain": "\ud800 broken"}))
    pages.write_notebook(nb, tmp_path, Path("a.ipynb"))
    again = nbformat.read(tmp_path / "a.ipynb", as_version=4)
    assert again.cells[0].outputs[0].data["text/plain"] == "\ud800 broken"


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "0.0 s"), (9.94, "9.9 s"), (42.4, "42 s"), (59.7, "1 min 00 s"), (7800, "2 h 10 min")],
)
def test_duration(seconds, text):
    assert pages.duration(seconds) == text


def test_picture_roundtrip():
    result = NotebookResult("a", "ok", pictures=(Picture("f.png", "c", "id", 1, 2),))
    assert NotebookResult.from_dict(asdict(result)) == result
