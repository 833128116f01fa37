"""stage_times: parts sum to the step, a delay is found where it is, and no hook stays."""

import statistics
import time

import pytest
import torch
from torch import nn

from labkit.config import ModelConfig
from labkit.data import random_micro_batch
from labkit.errors import UserError
from labkit.experiments import stages
from labkit.model import Transformer
from labkit.stages import first_tensor, stage_modules
from labkit.timers import stage_times
from labkit.train import make_optimizer
from tests.public.simulated_cuda import SimulatedCuda

CFG = ModelConfig.preset("olmoe-tiny", n_layers=3)


def setup(recompute=False):
    torch.manual_seed(0)
    model = Transformer(CFG)
    model.recompute = recompute
    return model, make_optimizer(model), random_micro_batch(CFG, 2, 16)


class Delay(torch.autograd.Function):
    """The identity, which does something on its way forward and on its way back."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward = backward
        forward()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.backward()
        return grad, None, None


def slow_down(layer, forward, backward):
    original = layer.forward
    layer.forward = lambda x, *rest: original(Delay.apply(x, forward, backward), *rest)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_delay_is_found_in_its_place_and_kind(recompute):
    """30 ms forward and 50 ms backward in layer 1, in the simulated GPU's own time."""
    model, optimizer, batch = setup(recompute)
    cuda = SimulatedCuda()
    slow_down(model.layers[1], lambda: cuda.launch(30.0), lambda: cuda.launch(50.0))
    with cuda.installed():
        found = stage_times(model, optimizer, batch, warmup=1, steps=3)
    for name, times in found.stages.items():
        expected = (30, 50, 30 * recompute) if name == "layers.1" else (0, 0, 0)
        assert times == pytest.approx(expected, abs=0.5), (name, times)
    assert found.step_ms == pytest.approx(80 + 30 * recompute, abs=1)


def test_nothing_waits_between_stages():
    model, optimizer, batch = setup()
    cuda = SimulatedCuda()
    for layer in model.layers:
        slow_down(layer, lambda: cuda.launch(5.0), lambda: cuda.launch(5.0))
    with cuda.installed():
        stage_times(model, optimizer, batch, warmup=1, steps=3)
    waits = [entry for entry in cuda.log if "synchronize" in str(entry)]
    assert len(waits) == 1, waits


def measure_slowed_layer(recompute):
    """→ (what stage_times finds in layer 1, what it should find), each as three times in ms."""
    model, optimizer, batch = setup(recompute)
    stage_times(model, optimizer, batch, warmup=0, steps=1)
    own = stage_times(model, optimizer, batch, warmup=0, steps=3).stages["layers.1"]
    slept = {"forward": [], "backward": []}

    def sleeper(kind, seconds):
        def sleep():
            start = time.perf_counter()
            time.sleep(seconds)
            slept[kind].append(1e3 * (time.perf_counter() - start))

        return sleep

    slow_down(model.layers[1], sleeper("forward", 0.1), sleeper("backward", 0.2))
    started = time.perf_counter()
    found = stage_times(model, optimizer, batch, warmup=0, steps=1)
    wall_ms = 1e3 * (time.perf_counter() - started)
    assert 0.75 * wall_ms < found.step_ms <= wall_ms, (found.step_ms, wall_ms)
    delays = (slept["forward"][0], slept["backward"][0], sum(slept["forward"][1:]))
    return found.stages["layers.1"], tuple(a + b for a, b in zip(own, delays, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_parts_sum_to_the_step_and_delays_are_found_on_a_cpu(recompute):
    """Within 5 % of what was really slept. A busy machine may spoil a try, so there are five."""
    tries = []
    for _ in range(5):
        found, expected = measure_slowed_layer(recompute)
        tries.append((found, expected))
        if all(abs(a - b) <= 0.05 * b for a, b in zip(found, expected, strict=True)):
            return
    pytest.fail(f"found and expected, in ms: {tries}")


def test_hooks_are_gone_afterwards_also_after_an_error():
    model, optimizer, batch = setup()
    stage_times(model, optimizer, batch, warmup=0, steps=1)

    def fails():
        raise RuntimeError("no more")

    slow_down(model.layers[2], lambda: None, fails)
    with pytest.raises(RuntimeError, match="no more"):
        stage_times(model, optimizer, batch, warmup=0, steps=1)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Own(nn.Module):
    """Somebody else's model: stages that return tuples, and one that runs twice."""

    def __init__(self, tuples=True):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.twice, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        if tuples:
            for block in self.blocks:
                block.register_forward_hook(lambda module, args, out: (out, {"cache": None}))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x[0] if isinstance(x, tuple) else x)
        x = x[0] if isinstance(x, tuple) else x
        return self.twice(self.twice(x)).square().mean()


def own_times(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(16)
    return stage_times(model, optimizer, warmup=1, steps=2, loss=lambda: model(ids), **options)


def test_a_model_of_ones_own():
    found = own_times(Own())
    assert list(found.stages) == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert all(ms >= 0 for times in found.stages.values() for ms in times)
    assert list(own_times(Own(), stages=["blocks.1"]).stages) == ["blocks.1", "head"]


def test_a_frozen_embedding_has_no_backward():
    model = Own()
    model.embedding.requires_grad_(False)
    assert own_times(model).stages["embedding"][1] == 0


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (["blocks.7"], "no stage 'blocks.7' in Own; it has embedding"),
        (["twice"], "'twice' runs twice in a step"),
        (["blocks.0", "never"], "'never' did not run"),
        (["blocks.0", "blocks.0"], "name each module once"),
    ],
)
def test_bad_stages_are_named(stages, words):
    model = Own(tuples=False)
    with pytest.raises(UserError, match=words):
        own_times(model, stages=stages)
    assert not any(m._forward_hooks for m in model.modules())


def test_stages_are_found_by_a_rule():
    assert list(stage_modules(Transformer(CFG))) == ["embed", "layers.0", "layers.1", "layers.2"]
    with pytest.raises(UserError, match="no ModuleList"):
        stage_modules(nn.Linear(2, 2))


def test_the_first_tensor_of_an_output():
    x = torch.ones(2, requires_grad=True)
    assert first_tensor((None, {"a": torch.ones(1), "b": [x]})) is x
    assert first_tensor({"a": 3}) is None


def test_a_hugging_face_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, vocab_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.randint(64, (2, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    loss = lambda: model(input_ids=ids, labels=ids).loss  # noqa: E731
    found = stage_times(model, optimizer, loss=loss, warmup=1, steps=1)
    assert list(found.stages) == [
        "model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "head",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------ on a real GPU


def gpu_step(recompute=False):
    cfg = ModelConfig.preset("olmoe-tiny")
    torch.manual_seed(0)
    model = Transformer(cfg).to("cuda", torch.bfloat16)
    model.recompute = recompute
    return model, make_optimizer(model), random_micro_batch(cfg, 4, 128, "cuda")


class Spin:
    """A kernel that spins for a number of cycles; `ms()` is what it really took, by events."""

    def __init__(self, cycles):
        self.cycles, self.marks = cycles, []

    def __call__(self):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        torch.cuda._sleep(self.cycles)
        pair[1].record()
        self.marks.append(pair)

    def ms(self):
        return statistics.median(start.elapsed_time(end) for start, end in self.marks)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_a_delay_is_found_on_a_gpu(recompute):
    """About 30 ms forward and 50 ms backward; found within 5 % of what the kernels took."""
    model, optimizer, batch = gpu_step(recompute)
    plain = stage_times(model, optimizer, batch, warmup=3, steps=5).stages
    forward, backward = Spin(55_000_000), Spin(95_000_000)
    slow_down(model.layers[1], forward, backward)
    slowed = stage_times(model, optimizer, batch, warmup=3, steps=5).stages
    delays = (forward.ms(), backward.ms(), forward.ms() * recompute)
    for name in plain:
        expected = delays if name == "layers.1" else (0, 0, 0)
        extra = tuple(b - a for a, b in zip(plain[name], slowed[name], strict=True))
        # What was bound by the host before is hidden behind a delay: others may get faster.
        for found, wanted in zip(extra, expected, strict=True):
            slack = 0.05 * (wanted or 40) + sum(plain[name])
            assert abs(found - wanted) < slack, f"{name}: {extra} ms more, not {expected}"


@pytest.mark.gpu
def test_no_synchronisation_between_stages_on_a_gpu(monkeypatch):
    model, optimizer, batch = gpu_step()
    stage_times(model, optimizer, batch)
    waits, synchronize = [], torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: waits.append(synchronize(*args)))
    mode, seen = torch.cuda.set_sync_debug_mode, []
    mode("error")
    try:
        stage_times(model, optimizer, batch, steps=20)
    except RuntimeError as error:
        seen.append(error)
    finally:
        mode("default")
    assert not seen and len(waits) == 1, (seen, len(waits))


def test_the_experiment_goes_on_and_draws(tmp_path):
    from labkit.experiments import run_experiment, table

    frame = run_experiment("stages", tmp_path, quick=True, device="cpu", progress=False)
    assert len(frame) == 2 * 6, frame
    totals = table.read(table.STEPS.path(tmp_path), table.STEPS)
    for total in totals.to_dict("records"):
        mine = frame[frame["recompute"] == total["recompute"]]
        parts = mine[["forward_ms", "backward_ms", "recompute_ms"]].to_numpy().sum()
        assert parts + total["optimizer_ms"] == pytest.approx(total["step_ms"], rel=1e-4)
        assert (mine["recompute_ms"].sum() > 0) == (total["recompute"] == "yes")
    assert (tmp_path / "stages.png").stat().st_size > 10_000
    again = run_experiment("stages", tmp_path, quick=True, device="cpu", progress=False)
    assert len(again) == len(frame)


def test_a_model_on_the_cpu_of_a_machine_with_a_gpu_is_timed_by_the_clock():
    model, optimizer, batch = setup()
    cuda = SimulatedCuda()
    with cuda.installed():
        times = stage_times(model, optimizer, batch, warmup=0, steps=1, device="cpu")
    kinds = {entry.kind for entry in cuda.log}
    assert kinds == {"clock"}, f"the CPU's stages were timed with {kinds}"
    assert times.step_ms > 0


@pytest.mark.parametrize("size", ["layers", "micro_batch_size", "seqlen"])
def test_the_experiment_takes_no_zero_for_the_usual_size(tmp_path, size):
    with pytest.raises(UserError, match=f"{size}=0"):
        stages.run(tmp_path, device="cpu", **{size: 0})
