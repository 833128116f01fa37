"""The roofline with a matrix multiply on it: a figure, and a picture whose point moves quickly."""

import io

import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from labkit import plots
from labkit.devices import resolve
from labkit.errors import UserError
from labkit.widgets.measured import Measured
from labkit.widgets.point import GemmPoint, gemm_point

# 1, 2, 3, 4, 6, 8, 12 … 65,536: the M that the slider stops at
ROWS = sorted({2**i for i in range(17)} | {3 * 2**i for i in range(15)})


class Picture:
    """The roofline of one or two devices, the way of a shape along it, and a point on each.

    `points` are GemmPoints of one shape and dtype. What was measured on the first device is there
    as dots, grey for other shapes.
    """

    def __init__(self, points: list[GemmPoint], measured: Measured):
        self.figure = plots.roofline([point.device for point in points], _way(points[0]))
        self.ax = self.figure.axes[0]
        _add_dots(self.ax, measured, points[0])
        self.ax.set(title="", ylim=self.ax.get_ylim())  # fixed: the marks' lines end at the axis
        self._draw_faster()
        color = plots.palette()[3]
        self.marks = [
            self.ax.plot([], [], "o:", color=color, ms=11, mec="black", markevery=[1])[0]
            for _ in points
        ]
        self.name = self.ax.annotate(
            "", (0, 0), (0, 0), textcoords="offset points", va="top", color=color,
            bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1},
        )  # fmt: skip
        self._canvas = None
        self.move(points)

    def _draw_faster(self) -> None:
        """Minor ticks, powers of ten and the search for margins take most of a drawing's time."""
        self.ax.minorticks_off()
        for axis in (self.ax.xaxis, self.ax.yaxis):
            axis.set_major_formatter("{x:,g}")
        self.figure.set_layout_engine("none")
        self.ax.set_position((0.12, 0.11, 0.86, 0.84))

    def move(self, points: list[GemmPoint]) -> None:
        """Put the marks on other points of the same shape and devices."""
        for mark, point in zip(self.marks, points, strict=True):
            mark.set_data([point.intensity] * 2, [self.ax.get_ylim()[0], point.tflops])
        first = points[0]
        to_the_left = first.compute_us > first.memory_us  # below the roof there is room
        self.name.set(text=f"M = {first.M:,}", ha="right" if to_the_left else "left")
        self.name.xy = first.intensity, first.tflops
        self.name.set_position((-12 if to_the_left else 12, -4))

    def png(self) -> bytes:
        """The picture as a file. All but the marks is drawn once and kept."""
        if self._canvas is None:
            for artist in (*self.marks, self.name):
                artist.set_animated(True)
            self._canvas = FigureCanvasAgg(self.figure)
            self._canvas.draw()
            self._still = self._canvas.copy_from_bbox(self.figure.bbox)
        self._canvas.restore_region(self._still)
        for artist in (*self.marks, self.name):
            self.ax.draw_artist(artist)
        size = self._canvas.get_width_height()
        pixels = Image.frombuffer("RGBA", size, self._canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
        file = io.BytesIO()
        pixels.convert("RGB").save(file, "png", compress_level=1)  # fast: sent once, then gone
        return file.getvalue()


def _way(point: GemmPoint) -> pd.DataFrame:
    """Where the shape stands for every M of the slider."""
    way = [gemm_point(M, point.k, point.n, point.device) for M in ROWS]
    return pd.DataFrame(
        {
            "intensity_flop_per_byte": [stop.intensity for stop in way],
            "tflops": [stop.tflops for stop in way],
            "shape": f"{point.k:,} × {point.n:,}, M = {ROWS[0]} … {ROWS[-1]:,}",
        }
    )


def _add_dots(ax, measured: Measured, point: GemmPoint) -> None:
    dots = measured.of(point.device, point.device.dtype)
    same = (dots["k"] == point.k) & (dots["n"] == point.n)
    for mine, color, label in (
        (dots[~same], "0.7", "measured, other shapes"),
        (dots[same], plots.palette()[2], f"measured, {point.k:,} × {point.n:,}"),
    ):
        if len(mine):
            ax.plot(
                mine["intensity_flop_per_byte"], mine["tflops"], "s", ms=5, color=color, label=label
            )
    ax.legend(loc="lower right", **plots.LEGEND)


def static(M, k, n, device, compare, dtype, gemm_csv):
    """See `labkit.widgets.roofline_static`."""
    measured = Measured.read(gemm_csv)
    if measured.problem:
        raise UserError(measured.problem)
    devices = [resolve(one) for one in ([device] if compare is None else [device, compare])]
    points = [gemm_point(M, k, n, measured.completed(one), dtype) for one in devices]
    return Picture(points, measured).figure
