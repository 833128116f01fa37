"""Save and load the 14 GB model: seconds, and how much host memory the loading takes.

    python benchmarks/load_checkpoint.py OUT.json FOLDER     # FOLDER needs 15 GB of disk

Host memory is the peak of anonymous pages: pages of the file that the kernel caches are not a copy.
"""

import json
import re
import threading
import time
from pathlib import Path

import torch
import typer

from labkit.checkpoint import load_hf, save_hf
from labkit.config import ModelConfig
from labkit.model import Transformer
from labkit.provenance import machine_facts


def anonymous_gib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status).group(1)) / 2**20


class PeakMemory:
    """Samples the process's anonymous memory every 5 ms; `peak_gib` is the rise above the start."""

    def __enter__(self):
        self.start = self.highest = anonymous_gib()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        return self

    def _sample(self):
        while not self.done.wait(0.005):
            self.highest = max(self.highest, anonymous_gib())

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        self.peak_gib = self.highest - self.start


def main(out: Path, folder: Path, layers: int = 16):
    cfg = ModelConfig.preset("olmoe-1b-7b", n_layers=layers)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Transformer(cfg)
    torch.set_default_dtype(torch.float32)
    report = {**machine_facts(), "layers": layers}
    report["file_gb"] = sum(p.nbytes for p in model.parameters()) / 1e9
    actions = {"save": lambda: save_hf(model, folder), "load": lambda: load_hf(folder)}
    for name, action in actions.items():
        start = time.perf_counter()
        with PeakMemory() as memory:
            result = action()
        torch.cuda.synchronize()
        report[name] = {"seconds": time.perf_counter() - start, "host_gib": memory.peak_gib}
    theirs = result.state_dict()
    report["exact"] = all(torch.equal(w, theirs[name]) for name, w in model.state_dict().items())
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    typer.run(main)
