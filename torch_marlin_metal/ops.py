"""The operators `torch.ops.torch_marlin_metal.*` as Python functions.

The functions also accept aliases of weight formats and `group_size=-1`. The C++ extension registers schemas, checks,
fake kernels, autograd and autocast.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torch_marlin_metal import extension
from torch_marlin_metal.formats import NAMED_TABLES, resolve_group_size
from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.packed_weight import PackedWeight

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


def resolve(
    op: str, name: str, group_size: int, b_packed: Tensor, lut: Tensor | None
) -> tuple[str, int, Tensor | None]:
    """Replaces an alias by the format's name and -1 by K; the operator checks everything else."""
    fmt = find_format(name)
    if lut is None and name in NAMED_TABLES:
        lut = torch.tensor(NAMED_TABLES[name], dtype=torch.float32, device=b_packed.device)
    if group_size == -1 and b_packed.dim() in (2, 3):  # for other ranks the operator raises the error
        group_size = resolve_group_size(op, fmt, group_size, 8 * b_packed.shape[-2])
    return fmt.name, group_size, lut


def given(
    zeros: Tensor | None,
    global_scale: Tensor | None,
    lut: Tensor | None,
    perm: Tensor | None,
    bias: Tensor | None = None,
) -> dict[str, Any]:
    """Returns the arguments that are not None, because each argument costs the dispatcher 0.4 us, even if None."""
    named: dict[str, Any] = {}
    if zeros is not None:
        named["zeros"] = zeros
    if global_scale is not None:
        named["global_scale"] = global_scale
    if lut is not None:
        named["lut"] = lut
    if perm is not None:
        named["perm"] = perm
    if bias is not None:
        named["bias"] = bias
    return named


def gemm(
    a: Tensor,
    b_packed: Tensor,
    scales: Tensor,
    *,
    weight_format: str,
    group_size: int,
    zeros: Tensor | None = None,
    global_scale: Tensor | None = None,
    lut: Tensor | None = None,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    variant: str = "auto",
) -> Tensor:
    """Multiplies activations with a packed 4-bit weight: `a @ w + bias`.

    The weight is decoded inside the product and never stored. Sums are in fp32, and the result is rounded once. `gemm`
    is differentiable with respect to `a` and `bias`.

    Args:
        a: activations `[..., K]`, float16, bfloat16 or float32, any strides.
        b_packed: int32 `[K/8, N]`, contiguous; word (r, n) holds the codes of k = 8r ... 8r+7 of column n, lowest k in
            the lowest nibble.
        scales: `[G, N]` with `G = ceil(K / group_size)`; float16, bfloat16 or float32, or uint8 codes (nvfp4, mxfp4).
        weight_format: a name of `WEIGHT_FORMATS` or an alias ("u4b8", "u4", "fp4", "float4_e2m1f", "nf4").
        group_size: 16, 32, 64, 128, 256 or K; -1 stands for K. The last group may be short.
        zeros: `[G, N]`; zero points of uint4 (uint8 codes or floating), biases of uint4_bias (floating).
        global_scale: float32 `[]`, `[1]` or `[N]`, multiplies the scales of nvfp4.
        lut: float32 `[16]`, the table of lut4; the alias "nf4" supplies it.
        perm: int32 `[K]`, GPTQ's act-order: packed row j multiplies `a[..., perm[j]]`. See `gptq_perm`.
        bias: `[N]`, float16, bfloat16 or float32; added in fp32.
        variant: "auto", or the name of a GPU kernel variant. The CPU ignores all but "two_pass" with bfloat16
            activations, which rounds the weights there too if the CPU has fast bfloat16 products.

    Returns:
        `[..., N]` in the dtype of `a`.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or value; the message says what was expected.
    """
    name, group_size, lut = resolve("gemm", weight_format, group_size, b_packed, lut)
    options = given(zeros, global_scale, lut, perm, bias)
    if variant != "auto":
        options["variant"] = variant
    result: Tensor = _gemm(a, b_packed, scales, weight_format=name, group_size=group_size, **options)
    return result


def gemm_transposed(
    a: Tensor,
    b_packed: Tensor,
    scales: Tensor,
    *,
    weight_format: str,
    group_size: int,
    zeros: Tensor | None = None,
    global_scale: Tensor | None = None,
    lut: Tensor | None = None,
    perm: Tensor | None = None,
) -> Tensor:
    """Multiplies by the transposed weight: `a @ w.T`.

    This product gives the gradient of `gemm` with respect to its `a`.

    The weight is decoded in parts of rows of K. A part takes at most `TORCH_MARLIN_METAL_GRADIENT_BYTES` bytes, 64 MiB
    by default, and on the CPU never more than 16 MiB. The variable is read at each call. The smallest part is eight
    rows, or one group of nvfp4 and mxfp4. The parts are in bfloat16 if `a` is, because that dtype has the range of
    float32, and otherwise in float32. The number of parts changes the result only by the rounding of sums, and equal
    calls give equal bits. The function is differentiable with respect to `a`; forward-mode derivatives are refused.

    Args:
        a: `[..., N]`, float16, bfloat16 or float32, any strides.
        b_packed: int32 `[K/8, N]`, as in `gemm`.
        scales: `[G, N]`.
        weight_format: a format's name or alias.
        group_size: the group size, or -1 for K.
        zeros: `[G, N]` or None.
        global_scale: float32 `[]`, `[1]`, `[N]` or None.
        lut: float32 `[16]` or None.
        perm: int32 `[K]`, a permutation, or None.

    Returns:
        `[..., K]` in the dtype of `a`.

    Raises:
        ValueError: an argument or the variable is wrong; the message names it and says what was expected.
    """
    name, group_size, lut = resolve("gemm_transposed", weight_format, group_size, b_packed, lut)
    options = given(zeros, global_scale, lut, perm)
    result: Tensor = _ops.gemm_transposed(a, b_packed, scales, weight_format=name, group_size=group_size, **options)
    return result


def moe_gemm(
    a: Tensor,
    b_packed: Tensor,
    scales: Tensor,
    expert_ids: Tensor,
    *,
    weight_format: str,
    group_size: int,
    zeros: Tensor | None = None,
    global_scale: Tensor | None = None,
    lut: Tensor | None = None,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
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
        b_packed: int32 `[E, K/8, N]`, contiguous: the words of `gemm` for each expert.
        scales: `[E, G, N]`.
        expert_ids: int32 or int64 `[T, top_k]`. An id outside `[0, E)` stands for a row of zeros and reads no weight.
        weight_format: a format's name or alias.
        group_size: the group size, or -1 for K.
        zeros: `[E, G, N]` or None.
        global_scale: float32 `[E]`, `[E, 1]`, `[E, N]` or None.
        lut: float32 `[16]` or None; all experts share it.
        perm: int32 `[E, K]` or None.
        bias: `[E, N]` or None.
        row_weights: `[T, top_k]` in any of the three floating dtypes, or None for 1.
        reduce: whether to add up the rows of a token.
        variant: "auto", "gemv", "fused" or "tensor"; the CPU ignores it.

    Returns:
        `[T, top_k, N]`, or `[T, N]` with `reduce`, in the dtype of `a`.

    Raises:
        IndexError: on the CPU, `perm` of a chosen expert has a value outside `[0, K)`.
        ValueError: an argument has the wrong dtype, shape, device or value; the message says what was expected.
    """
    name, group_size, lut = resolve("moe_gemm", weight_format, group_size, b_packed, lut)
    options = given(zeros, global_scale, lut, perm, bias)
    if row_weights is not None:
        options["row_weights"] = row_weights
    result: Tensor = _ops.moe_gemm(
        a,
        b_packed,
        scales,
        expert_ids,
        weight_format=name,
        group_size=group_size,
        reduce=reduce,
        variant=variant,
        **options,
    )
    return result


def linear(a: Tensor, weight: PackedWeight) -> Tensor:
    """Multiplies activations with a packed weight and adds its bias, as `torch.nn.functional.linear` does.

    Args:
        a: `[..., K]`, float16, bfloat16 or float32.
        weight: from `quantize_weight`, `convert.read_layers` or `MarlinLinear.to_packed`.

    Returns:
        `[..., N]` in a's dtype.

    Raises:
        TypeError: `weight` is not a `PackedWeight`.
        ValueError: see `gemm`, which computes the product.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"linear: weight: expected a PackedWeight, got {type(weight).__name__}")
    return weight(a)


def dequantize(
    b_packed: Tensor,
    scales: Tensor,
    *,
    weight_format: str,
    group_size: int,
    zeros: Tensor | None = None,
    global_scale: Tensor | None = None,
    lut: Tensor | None = None,
    perm: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """Returns the weight of `gemm` as floats, `[K, N]`, in the original order of k: `out[perm[j], :]` is packed row j.

    The weight is computed in fp32 and rounded once.

    Args:
        b_packed: int32 `[K/8, N]`, as in `gemm`.
        scales: `[G, N]`.
        weight_format: a format's name or alias.
        group_size: the group size, or -1 for K.
        zeros: `[G, N]` or None.
        global_scale: float32 `[]`, `[1]`, `[N]` or None.
        lut: float32 `[16]` or None.
        perm: int32 `[K]`, a permutation, or None. If several rows have the same index, the result has one of them;
            which one is unspecified.
        dtype: float16, bfloat16 or float32.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or value.
    """
    name, group_size, lut = resolve("dequantize", weight_format, group_size, b_packed, lut)
    options = given(zeros, global_scale, lut, perm)
    result: Tensor = _ops.dequantize(
        b_packed, scales, weight_format=name, group_size=group_size, dtype=dtype, **options
    )
    return result


def embedding(
    ids: Tensor,
    b_packed: Tensor,
    scales: Tensor,
    *,
    weight_format: str,
    group_size: int,
    zeros: Tensor | None = None,
    global_scale: Tensor | None = None,
    lut: Tensor | None = None,
    perm: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """Looks up vectors of a packed embedding table: vector i is column i of the weight `[K, N]`.

    Decodes only the vectors of the given ids. They have the same bits as in the result of `dequantize`. No tensor has a
    gradient.

    Args:
        ids: int32 or int64, any shape and strides, values in `[0, N)`.
        b_packed: int32 `[K/8, N]`, as in `gemm`; N is the size of the vocabulary, K the length of a vector.
        scales: `[G, N]`.
        weight_format: a format's name or alias.
        group_size: the group size, or -1 for K.
        zeros: `[G, N]` or None.
        global_scale: float32 `[]`, `[1]`, `[N]` or None.
        lut: float32 `[16]` or None.
        perm: int32 `[K]`, a permutation, or None, as in `dequantize`.
        dtype: float16, bfloat16 or float32.

    Returns:
        `[..., K]` in `dtype`. On mps an id outside the table gives a vector of NaN, because only the GPU knows the ids.

    Raises:
        IndexError: on the CPU, an id outside the table.
        ValueError: an argument has the wrong dtype, shape, device or value, or requires grad.
    """
    name, group_size, lut = resolve("embedding", weight_format, group_size, b_packed, lut)
    options = given(zeros, global_scale, lut, perm)
    result: Tensor = _ops.embedding(
        ids, b_packed, scales, weight_format=name, group_size=group_size, dtype=dtype, **options
    )
    return result
