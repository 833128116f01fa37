"""Where the time of a step goes: `profile(fn, model=model)` → ranges, kernels, API calls."""

from importlib import import_module

__all__ = ["ProfileError", "Recording", "profile"]


def __getattr__(name):  # torch loads when something is recorded, not when a figure is drawn
    if name in __all__:
        return getattr(import_module("labkit.profiling.recording"), name)
    raise AttributeError(f"module 'labkit.profiling' has no attribute {name!r}")
