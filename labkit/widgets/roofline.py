"""The roofline explorer: controls, a picture, and the same in words."""

from contextlib import contextmanager
from functools import partial
from html import escape

import ipywidgets

from labkit.config import ModelConfig
from labkit.devices import known_devices, resolve, spec
from labkit.errors import UserError
from labkit.widgets.controls import labelled
from labkit.widgets.measured import Measured
from labkit.widgets.picture import ROWS, Picture
from labkit.widgets.point import BYTES, GemmPoint, amount, duration, expert_rows, gemm_point, rate

MODELS = ("olmoe-1b-7b", "small", "medium")
LARGEST = 2**18  # of k and n
_control = partial(labelled, label_width="4.5rem")
NONE, OWN = "none", "other sizes"


class RooflineExplorer(ipywidgets.VBox):
    """See `labkit.widgets.roofline_explorer`. Where widgets do not show, its text is the words."""

    def __init__(self, device=None, gemm_csv=None):
        first = resolve(device)
        self._device = first
        self._layers = _layers()
        self._measured = Measured.read(gemm_csv)
        self._picture, self._drawn, self._busy = None, None, False
        self.summary = ""  # the words, as plain text
        self._make_controls(first)
        picture = {"width": "38rem", "max_width": "100%", "height": "auto"}
        self.image = ipywidgets.Image(format="png", layout=picture)
        self.words = ipywidgets.HTML(layout={"min_width": "18rem", "flex": "1 1 18rem"})
        body = ipywidgets.HBox([self.image, self.words], layout={"flex_flow": "row wrap"})
        controls = ipywidgets.HBox(self.controls, layout={"flex_flow": "row wrap"})
        super().__init__([controls, body])
        self._draw()

    def _make_controls(self, first) -> None:
        names = [first.name, *(name for name in known_devices() if name != first.name)]
        layer = next(iter(self._layers))
        k, n, _ = self._layers[layer]
        self.layer = _control(
            ipywidgets.Dropdown, "Layer", "A weight matrix of a model; it sets k and n",
            options=[*self._layers, OWN], value=layer,
        )  # fmt: skip
        self.M = _control(
            ipywidgets.SelectionSlider, "M", "Rows: tokens, or the rows of one expert",
            options=[(f"{M:,}", M) for M in ROWS], value=16,
        )  # fmt: skip
        self.k, self.n = (
            _control(
                ipywidgets.BoundedIntText, name, f"The weight matrix has {name} {what}",
                value=value, min=1, max=LARGEST,
            )
            for name, what, value in (("k", "inputs", k), ("n", "outputs", n))
        )  # fmt: skip
        self.dtype = _control(
            ipywidgets.Dropdown, "dtype", "Of inputs and outputs",
            options=_dtypes(first), value=first.dtype,
        )  # fmt: skip
        self.device = _control(
            ipywidgets.Dropdown, "Device", "Whose roofline", options=names, value=first.name
        )
        self.compare = _control(
            ipywidgets.Dropdown, "Compare", "A second device",
            options=[NONE, *names], value=NONE,
        )  # fmt: skip
        self.controls = (
            self.layer, self.M, self.k, self.n, self.dtype, self.device, self.compare,
        )  # fmt: skip
        for control in self.controls:
            control.observe(self._changed, "value")

    def _changed(self, change) -> None:
        if self._busy:
            return
        with self._quietly():
            if change.owner is self.layer and change.new != OWN:
                self.k.value, self.n.value, _ = self._layers[change.new]
            elif change.owner in (self.k, self.n):
                self.layer.value = OWN
        self._draw()

    @contextmanager
    def _quietly(self):
        """One change of the user's draws once, whatever it changes in turn."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _offer_dtypes(self, device) -> None:
        offered, before = _dtypes(device), self.dtype.value
        if offered != list(self.dtype.options):
            with self._quietly():
                self.dtype.options = offered
                self.dtype.value = before if before in offered else device.dtype

    def _spec(self, name: str):
        return self._measured.completed(self._device if name == self._device.name else spec(name))

    def _draw(self) -> None:
        try:
            points, notes = self._points()
            self._show(points)
        except Exception as error:  # nobody would see the traceback of a callback
            self.image.layout.display = "none"
            self.summary = _told(error)
            self.words.value = f'<div role="alert">{escape(self.summary)}</div>'
            return
        self.image.layout.display = None
        _, _, model = self._layers.get(self.layer.value, (0, 0, None))
        sentences = [expert_rows(self.M.value, model)] if model else []
        sentences += [said for said in (self._measured.beside(points[0]), *notes) if said]
        self.summary = "\n".join([f"{_headline(points[0])} {points[0].why}", *sentences])
        self.words.value = _html(points, sentences)

    def _points(self) -> tuple[list[GemmPoint], list[str]]:
        """The point on each device, and what is to say about a device that has none."""
        sizes = self.M.value, self.k.value, self.n.value
        device = self._spec(self.device.value)
        self._offer_dtypes(device)
        points = [gemm_point(*sizes, device, self.dtype.value)]
        if self.compare.value in (NONE, self.device.value):
            return points, []
        other = self._spec(self.compare.value)
        if self.dtype.value not in other.peaks:
            return points, [f"{other.name} has no known {self.dtype.value} rate."]
        return [*points, gemm_point(*sizes, other, self.dtype.value)], []

    def _show(self, points: list[GemmPoint]) -> None:
        """Only another M moves the points of the picture that is there."""
        drawn = [(point.k, point.n, point.device) for point in points]
        if drawn != self._drawn:
            self._picture = Picture(points, self._measured)
            self._drawn = drawn
        else:
            self._picture.move(points)
        self.image.value = self._picture.png()

    def _repr_mimebundle_(self, **kwargs) -> dict:
        return super()._repr_mimebundle_(**kwargs) | {"text/plain": self.summary}


def _layers() -> dict[str, tuple[int, int, ModelConfig | None]]:
    """Menu entry → (k, n, the model if it is a matrix of its experts)."""
    from labkit.experiments.gemm import shapes

    found = {}
    for preset in MODELS:
        cfg = ModelConfig.preset(preset)
        for (k, n), name in shapes(cfg).items():
            found[f"{preset}: {name}"] = (k, n, cfg if "expert" in name else None)
    return found


def _dtypes(device) -> list[str]:
    return [dtype for dtype in device.peaks if dtype in BYTES]


def _told(error: Exception) -> str:
    """An error as a sentence; an exercise that is open says which one it is by itself."""
    if isinstance(error, (UserError, NotImplementedError)):
        return str(error)
    return f"labkit.perfmodel gave no point: {type(error).__name__}: {error}"


def _headline(point: GemmPoint) -> str:
    return f"M = {point.M:,}: {point.regime} on {point.device.name}."


def _html(points: list[GemmPoint], sentences: list[str]) -> str:
    """Reasons, then the numbers with a column for each device; colours are the theme's."""
    reasons = [f"<b>{escape(_headline(point))}</b> {escape(point.why)}" for point in points]
    text = "".join(f"<p>{line}</p>" for line in [*reasons, *map(escape, sentences)])
    numbers = [_numbers(point) for point in points]
    rows = [_row("", [point.device.name for point in points])]
    rows += [_row(name, [column[name] for column in numbers]) for name in numbers[0]]
    table = f'<table style="border-spacing: 0.75rem 0; text-align: right">{"".join(rows)}</table>'
    return f'<div role="status" style="line-height: 1.4">{text}{table}</div>'


def _row(name: str, cells: list[str]) -> str:
    texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row" style="text-align: left">{name}</th>{texts}</tr>'


def _numbers(point: GemmPoint) -> dict[str, str]:
    share = point.tflops / point.device.peak_tflops
    return {
        "work": amount(point.flops, "FLOP"),
        "traffic": amount(point.bytes, "B"),
        "intensity": f"{rate(point.intensity)} FLOP/B",
        "ridge": f"{rate(point.device.ridge)} FLOP/B",
        "bound": duration(point.bound_us),
        "attainable": f"{rate(point.tflops)} TFLOP/s",
        "share of peak": f"{100 * share:.3g} %",
    }
