"""Text from a model: prompts go through it once, then one token at a time with a KV cache.

Shapes: B sequences, L cached positions, H heads, G key-value heads, d head dim, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.attention import causal_attention
from labkit.config import ModelConfig
from labkit.data import Seqs
from labkit.errors import UserError, positive_number, whole_number
from labkit.model import Transformer


class KVCache:
    """Keys and values of B sequences, up to L positions each; `lengths[i]` of them are filled."""

    def __init__(self, cfg: ModelConfig, n_sequences: int, max_len: int, like: Tensor):
        shape = (cfg.n_layers, 2, n_sequences, max_len, cfg.n_kv_heads, cfg.head_dim)
        self.kv = like.new_zeros(shape)
        self.lengths = torch.zeros(n_sequences, dtype=torch.int64, device=like.device)

    def begin(self, seqs: Seqs) -> Tensor:
        """Start a pass → `[T]`, the positions of its tokens, counted on from what is cached."""
        lengths = seqs.cu_seqlens.diff()
        numbers = torch.arange(len(lengths), device=lengths.device)
        numbers_T = numbers.repeat_interleave(lengths, output_size=seqs.n_tokens)
        # Where the pass's keys and values go, which is the same in all layers.
        self._places = numbers_T, self.lengths[numbers_T] + seqs.positions
        return self._places[1]

    def attend(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, *, layer: int, seqs: Seqs):
        """Keep the new keys and values, and attend to all that is kept → `[T, H, d]`.

        Either everything is new (a prefill), or each sequence brings one token (a decode).
        """
        keys, values = self.kv[layer]
        keys[self._places], values[self._places] = k_TGd, v_TGd
        if seqs.max_seqlen > 1:
            return causal_attention(q_THd, k_TGd, v_TGd, seqs)
        share = q_THd.shape[1] // k_TGd.shape[1]
        k, v = (x.transpose(1, 2).repeat_interleave(share, dim=1) for x in (keys, values))
        filled = torch.arange(keys.shape[1], device=keys.device) <= self.lengths[:, None]
        y = F.scaled_dot_product_attention(q_THd[:, :, None], k, v, attn_mask=filled[:, None, None])
        return y[:, :, 0]

    def advance(self, seqs: Seqs):
        """Count the tokens of a finished pass as cached."""
        self.lengths += seqs.cu_seqlens.diff()


def generate(
    model: Transformer, prompts: Sequence[Sequence[int]], max_new_tokens: int = 64, **options
) -> list[list[int]]:
    """Continue every prompt → the new token ids of each. The options are those of `stream`."""
    outputs = [[] for _ in prompts]
    for tokens in stream(model, prompts, max_new_tokens, **options):
        for output, token in zip(outputs, tokens, strict=True):
            output += [] if token is None else [token]
    return outputs


def stream(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    stop_id: int | None = None,
    seed: int = 0,
    use_cache: bool = True,
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt (lists of token ids, of any lengths), step by step.

    temperature 0 takes the likeliest token; otherwise tokens are drawn from the `top_k` likeliest
    (all of them for None). A sequence ends at `stop_id` or after `max_new_tokens`; then it yields
    None. `use_cache=False` runs everything again for each token: slow, and the same tokens, which
    is what it is for. A bad request is a UserError at once, not at the first token.
    """
    _check(model, prompts, max_new_tokens, temperature, top_k, seed)
    return _stream(model, prompts, max_new_tokens, temperature, top_k, stop_id, seed, use_cache)


@torch.inference_mode()
def _stream(model, prompts, max_new_tokens, temperature, top_k, stop_id, seed, use_cache):
    weight = model.embed.weight
    generator = torch.Generator(weight.device).manual_seed(seed)
    longest = max(map(len, prompts)) + max_new_tokens
    cache = KVCache(model.cfg, len(prompts), longest, weight) if use_cache else None
    sequences = [list(prompt) for prompt in prompts]
    done = [False] * len(prompts)
    for step in range(max_new_tokens):
        new = [ids[-1:] for ids in sequences] if use_cache and step else sequences
        logits_BV = _next_logits(model, new, cache)
        tokens = _choose(logits_BV, temperature, top_k, generator).tolist()
        done = [ended or token == stop_id for ended, token in zip(done, tokens, strict=True)]
        if all(done):
            return
        for ids, token in zip(sequences, tokens, strict=True):
            ids.append(token)
        yield [None if ended else token for ended, token in zip(done, tokens, strict=True)]


def _next_logits(model: Transformer, new: list[list[int]], cache: KVCache | None) -> Tensor:
    """Run the new tokens → logits `[B, V]` of what follows the last of each sequence, float32."""
    device = model.embed.weight.device
    seqs = Seqs.from_lengths([len(ids) for ids in new], device)
    tokens = torch.tensor([token for ids in new for token in ids], device=device)
    hidden_TD = model.hidden(tokens, seqs, cache)
    if cache is not None:
        cache.advance(seqs)
    return model.lm_head(hidden_TD[seqs.cu_seqlens[1:] - 1]).float()


def _choose(logits_BV: Tensor, temperature: float, top_k: int | None, generator) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1)
    if top_k:
        floor = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < floor, -torch.inf)
    probabilities = (logits_BV / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _check(model: Transformer, prompts, max_new_tokens: int, temperature: float, top_k, seed: int):
    vocab, places = model.cfg.vocab_size, model.cfg.max_seqlen
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise UserError("a prompt is empty: give every sequence at least one token")
    whole_number("max_new_tokens", max_new_tokens)
    if temperature != 0:
        positive_number("temperature", temperature)
    if not -(2**63) <= seed < 2**64:
        raise UserError(f"seed={seed} does not fit into 64 bits")
    if top_k is not None and not 1 <= top_k <= vocab:
        raise UserError(f"top_k={top_k} must lie in 1…{vocab}, the vocabulary")
    model.check_token_ids(torch.tensor([token for prompt in prompts for token in prompt]))
    longest = max(map(len, prompts))
    if longest + max_new_tokens > places:
        raise UserError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones need more than the "
            f"model's {places} positions; shorten the prompt or lower max_new_tokens"
        )
