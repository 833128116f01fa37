"""Usual mistakes of Coding Exercise 7, as the tables that they give."""

from statistics import fmean, median

from labkit.stages import StageTimes

Table = list[list[float]]  # forward, backward and recompute of each stage; the last: the optimizer


def judge(case, found: StageTimes, launch_ms: float):
    """Fail if a time is not where it belongs, and name what explains the table found."""
    right, here = as_table(case.times()), as_table(found)
    if near(here, right):
        return
    names = [*case.names, "optimizer"]
    place = next(i for i in range(len(names)) if not near(here[i : i + 1], right[i : i + 1]))
    said = f"{names[place]} has {shown(here[place])}, and takes {shown(right[place])}"
    said = f"with recomputation, {said}" if case.recompute else said
    if max(map(max, here)) < min(3 * launch_ms, 0.01 * max(map(max, right))):
        words = ["that is what Python needs to launch it: the CPU's clock does not see the GPU"]
        if near(times(here, 1e3), right):
            words = ["these are seconds: return ms"]
    else:
        words = [what for what, table in slips(case).items() if near(here, table)]
    raise AssertionError(f"{said}: {words[0] if words else 'see the docstring'}")


def as_table(times: StageTimes) -> Table:
    return [*map(list, times.stages.values()), [times.optimizer_ms]]


def near(a: Table, b: Table) -> bool:
    return all(
        len(x) == len(y) and all(map(close, x, y)) for x, y in zip(a, b, strict=True)
    )  # fmt: skip


def close(found: float, right: float) -> bool:
    return abs(found - right) <= 0.1 + 0.01 * abs(right)


def shown(times) -> str:
    kinds = ("forward", "backward", "recompute") if len(times) == 3 else ("",)
    words = [f"{ms:.3g} {kind}".strip() for ms, kind in zip(times, kinds, strict=True)]
    return f"{' / '.join(words)} ms"


def slips(case) -> dict[str, Table]:
    """What is wrong → the table that it gives."""
    right = as_table(case.times())
    *stages, (optimizer,) = right
    kinds = {
        "the recomputation is counted as backward: take the time from a recomputed forward's begin "
        "to its end out of the backward (its forward hook needs always_call=True)":
            [[f, b + r, 0.0] for f, b, r in stages],
        "the recomputation is counted twice: take it out of the backward that it lies in":
            [[f, b + r, r] for f, b, r in stages],
        "the recomputation is counted as forward: in_backward() tells them apart":
            [[f + r, b, 0.0] for f, b, r in stages],
        "the recomputation is taken out, and is nowhere": [[f, b, 0.0] for f, b, _ in stages],
        "backward and recompute are swapped": [[f, r, b] for f, b, r in stages],
        "forward and backward are swapped": [[b, f, r] for f, b, r in stages],
        "a stage has the backward of the one after it: at a tensor hook of its output the backward "
        "of that stage has just ended, and its own begins":
            moved(stages, 1, [*(b for _, b, _ in stages[1:]), 0.0]),
        "a stage has the backward of the one before it":
            moved(stages, 1, [0.0, *(b for _, b, _ in stages[:-1])]),
        "a stage has the forward of the one after it":
            moved(stages, 0, [*(f for f, *_ in stages[1:]), 0.0]),
        "a stage has the forward of the one before it":
            moved(stages, 0, [0.0, *(f for f, *_ in stages[:-1])]),
        "the optimizer's time is in the last backward, the embedding's: mark the end of backward() "
        "before optimizer.step()":
            [[f, b + optimizer * (i == 0), r] for i, (f, b, r) in enumerate(stages)],
        "only forward is measured": [[f, 0.0, 0.0] for f, *_ in stages],
    }  # fmt: skip
    tables = {words: [*table, [optimizer]] for words, table in kinds.items()}
    in_backward = next(words for words in kinds if words.startswith("the optimizer's time"))
    tables[f"{in_backward} "] = [*kinds[in_backward], [0.0]]
    tables["the optimizer's time is not measured: mark its begin and its end"] = [*stages, [0.0]]
    return tables | scaled(case, right)


def moved(stages: Table, column: int, values: list[float]) -> Table:
    return [[*row[:column], value, *row[column + 1 :]] for row, value in zip(stages, values)]  # noqa: B905


def scaled(case, right: Table) -> dict[str, Table]:
    """The same table in another unit, or of other steps."""
    timed = range(case.warmup, case.warmup + case.steps)
    tables = {
        "these are µs: return ms": times(right, 1e3),
        "these are sums over the steps: return the mean": times(right, case.steps),
    }
    others = {
        "the warm-up steps are in the mean": range(case.warmup + case.steps),
        "these are the times of the first steps: the warm-up steps were timed": range(case.steps),
        "that is the last step alone: return the mean of all timed steps": timed[-1:],
        "that is the first timed step alone: return the mean of all": timed[:1],
    }
    tables |= {words: as_table(case.times(steps)) for words, steps in others.items()}
    factors = list(map(case.factor, timed))
    middle = times(right, median(factors) / fmean(factors))
    return {"that is the median: the parts sum to the step only if each is a mean": middle} | tables


def times(table: Table, factor: float) -> Table:
    return [[factor * ms for ms in row] for row in table]
