"""The pages that show a run: each executed notebook with its outputs, and the index of all."""

import base64
import io
import re
import shutil
from pathlib import Path

import labkit
from labkit.report import key_figures
from labkit.runner.summary import NotebookResult, Picture, write_text

TEMPLATES = Path(labkit.__file__).parent / "templates"
THUMBNAIL = (480, 360)  # pixels, at most
STATUS_WORDS = {
    "ok": "✓ ok",
    "failed": "✗ failed",
    "interrupted": "■ interrupted",
    "unfinished": "… unfinished",
}


def title(nb) -> str:
    """The notebook's first heading, or ""."""
    headings = (_heading(cell) for cell in nb.cells)
    return next((heading for heading in headings if heading), "")


def _heading(cell) -> str:
    """The last heading of a markdown cell as plain text, or ""."""
    if cell.cell_type != "markdown":
        return ""
    code_left_out = re.sub(r"^```.*?^```", "", cell.source, flags=re.M | re.S)
    headings = re.findall(r"^#{1,6}\s+(.+?)\s*#*$", code_left_out, flags=re.M)
    if not headings:
        return ""
    unlinked = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", headings[-1])
    return re.sub(r"[*`]|<[^>]+>", "", unlinked).strip()


def write_notebook(nb, output: Path, place: Path) -> dict:
    """Write an executed notebook, its page and its thumbnails to `output / place` and beside it.

    Returns the fields of a NotebookResult that point there. Raises OSError when the notebook
    itself cannot be written; a notebook that nbconvert cannot show has no page.
    """
    import nbformat

    target = output / place
    write_text(target, nbformat.writes(nb))
    page = place.with_suffix(".html")
    try:
        write_text(output / page, _page(nb, place))
    except Exception:  # whatever an extension or a strange output may raise
        page = None
    return {
        "executed": place.as_posix(),
        "page": page.as_posix() if page else "",
        "figures": key_figures(nb),
        "pictures": _write_pictures(nb, output, place.with_suffix(".figures")),
    }


def _page(nb, place: Path) -> str:
    """The notebook as HTML. Without a network it loses formulas and live widgets, nothing else."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_file=str(TEMPLATES / "notebook.html.j2"))
    resources = {
        "metadata": {"name": title(nb) or place.stem},
        "home": "../" * (len(place.parts) - 1) + "index.html",
    }
    html, _ = exporter.from_notebook_node(nb, resources=resources)
    return html


def _write_pictures(nb, output: Path, folder: Path) -> tuple[Picture, ...]:
    """Thumbnails of the notebook's PNG outputs; `folder` is relative to `output`, and emptied."""
    shutil.rmtree(output / folder, ignore_errors=True)
    pictures = []
    heading = ""
    for cell in nb.cells:
        heading = _heading(cell) or heading
        for out in cell.get("outputs", ()):
            png = out.get("data", {}).get("image/png")
            thumbnail = png and _thumbnail(png)
            if not thumbnail:
                continue
            file = folder / f"{len(pictures) + 1}.png"
            (output / folder).mkdir(parents=True, exist_ok=True)
            thumbnail.save(output / file)
            size = thumbnail.size
            pictures.append(Picture(file.as_posix(), heading, cell.get("id", ""), *size))
    return tuple(pictures)


def _thumbnail(png: str):
    """A small PIL image of a base64 PNG; None when it is no picture."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(base64.b64decode(png)))
        image.thumbnail(THUMBNAIL)
    except Exception:  # Pillow raises many kinds for a broken file
        return None
    return image


def write_index(output: Path, results: list[NotebookResult]):
    """Write `index.html`, which needs nothing but the files beside it, from the records."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["duration"] = duration
    html = environment.get_template("index.html.j2").render(
        results=results,
        counts={status: n for status in STATUS_WORDS if (n := _count(results, status))},
        words=STATUS_WORDS,
        longest=max((result.seconds for result in results), default=0) or 1,
        total=sum(result.seconds for result in results),
        version=labkit.__version__,
    )
    write_text(output / "index.html", html)


def _count(results: list[NotebookResult], status: str) -> int:
    return sum(result.status == status for result in results)


def duration(seconds: float) -> str:
    """A time as people say it: `0.8 s`, `42 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
