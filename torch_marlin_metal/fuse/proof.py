"""Compares a replacement with the module that it replaces, and says where replacements may run."""

from typing import Any

import torch
from torch import Tensor, nn

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DEVICES = ("cpu", "mps", "meta")
# The largest difference of a proof, as a part of the largest result. Originals round to the dtype several times.
TOLERANCE = {torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5, torch.float32: 2.0**-16}


def runs(tensor: Tensor) -> bool:
    """Returns whether the operators take this tensor; other tensors go to the original module."""
    return tensor.device.type in DEVICES and tensor.dtype in DTYPES


def random_like(tensor: Tensor, seed: int = 0) -> Tensor:
    """Returns normal random numbers of a tensor's shape, dtype and device, without changing the global generator."""
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return values.to(tensor.device, tensor.dtype)


def difference(got: Any, expected: Any) -> float:
    """Returns the largest difference as a part of the largest expected value; infinity if it proves nothing."""
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        return float("inf")
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    size = expected.float().abs().max().item()
    error = (got.float() - expected.float()).abs().max().item()
    return error / size if size > 0 and error == error else float("inf")


def agrees(got: Any, expected: Any) -> bool:
    """Returns whether a replacement's result is the original's, within the roundings of its dtype."""
    return difference(got, expected) <= TOLERANCE.get(getattr(expected, "dtype", torch.float32), 0.0)


def has_forward_of_its_own(module: nn.Module) -> bool:
    """Returns whether somebody else has replaced this module's forward or hooked into it."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    own = module.__dict__.get("forward")
    # After unpickling, a fused module holds its class's forward.
    is_replaced = own is not None and getattr(own, "__func__", None) is not type(module).forward
    return is_replaced or bool(hooks)
