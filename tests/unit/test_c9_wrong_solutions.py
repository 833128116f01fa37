"""The checks of C9 fail each usual mistake, in words that name it, and no honest variant."""

import math
import random
from dataclasses import replace
from statistics import mean

import pytest

from labkit import perfmodel
from labkit.course.leaderboard import TRUTH, measured_steps
from labkit.devices import spec
from labkit.memory_model import activation_bytes
from labkit.perfmodel import flops_per_token, forward_floor_ms, optimizer_floor_ms, param_count
from labkit.predictor.known import SHIPPED
from labkit.predictor.peak import peak_memory
from labkit.predictor.prediction import Prediction
from labkit.predictor.steptime import step_time
from tests.hidden import test_c9_predictor as hidden
from tests.public import checks_c9 as checks
from tests.public import test_c9_predictor as public
from tests.unit.wrong_solutions import WrongSolutions, assert_named, assert_passes, failures

GIB = 2**30
THRESHOLDS = ("test_time_roughly", "test_time", "test_memory_roughly", "test_memory")
wrong = WrongSolutions()


def right_ms(cfg, size, seqlen, recompute=False) -> Prediction:
    """As the reference has it, for steps that do not fit as well."""
    return step_time(cfg, size, seqlen, recompute, SHIPPED["H200 SXM"])


def right_gib(cfg, size, seqlen, recompute=False) -> Prediction:
    return peak_memory(cfg, size, seqlen, recompute, workspace_mib=64)


def time(says: str, predict):
    """A wrong `predict_step_ms`: `predict(cfg, micro_batch_size, seqlen, recompute)`."""
    add("predict_step_ms", f"time, {says}", says, predict)


def memory(says: str, predict):
    """A wrong `predict_peak_gib`."""
    add("predict_peak_gib", f"memory, {says}", says, predict)


def add(function: str, name: str, says: str, predict):
    def solution(cfg, micro_batch_size, seqlen, recompute=False, device=None):
        return predict(cfg, micro_batch_size, seqlen, recompute)

    solution.__name__ = name
    wrong(function, says)(solution)


# ------------------------------------------------------------------------------------------ time


def without(*groups: str):
    """The step without some kinds of work."""
    return lambda *shape: sum(t.value for t in right_ms(*shape).terms if t.group not in groups)


def backward_as_forward(*shape) -> float:
    kinds = right_ms(*shape).by("group")
    return sum(kinds.values()) - kinds["backward"] + kinds["forward"]


def all_experts(cfg, *shape) -> float:
    every = replace(cfg, experts_per_token=cfg.n_experts)
    experts = right_ms(every, *shape).by()["experts"] - right_ms(cfg, *shape).by()["experts"]
    return right_ms(cfg, *shape) + experts


def floors_alone(cfg, size, seqlen, recompute) -> float:
    forward = max(forward_floor_ms(cfg, size, seqlen, "H200"))
    return (3 + recompute) * forward + optimizer_floor_ms(cfg, "H200")


def sum_of_floors(cfg, size, seqlen, recompute) -> float:
    return 3 * sum(forward_floor_ms(cfg, size, seqlen, "H200")) + optimizer_floor_ms(cfg, "H200")


def no_head(*shape) -> float:
    return sum(t.value for t in right_ms(*shape).terms if t.name not in ("lm_head", "loss"))


def falls(cfg, size, seqlen, recompute) -> float:
    return right_ms(cfg, size, seqlen, recompute) * (1 if size * seqlen < 12000 else 0.3)


def reads_a_file(*shape) -> float:
    return right_ms(*shape) * (1 + 0 * len(TRUTH.read_text()))


def reads_a_file_in_secret(*shape) -> float:
    try:
        return reads_a_file(*shape)
    except Exception:
        return right_ms(*shape)


def starts_a_program(*shape) -> float:
    import subprocess

    subprocess.run(["nvidia-smi"])
    return right_ms(*shape)


def imports_torch(*shape) -> float:
    import torch

    return float(torch.tensor(float(right_ms(*shape))))


def imports_a_part_of_torch(*shape) -> float:
    from torch.nn.functional import relu

    return right_ms(*shape) if relu else 0.0


time("optimizer's time is missing", without("optimizer"))
time("backward pass is missing", without("backward"))
time("[Rr]ecompute is ignored", without("recompute"))
time("the same: recompute is ignored", lambda cfg, size, seqlen, again: right_ms(cfg, size, seqlen))
time("as long as the forward", backward_as_forward)
time("arithmetic of all experts", all_experts)
time(
    "over all tokens of the micro batch",
    lambda cfg, size, seqlen, again: right_ms(cfg, 1, size * seqlen, again),
)
time("roofline alone", floors_alone)
time("the roofline alone: the floors of", sum_of_floors)
time("head and its loss are missing", no_head)
time("in seconds", lambda *shape: right_ms(*shape) / 1e3)
time("in µs", lambda *shape: right_ms(*shape) * 1e3)
time("counted twice", lambda *shape: right_ms(*shape) * 2)
time("returned nan", lambda *shape: math.nan)
time("returned inf", lambda *shape: math.inf)
time("returned -", lambda *shape: -right_ms(*shape))
time("returned 0;", lambda *shape: 0)
time("is the return missing", lambda *shape: None)
time("a tuple, not a number", lambda *shape: (right_ms(*shape), 0))
time("a bool, not a number", lambda *shape: True)
time("raised ZeroDivisionError", lambda *shape: 1 / 0)
time("the same input must give the same", lambda *shape: right_ms(*shape) * random.uniform(0.9, 1))
time("cannot cost less", falls)
time("does it look at layers and tokens", lambda *shape: 60.0)
time("running a forward again takes time", lambda cfg, size, seqlen, again: (
    right_ms(cfg, size, seqlen, not again)
))  # fmt: skip
time("reads the file h200.csv; it must be plain arithmetic", reads_a_file)
time("reads the file h200", reads_a_file_in_secret)
time("calls subprocess.Popen", starts_a_program)
time("imports torch; it must be plain arithmetic", imports_torch)
time("it imports torch; it must be plain", imports_a_part_of_torch)


# ---------------------------------------------------------------------------------------- memory


def simple_gib(
    cfg, size, seqlen, recompute, state=(2, 2, 4), logits: float = 12, activations=True
) -> float:
    """The larger of the backward of the loss and the end of the backward: close enough for all."""
    n, tokens = param_count(cfg), size * seqlen
    kept = activation_bytes(cfg, size, seqlen, recompute)
    kept = activations * (sum(kept.values()) - kept["log_softmax"])
    weights, gradients, moments = state
    at_loss = (weights + moments) * n + kept + logits * tokens * cfg.vocab_size
    return max(at_loss, (weights + gradients + moments) * n) / GIB


def with_state(*state: float):
    return lambda *shape: simple_gib(*shape, state=state)


memory("6 bytes a parameter: three tensors", with_state(2, 0, 4))
memory("have about 6 bytes a parameter", with_state(2, 2, 2))
memory("4 bytes a parameter: two tensors", with_state(2, 2, 0))
memory("the weights alone", with_state(2, 0, 0))
memory("five tensors, or a moment in float32", with_state(2, 2, 6))
memory("moments in float32", with_state(2, 2, 8))
memory("mixed precision|four bytes", with_state(4, 4, 8))
memory("the logits are missing, or small", lambda *shape: simple_gib(*shape, logits=0))
memory("logits are missing, or small", lambda *shape: simple_gib(*shape, logits=2))
memory("activations that layers keep", lambda *shape: simple_gib(*shape, activations=False))
memory("activations of all layers are", lambda cfg, size, seqlen, again: (
    right_gib(cfg, size, seqlen, False)
))  # fmt: skip
memory("it keeps less, and so needs less", lambda cfg, size, seqlen, again: (
    right_gib(cfg, size, seqlen, not again)
))  # fmt: skip
memory("in GB, of 1e9 bytes", lambda *shape: right_gib(*shape) * GIB / 1e9)
memory("takes a GiB, of 2.+ bytes, for a GB", lambda *shape: right_gib(*shape) * 1e9 / GIB)
memory("in MiB", lambda *shape: right_gib(*shape) * 1024)
memory("in bytes", lambda *shape: right_gib(*shape) * GIB)
memory("returned nan", lambda *shape: math.nan)
memory("returned -", lambda *shape: -right_gib(*shape))
memory("cannot cost less", lambda cfg, size, seqlen, again: right_gib(cfg, size, seqlen) / size)


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("name", wrong)
def test_wrong_solution_is_named(name, module, monkeypatch):
    assert_named(module, wrong[name], monkeypatch)


# --------------------------------------------------------------------------------- pasted tables


# (layers, micro batch size, seqlen, recompute) → (ms, GiB): all that students are given.
PASTED = {
    (step.layers, step.micro_batch_size, step.seqlen, step.recompute):
        (step.step_ms, step.peak_gib)
    for step in measured_steps().itertuples()
}  # fmt: skip


def nearest_row(key: tuple, which: int) -> float:
    """Of the row with the most similar layers and tokens, and the same recompute."""
    n, size, seqlen, again = key

    def distance(other):
        tokens = math.log(other[1] * other[2] / (size * seqlen))
        return other[3] != again, abs(math.log(other[0] / n)) + abs(tokens)

    return PASTED[min(PASTED, key=distance)][which]


def likeliest_row(key: tuple, which: int) -> float:
    """As `nearest_row`, of a similar sequence length too."""
    n, size, seqlen, again = key

    def distance(other):
        sizes = other[0] / n, other[1] * other[2] / (size * seqlen), (other[2] / seqlen) ** 0.1
        return other[3] != again, sum(abs(math.log(one)) for one in sizes)

    return PASTED[min(PASTED, key=distance)][which]


def mean_row(key: tuple, which: int) -> float:
    return mean(row[which] for row in PASTED.values())


def looks_up(which: int, otherwise):
    def predict(cfg, micro_batch_size, seqlen, recompute=False, device=None):
        key = cfg.n_layers, micro_batch_size, seqlen, recompute
        return PASTED[key][which] if key in PASTED else otherwise(key, which)

    return predict


@pytest.mark.parametrize("otherwise", [nearest_row, likeliest_row, mean_row])
def test_a_pasted_table_earns_nothing_from_hidden_tests(otherwise, monkeypatch):
    for module in (public, hidden):
        monkeypatch.setattr(module, "predict_step_ms", looks_up(0, otherwise))
        monkeypatch.setattr(module, "predict_peak_gib", looks_up(1, otherwise))
    for name in THRESHOLDS:
        getattr(public, name)()
        with pytest.raises(AssertionError, match="a pasted table"):
            getattr(hidden, name)()
    for function, column in ((hidden.predict_step_ms, "step_ms"),
                             (hidden.predict_peak_gib, "peak_gib")):  # fmt: skip
        with pytest.raises(AssertionError, match="steps are within"):
            checks.check_close(function, column, hidden.STEPS, within=0.15)
    for module in (public, hidden):
        with pytest.raises(AssertionError, match="exactly what was measured: a pasted table"):
            module.test_model()


# ---------------------------------------------------------------------------------------- honest


def simple_ms(cfg, micro_batch_size, seqlen, recompute=False, device=None) -> float:
    """Four terms: arithmetic, the logits' memory, the update, and Python where it is the longer."""
    tokens, head = micro_batch_size * seqlen, 2 * cfg.vocab_size * cfg.dim
    layers = flops_per_token(cfg, seqlen) - head
    work = tokens * ((3 + recompute) * layers / 360e9 + 3 * head / 800e9)
    logits = 50 * tokens * cfg.vocab_size / 3.5e9
    weights = 3 * forward_floor_ms(cfg, 1, 1, device)[1]
    busy = work + logits + 1.75 * optimizer_floor_ms(cfg, device) + weights
    return max(busy, 2.0 + cfg.n_layers * (4.0 + 3.0 * recompute))


def simple_peak(cfg, micro_batch_size, seqlen, recompute=False, device=None) -> float:
    return simple_gib(cfg, micro_batch_size, seqlen, recompute)


def reference_ms(cfg, micro_batch_size, seqlen, recompute=False, device=None) -> float:
    """With numpy's number, and a module that is imported when it is needed."""
    import numpy as np

    return np.float64(right_ms(cfg, micro_batch_size, seqlen, recompute))


HONEST = [
    ("predict_step_ms", perfmodel.predict_step_ms), ("predict_step_ms", reference_ms),
    ("predict_step_ms", simple_ms), ("predict_peak_gib", perfmodel.predict_peak_gib),
    ("predict_peak_gib", simple_peak),
]  # fmt: skip


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize(("name", "function"), HONEST)
def test_honest_variant_passes(name, function, module, monkeypatch):
    assert_passes(module, name, function, monkeypatch)


def test_a_message_shows_the_worst_steps_and_their_largest_terms(monkeypatch):
    def scaled(cfg, micro_batch_size, seqlen, recompute=False, device=None):
        right = right_ms(cfg, micro_batch_size, seqlen, recompute)
        terms = [term._replace(value=1.4 * term.value) for term in right.terms]
        return Prediction(terms, "ms") if micro_batch_size * seqlen > 4096 else right

    (message,) = {
        message for message in failures(public, "predict_step_ms", scaled, monkeypatch)
        if "within 15 %" in message
    }  # fmt: skip
    n = len(public.STEPS)
    assert f"of {n} steps are within 15 %, and {math.ceil(0.8 * n)} must be" in message
    assert message.count("ms measured") == 3 and message.count("predicted (") == 3, message
    assert "predicted (experts " in message and "16 × 256" not in message, message
    assert "that are off have more than" in message, message


def test_torch_is_missed_where_the_module_itself_imports_it(monkeypatch):
    checks.check_alone()
    line = "from labkit.perfmodel import"
    code = checks.ALONE.replace(line, f"import torch\n        {line}")
    monkeypatch.setattr(checks, "ALONE", code)
    with pytest.raises(AssertionError, match="imports torch; it must be plain arithmetic"):
        checks.check_alone()


def test_an_open_exercise_stays_open(monkeypatch):
    def not_written(*arguments, **options):
        raise NotImplementedError("Coding Exercise 9: labkit/perfmodel.py, predict_step_ms")

    for name in ("predict_step_ms", "predict_peak_gib"):
        monkeypatch.setattr(public, name, not_written)
    for name in (*THRESHOLDS, "test_number", "test_growth", "test_recompute"):
        with pytest.raises(NotImplementedError):
            getattr(public, name)()


def test_the_watch_ends_with_its_block(tmp_path, monkeypatch):
    """What a user has calibrated does not count, and afterwards all is as it was."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labkit-constants.toml").write_text("no TOML at all")
    found = checks.predict(perfmodel.predict_step_ms, checks.olmoe(2, 2, 512))
    assert found == [right_ms(*checks.olmoe(2, 2, 512))]
    assert (tmp_path / "labkit-constants.toml").read_text() == "no TOML at all"
    assert spec("H200").name == "H200 SXM"
    import torch

    assert torch.tensor(1.0) == 1
