"""The step explorer: a step's time and memory, predicted while its sliders move."""

import io
from html import escape
from threading import Lock

import ipywidgets
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from labkit.devices import known_devices, resolve, spec
from labkit.widgets.controls import labelled, labelled_slider
from labkit.widgets.predictor_picture import RED, Measured, Step, figure, words

MODELS = ("olmoe-1b-7b", "small", "medium", "olmoe-tiny", "tiny")
LAYERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SIZES = (1, 2, 4, 8, 16, 32, 64)
SEQLENS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MICRO_BATCHES = (1, 2, 4, 8, 16)


class StepExplorer(ipywidgets.VBox):
    """See `labkit.widgets.step_explorer`. Where widgets do not show, its text is the words."""

    def __init__(self, device=None, sweep_csv=None):
        self._device = resolve(device)
        self._measured = Measured(sweep_csv)
        self._drawing = Lock()
        self.summary = ""  # the words, as plain text
        self._make_controls()
        picture = {"width": "46rem", "max_width": "100%", "height": "auto"}
        self.image = ipywidgets.Image(format="png", layout=picture)
        self.words = ipywidgets.HTML()
        controls = ipywidgets.HBox(self.controls, layout={"flex_flow": "row wrap"})
        super().__init__([controls, self.image, self.words])
        self._draw()

    def _make_controls(self) -> None:
        small = self._device.dtype == "float32"  # a CPU, for which OLMoE is too much
        names = [self._device.name, *known_devices()]
        self.model = labelled(
            ipywidgets.Dropdown, "Model", "A preset of ModelConfig",
            options=MODELS, value="olmoe-tiny" if small else MODELS[0],
        )  # fmt: skip
        self.layers = labelled_slider("Layers", "How many layers", LAYERS, 2 if small else 4)
        self.micro_batch_size = labelled_slider("Micro batch", "Sequences in one pass", SIZES, 4)
        self.seqlen = labelled_slider("Tokens", "In each sequence", SEQLENS, 128 if small else 2048)
        self.micro_batches = labelled_slider(
            "Accumulate", "Micro batches in a step", MICRO_BATCHES, 1
        )
        self.recompute = labelled(
            ipywidgets.Checkbox, "Recompute", "Keep only each layer's input", value=False
        )
        self.device = labelled(
            ipywidgets.Dropdown, "Device", "Where the step would run",
            options=list(dict.fromkeys(names)), value=self._device.name,
        )  # fmt: skip
        self.controls = (
            self.model, self.device, self.layers, self.micro_batch_size, self.seqlen,
            self.micro_batches, self.recompute,
        )  # fmt: skip
        for control in self.controls:
            control.observe(self._draw, "value")

    def _draw(self, change=None) -> None:
        with self._drawing:  # JupyterLab may give each control a thread of its own in the kernel
            try:
                step = self._step()
                self.image.value = _png(figure(step, self._measured))
                lines = words(step, self._measured)
            except Exception as error:  # nobody would see the traceback of a callback
                self._tell(f"{type(error).__name__}: {error}")
                return
            self.image.layout.display = None
            self.summary = "\n".join(lines)
            text = "".join(_paragraph(line, line == step.problem) for line in lines)
            self.words.value = f'<div role="status" style="line-height: 1.4">{text}</div>'

    def _tell(self, problem: str) -> None:
        self.image.layout.display = "none"
        self.summary = problem
        self.words.value = f'<div role="alert">{escape(problem)}</div>'

    def _step(self) -> Step:
        chosen = self.device.value
        device = self._device if chosen == self._device.name else spec(chosen)
        return Step.predicted(
            model=self.model.value, layers=self.layers.value,
            micro_batch_size=self.micro_batch_size.value, seqlen=self.seqlen.value,
            micro_batches=self.micro_batches.value, recompute=self.recompute.value, device=device,
        )  # fmt: skip

    def _repr_mimebundle_(self, **kwargs) -> dict:
        return super()._repr_mimebundle_(**kwargs) | {"text/plain": self.summary}


def _paragraph(line: str, wrong: bool) -> str:
    text = f'<b style="color: {RED}">{escape(line)}</b>' if wrong else escape(line)
    return f"<p>{text}</p>"


def _png(drawn) -> bytes:
    """The figure as a file, drawn once: `savefig` draws twice."""
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    pixels = Image.fromarray(np.asarray(canvas.buffer_rgba()))
    file = io.BytesIO()
    pixels.convert("RGB").save(file, "png", compress_level=1)
    return file.getvalue()
