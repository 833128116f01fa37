"""A training step of a small model on the simulated machine: every stage takes a known time."""

import random
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.data import MicroBatch
from labkit.stages import StageTimes
from tests.public.recorded_ranges import Broken
from tests.public.simulated_cuda import SimulatedCuda


@dataclass(frozen=True)
class Case:
    """A training step whose parts take known times, in ms.

    forward, backward: of the embedding, each layer and the head. between_ms: between the embedding
    and the first layer, in neither. cold: how many times longer a warm-up step takes. scatter: how
    much the timed steps differ. gpu: a GPU does the work, or the host itself.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    recompute: bool = False
    optimizer_ms: float = 7.0
    between_ms: float = 0.0
    warmup: int = 1
    steps: int = 2
    cold: float = 1.0
    scatter: float = 0.0
    gpu: bool = True
    seed: int = 0

    @classmethod
    def slow_layer(cls, layer: int, n_layers: int, **options) -> "Case":
        """One layer takes 30 ms going forward and 50 ms going back, and nothing else takes any."""
        times = ([0.0] * (n_layers + 2) for _ in range(2))
        for ms, delay in zip(pair := list(times), (30.0, 50.0), strict=True):
            ms[layer + 1] = delay
        return cls(tuple(pair[0]), tuple(pair[1]), optimizer_ms=0.0, **options)

    @cached_property
    def names(self) -> list[str]:
        layers = [f"layers.{number}" for number in range(len(self.forward) - 2)]
        return ["embed", *layers, "head"]

    def factor(self, step: int) -> float:
        """How many times longer than the case says everything takes in a step."""
        draw = random.Random(1000 * self.seed + step)
        return self.cold if step < self.warmup else 1 + self.scatter * draw.uniform(-1, 1)

    def times(self, steps=None) -> StageTimes:
        """What is right: the mean over the timed steps (or over others)."""
        timed = range(self.warmup, self.warmup + self.steps) if steps is None else steps
        mean = fmean(map(self.factor, timed))
        stages = {}
        for name, forward, backward in zip(self.names, self.forward, self.backward, strict=True):
            again = forward * (self.recompute and name.startswith("layers."))
            forward += self.between_ms * (name == self.names[1])
            stages[name] = (mean * forward, mean * backward, mean * again)
        return StageTimes(stages, mean * self.optimizer_ms)


@dataclass
class Run:
    """What one call of `stage_times` did and returned."""

    case: Case
    cuda: SimulatedCuda
    found: StageTimes | None = None
    step: int = 0
    forwards: int = 0
    ends_ms: list[float] = field(default_factory=list)  # the device's clock after each step
    breaks_at: tuple = ()  # (step, kind, stage) of an exception

    def work(self, kind: str, stage: str, ms: float):
        """Keep the device busy, or the host if there is none."""
        if (self.step, kind, stage) == self.breaks_at:
            raise Broken(f"{stage} breaks")
        ms *= self.case.factor(self.step)
        if ms:
            (self.cuda.launch if self.case.gpu else self.cuda.run_python)(ms)

    def of_stage(self, kind: str, stage: str):
        self.work(kind, stage, getattr(self.case, kind)[self.case.names.index(stage)])


class Delay(torch.autograd.Function):
    """The identity, which takes the time of a stage on its way forward and on its way back."""

    @staticmethod
    def forward(ctx, x, run, stage):
        ctx.run, ctx.stage = run, stage
        run.of_stage("forward", stage)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.run.of_stage("backward", ctx.stage)
        return grad, None, None


class Embed(nn.Embedding):
    def forward(self, ids):
        return Delay.apply(super().forward(ids), self.run, "embed")


class Block(nn.Module):
    """A layer. Recomputing it stops before the last multiply, whose result nothing needs."""

    def __init__(self, run: Run, name: str):
        super().__init__()
        self.run, self.name = run, name
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x):
        x = Delay.apply(x, self.run, self.name)
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, run: Run):
        super().__init__()
        self.run = run
        self.embed = Embed(16, 4)
        self.embed.run = run
        self.layers = nn.ModuleList(Block(run, name) for name in run.case.names[1:-1])
        self.norm, self.lm_head = nn.LayerNorm(4), nn.Linear(4, 16)

    def forward(self, tokens, seqs):
        self.run.forwards += 1
        x = self.embed(tokens)
        self.run.work("forward", "", self.run.case.between_ms)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.run.case.recompute else layer(x)
        return self.lm_head(self.norm(Delay.apply(x, self.run, "head")))


class Optimizer(torch.optim.Optimizer):
    """Plain gradient descent that takes its time."""

    def __init__(self, model: Model):
        super().__init__(model.parameters(), {"lr": 0.1})
        self.run = model.run

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * p.grad)
        self.run.work("optimizer", "", self.run.case.optimizer_ms)
        self.run.cuda.note("stepped")
        self.run.ends_ms.append(self.run.cuda.device_ms)
        self.run.step += 1


def new_run(case: Case) -> tuple[Run, Model, MicroBatch]:
    torch.manual_seed(case.seed)
    run = Run(case, SimulatedCuda(available=case.gpu))
    batch = MicroBatch.from_sequences([torch.randint(16, (n,)).tolist() for n in (6, 4)])
    return run, Model(run), batch
