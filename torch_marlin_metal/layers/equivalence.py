"""Compares a replacement with its original module, and tells which tensors and modules can be replaced."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DEVICES = ("cpu", "mps", "meta")
# Results agree if they differ by at most this fraction of the largest result: originals round several times.
TOLERANCE = {torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5, torch.float32: 2.0**-16}


def is_supported(tensor: Tensor) -> bool:
    """Returns whether the operators support this tensor. Other tensors go to the original forward."""
    return tensor.device.type in DEVICES and tensor.dtype in DTYPES


def random_like(tensor: Tensor, seed: int = 0) -> Tensor:
    """Returns normal random numbers of a tensor's shape, dtype and device, without changing the global generator."""
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return values.to(tensor.device, tensor.dtype)


def difference(got: Any, expected: Any) -> float:
    """Returns the largest difference relative to the largest expected value; infinity if the two cannot be compared."""
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        return float("inf")
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    size = expected.float().abs().max().item()
    error = (got.float() - expected.float()).abs().max().item()
    return error / size if size > 0 and error == error else float("inf")


def agrees(got: Any, expected: Any) -> bool:
    """Returns whether a replacement's result equals the original's, except for rounding to its dtype."""
    return difference(got, expected) <= TOLERANCE.get(getattr(expected, "dtype", torch.float32), 0.0)


class _DoublingDropout(TorchFunctionMode):
    """Makes dropout double its input, so that a missing dropout shows without random numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.dropout:
            call = inspect.signature(functional.dropout).bind(*args, **kwargs)
            call.apply_defaults()
            given = call.arguments
            return given["input"] * 2 if given["training"] and given["p"] > 0 else given["input"]
        if func is functional.scaled_dot_product_attention:
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Puts a module into training or evaluation mode for a while, in which dropout doubles its input."""
    others = [part for part in module.modules() if part.training != training]
    module.train(training)
    try:
        with _DoublingDropout():
            yield
    finally:
        for part in others:
            part.training = not training


def agrees_in_training(module: nn.Module, replacement: Callable[[], Any], original: Callable[[], Any]) -> bool:
    """Returns whether both calls give equal results in training mode, in which a module may use dropout.

    Args:
        module: the module that both calls use; it is put into training mode for the calls.
        replacement: computes the replacement's result.
        original: computes the module's own result.
    """
    with in_mode(module, training=True):
        return agrees(replacement(), original())


def has_forward_of_its_own(module: nn.Module) -> bool:
    """Returns whether other code has replaced this module's forward or added hooks to it."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    own = module.__dict__.get("forward")
    # A fused module that was pickled and loaded has the forward of its class as an attribute; that is no replacement.
    is_replaced = own is not None and getattr(own, "__func__", None) is not type(module).forward
    return is_replaced or bool(hooks)
