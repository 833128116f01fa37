"""On a GPU: the predictor against steps that are measured now."""

import pytest

from labkit.config import ModelConfig
from labkit.devices import current
from labkit.experiments.machine import Machine
from labkit.experiments.sweep import KEYS, Bench
from labkit.perfmodel import predict_peak_gib, predict_step_ms
from labkit.predictor.known import SHIPPED

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bench():
    return Bench(Machine.here("cuda"))


@pytest.mark.parametrize("recompute", ["no", "yes"])
@pytest.mark.parametrize("shape", [(2, 4, 1024), (2, 3, 2000), (4, 2, 4096), (3, 12, 512)])
def test_steps_that_keep_the_gpu_busy(bench, shape, recompute):
    if current().name not in SHIPPED:
        pytest.skip(f"nobody has calibrated {current().name}")
    layers, size, seqlen = shape
    key = dict(zip(KEYS, ("olmoe-1b-7b", *shape, recompute, 1, 0), strict=True))
    row = bench.measure(key, quick=True)
    cfg = ModelConfig.preset("olmoe-1b-7b", n_layers=layers)
    ms = predict_step_ms(cfg, size, seqlen, recompute == "yes")
    assert abs(ms / row["step_ms"] - 1) < 0.05, f"{ms} against {row['step_ms']:.4g} ms"
    gib = predict_peak_gib(cfg, size, seqlen, recompute == "yes")
    assert abs(gib / row["peak_gib"] - 1) < 0.01, f"{gib} against {row['peak_gib']:.4g} GiB"


def test_peak_memory_of_a_dense_model_with_shared_keys(bench):
    """Whether attention copies keys and values depends on PyTorch's version."""
    key = dict(zip(KEYS, ("small", 12, 4, 1024, "no", 1, 0), strict=True))
    row = bench.measure(key, quick=True)
    gib = predict_peak_gib(ModelConfig.preset("small"), 4, 1024)
    assert abs(gib / row["peak_gib"] - 1) < 0.015, f"{gib} against {row['peak_gib']:.4g} GiB"
