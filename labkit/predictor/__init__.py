"""The performance model: time and peak memory of training steps that nobody has run.

`predict.step_ms` and `predict.peak_gib` are what `labkit.perfmodel` hands out. `steptime` and
`peak` are the two models, `constants` says what they need of a device, `known` has the constants of
measured devices, `unseen` finds those of a device that never ran a step, `calibrate` fits them, and
`search` looks for configurations.
"""

from labkit.predictor.constants import Constants
from labkit.predictor.prediction import Prediction, Term

__all__ = ["Constants", "Prediction", "Term"]
