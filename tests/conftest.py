"""Seeds for every test, and what this machine cannot run left out."""

import random
import sys
from importlib.util import find_spec

import pytest

_NEEDS = {
    "nbformat": ["unit/test_report.py", "unit/test_runner.py", "notebooks"],
    "ipywidgets": ["unit/test_widgets.py"],
    "playwright": ["browser"],
}
collect_ignore = [p for module, paths in _NEEDS.items() if not find_spec(module) for p in paths]


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
