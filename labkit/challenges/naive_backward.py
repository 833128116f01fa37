"""The naive mixture's backward pass, fixed in one line.

Shapes: T tokens, D model dim, F inner dim of an expert, E experts, K experts a token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.model import Experts


@contextmanager
def unbound_experts(model: nn.Module) -> Iterator[nn.Module]:
    """Inside the block, the naive mixtures of a model take their experts' weights by `unbind`.

    The gradient of `weight[expert]` is a tensor of all experts' size, zero but for one, and there
    are as many of them as experts, which autograd adds up: E times the memory traffic of the
    gradient, three times a layer. The gradient of `unbind` is one `stack` of the experts' own.
    """
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    for module in experts:
        module._naive = partial(_naive, module)  # shadows the method of the class
    try:
        yield model
    finally:
        for module in experts:
            del module._naive


def _naive(experts: Experts, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """`Experts._naive`, but for its first line."""
    matrices = zip(*(w.unbind() for w in experts.parameters()), strict=True)  # the fix
    out_TD = torch.zeros_like(x_TD)
    for expert, (gate_FD, up_FD, down_DF) in enumerate(matrices):
        tokens, choices = torch.where(experts_TK == expert)
        x = x_TD[tokens]
        y = F.linear(F.silu(F.linear(x, gate_FD)) * F.linear(x, up_FD), down_DF)
        out_TD = out_TD.index_add(0, tokens, y * weights_TK[tokens, choices, None])
    return out_TD


def zero_fills(fn: Callable[[], object], model: nn.Module) -> int:
    """How often a call of `fn` fills a tensor of the shape of all experts' weights with zeros.

    As torch.profiler sees it from the host, so a GPU's fills count as well.
    """
    stacks = {
        tuple(weight.shape)
        for module in model.modules() if isinstance(module, Experts)
        for weight in module.parameters()
    }  # fmt: skip
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], record_shapes=True) as recorded:
        fn()
    fills = [event.input_shapes for event in recorded.events() if event.name == "aten::zero_"]
    return sum(bool(shapes) and tuple(shapes[0]) in stacks for shapes in fills)
