"""Somebody's predictor: under watch that it is plain arithmetic, and in a process of its own.

`leaderboard` runs this file as a script, beside a labkit that may be the hand-in's own: it imports
nothing but the standard library. The process is told configurations, and not what was measured.
It is no sandbox: code that sets out to get around the watch will.
"""

import importlib
import importlib.util
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager
from numbers import Real
from pathlib import PurePath
from tempfile import TemporaryDirectory

CODE = {".py", ".pyc", ".so", ".pyd", ".zip"}
TABLES = {"devices.toml", "METADATA"}  # of labkit, and the versions of packages
STARTS = {
    "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn",
    "os.kill", "os.killpg", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.symlink",
    "os.link", "shutil.rmtree", "socket.connect", "socket.bind", "socket.getaddrinfo",
    "ctypes.dlsym", "ctypes.dlsym/handle",
}  # fmt: skip
REFERENCE = ("labkit.predictor.steptime", "labkit.predictor.peak")
MEMORY_BYTES, REPORT_BYTES = 4 * 2**30, 2**20
MISSING = "it is not written yet"

_broken: list[str] | None = None  # what the watch has seen; None while nobody is watched
_hooked = False


class NotArithmetic(Exception):
    """What a predictor may not do: use a file, another program, or the network."""


@contextmanager
def watched() -> Iterator[list[str]]:
    """Within the block no torch can be imported, and files, programs and network are refused.

    Gives the list of what was tried, which grows even if the refusal is caught. Python's own
    modules can be read, and labkit's table of devices. The working directory and the home are
    empty: what a user has calibrated or added there does not count.
    """
    global _broken, _hooked
    if not _hooked:  # a hook cannot be taken away again
        sys.addaudithook(_audit)
        _hooked = True
    tried = []
    with TemporaryDirectory() as folder, chdir(folder), ExitStack() as stack:
        for name in {"torch", *(name for name in sys.modules if name.startswith("torch."))}:
            stack.callback(_put_back, sys.modules, name, sys.modules.get(name))
            sys.modules[name] = None
        stack.callback(_put_back, os.environ, "HOME", os.environ.get("HOME"))
        os.environ["HOME"] = folder
        _broken = tried
        try:
            yield tried
        finally:
            _broken = None


def _put_back(names, name: str, value) -> None:
    del names[name]
    if value is not None:
        names[name] = value


def _audit(event: str, arguments: tuple) -> None:
    if _broken is None:
        return
    if event == "open":
        problem = _file_problem(*arguments)
    else:
        problem = f"it calls {event}" if event in STARTS else None
    if problem:
        _broken.append(problem)
        raise NotArithmetic(problem)


def _file_problem(path, _mode, flags) -> str | None:
    if isinstance(path, int):
        return None
    path = PurePath(os.path.realpath(os.fsdecode(path)))  # a link and ".." can hide what it is
    if {"__pycache__", "zoneinfo"} & set(path.parts):
        return None
    if flags & (os.O_WRONLY | os.O_RDWR):
        return f"it writes the file {path.name}"
    known = path.suffix in CODE or path.name in TABLES
    return None if known else f"it reads the file {path.name}"


def in_words(error: BaseException) -> str:
    """Why a predictor gave no number."""
    if isinstance(error, ImportError) and str(error.name).partition(".")[0] == "torch":
        return "it imports torch"
    if isinstance(error, ImportError) and error.name in REFERENCE:
        return f"it imports {error.name}, which is not its own"
    if isinstance(error, NotImplementedError):
        return MISSING
    if isinstance(error, NotArithmetic):
        return str(error)
    said = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {said}"


def value(function, configuration: dict) -> tuple[float | None, str]:
    """(the number, "") that a function predicts, or (None, why there is none)."""
    from labkit.config import ModelConfig

    cfg = ModelConfig.preset(configuration["model"], n_layers=configuration["layers"])
    size, seqlen = configuration["micro_batch_size"], configuration["seqlen"]
    more = {"recompute": configuration["recompute"], "device": configuration["device"]}
    if configuration["micro_batches"] > 1:
        more["micro_batches"] = configuration["micro_batches"]
    try:
        found = function(cfg, size, seqlen, **more)
        if not isinstance(found, Real) or isinstance(found, bool):
            return None, f"it returned a {type(found).__name__}, not a number"
        return float(found), ""
    except BaseException as error:  # sys.exit is one way to give no number
        return None, in_words(error)


def load(file: str, own_labkit: str | None):
    """The module of a hand-in: of its own labkit, or a file that takes the place of ours."""
    if own_labkit:
        sys.path.insert(0, own_labkit)
        return importlib.import_module("labkit.perfmodel")
    sys.modules |= dict.fromkeys(REFERENCE)
    spec = importlib.util.spec_from_file_location("labkit.perfmodel", file)
    module = importlib.util.module_from_spec(spec)
    import labkit

    labkit.perfmodel = sys.modules["labkit.perfmodel"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Answer each configuration of standard input by a line of JSON to the descriptor named."""
    task = json.load(sys.stdin)
    sys.path += [task["labkit"]]
    for limit, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, REPORT_BYTES)):
        resource.setrlimit(limit, (most, most))

    def report(**answer) -> None:
        os.write(task["descriptor"], json.dumps(answer).encode() + b"\n")

    with watched() as broken:
        try:
            module = load(task["file"], task["own_labkit"])
            functions = {name: getattr(module, name) for name in task["functions"]}
        except BaseException as error:
            report(problem=(broken or [in_words(error)])[0])
            return
        for configuration in task["configurations"]:
            answers = {name: value(function, configuration) for name, function in functions.items()}
            if broken:
                report(problem=broken[0])
                return
            report(answers=answers)


if __name__ == "__main__":
    main()
