"""Helpers for all operator families: the arguments of a weight, and the counts of floating-point operations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torch_marlin_metal import extension
from torch_marlin_metal.packed_weight import PackedWeight, operator_arguments


def flop_formula(*operators: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Registers a function with torch that counts the floating-point operations of operators.

    Does nothing without the compiled extension, because torch requires a registered operator.
    """
    if extension.refusal is not None:
        return lambda formula: formula
    return register_flop_formula([getattr(torch.ops.torch_marlin_metal, operator) for operator in operators])


def weight_arguments(
    op: str, weight: PackedWeight, bias: Tensor | None = None, takes_bias: bool = False
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Returns the positional and the named arguments of the operator `op` for a weight.

    If the operator has a bias and `bias` is None, the weight's own bias is passed.

    Raises:
        TypeError: `weight` is not a `PackedWeight`.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"{op}: weight: expected a PackedWeight, got {type(weight).__name__}; torch.ops.torch_marlin_metal.{op} "
            "takes the tensors of a weight"
        )
    if takes_bias and bias is None:
        bias = weight.bias
    return operator_arguments(vars(weight), weight.weight_format, weight.group_size, bias)
