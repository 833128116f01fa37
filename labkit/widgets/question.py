"""A question with its answer behind a button."""

import html
import re

import ipywidgets

from labkit.errors import UserError


class Quiz(ipywidgets.VBox):
    """See `labkit.widgets.quiz`. Where widgets do not show, its text is the question."""

    def __init__(self, question: str, options, answer: str, why: str):
        options = _checked(question, options, answer, why)
        self.question, self.answer, self.why = question, answer, why
        self.choice = ipywidgets.RadioButtons(options=options, value=None, layout={"width": "auto"})
        self.button = ipywidgets.Button(description="Check", tooltip="Check the chosen answer")
        self.feedback = ipywidgets.HTML()
        self.choice.observe(self._clear, "value")
        self.button.on_click(self._check)
        heading = ipywidgets.HTML(f'<div style="line-height: 1.4">{_inline(question)}</div>')
        super().__init__(
            [heading, self.choice, self.button, self.feedback],
            layout={"padding": "0.25rem 0.75rem", "border_left": "4px solid #0173b2"},
        )

    def _clear(self, change) -> None:
        self.feedback.value = ""  # it spoke of another choice

    def _check(self, button) -> None:
        chosen = self.choice.value
        if chosen is None:
            self.feedback.value = _said("Choose an answer first.")
        elif chosen == self.answer:
            self.feedback.value = _said("✓ Right.", self.why)
        else:
            self.feedback.value = _said("✗ Not this one.", self.why)

    def _repr_mimebundle_(self, **kwargs) -> dict:
        lines = [self.question, *(f"( ) {option}" for option in self.choice.options)]
        return super()._repr_mimebundle_(**kwargs) | {"text/plain": "\n".join(lines)}


def _checked(question, options, answer, why) -> list[str]:
    """The options as a list. Raises UserError unless all are words and the answer is an option."""
    for name, text in (("question", question), ("why", why)):
        if not _is_words(text):
            raise UserError(f"{name}={text!r} must be words")
    try:
        found = [] if isinstance(options, str) else list(options)
    except TypeError:
        found = []
    if len(found) < 2 or not all(map(_is_words, found)) or len(set(found)) < len(found):
        raise UserError(f"options={options!r} must be a list of two or more different texts")
    if answer not in found:
        raise UserError(f"answer={answer!r} is none of the options {found}")
    return found


def _is_words(text) -> bool:
    return isinstance(text, str) and bool(text.strip())


def _said(verdict: str, why: str = "") -> str:
    return f'<div role="alert" style="line-height: 1.4"><b>{verdict}</b> {_inline(why)}</div>'


def _inline(text: str) -> str:
    """The text as HTML, with `code` in backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
