"""What a kernel does, told from its name."""

import re

_CLASSES = (
    ("attention", r"flash|fmha|attention|sdpa"),
    ("optimizer", r"FusedOptimizer|FusedAdam|_fused_adam"),
    ("sort", r"[Ss]ort|[Rr]adix|[Tt]op[Kk]"),
    ("gemm", r"gemm|nvjet|cutlass|matmul|gemv|aten::(mm|bmm|addmm|linear|_grouped_mm)$"),
    ("softmax", r"[Ss]oft[Mm]ax|nll_loss|cross_entropy"),
    ("norm", r"layer_norm|rms_norm|LayerNorm|RMSNorm|GammaBeta"),
    ("embedding", r"embedding"),
    ("index", r"index|indices|gather|scatter|where|nonzero|masked|DeviceSelect|take|bag|_select"),
    ("scan", r"scan|cumsum|searchsorted"),
    ("reduce", r"reduce|sum|mean|amax|aminmax|norm_"),
    ("copy", r"[Mm]emcpy|[Mm]emset|[Ff]ill|copy|Cat|cat$|clone|contiguous|zero_|flip"),
    ("elementwise", r"elementwise|vectorized|pointwise|aten::(mul|add|sub|div|silu|pow|neg|rsub)"),
)  # fmt: skip
_PATTERNS = [(name, re.compile(pattern)) for name, pattern in _CLASSES]


def kernel_class(name: str, kind: str = "kernel") -> str:
    """gemm, attention, elementwise, index, sort, reduce, copy …; "other" if the name says nothing.

    The first class that the name fits counts: a GEMM with an elementwise epilogue is a GEMM.
    """
    if kind in ("copy", "fill"):
        return "copy"
    return next((found for found, pattern in _PATTERNS if pattern.search(name)), "other")
