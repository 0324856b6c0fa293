"""Finds RMS norms and computes each in one operator."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torch_marlin_metal.fuse.proof import agrees, random_like, runs
from torch_marlin_metal.layer_ops import rms_norm

Forward = Callable[..., Tensor]


def is_candidate(module: nn.Module) -> bool:
    """Returns True if a module has one vector of weights, no other tensor, and a forward that takes one argument."""
    if any(True for _ in module.children()) or any(True for _ in module.buffers(recurse=False)):
        return False
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    if len(parameters) != 1 or weight is None or weight.dim() != 1 or not runs(weight) or weight.is_meta:
        return False
    return len(inspect.signature(module.forward).parameters) == 1


def settings_of(module: nn.Module) -> tuple[float, float] | None:
    """Returns eps and weight offset if a module computes an RMS norm on random input, otherwise None."""
    numbers = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.01}
    weight = module.weight
    assert isinstance(weight, Tensor)
    # The weights are fp32 so that a wrong offset shows; inputs go down to 1e-4 so that a wrong eps shows.
    wide = random_like(weight.detach().float(), seed=1)
    x = random_like(wide.expand(3, 2, -1), seed=2) * torch.tensor([1.0, 1e-2, 1e-4], device=wide.device)[:, None, None]
    same = x.to(weight.dtype)
    try:
        expected = functional_call(module, {"weight": wide}, (x,))
        rounded = module.forward(same)
    except Exception:  # a module that raises an error here is not a norm
        return None
    for eps in sorted(numbers):
        for offset in (0.0, 1.0):
            rows = zip(rms_norm(x, wide, eps=eps, weight_offset=offset), expected, strict=True)
            if not all(agrees(got, row) for got, row in rows):
                continue
            if agrees(rms_norm(same, weight, eps=eps, weight_offset=offset), rounded):
                return eps, offset
    return None


def fused_norm(original: Forward, eps: float, offset: float) -> Callable[[nn.Module, Tensor], Tensor]:
    """Returns a forward that takes one operator. It calls the original if input and weight have different dtypes."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        weight = self.weight
        if x.dtype != weight.dtype or not runs(x):
            return original(self, x)
        # the heads of a token are adjacent, so rows are read in the order of memory
        if x.dim() == 4 and x.stride(1) < x.stride(2):
            return rms_norm(x.transpose(1, 2), weight, eps=eps, weight_offset=offset).transpose(1, 2)  # type: ignore[arg-type]
        return rms_norm(x, weight, eps=eps, weight_offset=offset)  # type: ignore[arg-type]

    return forward
