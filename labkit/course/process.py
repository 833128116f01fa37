"""A pytest process that runs code nobody has looked at, and its signed reports."""

import hashlib
import hmac
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

POLL_S = 0.02
NO_TESTS = 5  # pytest's exit status


def sign(key: bytes, line: str) -> str:
    """The signature of a report's line: HMAC-SHA256, in hexadecimal."""
    return hmac.new(key, line.encode(), hashlib.sha256).hexdigest()


class CheckProcess:
    """pytest on test files, in a process group of its own that does not outlive the block.

    The child writes to a file that has no name. Only its descriptor is inherited, and the key
    for signing comes through standard input, which is read before any test file is imported.
    """

    def __init__(self, root: Path, files: list[Path], *options: str):
        self.root, self.arguments = root, [*options, *map(str, files)]
        self.key = secrets.token_bytes(32)
        self.silent_s: float | None = None  # how long it had been silent when it was given up
        self.read_up_to = 0

    def __enter__(self):
        with ExitStack() as stack:
            self.reports = stack.enter_context(tempfile.TemporaryFile())
            self.errors = stack.enter_context(tempfile.TemporaryFile())
            self.process = self._start(self.reports.fileno())
            stack.callback(self._stop)
            self._greet(self.reports.fileno())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _start(self, descriptor: int) -> subprocess.Popen:
        options = ["-s", "-c", str(self.root / "pyproject.toml"), "--rootdir", str(self.root)]
        options += ["-p", "labkit.course.pytest_plugin", "-p", "no:cacheprovider"]
        options += ["--continue-on-collection-errors"]
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *self.arguments],
            cwd=self.root,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            pass_fds=(descriptor,),
            start_new_session=True,
        )

    def _greet(self, descriptor: int):
        hello = json.dumps({"descriptor": descriptor, "key": self.key.hex()})
        with suppress(BrokenPipeError):  # it died at once; records() and ending() will say so
            self.process.stdin.write(hello.encode() + b"\n")
            self.process.stdin.close()

    def _stop(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @staticmethod
    def _environment() -> dict:
        """Ours without pytest's options and plugins; a notebook's plotting backend is not there."""
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "MPLBACKEND")}
        return kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONFAULTHANDLER": "1"}

    def records(self, limit_s: float) -> Iterator[dict]:
        """Each report as it comes, until the process ends or has been silent for `limit_s`."""
        heard = time.monotonic()
        while True:
            ended = self.process.poll() is not None
            for record in self._unread():
                heard = time.monotonic()
                yield record
            if ended:
                return
            if time.monotonic() - heard > limit_s:
                self.silent_s = limit_s
                return
            time.sleep(POLL_S)

    def _unread(self) -> Iterator[dict]:
        """Reports since the last call. A line with a wrong signature is dropped: it is not ours."""
        size = os.fstat(self.reports.fileno()).st_size - self.read_up_to
        data = os.pread(self.reports.fileno(), max(size, 0), self.read_up_to)
        whole = data[: data.rfind(b"\n") + 1]
        self.read_up_to += len(whole)
        for row in whole.decode(errors="replace").splitlines():
            signature, _, line = row.partition(" ")
            if hmac.compare_digest(signature.encode(), sign(self.key, line).encode()):
                yield json.loads(line)

    def ending(self) -> str:
        """How it ended, in words, for a check or a file that it did not get through."""
        if self.silent_s is not None:
            return f"it did not finish within {self.silent_s:g} s (an endless loop?)"
        status = self.process.wait()
        if status == NO_TESTS:
            return "the test file has no checks"
        if status < 0:
            return f"it ended Python with {signal.Signals(-status).name}"
        said = self._last_words()
        return f"it ended Python with exit status {status}" + (f": {said}" if said else "")

    def _last_words(self) -> str:
        size = os.fstat(self.errors.fileno()).st_size
        tail = os.pread(self.errors.fileno(), 2000, max(0, size - 2000)).decode(errors="replace")
        lines = [line.strip() for line in tail.splitlines() if line.strip()]
        return lines[-1] if lines else ""
