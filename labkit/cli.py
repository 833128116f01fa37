"""`labkit …`: the library from a shell. Each command imports what it needs when it runs."""

import ast
import io
import os
import sys
from collections.abc import Callable, Sized
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from labkit.errors import UserError, out_of_memory
from labkit.experiments import EXPERIMENTS

app = typer.Typer(
    name="labkit",
    help="Find out what limits an LLM on a GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Device = Annotated[str, typer.Option(help="auto, cpu, gpu or cuda:N.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The folder for results.")]
Checkpoint = Annotated[
    Path | None,
    typer.Option(help="A model directory: OLMoE-1B-7B-0924, say.", show_default="the shipped one"),
]


def _whole(option: typer.CallbackParam, texts: list[str] | None) -> tuple[int, ...] | None:
    """["1,2", "4"] → (1, 2, 4)."""
    parts = [part.strip() for text in texts or [] for part in text.split(",")]
    if wrong := [part for part in parts if not part.isdecimal()]:
        name = option.opts[0]
        raise UserError(f"{name}: {wrong[0]!r} is no whole number; write {name} 1,2,4")
    return tuple(map(int, parts)) or None


def _numbers(what: str):
    """An option for whole numbers: `--layers 1,2`, or `--layers 1 --layers 2`."""
    return Annotated[list[str] | None, typer.Option(metavar="N,…", help=what, callback=_whole)]


@app.command()
def check(checkpoint: Checkpoint = None, output: Output = Path("results")):
    """Look whether everything that labkit needs is there."""
    from labkit.doctor import examine, healthy, render

    facts = examine(checkpoint, output)
    Console().print(render(facts), soft_wrap=True)
    raise typer.Exit(0 if healthy(facts) else 1)


@app.command()
def hello(
    prompt: Annotated[str, typer.Argument(help="The beginning of a text.")] = "To be, or not",
    checkpoint: Checkpoint = None,
    tokens: Annotated[int, typer.Option(help="How many tokens to write.")] = 80,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Another seed, another text.")] = 0,
    device: Device = "auto",
):
    """Let a model go on with a text: the shipped olmoe-tiny, or a checkpoint of your own."""
    from labkit.hello import say

    for text in say(prompt, checkpoint, tokens, temperature, seed, device):
        sys.stdout.write(text)
        sys.stdout.flush()


@app.command()
def run(
    notebooks: Annotated[
        list[Path] | None, typer.Argument(help="Notebooks or folders.", show_default="all")
    ] = None,
    profile: Annotated[str, typer.Option(help="auto, cpu or gpu.")] = "auto",
    output: Output = Path("results"),
    resume: Annotated[bool, typer.Option(help="Keep what succeeded before.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that one cell may take.")] = 1800,
    parameter: Annotated[
        list[str] | None, typer.Option("--parameter", "-p", help="name=value, as in Python.")
    ] = None,
):
    """Run notebooks from top to bottom, and write a report of them."""
    from labkit.runner import exit_code, run_notebooks
    from labkit.runner.progress import ConsoleObserver

    with ConsoleObserver() as observer:
        results = run_notebooks(
            notebooks or None,
            profile=profile,
            output=output,
            resume=resume,
            timeout=timeout,
            parameters=dict(map(_assignment, parameter or [])),
            observer=observer,
        )
    observer.summary(results, output)
    raise typer.Exit(exit_code(results))


@app.command()
def test(
    exercises: Annotated[
        list[str] | None, typer.Argument(help="C1, E2 …", show_default="all that there are")
    ] = None,
):
    """Check exercises, and print the score."""
    from rich.progress import Progress, SpinnerColumn, TextColumn

    from labkit.course.score import run_checks
    from labkit.course.tables import render

    console = Console()
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False)
    silent = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=silent) as progress:
        task = progress.add_task("starting")

        def show(check):
            progress.update(task, description=f"{check.exercise} {check.what}")

        score = run_checks(exercises, on_check=show)
    console.print(render(score))
    raise typer.Exit(0 if score.ok else 1)


def _experiments() -> str:
    """What there is to measure, a paragraph each: within one, the help would join the lines."""
    lines = (f"{name:<16}{what}" for name, what in EXPERIMENTS.items())
    return "\n\n".join(lines)


@app.command(epilog=_experiments())
def experiment(
    name: Annotated[str, typer.Argument(help="One of the list below.")],
    quick: Annotated[bool, typer.Option(help="Fewer sizes, shorter runs.")] = False,
    device: Device = "auto",
    output: Output = Path("results"),
):
    """Measure something, and write a table and figures of it. A second call goes on."""
    from labkit.experiments import run_experiment

    _measure(partial(run_experiment, name, output, quick, device), output)


@app.command()
def sweep(
    model: Annotated[str | None, typer.Option(help="A preset of ModelConfig.")] = None,
    layers: _numbers("Layers of the model.") = None,
    micro_batch_size: _numbers("Sequences in a micro batch.") = None,
    seqlen: _numbers("Tokens in a sequence.") = None,
    recompute: Annotated[
        bool | None, typer.Option(help="Recompute activations, or keep them.", show_default="both")
    ] = None,
    micro_batches: _numbers("Micro batches that a step accumulates.") = None,
    repeats: Annotated[int | None, typer.Option(help="How often to measure each.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Leave out larger micro batches.")] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed, another order.")] = None,
    truth: Annotated[bool, typer.Option(help="The grid that a predictor is judged by.")] = False,
    quick: Annotated[bool, typer.Option(help="Less time for each step.")] = False,
    device: Device = "auto",
    output: Output = Path("results"),
):
    """Measure training steps over a grid: time, its kinds, and memory. A second call goes on.

    N is one number, or several: 1,2,4. What is not given is as in `labkit experiment sweep`.
    """
    from labkit.experiments.machine import Machine
    from labkit.experiments.sweep import default_grid, in_words, run, truth_grid

    options = {
        "model": model, "layers": layers, "micro_batch_sizes": micro_batch_size,
        "seqlens": seqlen, "micro_batches": micro_batches, "repeats": repeats,
        "recompute": {True: ("yes",), False: ("no",)}.get(recompute),
        "max_tokens": max_tokens, "seed": seed,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    if truth and given:
        raise UserError(f"--truth has a grid of its own; leave {', '.join(given)} out")
    machine = Machine.here(device)
    grid = truth_grid(machine) if truth else replace(default_grid(machine, quick), **given)

    def show(done: int, total: int, row: dict) -> None:
        typer.echo(f"{done}/{total}  {in_words(row)}")

    _measure(partial(run, output, quick, device, grid=grid, on_row=show), output)


@app.command()
def predict(
    model: Annotated[str, typer.Option(help="A preset of ModelConfig.")] = "olmoe-1b-7b",
    layers: Annotated[int | None, typer.Option(help="Take only so many layers.")] = None,
    micro_batch_size: Annotated[int, typer.Option(help="Sequences in a micro batch.")] = 4,
    seqlen: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 2048,
    recompute: Annotated[bool, typer.Option(help="Recompute activations.")] = False,
    micro_batches: Annotated[int, typer.Option(help="Micro batches a step accumulates.")] = 1,
    device: Annotated[str, typer.Option(help="A device of the table (H200), or auto.")] = "auto",
    part1: Annotated[
        Path | None, typer.Option(help="Take the constants from this folder's Part 1.")
    ] = None,
):
    """Predict time and peak memory of a training step that nobody has run, term by term."""
    from labkit.config import ModelConfig
    from labkit.devices import resolve
    from labkit.perfmodel import mfu
    from labkit.predictor import predict as predictor
    from labkit.predictor.render import prediction
    from labkit.predictor.unseen import from_part1

    cfg = ModelConfig.preset(model, **({} if layers is None else {"n_layers": layers}))
    spec = resolve(None if device == "auto" else device)
    shape, more = (micro_batch_size, seqlen, recompute, spec), {"micro_batches": micro_batches}
    constants = from_part1(part1, spec) if part1 else None
    time = predictor.step_ms(cfg, *shape, constants=constants, **more)
    memory = predictor.peak_gib(cfg, *shape, **more)
    tokens = micro_batch_size * seqlen * micro_batches
    used = mfu(cfg, tokens, seqlen, float(time), spec)
    Console().print(prediction(time, memory, tokens, used, spec.memory_gib), soft_wrap=True)


@app.command()
def calibrate(
    sweep: Annotated[Path, typer.Argument(help="A sweep.csv, or the folder that has it.")],
    part1: Annotated[
        Path | None,
        typer.Option(help="The folder of gemm, ops, regimes, kernels.", show_default="the sweep's"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="A device of the table.", show_default="the sweep's")
    ] = None,
    save: Annotated[Path, typer.Option(help="Where the constants go.")] = Path(
        "labkit-constants.toml"
    ),
):
    """Fit the predictor's constants to a sweep of this device and to its Part 1."""
    from labkit.predictor.calibrate import calibrate_files
    from labkit.predictor.render import fit

    found = calibrate_files(sweep, part1, device, save)
    Console().print(fit(found), soft_wrap=True)
    typer.echo(f"written to {save}; predictions for this device use it from here")


@app.command()
def profile(
    name: Annotated[str, typer.Argument(help="What the files are called.")] = "profile",
    model: Annotated[str, typer.Option(help="A preset of ModelConfig.")] = "olmoe-tiny",
    mode: Annotated[str, typer.Option(help="forward or train.")] = "forward",
    layers: Annotated[int | None, typer.Option(help="Take only so many layers.")] = None,
    micro_batch_size: Annotated[int, typer.Option(help="Sequences in a step.")] = 1,
    seqlen: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 512,
    moe_impl: Annotated[str, typer.Option(help="grouped or naive.")] = "grouped",
    recompute: Annotated[bool, typer.Option(help="Recompute activations.")] = False,
    target: Annotated[
        str | None, typer.Option(help="A step of your own: package.module:make_step.")
    ] = None,
    checkpoint: Checkpoint = None,
    steps: Annotated[int, typer.Option(help="Steps to record.")] = 2,
    warmup: Annotated[int, typer.Option(help="Steps to throw away before.")] = 2,
    backend: Annotated[str, typer.Option(help="auto, torch or nsys.")] = "auto",
    memory_snapshot: Annotated[bool, typer.Option(help="Record allocations too.")] = False,
    device: Device = "auto",
    output: Output = Path("results"),
):
    """Record a few steps: where the time goes, by range, kernel and API call."""
    from labkit.profiling.command import Request, run
    from labkit.profiling.render import render

    request = Request(
        name, model, mode, layers, micro_batch_size, seqlen, moe_impl, recompute, target,
        checkpoint=str(checkpoint) if checkpoint else None, device=device, steps=steps,
        warmup=warmup, backend=backend, memory_snapshot=memory_snapshot, output=str(output),
    )  # fmt: skip
    recording, files, notes = run(request)
    console = Console()
    console.print(render(recording))
    for note in notes:
        console.print(f"note: {note}", markup=False)
    console.print("wrote " + ", ".join(map(str, files)), markup=False, soft_wrap=True)


@app.command()
def leaderboard(
    handins: Annotated[
        list[Path], typer.Argument(help="Files such as perfmodel.py, or folders that have one.")
    ],
    truth: Annotated[
        list[Path] | None,
        typer.Option(help="A sweep.csv to judge by; may be repeated.", show_default="the H200's"),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table to this file too.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds that one predictor may take.")] = 30,
):
    """Rank the predictors of Coding Exercise 9 by the median error of their times."""
    from labkit.course.leaderboard import TRUTH, rank, render, write_csv

    standings = rank(handins, truth or [TRUTH], limit_s=limit)
    Console().print(render(standings))
    if csv:
        write_csv(standings, csv)


def main():
    """Run the CLI. What the user can fix is one line on stderr and status 2; no traceback."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without UTF-8 shows "?" for a letter
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except UserError as error:
        _complain("error", error)
    except NotImplementedError as error:  # an exercise that is still open
        _complain("first", error)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        said = str(error).partition("\n")[0]
        _complain("out of memory", f"{said}; take a smaller model or batch")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # `labkit … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


def _measure(run: Callable[[], Sized], output: Path) -> None:
    """Measure to the end or to Ctrl-C, and say what there is."""
    try:
        rows = run()
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; the same command goes on from here")
        raise typer.Exit(130) from None
    said = f"{len(rows)} rows; tables and figures are in {output}/"
    Console().print(said, markup=False, highlight=False, soft_wrap=True)


def _assignment(text: str) -> tuple[str, object]:
    """`n=3` → ("n", 3); what is no Python value is taken as text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(f"--parameter {text!r} is not of the form name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _complain(what: str, error) -> NoReturn:
    said = Text.assemble((f"{what}: ", "bold red"), str(error))
    Console(stderr=True).print(said, soft_wrap=True)
    raise SystemExit(2) from None


if __name__ == "__main__":
    main()
