"""Finds norms and replaces each by one operator.

An RMS norm becomes `rms_norm`. Some models, for example Cohere's, write out LayerNorm as a sequence of operations. Such
a LayerNorm becomes PyTorch's `layer_norm`, which is one dispatch on mps.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import layer_norm

from torch_marlin_metal.layers.equivalence import agrees, is_supported, random_like
from torch_marlin_metal.ops.decoder import rms_norm

Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Norm:
    """The parameters of a norm's computation.

    Attributes:
        eps: the number added to the mean of the squares.
        offset: the number added to each weight.
        has_mean: True if the norm first subtracts the mean of each row, like LayerNorm.
    """

    eps: float
    offset: float = 0.0
    has_mean: bool = False

    def apply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalizes each row of `x`, and returns the result in the dtype of `x`."""
        if self.has_mean:
            return layer_norm(x, weight.shape, weight, eps=self.eps).to(x.dtype)  # autocast may have widened the result
        return rms_norm(x, weight, eps=self.eps, weight_offset=self.offset)


def is_candidate(module: nn.Module) -> bool:
    """Returns True if a module has a weight vector, no other tensor, and a forward with one argument.

    PyTorch's own LayerNorm is already one dispatch, so it is no candidate.
    """
    if (
        type(module).forward is nn.LayerNorm.forward
        or any(True for _ in module.children())
        or any(True for _ in module.buffers(recurse=False))
    ):
        return False
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    if len(parameters) != 1 or weight is None or weight.dim() != 1 or not is_supported(weight) or weight.is_meta:
        return False
    return len(inspect.signature(module.forward).parameters) == 1


def settings_of(module: nn.Module) -> Norm | None:
    """Returns the norm whose results a module matches on random input, or None if none matches."""
    numbers = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.01}
    weight = module.weight
    assert isinstance(weight, Tensor)
    # fp32 weights reveal a wrong offset, and inputs down to 1e-4 reveal a wrong eps.
    wide = random_like(weight.detach().float(), seed=1)
    x = random_like(wide.expand(3, 2, -1), seed=2) * torch.tensor([1.0, 1e-2, 1e-4], device=wide.device)[:, None, None]
    same = x.to(weight.dtype)
    try:
        expected = functional_call(module, {"weight": wide}, (x,))
        rounded = module.forward(same)
    except Exception:  # a norm would not raise an error here
        return None
    for eps in sorted(numbers):
        for norm in (Norm(eps), Norm(eps, offset=1.0), Norm(eps, has_mean=True)):
            rows = zip(norm.apply(x, wide), expected, strict=True)
            if all(agrees(got, row) for got, row in rows) and agrees(norm.apply(same, weight), rounded):
                return norm
    return None


def fused_norm(original: Forward, norm: Norm) -> Callable[[nn.Module, Tensor], Tensor]:
    """Returns a forward with one operator. Input and weight of different dtypes are passed to the original."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        weight = self.weight
        if x.dtype != weight.dtype or not is_supported(x):
            return original(self, x)
        # x may be a transposed view of a tensor [B, S, heads, D]. Transposed back, its rows are evenly spaced, and the
        # operator does not copy them.
        if x.dim() == 4 and x.stride(1) < x.stride(2):
            return norm.apply(x.transpose(1, 2), weight).transpose(1, 2)  # type: ignore[arg-type]
        return norm.apply(x, weight)  # type: ignore[arg-type]

    return forward
