"""The products with a single packed weight."""

from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.ops.arguments import flop_formula, weight_arguments
from torch_marlin_metal.packed_weight import PackedWeight

_ops = torch.ops.torch_marlin_metal
_gemm = _ops.gemm.default


@flop_formula("gemm", "gemm_fp32")
def _gemm_flops(a_shape: torch.Size, b_packed_shape: torch.Size, *_: Any, **__: Any) -> int:
    """Returns 2 M N K, a multiplication and an addition per term, like `FlopCounterMode` for `nn.Linear`."""
    return 2 * a_shape.numel() * b_packed_shape[1]


@flop_formula("gemm_transposed")
def _gemm_transposed_flops(
    a_shape: torch.Size, b_packed_shape: torch.Size, *_: Any, weight_format: str, **__: Any
) -> int:
    return 2 * a_shape.numel() * find_format(weight_format).codes_per_word * b_packed_shape[0]


def gemm(
    a: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    variant: str = "auto",
    activations: str | None = None,
) -> Tensor:
    """Multiplies activations by a packed weight: `a @ w + bias`.

    The weight is decoded inside the product, and the decoded weight is never stored. Sums are in fp32, and the result
    is rounded once. `gemm` is differentiable with respect to `a` and `bias`.

    Args:
        a: activations `[..., K]`, float16, bfloat16 or float32, any strides.
        weight: `[K, N]`, for example from `quantize_weight`, `convert.read_layers` or `MarlinLinear.to_packed`.
        bias: `[N]`, float16, bfloat16 or float32, added in fp32. None means `weight.bias`.
        variant: "auto", "rounded", or the name of a GPU kernel variant, which the CPU ignores. "rounded" may round the
            weights to the dtype of `a` where this is faster: for many rows on mps, and for bfloat16 activations on CPUs
            with fast bfloat16 products.
        activations: "int8" rounds each row of `a` to 8 bits on the CPU, in groups of 32 k, or of the weight's group
            size if that is smaller. The error of an element is at most 1/254 of the largest element of its group. The
            weight's codes must be integers or E2M1. Gradients ignore the rounding. None means no rounding.

    Returns:
        `[..., N]` in the dtype of `a`.

    Raises:
        TypeError: `weight` is not a `PackedWeight`.
        ValueError: an argument has the wrong dtype, shape, device or value. The message states what was expected.

    Examples:
        >>> weight = tmm.quantize_weight(torch.randn(24, 64), "uint4", group_size=32)
        >>> a = torch.randn(2, 5, 64)
        >>> torch.allclose(tmm.gemm(a, weight), a @ weight.dequantize(), atol=1e-4)
        True
    """
    tensors, named = weight_arguments("gemm", weight, bias, takes_bias=True)
    if variant != "auto":
        named["variant"] = variant
    if activations is not None:
        named["activations"] = activations
    result: Tensor = _gemm(a, *tensors, **named)
    return result


def gemm_transposed(a: Tensor, weight: PackedWeight) -> Tensor:
    """Multiplies by the transposed weight: `a @ w.T`.

    This product computes the gradient of `gemm` with respect to its `a`.

    The weight is decoded in parts, each some rows of K. A part has at most `TORCH_MARLIN_METAL_GRADIENT_BYTES` bytes,
    64 MiB by default, and on the CPU at most 16 MiB. The environment variable is read at each call. The smallest part
    is eight rows, or one group of nvfp4 and mxfp4. Parts are bfloat16 if `a` is bfloat16, which has the range of
    float32, and otherwise float32. The number of parts affects the result only by the rounding of sums, and equal calls
    have equal bits. The function is differentiable with respect to `a`. Forward-mode derivatives raise an error.

    Args:
        a: `[..., N]`, float16, bfloat16 or float32, any strides.
        weight: `[K, N]`. Its bias is not used.

    Returns:
        `[..., K]` in the dtype of `a`.

    Raises:
        TypeError: `weight` is not a `PackedWeight`.
        ValueError: an argument or the environment variable is invalid. The message names it and states what was
            expected.

    Examples:
        >>> weight = tmm.quantize_weight(torch.randn(24, 64), "uint4", group_size=32)
        >>> a = torch.randn(5, 24)
        >>> torch.allclose(tmm.gemm_transposed(a, weight), a @ weight.dequantize().T, atol=1e-4)
        True
    """
    tensors, named = weight_arguments("gemm_transposed", weight)
    result: Tensor = _ops.gemm_transposed(a, *tensors, **named)
    return result
