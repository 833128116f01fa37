"""labkit: find out what limits an LLM on a GPU.

Submodules are imported when they are first used, so `import labkit` costs nothing.
"""

from importlib import import_module

__version__ = "0.1.0"

_LAZY = {
    "check": "labkit.course.checks",        # labkit.check("C1") in a notebook
    "record": "labkit.report",              # labkit.record("GEMM", 1.38, "ms"): a key figure
}  # fmt: skip


def __getattr__(name):
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")
