"""Which part of a model a range belongs to: attention, experts, router, norms …"""

import re

import pandas as pd

# In the order of figures. The first of _PATTERNS counts: a q_norm is a norm, not attention.
PARTS = ("attention", "experts", "ffn", "router", "norms", "embedding", "lm_head", "recompute",
         "backward", "optimizer")  # fmt: skip
REST = "rest"
_PATTERNS = (
    ("recompute", r"^recompute\."),
    ("backward", r"^backward$"),
    ("optimizer", r"^[Oo]ptimizer"),
    ("norms", r"(norm\w*|\.ln_\w+)$"),
    ("router", r"\b(router|mlp\.gate)\b"),
    ("experts", r"\bexperts\b"),
    ("attention", r"attn|attention"),
    ("ffn", r"\b(ffn|mlp|feed_?forward)\b"),
    ("embedding", r"embed|\bw[tp]e$"),
    ("lm_head", r"\blm_head$"),
)
_MOST_OTHERS = 3  # parts of a model that the table above does not know


def part_of(path: str, inner: bool = False) -> str:
    """The part that a range's path names; for another model's leaf, the last word of its path.

    `inner`: the range has ranges inside, so what is its own is what they leave: "rest".
    """
    for name, pattern in _PATTERNS:
        if re.search(pattern, path):
            return name
    words = [word for word in path.split(".") if not word.isdigit() and word != "*"]
    return REST if inner or path in ("step", "forward") or not words else words[-1]


def part_times(ranges: pd.DataFrame) -> pd.Series:
    """ms a step of each part, from the own_ms of a ranges table; sums to the busy time.

    The parts that labkit's model has come in a fixed order. Of another model's parts the largest
    have their own entry, and everything else is "rest".
    """
    names = set(ranges["range"])
    outer = {name.rpartition(".*")[0] for name in names} | {n.rpartition(".")[0] for n in names}
    part = [part_of(name, inner=name in outer) for name in ranges["range"]]
    times = ranges["own_ms"].groupby(part).sum()
    times = times[times > 0]
    others = times.drop([*PARTS, REST], errors="ignore").sort_values(ascending=False)
    kept = [*(name for name in PARTS if name in times), *others.index[:_MOST_OTHERS]]
    rest = times.drop(kept).sum()
    return pd.concat([times[kept], pd.Series({REST: rest} if rest else {}, dtype=float)])
