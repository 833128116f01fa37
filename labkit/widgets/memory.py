"""The memory explorer: what a training step needs, and which GPUs have as much."""

import io
from html import escape

import ipywidgets

from labkit.devices import resolve
from labkit.errors import UserError
from labkit.widgets.controls import labelled, labelled_slider
from labkit.widgets.memory_picture import SEQLENS, STATES, estimate, figure, words

MODELS = ("olmoe-1b-7b", "small", "medium", "olmoe-tiny", "tiny")
LAYERS = (1, 2, 4, 8, 12, 16, 24, 32)
SIZES = (1, 2, 4, 8, 16, 32, 64)
_CHOICES = ("model", "layers", "micro_batch_size", "seqlen", "recompute", "state")


class MemoryExplorer(ipywidgets.VBox):
    """See `labkit.widgets.memory_explorer`. Where widgets do not show, its text is the words."""

    def __init__(self, device=None):
        self._device = resolve(device)
        self.summary = ""  # the words, as plain text
        self._make_controls()
        picture = {"width": "42rem", "max_width": "100%", "height": "auto"}
        self.image = ipywidgets.Image(format="png", layout=picture)
        self.words = ipywidgets.HTML()
        controls = ipywidgets.HBox(self.controls, layout={"flex_flow": "row wrap"})
        super().__init__([controls, self.image, self.words])
        self._draw()

    def _make_controls(self) -> None:
        self.model = labelled(
            ipywidgets.Dropdown, "Model", "A preset of ModelConfig",
            options=MODELS, value=MODELS[0],
        )  # fmt: skip
        self.layers = labelled_slider("Layers", "How many layers", LAYERS, 4)
        self.micro_batch_size = labelled_slider("Micro batch", "Sequences in one pass", SIZES, 4)
        self.seqlen = labelled_slider("Tokens", "In each sequence", SEQLENS, 2048)
        self.recompute = labelled(
            ipywidgets.Checkbox, "Recompute", "Keep only each layer's input", value=False
        )
        self.state = labelled(
            ipywidgets.Dropdown, "State", "Weights, gradients and AdamW's moments",
            options=list(STATES), value="bfloat16",
        )  # fmt: skip
        self.controls = (
            self.model, self.layers, self.micro_batch_size, self.seqlen, self.recompute, self.state,
        )  # fmt: skip
        for control in self.controls:
            control.observe(self._draw, "value")

    def _draw(self, change=None) -> None:
        choice = {control: getattr(self, control).value for control in _CHOICES}
        try:
            parts = estimate(**choice)
            self.image.value = _png(figure(**choice, device=self._device))
        except Exception as error:  # nobody would see the traceback of a callback
            self.image.layout.display = "none"
            known = isinstance(error, (UserError, NotImplementedError))
            self.summary = str(error) if known else f"{type(error).__name__}: {error}"
            self.words.value = f'<div role="alert">{escape(self.summary)}</div>'
            return
        self.image.layout.display = None
        lines = words(parts, self._device, **choice)
        self.summary = "\n".join(lines)
        text = "".join(f"<p>{escape(line)}</p>" for line in lines)
        self.words.value = f'<div role="status" style="line-height: 1.4">{text}</div>'

    def _repr_mimebundle_(self, **kwargs) -> dict:
        return super()._repr_mimebundle_(**kwargs) | {"text/plain": self.summary}


def _png(drawn) -> bytes:
    file = io.BytesIO()
    drawn.savefig(file, format="png", pil_kwargs={"compress_level": 1})
    return file.getvalue()
