"""Compares the results of a replacement with those of the original module, in evaluation and in training mode."""

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
# Largest allowed difference, as a fraction of the largest result. It allows several roundings, because originals round
# several times.
TOLERANCE = {torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5, torch.float32: 2.0**-16}


def check_module(op: str, model: object) -> None:
    """Raises an error for an object that is not a module. For a diffusers pipeline, the message lists its models."""
    if isinstance(model, nn.Module):
        return
    parts = [name for name, part in getattr(model, "components", {}).items() if isinstance(part, nn.Module)]
    advice = f": pass its models, one by one: {', '.join(parts)}" if parts else ""
    raise TypeError(f"{op}: model: expected an nn.Module, got {type(model).__name__}{advice}")


def is_supported(tensor: Tensor) -> bool:
    """Returns True if the operators support the tensor. Other tensors are passed to the original forward."""
    return tensor.device.type in DEVICES and tensor.dtype in DTYPES


def random_like(tensor: Tensor, seed: int = 0) -> Tensor:
    """Returns normal random numbers in the shape, dtype and device of a tensor. Keeps the global generator's state."""
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return values.to(tensor.device, tensor.dtype)


def difference(got: Any, expected: Any) -> float:
    """Returns the largest difference relative to the largest expected value, or infinity if shapes or dtypes differ."""
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        return float("inf")
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    size = expected.float().abs().max().item()
    error = (got.float() - expected.float()).abs().max().item()
    return error / size if size > 0 and error == error else float("inf")


def agrees(got: Any, expected: Any) -> bool:
    """Returns True if a replacement's result equals the original's, up to rounding to the dtype."""
    return difference(got, expected) <= TOLERANCE.get(getattr(expected, "dtype", torch.float32), 0.0)


class _DoublingDropout(TorchFunctionMode):
    """Makes dropout double its input, so that a missing dropout is detected without random numbers."""

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
    """Sets a module to training or evaluation mode inside the block, where dropout doubles its input."""
    others = [part for part in module.modules() if part.training != training]
    module.train(training)
    try:
        with _DoublingDropout():
            yield
    finally:
        for part in others:
            part.training = not training


def agrees_in_training(module: nn.Module, replacement: Callable[[], Any], original: Callable[[], Any]) -> bool:
    """Returns True if both calls have equal results while `module` is in training mode, where it may use dropout."""
    with in_mode(module, training=True):
        return agrees(replacement(), original())


def has_forward_of_its_own(module: nn.Module) -> bool:
    """Returns True if other code has replaced the module's forward or added hooks."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    own = module.__dict__.get("forward")
    # Unpickling a fused module sets its class's forward as an attribute, which is not a replacement.
    is_replaced = own is not None and getattr(own, "__func__", None) is not type(module).forward
    return is_replaced or bool(hooks)
