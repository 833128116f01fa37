"""What the tests of Experiment 4 look for in a folder of results."""

from itertools import pairwise

from PIL import Image, UnidentifiedImageError

from labkit.config import ModelConfig
from labkit.experiments import micro_batches
from labkit.experiments.table import MICRO_BATCHES
from tests.public.judging import require
from tests.public.result_files import MOST_COMPUTE, Results, check_keys, load, require_possible_peak
from tests.public.slips_c3 import floors, params

KEPT, RECOMPUTED = "no", "yes"


def check_rows(folder):
    """micro_batches.csv: every size, with activations kept and recomputed, of one global batch."""
    results = _load(folder)
    check_keys(results, expected(results.on_gpu))


def expected(on_gpu: bool) -> list[dict]:
    """The keys of the rows that the experiment measures."""
    model, layers, size, seqlen = (
        ("olmoe-1b-7b", 4, 16, 2048) if on_gpu else ("olmoe-tiny", 2, 8, 128)
    )  # fmt: skip
    shape = {"model": model, "layers": layers, "seqlen": seqlen, "global_batch_size": size}
    return [shape | key for key in micro_batches.grid(size)]


def check_rates(folder):
    """Throughput follows from the step's time, and no step is faster than its arithmetic."""
    results = _load(folder)
    for row in results.frame.to_dict("records"):
        count = -(-row["global_batch_size"] // row["micro_batch_size"])
        require(
            row["micro_batches"] == count,
            f"{results.which(row)}: it has {row['micro_batches']:g} micro batches, and "
            f"{row['global_batch_size']:g} sequences make {count:g} of them",
        )
        right = 1e3 * row["global_batch_size"] * row["seqlen"] / row["step_ms"]
        require(
            abs(row["tokens_per_s"] - right) <= 1e-3 * right,
            f"{results.which(row)}: tokens_per_s says {row['tokens_per_s']:.5g}, but the step's "
            f"{row['step_ms']:.5g} ms give {right:.5g}",
        )
        if results.spec and "MIG" not in results.device:
            floor = (
                3
                * floors(
                    _config(row), int(row["global_batch_size"]), int(row["seqlen"]), results.spec
                )[0]
            )
            require(
                row["step_ms"] >= floor / MOST_COMPUTE,
                f"{results.which(row)}: {row['step_ms']:.4g} ms is below the compute floor of "
                f"{floor:.4g} ms, which no {results.spec.name} can reach",
            )
    times = results.frame["step_ms"]
    require(
        times.nunique() == len(times),
        f"{results.path}: some of {len(times)} steps have the very same time; measured ones differ",
    )


def check_memory(folder):
    """The peak falls with the micro batch size and with recomputation, and is above the state."""
    results = _load(folder)
    for row in results.frame.to_dict("records"):
        require_possible_peak(results, row, params(_config(row)))
    for recompute, rows in results.frame.groupby("recompute"):
        rows = rows.sort_values("micro_batch_size").to_dict("records")
        for small, large in pairwise(rows):
            require(
                small["peak_gib"] <= 1.01 * large["peak_gib"],
                f"{results.path.name}, recompute {recompute}: micro batches of "
                f"{small['micro_batch_size']:g} have a higher peak ({small['peak_gib']:.4g} GiB) "
                f"than those of {large['micro_batch_size']:g} ({large['peak_gib']:.4g} GiB)",
            )
        require(
            len(rows) < 2 or rows[0]["peak_gib"] < rows[-1]["peak_gib"],
            f"{results.path.name}, recompute {recompute}: the peak is the same for all sizes",
        )
    for kept, again in _pairs(results):
        require(
            again["peak_gib"] <= 1.01 * kept["peak_gib"],
            f"{results.which(again)}: recomputation raises the peak from {kept['peak_gib']:.4g} to "
            f"{again['peak_gib']:.4g} GiB",
        )


def check_fit(folder):
    """If a size fits, the smaller ones do, and so does the same size with recomputation."""
    results = _load(folder)
    there = {(r["recompute"], r["micro_batch_size"]) for r in results.frame.to_dict("records")}
    sizes = sorted({key["micro_batch_size"] for key in expected(results.on_gpu)})
    for recompute, size in sorted(there):
        for smaller in (one for one in sizes if one < size):
            require(
                (recompute, smaller) in there,
                f"{results.path}: micro batches of {size:g} fit and those of {smaller:g} do not "
                f"(recompute {recompute}); was another program on the device? Delete the row, and "
                f"{results.command} measures it again",
            )
        require(
            (RECOMPUTED, size) in there,
            f"{results.path}: micro batches of {size:g} fit with activations kept, and do not with "
            f"recomputation; delete the row, and {results.command} measures it again",
        )
    require(
        (RECOMPUTED, sizes[0]) in there,
        f"{results.path}: nothing fitted, not even micro batches of {sizes[0]} with recomputation",
    )


def check_costs(folder):
    """Recomputation takes time, and the figure of memory over a step is there."""
    results = _load(folder)
    if results.on_gpu:  # other programs share a CPU
        for kept, again in _pairs(results):
            require(
                again["step_ms"] > kept["step_ms"],
                f"{results.which(again)}: a step that recomputes ({again['step_ms']:.4g} ms) is "
                f"faster than one that does not ({kept['step_ms']:.4g} ms)",
            )
    path = results.path.with_suffix(".png")
    require(path.is_file(), f"{path} is not there: {results.command} draws it")
    try:
        with Image.open(path) as image:
            image.verify()
            width, height = image.size
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise AssertionError(f"{path} is no picture: {error}; delete it and run again") from None
    require(
        min(width, height) >= 300, f"{path} has {width} × {height} pixels: four panels need more"
    )


def _load(folder) -> Results:
    """What does not fit is a result here, so most rows may have run out of memory."""
    results = load(folder, MICRO_BATCHES, "micro_batches", fits=0)
    wanted = expected(results.on_gpu)[0]
    frame, shape = results.frame, ("model", "layers", "seqlen", "global_batch_size")
    mine = (frame[list(shape)] == [wanted[name] for name in shape]).all(axis=1)
    said = ", ".join(f"{name} {wanted[name]}" for name in shape)
    require(
        mine.any(), f"{results.path} has no step of {said}: run {results.command} without options"
    )
    return Results(
        frame[mine].reset_index(drop=True), MICRO_BATCHES, results.path, results.command
    )  # fmt: skip


def _pairs(results: Results) -> list[tuple[dict, dict]]:
    """(kept, recomputed) of each size that fits both ways."""
    rows = {(r["recompute"], r["micro_batch_size"]): r for r in results.frame.to_dict("records")}
    return [
        (row, rows[RECOMPUTED, size])
        for (recompute, size), row in rows.items()
        if recompute == KEPT and (RECOMPUTED, size) in rows
    ]


def _config(row) -> ModelConfig:
    return ModelConfig.preset(row["model"], n_layers=int(row["layers"]))
