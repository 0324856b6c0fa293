"""Finds the function with which a module rotates q and k, and replaces it by one operator."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.fuse.forwards import function_called
from torch_marlin_metal.layers.equivalence import agrees, is_supported
from torch_marlin_metal.ops.decoder import rotary

Rotation = Callable[..., tuple[Tensor, Tensor]]
PARAMETERS = ["q", "k", "cos", "sin"]
# The variants of a rotary embedding. A variant has three flags: the elements of a pair are adjacent; the tables have
# one value per pair; only the first half of each table is used.
VARIANTS = ((False, False, False), (True, False, False), (False, True, False), (True, True, True), (True, True, False))


def rotation_of(module: nn.Module) -> tuple[str, FunctionType] | None:
    """Returns the name and object of the function (q, k, cos, sin, ...) that a module's forward calls, or None."""
    return function_called(type(module).forward, PARAMETERS)


def _apply(variant: tuple[bool, bool, bool], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    interleaved, per_pair, first_half = variant
    if first_half:
        half = cos.shape[-1] // 2
        cos, sin = cos[..., :half], sin[..., :half]
    return rotary(q, k, cos, sin, interleaved=interleaved, per_pair=per_pair)


def variant_of(function: FunctionType) -> tuple[bool, bool, bool] | None:
    """Returns the variant whose results equal a function's on random input, or None.

    The comparison includes heads of which only a part is rotated.
    """
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 3, 16, generator=generator, device="cpu") for heads in (4, 2))
    results = []
    for size in (16, 8):
        cos, sin = (torch.randn(2, 3, size, generator=generator, device="cpu") for _ in range(2))
        try:
            results.append((cos, sin, function(q, k, cos, sin)))
        except Exception:  # the function does not support tables of this size
            continue
    for variant in VARIANTS if results else ():
        try:
            if all(all(map(agrees, _apply(variant, q, k, cos, sin), expected)) for cos, sin, expected in results):
                return variant
        except ValueError:  # the tables have another size in this variant
            continue
    return None


def fused_rotation(original: FunctionType, variant: tuple[bool, bool, bool]) -> Rotation:
    """Returns a function that rotates with one operator, and calls the original if the operator does not apply."""

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        usual = not args and not kwargs and q.dim() == 4 and cos.dim() == 3 and q.dtype == k.dtype == cos.dtype
        if not usual or not is_supported(q) or cos.requires_grad:
            result: tuple[Tensor, Tensor] = original(q, k, cos, sin, *args, **kwargs)
            return result
        return _apply(variant, q, k, cos, sin)

    return apply
