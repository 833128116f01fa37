"""Every notebook: what it must look like before it is committed, and that it runs (nbval)."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(
    path for path in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts
)


def name(path):
    return str(path.relative_to(ROOT / "notebooks"))


@pytest.fixture(params=NOTEBOOKS, ids=name)
def notebook(request):
    nb = nbformat.read(request.param, as_version=4)
    nbformat.validate(nb)
    return nb


def tags(cell):
    return cell.metadata.get("tags", [])


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 3


def test_it_has_one_parameters_cell_with_the_profile(notebook):
    (cell,) = (cell for cell in notebook.cells if "parameters" in tags(cell))
    assert cell.source.startswith('profile = "auto"'), cell.source


def test_outputs_are_stored_only_where_they_are_compared(notebook):
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if "nbval-check-output" in tags(cell):
            assert cell.outputs, f"cell {cell.id} has no output to compare with: {cell.source}"
        else:
            assert not cell.outputs, f"cell {cell.id} keeps an output that nothing compares"


def test_it_opens_with_a_question_and_closes_with_what_to_remember(notebook):
    assert notebook.cells[0].source.startswith("# ")
    assert "?**" in notebook.cells[0].source
    assert notebook.cells[-1].source.startswith("## Remember")


def test_its_links_lead_somewhere(notebook, request):
    folder = request.node.callspec.params["notebook"].parent
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#:]+)\)", cell.source):
                assert (folder / target).exists(), f"cell {cell.id} links to {target}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_it_runs_and_shows_what_it_stores(path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-cell-timeout=300", "-p",
         "no:cacheprovider", "-o", "addopts=", "-q", path],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
