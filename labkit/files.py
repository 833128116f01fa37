"""Files that are there whole or not at all, and folders that take them."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from labkit.errors import UserError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A draft to write, which takes the place of `path` if the block ends well.

    A reader, or a killed run, never meets half of the file, and a failure leaves no draft. The
    folder is made if it is absent. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink()


def writable_folder(folder: str | Path) -> Path:
    """The folder, made if it is absent, once a file has been written to it and removed again.

    Ask before a measurement, not after it. UserError: the folder cannot be written to.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{uuid.uuid4().hex}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{folder} cannot be written to ({error.strerror})") from None
    return folder
