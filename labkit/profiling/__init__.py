"""Where the time of a step goes: `profile(fn, model=model)` → ranges, kernels, API calls."""

from labkit.profiling.recording import ProfileError, Recording, profile

__all__ = ["ProfileError", "Recording", "profile"]
