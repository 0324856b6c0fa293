"""The products of tokens with the weights of their experts."""

from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.ops.arguments import flop_formula, weight_arguments
from torch_marlin_metal.ops.decoder import ActivationName
from torch_marlin_metal.packed_weight import PackedWeight

_ops = torch.ops.torch_marlin_metal
_moe_gemm_gated = _ops.moe_gemm_gated.default


@flop_formula("moe_gemm", "moe_gemm_gated")
def _moe_gemm_flops(
    a_shape: torch.Size, b_packed_shape: torch.Size, _: torch.Size, ids_shape: torch.Size, *__: Any, **___: Any
) -> int:
    """Counts each pair of token and slot as a row of a product, even if the pair's id is not an expert."""
    return 2 * ids_shape.numel() * a_shape[-1] * b_packed_shape[2]


@flop_formula("moe_gemm_grad_a")
def _moe_gemm_grad_a_flops(
    grad_shape: torch.Size, b_packed_shape: torch.Size, *_: Any, weight_format: str, **__: Any
) -> int:
    return 2 * grad_shape.numel() * find_format(weight_format).codes_per_word * b_packed_shape[1]


def moe_gemm(
    a: Tensor,
    weight: PackedWeight,
    expert_ids: Tensor,
    bias: Tensor | None = None,
    *,
    row_weights: Tensor | None = None,
    reduce: bool = False,
    variant: str = "auto",
) -> Tensor:
    """Multiplies each token by the packed weights of its experts.

    Row (t, s) of the result is `a[t] @ w[expert_ids[t, s]] + bias[expert_ids[t, s]]`, multiplied by `row_weights[t, s]`
    if given. With `reduce`, the rows of a token are added in fp32, in the order of s, and the sum is rounded once.
    Shapes do not depend on values, and the host does not wait for the values of `expert_ids`. `moe_gemm` is
    differentiable with respect to `a` and `row_weights`. On mps, the host waits for `expert_ids` in the backward pass.

    Args:
        a: `[T, K]` (one row for all experts of a token) or `[T, top_k, K]`, float16, bfloat16 or float32, any strides.
        weight: the weights of E experts, as a `PackedWeight` whose tensors have a leading dimension E. All experts
            share `lut`, which is `[16]`. `global_scale` is `[E]`, `[E, 1]` or `[E, N]`.
        expert_ids: int32 or int64 `[T, top_k]`. For an id outside `[0, E)`, the row is zeros and no weight is read.
        bias: `[E, N]`. None means `weight.bias`.
        row_weights: `[T, top_k]` in any of the three floating-point dtypes. None means 1.
        reduce: True to add up the rows of each token.
        variant: "auto", "gemv", "fused" or "tensor". The CPU ignores it.

    Returns:
        `[T, top_k, N]`, or `[T, N]` with `reduce`, in the dtype of `a`.

    Raises:
        IndexError: on the CPU, `perm` of a chosen expert has a value outside `[0, K)`.
        TypeError: `weight` is not a `PackedWeight`.
        ValueError: an argument has the wrong dtype, shape, device or value. The message states what was expected.

    Examples:
        >>> parts = [tmm.quantize_weight(torch.randn(24, 64), "uint4b8", 32) for _ in range(4)]
        >>> stack = tmm.PackedWeight(
        ...     torch.stack([part.b_packed for part in parts]),
        ...     torch.stack([part.scales for part in parts]),
        ...     "uint4b8",
        ...     group_size=32,
        ... )
        >>> chosen = torch.tensor([[0, 3], [1, 0], [2, -1]])  # -1 is no expert
        >>> tmm.moe_gemm(torch.randn(3, 64), stack, chosen).shape
        torch.Size([3, 2, 24])
    """
    tensors, named = weight_arguments("moe_gemm", weight, bias, takes_bias=True)
    result: Tensor = _ops.moe_gemm(
        a, *tensors, expert_ids, row_weights=row_weights, reduce=reduce, variant=variant, **named
    )
    return result


def moe_gemm_gated(
    a: Tensor,
    weight: PackedWeight,
    expert_ids: Tensor,
    bias: Tensor | None = None,
    *,
    activation: ActivationName = "silu",
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
) -> Tensor:
    """Multiplies each token by the gate and up projections of its experts, and applies the gated activation.

    The result is bit for bit that of `moe_gemm` followed by `gated_activation`, so the products are rounded in between.
    For few rows, it takes one dispatch on mps instead of two. `moe_gemm_gated` is differentiable with respect to `a`.

    Args:
        a: as in `moe_gemm`.
        weight: the weights of E experts, with an even N: the columns of gate and up of each expert.
        expert_ids: int32 or int64 `[T, top_k]`.
        bias: `[E, N]`. None means `weight.bias`.
        activation: as in `gated_activation`.
        interleaved: True if the columns alternate between gate and up. False if the first N / 2 columns are gate.
        limit: a number for "clamped_silu" and "limited_silu" only.
        alpha: a number for "clamped_silu" only.

    Returns:
        `[T, top_k, N / 2]` in the dtype of `a`.

    Raises:
        TypeError: `weight` is not a `PackedWeight`.
        ValueError: an argument has the wrong dtype, shape, device or value. The message states what was expected.

    Examples:
        >>> parts = [tmm.quantize_weight(torch.randn(24, 64), "uint4b8", 32) for _ in range(4)]
        >>> stack = tmm.PackedWeight(
        ...     torch.stack([part.b_packed for part in parts]),
        ...     torch.stack([part.scales for part in parts]),
        ...     "uint4b8",
        ...     group_size=32,
        ... )
        >>> tmm.ops.moe_gemm_gated(torch.randn(3, 64), stack, torch.tensor([[0, 3], [1, 0], [2, 2]])).shape
        torch.Size([3, 2, 12])
    """
    tensors, named = weight_arguments("moe_gemm_gated", weight, bias, takes_bias=True)
    result: Tensor = _moe_gemm_gated(
        a,
        *tensors,
        expert_ids,
        activation=activation,
        interleaved=interleaved,
        limit=limit,
        alpha=alpha,
        **named,
    )
    return result
