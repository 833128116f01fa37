"""Generation: the cache changes the time, never the text."""

import pytest
import torch

from labkit.config import ModelConfig
from labkit.errors import UserError
from labkit.generate import generate, stream
from labkit.model import Transformer

SIZES = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 16, "max_seqlen": 64}
CONFIGS = {
    "moe": ModelConfig(**SIZES, n_kv_heads=4, n_experts=8, experts_per_token=2, qk_norm=True),
    "dense-gqa": ModelConfig(**SIZES, n_kv_heads=2),
}
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]


@pytest.fixture(params=CONFIGS)
def model(request):
    torch.manual_seed(3)
    model = Transformer(CONFIGS[request.param])
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)  # small random weights say the same token for ever
    return model


@pytest.mark.parametrize("prompts", [PROMPTS, [[3], [4]]], ids=["ragged", "one token each"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cached_and_uncached_tokens_are_the_same(model, prompts, temperature):
    options = {"max_new_tokens": 20, "temperature": temperature, "seed": 4}
    cached = generate(model, prompts, **options)
    assert cached == generate(model, prompts, **options, use_cache=False)
    assert len(set(map(tuple, cached))) > 1, "the test wants prompts that end differently"
    assert all(len(new) == 20 for new in cached)


def test_company_does_not_change_a_sequence(model):
    together = generate(model, PROMPTS, 10)
    assert [generate(model, [prompt], 10)[0] for prompt in PROMPTS] == together


def test_stop_and_streaming(model):
    (free,) = generate(model, [PROMPTS[0]], 12)
    stop = free[5]
    (stopped,) = generate(model, [PROMPTS[0]], 12, stop_id=stop)
    assert stopped == free[: free.index(stop)]
    assert [token for (token,) in stream(model, [PROMPTS[0]], 12, stop_id=stop)] == stopped


def test_one_sequence_ends_before_another(model):
    first, second = generate(model, PROMPTS[:2], 12)
    stop = next(token for token in first if token not in second)
    cut, whole = generate(model, PROMPTS[:2], 12, stop_id=stop)
    assert cut == first[: first.index(stop)] and whole == second


def test_top_k_of_one_is_greedy(model):
    drawn = generate(model, PROMPTS, 10, temperature=5.0, top_k=1)
    assert drawn == generate(model, PROMPTS, 10)


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, "a prompt is empty"),
        ([[1], []], {}, "a prompt is empty"),
        ([[64]], {}, "token id 64 is outside the vocabulary"),
        ([[1] * 60], {"max_new_tokens": 5}, "more than the model's 64 positions"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1]], {"temperature": float("nan")}, "temperature=nan"),
        ([[1]], {"temperature": float("inf")}, "temperature=inf"),
        ([[1]], {"seed": 2**64}, "does not fit into 64 bits"),
        ([[1]], {"top_k": 65}, "top_k=65 must lie in 1…64"),
    ],
)
def test_bad_requests_are_named(model, prompts, options, words):
    with pytest.raises(UserError, match=words):
        generate(model, prompts, **options)
