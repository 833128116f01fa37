"""Seeds for every test, and a reason for each GPU test that this machine cannot run."""

import random
import sys

import pytest


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))


@pytest.fixture(autouse=True)
def _seed():
    random.seed(0)
    for name in ("numpy", "torch"):  # only where a test has imported them: they are slow to load
        if name in sys.modules:
            module = sys.modules[name]
            (module.manual_seed if name == "torch" else module.random.seed)(0)
