"""The pytest plugin inside the scored process: reports on each check as a signed line of JSON.

It is loaded by `process.py`, which sends a file descriptor and a key through standard input before
any student's code runs.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from labkit.course.process import sign


class Reporter:
    """Writes "collected", "started", "finished" and "broken" lines."""

    def __init__(self, descriptor: int, key: bytes, root: Path):
        self.descriptor, self.key, self.root = descriptor, key, root

    def write(self, **fields):
        line = json.dumps(fields)
        os.write(self.descriptor, f"{sign(self.key, line)} {line}\n".encode())

    def pytest_collection_finish(self, session):
        checks = [described(item) for item in session.items if marker(item)]
        self.write(event="collected", checks=checks)

    def pytest_collectreport(self, report):
        if report.failed:
            error = getattr(report, "labkit_error", None) or str(report.longrepr)
            self.write(event="broken", file=report.nodeid, message=error)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        report = yield
        excinfo = getattr(getattr(report, "call", None), "excinfo", None)
        if excinfo is not None:
            report.labkit_error = in_words(excinfo, self.root)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        if marker(item):
            self.write(event="started", test=item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        # One line a test: of its body, or of the set-up or tear-down that went wrong.
        if marker(item) and (report.when == "call" or report.outcome != "passed"):
            self.write(
                event="finished",
                test=item.nodeid,
                outcome=outcome(report, call),
                message=in_words(call.excinfo, self.root) if call.excinfo else "",
                seconds=call.duration,
            )
        return report


def marker(item):
    """The exercise that a test belongs to, or None."""
    return item.get_closest_marker("exercise")


def described(item) -> dict:
    """What a score says of a test before it has run."""
    found = marker(item)
    what = (item.obj.__doc__ or item.name).strip().splitlines()[0]
    return {
        "test": item.nodeid,
        "exercise": found.args[0],
        "points": found.kwargs["points"],
        "what": what,
    }


def outcome(report, call) -> str:
    """passed, failed, open (not implemented) or skipped: by a mark, never from inside a test."""
    if report.outcome == "passed" and not hasattr(report, "wasxfail"):
        return "passed"
    if report.outcome == "skipped" and report.when == "setup":
        return "skipped"
    is_open = call.excinfo is not None and call.excinfo.errisinstance(NotImplementedError)
    return "open" if is_open else "failed"


def in_words(excinfo, root: Path) -> str:
    """An assertion's message alone; any other error with its type, and where it was raised."""
    text = str(excinfo.value)
    if excinfo.errisinstance(AssertionError) and text:
        return text.split("\nassert ")[0]
    if excinfo.errisinstance((NotImplementedError, pytest.skip.Exception)):
        return text
    places = [
        f" ({Path(entry.path).relative_to(root)}, line {entry.lineno + 1})"
        for entry in excinfo.traceback
        if Path(entry.path).is_relative_to(root / "labkit")
    ]
    return f"{excinfo.typename}: {text}" + (places[-1] if places else "")


def pytest_configure(config):
    """Take the key and the descriptor from stdin, where no test can read them again."""
    hello = json.loads(sys.stdin.readline())
    reporter = Reporter(hello["descriptor"], bytes.fromhex(hello["key"]), config.rootpath)
    config.pluginmanager.register(reporter)
