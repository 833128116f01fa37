"""An allocation timeline: every block of memory with its birth, its death and its owner."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from labkit.errors import UserError

CATEGORIES = ("weights", "gradients", "moments", "activations", "temporary", "other")
PHASE_COLUMNS = ["name", "first", "last", "start_ms", "end_ms"]

# At some position: these addresses belong to this category.
Claim = tuple[int, str, list[int]]


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """What was allocated during one call, after each of its n events: an allocation or a free.

    blocks: a row for each block of memory, with its `category`, `bytes`, and the numbers of the
    events at which it was `born` and `died`. Event 0 is the start: blocks that were there before
    are born at 0, and blocks that outlive the call die at n + 1.
    t_ms `[n + 1]`: when each event happened on the host, after the start.
    phases: a row for each span that the call opened: its name, the numbers of the `first` and
    `last` event in it, `start_ms` and `end_ms`.
    """

    blocks: pd.DataFrame
    t_ms: np.ndarray
    phases: pd.DataFrame

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each event: its number, t_ms and allocated_gib."""
        columns = {"event": np.arange(len(self.t_ms)), "t_ms": self.t_ms}
        return pd.DataFrame(columns | {"allocated_gib": self._bytes(self.blocks) / 2**30})

    @property
    def by_category(self) -> pd.DataFrame:
        """A row for each event, and a column for each category, in GiB; they add up to `frame`."""
        groups = self.blocks.groupby("category")
        empty = np.zeros(len(self.t_ms))
        found = {name: self._bytes(blocks) / 2**30 for name, blocks in groups}
        return pd.DataFrame({name: found.get(name, empty) for name in CATEGORIES})

    @property
    def peak_event(self) -> int:
        return int(self._bytes(self.blocks).argmax())

    @property
    def peak_gib(self) -> float:
        return float(self._bytes(self.blocks).max()) / 2**30

    def categories(self, at: str | int = "peak") -> dict[str, int]:
        """Bytes by category at one moment; their sum is what is allocated then, exactly.

        at: "peak", "start", "end", the name of a phase (the end of its first time), or the number
        of an event. Categories: weights (parameters and buffers), gradients, moments (the
        optimizer's state), activations (what a span named `forward` allocated and left behind),
        temporary (the rest of what the call allocated), other (there before, and nobody's).
        Raises UserError for a moment that is not there.
        """
        event = self._event(at)
        alive = self.blocks[(self.blocks["born"] <= event) & (self.blocks["died"] > event)]
        sums = alive.groupby("category")["bytes"].sum()
        return {name: int(sums.get(name, 0)) for name in CATEGORIES}

    def _event(self, at: str | int) -> int:
        last = len(self.t_ms) - 1
        known = {"peak": self.peak_event, "start": 0, "end": last}
        for phase in self.phases.itertuples():
            known.setdefault(phase.name, phase.last)
        if isinstance(at, str):
            if at not in known:
                raise UserError(f"at={at!r} is no moment of this timeline; it has {list(known)}")
            return known[at]
        if isinstance(at, bool) or not 0 <= at <= last:
            raise UserError(f"at={at!r}: the events of this timeline are 0 to {last}")
        return int(at)

    def _bytes(self, blocks: pd.DataFrame) -> np.ndarray:
        """Bytes of these blocks that are alive after each event."""
        n = len(self.t_ms)
        sizes = blocks["bytes"].to_numpy(dtype=np.float64)  # exact up to 2^53
        born = np.bincount(blocks["born"], sizes, minlength=n)
        died = np.bincount(blocks["died"], sizes, minlength=n)
        return np.cumsum(born[:n] - died[:n])

    def __repr__(self) -> str:
        names = " → ".join(self.phases["name"]) or "no phases"
        return f"Timeline({len(self.t_ms) - 1} events, peak {self.peak_gib:.4g} GiB, {names})"


def replay(
    base: dict[int, int],
    events: Iterable[tuple[float, int, int]],
    claims: Iterable[Claim] = (),
    phases: Iterable[tuple] = (),
) -> Timeline:
    """A Timeline of what was recorded.

    base: address → bytes of what was allocated before. events: (t_ms, address, signed bytes).
    claims: whose the block at an address was, after so many events. phases: rows of PHASE_COLUMNS.
    """
    rows = [[None, size, 0, -1] for size in base.values()]  # category, bytes, born, died
    live = dict(zip(base, range(len(rows)), strict=True))
    waiting = sorted(claims, key=lambda claim: claim[0], reverse=True)

    def settle(position: int) -> None:
        while waiting and waiting[-1][0] <= position:
            _, category, addresses = waiting.pop()
            for address in addresses:
                if address in live and rows[live[address]][0] is None:
                    rows[live[address]][0] = category

    settle(0)
    t_ms = [0.0]
    for number, (time_ms, address, size) in enumerate(events, start=1):
        t_ms.append(time_ms)
        if address in live:  # freed; or, if a free went unseen, replaced
            rows[live.pop(address)][3] = number
        if size > 0:
            live[address] = len(rows)
            rows.append([None, size, number, -1])
        settle(number)
    settle(len(t_ms))
    blocks = pd.DataFrame(rows, columns=["category", "bytes", "born", "died"])
    blocks.loc[blocks["died"] < 0, "died"] = len(t_ms)
    phases = pd.DataFrame(list(phases), columns=PHASE_COLUMNS)
    return Timeline(_classified(blocks, phases), np.array(t_ms), phases)


def _classified(blocks: pd.DataFrame, phases: pd.DataFrame) -> pd.DataFrame:
    """Give a category to each block that nobody claimed."""
    unclaimed = blocks["category"].isna()
    blocks.loc[unclaimed, "category"] = np.where(blocks["born"] > 0, "temporary", "other")[
        unclaimed
    ]
    for phase in phases[phases["name"] == "forward"].itertuples():
        inside = blocks["born"].between(phase.first, phase.last) & (blocks["died"] > phase.last)
        blocks.loc[unclaimed & inside, "category"] = "activations"
    return blocks
