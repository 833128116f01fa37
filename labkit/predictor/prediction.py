"""A prediction: a number that knows what it is made of."""

from typing import NamedTuple


class Term(NamedTuple):
    """A named part of a prediction.

    `group` is the kind of work (forward, backward, recompute, optimizer) or, of memory, whose the
    bytes are; `bound` is the resource that limits the term: compute, memory bandwidth, overhead, or
    memory capacity.
    """

    name: str
    group: str
    value: float
    bound: str


class Prediction(float):
    """A number, in `unit`, and the `terms` that sum to it. It counts and compares as a float.

    `source` says where the constants are from, `note` what to know about this prediction.
    """

    terms: tuple[Term, ...]
    unit: str
    source: str
    note: str

    def __new__(cls, terms, unit: str, source: str = "", note: str = ""):
        self = super().__new__(cls, sum(term.value for term in terms))
        self.terms, self.unit, self.source, self.note = tuple(terms), unit, source, note
        return self

    def __getnewargs__(self):
        return self.terms, self.unit, self.source, self.note

    def by(self, field: str = "name") -> dict[str, float]:
        """The sum of the terms for each `name`, `group` or `bound`, in the order of the terms."""
        sums: dict[str, float] = {}
        for term in self.terms:
            key = getattr(term, field)
            sums[key] = sums.get(key, 0.0) + term.value
        return sums

    def table(self):
        """A DataFrame: a row a term, with its share of the whole."""
        import pandas as pd

        frame = pd.DataFrame(self.terms, columns=Term._fields)
        frame["share"] = frame["value"] / float(self) if self else 0.0
        return frame.rename(columns={"value": self.unit.lower()})

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{float(self):.4g} {self.unit}{note}"

    def __repr__(self) -> str:
        largest = sorted(self.by().items(), key=lambda item: -item[1])[:4]
        parts = ", ".join(f"{name} {value:.3g}" for name, value in largest)
        return f"{self}: {parts}, …"
