"""The constants of the performance model: what each means, and whose they are."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from labkit.errors import UserError, positive_number

COMPUTE, MEMORY, OVERHEAD = "compute", "memory bandwidth", "overhead"


def _constant(unit: str, bound: str, what: str, **default):
    return field(metadata={"unit": unit, "bound": bound, "what": what}, **default)


@dataclass(frozen=True)
class Constants:
    """What one device reaches in a training step, in the dtype that it trains in.

    A rate is the one at which time grows with work; `kernel_us` is what every kernel costs besides.
    The last three are 0 where the device is the CPU that Python runs on. `source` says how the
    constants were found.
    """

    gemm_tflops: float = _constant("TFLOP/s", COMPUTE, "dense matrix multiplies")
    grouped_tflops: float = _constant("TFLOP/s", COMPUTE, "the grouped multiplies of experts")
    attention_tflops: float = _constant("TFLOP/s", COMPUTE, "attention, forward")
    attention_backward_tflops: float = _constant("TFLOP/s", COMPUTE, "attention, backward")
    stream_gbs: float = _constant("GB/s", MEMORY, "element-wise kernels over whole tensors")
    strided_gbs: float = _constant("GB/s", MEMORY, "element-wise kernels that compute indices")
    gather_gbs: float = _constant("GB/s", MEMORY, "rows sent to experts and collected")
    loss_gbs: float = _constant("GB/s", MEMORY, "softmax over the vocabulary")
    optimizer_gbs: float = _constant("GB/s", MEMORY, "the fused AdamW update")
    kernel_us: float = _constant("µs", OVERHEAD, "what any kernel costs on the device")
    power_loss: float = _constant(
        "1",
        COMPUTE,
        "extra time of multiplies for each doubling of 4096 tokens, up to two",
        default=0,
    )
    launch_us: float = _constant("µs", OVERHEAD, "Python's time for an operation", default=0)
    relaunch_us: float = _constant(
        "µs", OVERHEAD, "Python's time for an operation that is run again", default=0
    )
    source: str = ""

    def __post_init__(self):
        for name in NAMES:
            if not (name in CAN_BE_ZERO and getattr(self, name) == 0):
                positive_number(name, getattr(self, name))

    @classmethod
    def from_dict(cls, values: Mapping) -> "Constants":
        """UserError: a constant is missing, unknown, or no number above 0."""
        if missing := [n for n in NAMES if n not in values and n not in CAN_BE_ZERO]:
            raise UserError(f"the constants lack {missing}; `labkit calibrate` makes them anew")
        if unknown := sorted(values.keys() - {*NAMES, "source"}):
            raise UserError(f"unknown constants {unknown}; the model has {', '.join(NAMES)}")
        return cls(**values)

    def to_dict(self) -> dict:
        return asdict(self)


CAN_BE_ZERO = ("power_loss", "launch_us", "relaunch_us")
NAMES = tuple(each.name for each in fields(Constants) if each.name != "source")
MEANINGS = {each.name: each.metadata for each in fields(Constants) if each.name != "source"}
