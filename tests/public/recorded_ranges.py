"""Small models that say when they run, and `Ranges` that keep a log: what C4's checks look at."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit import hooks
from labkit.hooks import in_backward
from tests.public.judging import require

NO_ANNOTATION = "annotate returned None: is `return annotation` still there?"


class Broken(RuntimeError):
    """What a module of these checks raises half-way."""


class Block(nn.Module):
    """Children in a row. Each forward notes its own path, so that the log shows when it ran."""

    def __init__(self, *children: str | tuple[str, nn.Module], fails_after: str = ""):
        super().__init__()
        self.path, self.log, self.fails_after = "", [], fails_after
        for child in children:
            name, module = (child, nn.Linear(4, 4)) if isinstance(child, str) else child
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(Entry("run", self.path, in_backward()))
        for name, child in self.named_children():
            x = child(x)
            if name == self.fails_after:
                raise Broken("half-way")
        return x


class Recomputed(Block):
    """A Block whose children run under activation recomputation."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@dataclass(frozen=True)
class Entry:
    """A line of the log: a range opened or closed, or a Block's forward ran."""

    kind: str
    name: str
    backward: bool = False


@dataclass
class Log:
    """What one annotated model did."""

    entries: list[Entry] = field(default_factory=list)

    def names(self, kind: str, backward: bool | None = None) -> list[str]:
        return [
            entry.name for entry in self.entries
            if entry.kind == kind and backward in (None, entry.backward)
        ]  # fmt: skip

    def ranges(self) -> type:
        """A class that stands in for `Ranges` and writes to this log."""
        entries = self.entries

        class Recorder(hooks.Ranges):
            def __init__(self):
                super().__init__()
                self.stack = []

            def push(self, name):
                self.stack.append(name)
                entries.append(Entry("open", str(name), in_backward()))

            def pop(self):
                name = self.stack.pop() if self.stack else "(nothing)"
                entries.append(Entry("close", name, in_backward()))

            def close(self, depth=0):
                while len(self.stack) > depth:
                    self.pop()

        return Recorder

    def check_balance(self, why: str):
        """Every range was closed, and none was closed that was not open."""
        opened, closed = self.names("open"), self.names("close")
        require("(nothing)" not in closed, "a range was closed when none was open")
        left = sorted(set(name for name in opened if closed.count(name) < opened.count(name)))
        require(
            not left,
            f"{len(opened)} ranges were opened and {len(closed)} closed; left open: "
            f"{', '.join(left)}{why}",
        )


@contextmanager
def annotated(annotate: Callable, model: nn.Module) -> Iterator[tuple[Log, object]]:
    """The model's log, and what `annotate` returned, while the model is annotated."""
    log = Log()
    for path, module in model.named_modules():
        if isinstance(module, Block):
            module.path, module.log = path, log.entries
    with patch.object(hooks, "Ranges", log.ranges()):
        annotation = annotate(model)
    require(annotation is not None, NO_ANNOTATION)
    try:
        yield log, annotation
    finally:
        annotation.remove()
