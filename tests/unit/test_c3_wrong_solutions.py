"""The checks of C3 fail each usual mistake, in words that name it, and no honest variant."""

import math
from dataclasses import replace

import pytest

from labkit import perfmodel
from labkit.config import ModelConfig
from labkit.devices import resolve
from tests.hidden import test_c3_model_counts as hidden
from tests.public import slips_c3
from tests.public import test_c3_model_counts as public
from tests.unit.wrong_solutions import WrongSolutions, assert_named, assert_passes

wrong = WrongSolutions()


def matrices(cfg, *, kv=None, q=None, o=None, head=None, router=True, gates=3, experts=1):
    """Weights of the matrices of one layer, with places to make it wrong."""
    head = head or cfg.head_dim
    q = cfg.n_heads if q is None else q
    kv, o = cfg.n_kv_heads if kv is None else kv, q if o is None else o
    attention = cfg.dim * head * (q + o + 2 * kv)
    return attention + router * cfg.dim * cfg.n_experts + gates * experts * cfg.dim * cfg.ffn_dim


def params(cfg, *, embeddings=2, norms=2, last=1, qk=None, experts=None, **layer):
    experts = max(cfg.n_experts, 1) if experts is None else experts
    qk = cfg.qk_norm * (cfg.n_heads + cfg.n_kv_heads) * cfg.head_dim if qk is None else qk
    one = matrices(cfg, experts=experts, **layer) + norms * cfg.dim + qk
    return cfg.n_layers * one + embeddings * cfg.vocab_size * cfg.dim + last * cfg.dim


def active(cfg, *, embeddings=1, norms=0, last=0, qk=0, experts=None, **layer):
    experts = max(cfg.experts_per_token, 1) if experts is None else experts
    return params(
        cfg, embeddings=embeddings, norms=norms, last=last, qk=qk, experts=experts, **layer
    )  # fmt: skip


def qk_norms(cfg):
    return cfg.qk_norm * (cfg.n_heads + cfg.n_kv_heads) * cfg.head_dim


def flops(cfg, seqlen, *, pairs=None, heads=None, head=None, used=active):
    """2 FLOPs a weight, and 4 · head_dim for each pair in each head of each layer."""
    pairs = seqlen * (seqlen + 1) / 2 if pairs is None else pairs
    heads, head = heads or cfg.n_heads, head or cfg.head_dim
    return 2 * used(cfg) + 4 * cfg.n_layers * heads * head * pairs / seqlen


def floors(cfg, size, seqlen, device=None, *, compute=1.0, memory=1.0):
    right = perfmodel.forward_floor_ms(cfg, size, seqlen, device)
    return compute * right[0], memory * right[1]


# ------------------------------------------------------------------------------------- parameters


@wrong("param_count", "the norms are missing")
def without_norms(cfg):
    return params(cfg, norms=0, last=0, qk=0)


@wrong("param_count", "the last norm")
def without_the_last_norm(cfg):
    return params(cfg, last=0)


@wrong("param_count", "two norms")
def one_norm_a_layer(cfg):
    return params(cfg, norms=1)


@wrong("param_count", r"\(qk_norm\) are missing")
def without_qk_norm(cfg):
    return params(cfg, qk=0)


@wrong("param_count", "qk_norm is False")
def always_qk_norm(cfg):
    return params(cfg, qk=(cfg.n_heads + cfg.n_kv_heads) * cfg.head_dim)


@wrong("param_count", "covers all heads, not one")
def qk_norm_of_one_head(cfg):
    return params(cfg, qk=2 * cfg.head_dim * cfg.qk_norm)


@wrong("param_count", "n_kv_heads · head_dim weights")
def key_norm_as_wide_as_the_query_norm(cfg):
    return params(cfg, qk=2 * cfg.n_heads * cfg.head_dim * cfg.qk_norm)


@wrong("param_count", "the router is missing")
def without_router(cfg):
    return params(cfg, router=False)


@wrong("param_count", "two matrices of vocab_size")
def tied_head(cfg):
    return params(cfg, embeddings=1)


@wrong("param_count", "k_proj and v_proj have n_kv_heads heads")
def no_grouped_queries(cfg):
    return params(cfg, kv=cfg.n_heads)


@wrong("param_count", "q_proj and o_proj have n_heads heads")
def every_head_a_kv_head(cfg):
    return params(cfg, q=cfg.n_kv_heads)


@wrong("param_count", "o_proj has n_heads heads")
def narrow_output(cfg):
    return params(cfg, o=cfg.n_kv_heads)


@wrong("param_count", r"here that is not dim × dim")
def head_dim_from_dim(cfg):
    return params(cfg) + cfg.n_layers * (4 * cfg.dim**2 - matrices(cfg, router=False, gates=0))


@wrong("param_count", "three matrices")
def two_matrices_an_expert(cfg):
    return params(cfg, gates=2)


@wrong("param_count", "a dense model has an FFN too")
def no_experts_no_ffn(cfg):
    return params(cfg, experts=cfg.n_experts)


@wrong("param_count", "all n_experts have parameters")
def experts_in_use(cfg):
    return params(cfg, experts=max(cfg.experts_per_token, 1))


@wrong("param_count", "one expert was counted")
def one_expert(cfg):
    return params(cfg, experts=1)


@wrong("param_count", "that is active_params")
def the_other_count(cfg):
    return active(cfg)


@wrong("param_count", "in bytes of bfloat16")
def parameters_in_bytes(cfg):
    return 2 * params(cfg)


@wrong("param_count", "in billions")
def billions(cfg):
    return params(cfg) / 1e9


@wrong("param_count", "a str, not a number")
def words(cfg):
    return f"{params(cfg):,}"


@wrong("param_count", "is the return missing")
def no_return(cfg):
    params(cfg)


# --------------------------------------------------------------------------------- active weights


@wrong("active_params", "all experts are counted")
def all_experts(cfg):
    return active(cfg, experts=max(cfg.n_experts, 1))


@wrong("active_params", "one expert is counted")
def one_expert_a_token(cfg):
    return active(cfg, experts=1)


@wrong("active_params", "FFN of a dense model is missing")
def dense_has_no_experts(cfg):
    return active(cfg, experts=cfg.experts_per_token)


@wrong("active_params", "the embedding is counted")
def embedding_counted(cfg):
    return active(cfg, embeddings=2)


@wrong("active_params", "lm_head is missing")
def without_head(cfg):
    return active(cfg, embeddings=0)


@wrong("active_params", "the norms are counted")
def norms_counted(cfg):
    return active(cfg, norms=2, last=1, qk=qk_norms(cfg))


@wrong("active_params", "norms of queries and keys are counted")
def qk_norms_counted(cfg):
    return active(cfg, qk=qk_norms(cfg))


@wrong("active_params", "embedding and norms are counted")
def idle_experts_only_left_out(cfg):
    return active(cfg, embeddings=2, norms=2, last=1, qk=qk_norms(cfg))


@wrong("active_params", "the router is missing")
def no_router_in_use(cfg):
    return active(cfg, router=False)


@wrong("active_params", "k_proj and v_proj have n_kv_heads heads")
def all_heads_are_query_heads(cfg):
    return active(cfg, kv=cfg.n_heads)


@wrong("active_params", "q_proj and o_proj have n_heads heads")
def all_heads_are_kv_heads(cfg):
    return active(cfg, q=cfg.n_kv_heads)


@wrong("active_params", "the rest is used by every token")
def everything_in_part(cfg):
    return params(cfg) * max(cfg.experts_per_token, 1) / max(cfg.n_experts, 1)


@wrong("active_params", "every parameter of the model")
def every_parameter(cfg):
    return params(cfg)


# ------------------------------------------------------------------------------------------- FLOPs


@wrong("flops_per_token", "counts multiply-adds")
def multiply_adds(cfg, seqlen):
    return flops(cfg, seqlen) / 2


@wrong("flops_per_token", "attention is missing")
def weights_only(cfg, seqlen):
    return 2 * active(cfg)


@wrong("flops_per_token", "attention is causal")
def full_attention(cfg, seqlen):
    return flops(cfg, seqlen, pairs=seqlen**2)


@wrong("flops_per_token", "not S²/2")
def half_the_square(cfg, seqlen):
    return flops(cfg, seqlen, pairs=seqlen**2 / 2)


@wrong("flops_per_token", "attends to itself")
def without_the_diagonal(cfg, seqlen):
    return flops(cfg, seqlen, pairs=seqlen * (seqlen - 1) / 2)


@wrong("flops_per_token", "each query head has its own scores")
def attention_of_kv_heads(cfg, seqlen):
    return flops(cfg, seqlen, heads=cfg.n_kv_heads)


@wrong("flops_per_token", "here that is not dim")
def attention_of_dim(cfg, seqlen):
    return flops(cfg, seqlen, heads=1, head=cfg.dim)


@wrong("flops_per_token", "multiply-adds are two FLOPs each")
def scores_only(cfg, seqlen):
    return flops(cfg, seqlen, pairs=seqlen * (seqlen + 1) / 4)


@wrong("flops_per_token", "one was counted")
def attention_of_one_layer(cfg, seqlen):
    return 2 * active(cfg) + (flops(cfg, seqlen) - 2 * active(cfg)) / cfg.n_layers


@wrong("flops_per_token", "three times a forward pass")
def training(cfg, seqlen):
    return 3 * flops(cfg, seqlen)


@wrong("flops_per_token", "with recomputation")
def recomputing(cfg, seqlen):
    return 4 * flops(cfg, seqlen)


@wrong("flops_per_token", r"6 · weights \+ 12")
def six_n(cfg, seqlen):
    return 3 * flops(cfg, seqlen, pairs=seqlen**2)


@wrong("flops_per_token", "the whole sequence")
def per_sequence(cfg, seqlen):
    return seqlen * flops(cfg, seqlen)


@wrong("flops_per_token", "lm_head is missing")
def flops_without_head(cfg, seqlen):
    return flops(cfg, seqlen, used=without_head)


@wrong("flops_per_token", "all experts are counted")
def flops_of_all_experts(cfg, seqlen):
    return flops(cfg, seqlen, used=all_experts)


@wrong("flops_per_token", "idle experts and of the embedding")
def flops_of_all_parameters(cfg, seqlen):
    return flops(cfg, seqlen, used=params)


@wrong("flops_per_token", "the router is missing")
def flops_without_router(cfg, seqlen):
    return flops(cfg, seqlen, used=no_router_in_use)


# -------------------------------------------------------------------------------- rows of an expert


@wrong("rows_per_expert", "not to one")
def one_choice(cfg, n_tokens):
    return n_tokens / max(cfg.n_experts, 1)


@wrong("rows_per_expert", "divide by n_experts")
def all_rows(cfg, n_tokens):
    return n_tokens * max(cfg.experts_per_token, 1)


@wrong("rows_per_expert", r"ZeroDivisionError.*cfg.is_moe")
def dense_forgotten(cfg, n_tokens):
    return n_tokens * cfg.experts_per_token / cfg.n_experts


@wrong("rows_per_expert", "every token is a row")
def dense_has_no_rows(cfg, n_tokens):
    return n_tokens * cfg.experts_per_token / max(cfg.n_experts, 1)


@wrong("rows_per_expert", "a mean is not rounded")
def whole_rows(cfg, n_tokens):
    return n_tokens * max(cfg.experts_per_token, 1) // max(cfg.n_experts, 1)


@wrong("rows_per_expert", "rounded up")
def rows_rounded_up(cfg, n_tokens):
    return math.ceil(perfmodel.rows_per_expert(cfg, n_tokens))


@wrong("rows_per_expert", "no fewer than one|rounded up")
def at_least_one_row(cfg, n_tokens):
    return max(1.0, perfmodel.rows_per_expert(cfg, n_tokens))


@wrong("rows_per_expert", "not among experts_per_token")
def divided_by_choices(cfg, n_tokens):
    return n_tokens / max(cfg.experts_per_token, 1)


# ------------------------------------------------------------------------------------------ floors


@wrong("forward_floor_ms", "the larger of the two.*return both")
def larger(cfg, size, seqlen, device=None):
    return max(floors(cfg, size, seqlen, device))


@wrong("forward_floor_ms", "the sum of the two.*return both")
def added(cfg, size, seqlen, device=None):
    return sum(floors(cfg, size, seqlen, device))


@wrong("forward_floor_ms", "compute_ms comes first")
def swapped(cfg, size, seqlen, device=None):
    return floors(cfg, size, seqlen, device)[::-1]


@wrong("forward_floor_ms", "not two numbers")
def by_name(cfg, size, seqlen, device=None):
    compute, memory = floors(cfg, size, seqlen, device)
    return {"compute_ms": compute, "memory_ms": memory}


@wrong("forward_floor_ms", "compute_ms of .* it is in s;")
def seconds(cfg, size, seqlen, device=None):
    return floors(cfg, size, seqlen, device, compute=1e-3, memory=1e-3)


@wrong("forward_floor_ms", "TFLOP/s as they stand")
def tflops_as_they_stand(cfg, size, seqlen, device=None):
    return floors(cfg, size, seqlen, device, compute=1e9)


@wrong("forward_floor_ms", "GB/s as they stand")
def gbs_as_they_stand(cfg, size, seqlen, device=None):
    return floors(cfg, size, seqlen, device, memory=1e6)


@wrong("forward_floor_ms", "a rate for sparse matrices")
def sparse_peak(cfg, size, seqlen, device=None):
    return floors(cfg, size, seqlen, device, compute=0.5)


@wrong("forward_floor_ms", "the peak is that of float32")
def float32_peak(cfg, size, seqlen, device=None):
    peak = resolve(device).peak_tflops
    return floors(
        cfg, size, seqlen, device, compute=peak / resolve(device).peaks.get("float32", peak)
    )  # fmt: skip


@wrong("forward_floor_ms", "FLOPs of one token")
def one_token(cfg, size, seqlen, device=None):
    return floors(cfg, size, seqlen, device, compute=1 / (size * seqlen))


@wrong("forward_floor_ms", "FLOPs of one sequence")
def one_sequence(cfg, size, seqlen, device=None):
    return floors(cfg, size, seqlen, device, compute=1 / size)


@wrong("forward_floor_ms", "one sequence of all tokens")
def one_long_sequence(cfg, size, seqlen, device=None):
    longer = perfmodel.flops_per_token(cfg, size * seqlen) / perfmodel.flops_per_token(cfg, seqlen)
    return floors(cfg, size, seqlen, device, compute=longer)


@wrong("forward_floor_ms", "a training step")
def floor_of_training(cfg, size, seqlen, device=None):
    return floors(cfg, size, seqlen, device, compute=3)


@wrong("forward_floor_ms", "tokens together use all experts")
def active_bytes(cfg, size, seqlen, device=None):
    return floors(cfg, size, seqlen, device, memory=active(cfg) / params(cfg))


@wrong("forward_floor_ms", "float32 has four bytes; this device trains in bfloat16")
def always_four_bytes(cfg, size, seqlen, device=None):
    memory = 4 / perfmodel.bytes_per_element(resolve(device))
    return floors(cfg, size, seqlen, device, memory=memory)


@wrong("forward_floor_ms", "bfloat16 has two bytes; this device trains in float32")
def always_two_bytes(cfg, size, seqlen, device=None):
    memory = 2 / perfmodel.bytes_per_element(resolve(device))
    return floors(cfg, size, seqlen, device, memory=memory)


@wrong("forward_floor_ms", "elements were counted")
def elements(cfg, size, seqlen, device=None):
    memory = 1 / perfmodel.bytes_per_element(resolve(device))
    return floors(cfg, size, seqlen, device, memory=memory)


@wrong("forward_floor_ms", "not once a sequence")
def weights_every_sequence(cfg, size, seqlen, device=None):
    return floors(cfg, size, seqlen, device, memory=size)


@wrong("forward_floor_ms", "not in GiB")
def gibibytes(cfg, size, seqlen, device=None):
    return floors(cfg, size, seqlen, device, memory=1e9 / 2**30)


@wrong("forward_floor_ms", "the embedding too")
def without_embedding(cfg, size, seqlen, device=None):
    return floors(cfg, size, seqlen, device, memory=params(cfg, embeddings=1) / params(cfg))


@wrong("forward_floor_ms", "`device` ignored")
def always_an_l40(cfg, size, seqlen, device=None):
    return floors(cfg, size, seqlen, "L40")


@wrong("forward_floor_ms", r"AttributeError: 'str'.*resolve\(device\) is")
def specs_only(cfg, size, seqlen, device=None):
    return size * seqlen * perfmodel.flops_per_token(cfg, seqlen) / device.peak_tflops / 1e9, 1.0


def floats(cfg):
    return float(params(cfg))


def total_less_what_is_idle(cfg):
    """From the total: less experts that a token does not meet, embedding and norms."""
    used = replace(cfg, n_experts=cfg.experts_per_token) if cfg.is_moe else cfg
    routers = cfg.n_layers * cfg.dim * (cfg.n_experts - used.n_experts)
    norms = cfg.n_layers * (2 * cfg.dim + qk_norms(cfg)) + cfg.dim
    return perfmodel.param_count(used) + routers - cfg.vocab_size * cfg.dim - norms


def floors_in_a_list(cfg, size, seqlen, device=None):
    return list(floors(cfg, size, seqlen, device))


HONEST = [
    ("param_count", params),
    ("param_count", floats),
    ("active_params", active),
    ("active_params", total_less_what_is_idle),
    ("flops_per_token", flops),
    ("rows_per_expert", perfmodel.rows_per_expert),
    ("forward_floor_ms", floors),
    ("forward_floor_ms", floors_in_a_list),
]


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize("name", wrong)
def test_wrong_solution_is_named(name, module, monkeypatch):
    assert_named(module, wrong[name], monkeypatch)


@pytest.mark.parametrize("module", [public, hidden], ids=["public", "hidden"])
@pytest.mark.parametrize(("name", "solution"), HONEST)
def test_honest_variant_passes(name, solution, module, monkeypatch):
    assert_passes(module, name, solution, monkeypatch)


def test_the_reference_of_the_checks_is_olmoe():
    cfg = ModelConfig.preset("olmoe-1b-7b")
    assert slips_c3.params(cfg) == 6_919_161_856
    assert slips_c3.active_weights(cfg) == 1_178_861_568
    pairs = 512 * 513 // 2  # of a query and a key, in a sequence of 512
    assert slips_c3.attention_flops(cfg, 512) * 512 == 16 * 16 * 4 * 128 * pairs


def test_a_configuration_is_shown_by_its_preset():
    cfg = ModelConfig.preset("olmoe-1b-7b", n_layers=4)
    call, _ = public.checks.answer(perfmodel.param_count, cfg)
    assert call == "param_count(<olmoe-1b-7b, n_layers=4>)"


def test_an_open_exercise_stays_open(monkeypatch):
    def not_written(*arguments):
        raise NotImplementedError("Coding Exercise 3: labkit/perfmodel.py, param_count")

    for name in ("param_count", "forward_floor_ms"):
        monkeypatch.setattr(public, name, not_written)
    for test in (public.test_params, public.test_floors):
        with pytest.raises(NotImplementedError):
            test()
