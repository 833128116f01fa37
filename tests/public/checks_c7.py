"""What the tests of Coding Exercise 7 look for, as functions of an implementation.

Each check runs `stage_times` on a simulated machine, with a small model in which every stage takes
a known time, and raises an AssertionError that names the mistake.
"""

import warnings
from contextlib import contextmanager

from labkit.stages import StageTimes
from labkit.train import lm_loss
from tests.public import slips_c7
from tests.public.checks_c1 import WAITS
from tests.public.checks_c4 import fingerprint
from tests.public.judging import require
from tests.public.recorded_ranges import Broken
from tests.public.simulated_step import Case, Delay, Optimizer, Run, new_run
from tests.public.watched_steps import one_thread

AGAIN = (
    "A recomputed forward ends by an exception: its forward hook runs only if it was registered "
    "with always_call=True, and then its output is None"
)


@one_thread()
def observe(stage_times, case: Case, given: dict | None = None, **options) -> Run:
    """Run `stage_times`; name the misuse if it raises. `given`: in place of the case's counts."""
    run, model, batch = new_run(case)
    given = {"warmup": case.warmup, "steps": case.steps} if given is None else given
    call = (model, Optimizer(model), None if "loss" in options else batch)
    if "loss" in options:
        options["loss"] = options["loss"](model, batch)
    with simulated(run, stage_times):
        run.found = stage_times(*call, **given, **options)
    return run


@contextmanager
def simulated(run: Run, stage_times):
    """The simulated machine, on which an error of `stage_times` is named."""
    with run.cuda.installed(stage_times), warnings.catch_warnings():
        # torch makes a warning of a hook's error while a recomputation is being stopped.
        warnings.filterwarnings("ignore", message=".*always_call.*")
        try:
            yield
        except (NotImplementedError, Broken):
            raise
        except Exception as error:
            raise AssertionError(misuse(run, error)) from error


def misuse(run: Run, error: Exception) -> str:
    kinds = {entry.kind for entry in run.cuda.log}
    said = f"stage_times raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if "cuda without a GPU" in kinds:
        return (
            "CUDA was used on a machine without a GPU: clock.mark() is an event or a time, as the "
            "machine has it"
        )
    if "not ready" in kinds:
        return (
            "a time was read before the GPU had passed both marks: read after the last step, and "
            "clock.wait() first"
        )
    if run.case.recompute:
        return f"with recomputation, {said}. {AGAIN}: ask in_backward() before you use it"
    return said


# ------------------------------------------------------------------------------------------ checks


def check_stages(stage_times, case: Case):
    """Names in order, three numbers each, and the optimizer's time."""
    require_form(observe(stage_times, case))


def require_form(run: Run):
    found, names = run.found, run.case.names
    require(found is not None, "stage_times returned None: is the return missing?")
    require(
        isinstance(found, StageTimes),
        f"stage_times returned a {type(found).__name__}, not a StageTimes (see labkit/stages.py)",
    )
    there = list(found.stages)
    absent = [name for name in names if name not in there]
    hint = "; it is what comes after the last layer: norm, lm_head and loss"
    require(not absent, f"no stage {', '.join(absent)} among {there}{hint * ('head' in absent)}")
    require(there == names, f"the stages are {there}; a step goes through {names}")
    for name, times in found.stages.items():
        fine = len(times) == 3 and all(isinstance(ms, float) for ms in times)
        require(fine, f"{name} has {times}; it has three floats: forward, backward, recompute")


def check_times(stage_times, case: Case, **options):
    """Every time is where it belongs."""
    run = observe(stage_times, case, **options)
    require_form(run)
    slips_c7.judge(case, run.found, run.cuda.launch_ms)


def check_loss_in_head(stage_times, case: Case):
    """The loss's own time is the head's: here half of the head's work is in the loss."""

    def slow_loss(model, batch):
        def loss():
            logits = model(batch.tokens, batch.seqs)
            return lm_loss(Delay.apply(logits, model.run, "head"), batch.targets, 8)

        return loss

    run = observe(stage_times, case, loss=slow_loss)
    require_form(run)
    right = [2 * ms for ms in case.times().stages["head"]]
    found = run.found.stages["head"]
    require(
        all(slips_c7.close(a, b) for a, b in zip(found, right, strict=True)),
        f"head has {slips_c7.shown(found)}, and takes {slips_c7.shown(right)}, half of it in the "
        "loss: the head ends where the loss is known, and its backward begins there",
    )


def check_sum(stage_times, case: Case):
    """The parts sum to the whole step, with the work between two stages in one of them."""
    run = observe(stage_times, case)
    require_form(run)
    ends = run.ends_ms
    if len(ends) == case.warmup + case.steps:
        whole = (ends[-1] - ends[case.warmup - 1]) / case.steps
        parts = run.found.step_ms
        require(
            slips_c7.close(parts, whole),
            f"a step takes {whole:.4g} ms, and its parts sum to {parts:.4g} ms: each part begins "
            "where the one before it ends, so that nothing between two stages is lost",
        )
    slips_c7.judge(case, run.found, run.cuda.launch_ms)


def check_counts(stage_times, case: Case, **arguments):
    """It makes warmup + steps steps; `arguments` are passed in place of the case's own."""
    given = arguments or {"warmup": case.warmup, "steps": case.steps}
    warmup, steps = given.get("warmup", 2), given.get("steps", 5)
    run = observe(stage_times, case, given)
    asked = f"for warmup={warmup}, steps={steps}"
    for what, count in (("forward passes", run.forwards), ("optimizer steps", run.step)):
        hint = ": are the warm-up steps missing?" if count == steps < warmup + steps else ""
        require(count == warmup + steps, f"{count} {what} {asked}, not {warmup + steps}{hint}")


def check_no_waiting(stage_times, case: Case):
    """Nothing waits for the GPU from the first kernel to the end of the last step."""
    log = observe(stage_times, case).cuda.log
    kinds = [entry.kind for entry in log]
    require("launch" in kinds and "stepped" in kinds, "no step was made: nothing was launched")
    last = len(kinds) - 1 - kinds[::-1].index("stepped")
    inside = kinds[kinds.index("launch") : last]
    waits = [kind for kind in inside if kind in WAITS]
    n_steps = case.warmup + case.steps
    where = "between stages" if len(waits) > n_steps else "between steps"
    require(
        not waits,
        f"in {n_steps} steps of {len(case.names)} stages it waits for the GPU {len(waits)} times, "
        f"{where} ({', '.join(sorted(set(waits)))}): that changes what is measured. Record marks, "
        "and read them after the last step",
    )


def check_hooks_gone(stage_times, case: Case):
    """Hooks are off the model afterwards, also when a stage raises, and the error comes through."""
    for breaks_at in [(), *((case.warmup, kind, "layers.1") for kind in ("forward", "backward"))]:
        run, model, batch = new_run(case)
        run.breaks_at, before, came = breaks_at, fingerprint(model), False
        try:
            with simulated(run, stage_times):
                stage_times(model, Optimizer(model), batch, warmup=case.warmup, steps=case.steps)
        except Broken:
            came = True
        after = fingerprint(model)
        left = [name for name in before if before[name] != after[name]]
        when = f"after an exception in a {breaks_at[1]}" if breaks_at else "afterwards"
        require(
            not left,
            f"{when} there still is a hook on {', '.join(left)}: remove each handle, in a finally",
        )
        require(came or not breaks_at, "a stage raised an exception, and stage_times swallowed it")


@one_thread()
def check_unchanged(stage_times, case: Case):
    """The model is trained as by the same steps without hooks, bit for bit."""
    trained = []
    for watched in (False, True):
        run, model, batch = new_run(case)
        optimizer = Optimizer(model)
        with simulated(run, stage_times):
            if watched:
                stage_times(model, optimizer, batch, warmup=case.warmup, steps=case.steps)
            else:
                for _ in range(case.warmup + case.steps):
                    loss = lm_loss(model(batch.tokens, batch.seqs), batch.targets, 8)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
        trained.append(model)
    for (name, a), b in zip(trained[0].named_parameters(), trained[1].parameters(), strict=True):
        differ = (a - b).abs().max().item()
        require(
            differ == 0,
            f"after {case.warmup + case.steps} steps {name} differs by {differ:.2g} from what the "
            "same steps make of it without stage_times: hooks return nothing, and each step ends "
            "with optimizer.step() and optimizer.zero_grad()",
        )
