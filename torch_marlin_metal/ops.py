"""The operators on a packed weight as Python functions of a `PackedWeight`.

`torch.ops.torch_marlin_metal.*` are the same operators with the weight's tensors as single arguments. The C++ extension
registers their schemas, checks, fake kernels, autograd and autocast.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torch_marlin_metal import extension
from torch_marlin_metal.packed_weight import PackedWeight, operator_arguments

_ops = torch.ops.torch_marlin_metal
_gemm = _ops.gemm.default


def _flop_formula(operator: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Registers an operator's formula with torch, which accepts registered operators only."""
    if extension.refusal is not None:
        return lambda formula: formula
    return register_flop_formula(getattr(_ops, operator))


@_flop_formula("gemm")
def _gemm_flops(a_shape: torch.Size, b_packed_shape: torch.Size, *_: Any, **__: Any) -> int:
    """Returns 2 M N K, a multiplication and an addition per term, as `FlopCounterMode` counts for `nn.Linear`."""
    return 2 * a_shape.numel() * b_packed_shape[1]


@_flop_formula("gemm_fp32")
def _gemm_fp32_flops(a_shape: torch.Size, b_packed_shape: torch.Size, *_: Any, **__: Any) -> int:
    """Counts the same as for `gemm`."""
    return 2 * a_shape.numel() * b_packed_shape[1]


@_flop_formula("gemm_transposed")
def _gemm_transposed_flops(a_shape: torch.Size, b_packed_shape: torch.Size, *_: Any, **__: Any) -> int:
    """Counts the backward product as `FlopCounterMode` counts `nn.Linear`'s."""
    return 2 * a_shape.numel() * 8 * b_packed_shape[0]


@_flop_formula("moe_gemm")
@_flop_formula("moe_gemm_gated")
def _moe_gemm_flops(
    a_shape: torch.Size, b_packed_shape: torch.Size, _: torch.Size, ids_shape: torch.Size, *__: Any, **___: Any
) -> int:
    """Counts every pair of a token and a slot as a row of a product, even if the pair's id names no expert."""
    return 2 * ids_shape.numel() * a_shape[-1] * b_packed_shape[2]


@_flop_formula("moe_gemm_grad_a")
def _moe_gemm_grad_a_flops(grad_shape: torch.Size, b_packed_shape: torch.Size, *_: Any, **__: Any) -> int:
    """Counts the backward product of every pair, as for `moe_gemm`."""
    return 2 * grad_shape.numel() * 8 * b_packed_shape[1]


def weight_arguments(
    op: str, weight: PackedWeight, bias: Tensor | None = None, takes_bias: bool = False
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Returns the arguments of the operator `op` for a weight: those by position, and those by name.

    If the operator takes a bias, the weight's own bias takes the place of one that is None.

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


def gemm(a: Tensor, weight: PackedWeight, bias: Tensor | None = None, variant: str = "auto") -> Tensor:
    """Multiplies activations with a packed 4-bit weight: `a @ w + bias`.

    The weight is decoded inside the product and never stored. Sums are in fp32, and the result is rounded once. `gemm`
    is differentiable with respect to `a` and `bias`.

    Args:
        a: activations `[..., K]`, float16, bfloat16 or float32, any strides.
        weight: `[K, N]`, from `quantize_weight`, `convert.read_layers`, `MarlinLinear.to_packed` or made of tensors.
        bias: `[N]`, float16, bfloat16 or float32; added in fp32. None stands for `weight.bias`.
        variant: "auto", or the name of a GPU kernel variant. The CPU ignores all but "two_pass" with bfloat16
            activations, which rounds the weights there too if the CPU has fast bfloat16 products.

    Returns:
        `[..., N]` in the dtype of `a`.

    Raises:
        TypeError: `weight` is not a `PackedWeight`.
        ValueError: an argument has the wrong dtype, shape, device or value; the message says what was expected.
    """
    tensors, named = weight_arguments("gemm", weight, bias, takes_bias=True)
    if variant != "auto":
        named["variant"] = variant
    result: Tensor = _gemm(a, *tensors, **named)
    return result


def gemm_transposed(a: Tensor, weight: PackedWeight) -> Tensor:
    """Multiplies by the transposed weight: `a @ w.T`.

    This product gives the gradient of `gemm` with respect to its `a`.

    The weight is decoded in parts of rows of K. A part takes at most `TORCH_MARLIN_METAL_GRADIENT_BYTES` bytes, 64 MiB
    by default, and on the CPU never more than 16 MiB. The variable is read at each call. The smallest part is eight
    rows, or one group of nvfp4 and mxfp4. The parts are in bfloat16 if `a` is, because that dtype has the range of
    float32, and otherwise in float32. The number of parts changes the result only by the rounding of sums, and equal
    calls give equal bits. The function is differentiable with respect to `a`; forward-mode derivatives are refused.

    Args:
        a: `[..., N]`, float16, bfloat16 or float32, any strides.
        weight: `[K, N]`; its bias is not used.

    Returns:
        `[..., K]` in the dtype of `a`.

    Raises:
        TypeError: `weight` is not a `PackedWeight`.
        ValueError: an argument or the variable is wrong; the message names it and says what was expected.
    """
    tensors, named = weight_arguments("gemm_transposed", weight)
    result: Tensor = _ops.gemm_transposed(a, *tensors, **named)
    return result


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
    """Multiplies each token with the packed weights of its experts.

    Row (t, s) of the result is `a[t] @ w[expert_ids[t, s]] + bias[expert_ids[t, s]]`, times `row_weights[t, s]` if
    given. With `reduce` the rows of a token are added in fp32, in the order of s, and the sum is rounded once. Shapes
    do not depend on values, and the host never waits to learn `expert_ids`. `moe_gemm` is differentiable with respect
    to `a` and `row_weights`; on mps, the backward pass does wait for `expert_ids`.

    Args:
        a: `[T, K]`, a row for all experts of a token, or `[T, top_k, K]`; float16, bfloat16 or float32, any strides.
        weight: the weights of E experts: a `PackedWeight` whose tensors have a leading dimension E. All experts share
            `lut`, which is `[16]`; `global_scale` is `[E]`, `[E, 1]` or `[E, N]`.
        expert_ids: int32 or int64 `[T, top_k]`. An id outside `[0, E)` stands for a row of zeros and reads no weight.
        bias: `[E, N]`; None stands for `weight.bias`.
        row_weights: `[T, top_k]` in any of the three floating dtypes, or None for 1.
        reduce: whether to add up the rows of a token.
        variant: "auto", "gemv", "fused" or "tensor"; the CPU ignores it.

    Returns:
        `[T, top_k, N]`, or `[T, N]` with `reduce`, in the dtype of `a`.

    Raises:
        IndexError: on the CPU, `perm` of a chosen expert has a value outside `[0, K)`.
        TypeError: `weight` is not a `PackedWeight`.
        ValueError: an argument has the wrong dtype, shape, device or value; the message says what was expected.
    """
    tensors, named = weight_arguments("moe_gemm", weight, bias, takes_bias=True)
    result: Tensor = _ops.moe_gemm(
        a, *tensors, expert_ids, row_weights=row_weights, reduce=reduce, variant=variant, **named
    )
    return result


def dequantize(weight: PackedWeight, dtype: torch.dtype = torch.float16) -> Tensor:
    """Returns a weight as floats, `[K, N]`, in the original order of k: `out[perm[j], :]` is packed row j.

    The weight is computed in fp32 and rounded once.

    Args:
        weight: `[K, N]`. If several values of its `perm` are the same index, the result has one of their rows; which
            one is unspecified.
        dtype: float16, bfloat16 or float32.

    Raises:
        TypeError: `weight` is not a `PackedWeight`.
        ValueError: an argument has the wrong dtype, shape, device or value.
    """
    tensors, named = weight_arguments("dequantize", weight)
    result: Tensor = _ops.dequantize(*tensors, dtype=dtype, **named)
    return result


def embedding(ids: Tensor, weight: PackedWeight, dtype: torch.dtype = torch.float16) -> Tensor:
    """Looks up vectors of a packed embedding table: vector i is column i of the weight `[K, N]`.

    Decodes only the vectors of the given ids. They have the same bits as in the result of `dequantize`. No tensor has a
    gradient.

    Args:
        ids: int32 or int64, any shape and strides, values in `[0, N)`.
        weight: `[K, N]`; N is the size of the vocabulary, K the length of a vector.
        dtype: float16, bfloat16 or float32.

    Returns:
        `[..., K]` in `dtype`. On mps an id outside the table gives a vector of NaN, because only the GPU knows the ids.

    Raises:
        IndexError: on the CPU, an id outside the table.
        TypeError: `weight` is not a `PackedWeight`.
        ValueError: an argument has the wrong dtype, shape, device or value, or requires grad.
    """
    tensors, named = weight_arguments("embedding", weight)
    result: Tensor = _ops.embedding(ids, *tensors, dtype=dtype, **named)
    return result
