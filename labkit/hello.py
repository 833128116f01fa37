"""Let a model go on with a text, and show it as it appears."""

import time
from collections.abc import Iterator
from pathlib import Path

from labkit.doctor import SHIPPED


def say(
    prompt: str,
    checkpoint: Path | None = None,
    tokens: int = 80,
    temperature: float = 0.7,
    seed: int = 0,
    device: str = "auto",
) -> Iterator[str]:
    """Yield what to print: how the model was loaded, then the text, piece by piece."""
    from labkit.checkpoint import load_hf, load_tokenizer
    from labkit.devices import pick
    from labkit.errors import UserError
    from labkit.generate import stream

    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"the prompt {prompt!r} is not UTF-8 text") from None
    path, device = Path(checkpoint or SHIPPED), pick(device)
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(prompt).ids
    if not ids:
        raise UserError(f"the prompt {prompt!r} is empty: give the model a word to begin with")
    start = time.perf_counter()
    model = load_hf(path, device)
    seconds, size = time.perf_counter() - start, sum(p.numel() for p in model.parameters())
    options = {"temperature": temperature, "top_k": min(50, model.cfg.vocab_size), "seed": seed}
    stop_id = tokenizer.token_to_id("<|endoftext|>")
    pieces = stream(model, [ids], tokens, stop_id=stop_id, **options)
    yield f"{path.name}: {size / 1e6:,.1f} million parameters on {device}, "
    yield f"loaded in {seconds:.1f} s\n\n{prompt}"
    new, shown = [], ""
    for token in pieces:
        new += token
        text = tokenizer.decode(new)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character in several tokens
            yield text[len(shown) :]
            shown = text
    yield "\n"
