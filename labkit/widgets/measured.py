"""What the user's own experiments found, beside which a bound is looked at."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas as pd

from labkit.ceilings import Ceilings
from labkit.devices import DeviceSpec, lookup
from labkit.errors import UserError
from labkit.experiments import measured_ceilings, table
from labkit.widgets.point import GemmPoint, duration

PLACES = ("results/gemm.csv", "../results/gemm.csv")


@dataclass(frozen=True)
class Measured:
    """The rows of gemm.csv, the ceilings that it and its neighbours show, and what is wrong."""

    rows: pd.DataFrame
    ceilings: Ceilings = field(default_factory=Ceilings)
    problem: str = ""

    @classmethod
    def read(cls, path=None) -> "Measured":
        """None looks in `PLACES`, and finds it no problem that there is nothing yet."""
        places = PLACES if path is None else [path]
        found = next((place for place in map(Path, places) if place.exists()), path)
        nothing = pd.DataFrame(columns=list(table.GEMM.columns))
        if found is None:
            return cls(nothing)
        try:
            rows = table.read(found, table.GEMM)
            ceilings = measured_ceilings(Path(found).parent)
        except UserError as error:
            return cls(nothing, problem=f"No measurements: {error}")
        return cls(rows[rows["status"] == "ok"], ceilings)

    def of(self, device: DeviceSpec, dtype: str) -> pd.DataFrame:
        """The rows that were measured on a device in a dtype."""
        names = {name: getattr(lookup(name), "name", name) for name in self.rows["device"].unique()}
        here = self.rows["device"].map(names) == device.name
        return self.rows[here & (self.rows["dtype"] == dtype)]

    def completed(self, device: DeviceSpec) -> DeviceSpec:
        """The device with the ceilings that were reached, if it is the one that was measured."""
        known = {name: value for name, value in asdict(self.ceilings).items() if value}
        if not known or self.of(device, device.dtype).empty:
            return device
        return device.with_measured(**known)

    def beside(self, point: GemmPoint) -> str:
        """How this very multiply, measured, compares with its bound; "" if nobody measured it."""
        if self.rows.empty:
            return self.problem
        rows = self.of(point.device, point.device.dtype)
        if rows.empty:
            where = self.rows[["device", "dtype"]].drop_duplicates().agg(" in ".join, axis=1)
            return f"Measured so far: {', '.join(where)}."
        mine = rows[(rows["M"] == point.M) & (rows["k"] == point.k) & (rows["n"] == point.n)]
        if mine.empty:
            return ""
        us = float(mine["ms"].iloc[-1]) * 1e3
        return f"Measured: {duration(us)}, {us / point.bound_us:.3g} × the bound."
