"""Python functions for the operations between the matrix products of a decoder layer.

The operations are norms, rotary embedding, gated activation, and writing to a cache. Each function is one operator and
one dispatch on mps, where PyTorch's own operators need up to ten dispatches. All functions support any strides. All
except `write_cache` compute in fp32, round once and have derivatives.
"""

from typing import Literal

import torch
from torch import Tensor

from torch_marlin_metal import extension  # noqa: F401  registers the operators

_ops = torch.ops.torch_marlin_metal
_rms_norm = _ops.rms_norm.default
_add_rms_norm = _ops.add_rms_norm.default
_rotary = _ops.rotary.default
_gated_activation = _ops.gated_activation.default
_write_cache = _ops.write_cache.default

ActivationName = Literal["silu", "gelu", "gelu_tanh", "clamped_silu", "limited_silu"]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, weight_offset: float = 0.0) -> Tensor:
    """Divides each row by its root mean square and multiplies it by a weight.

    `y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)`. Squares are summed in fp32. If the sum of a row exceeds
    3.4e38, the range of fp32, the row's result is zeros, as with PyTorch's operators.

    PyTorch's `rms_norm` is also one dispatch on mps. But it has no offset, it requires a weight in the dtype of `x`,
    and on the CPU it is a sequence of operators.

    Args:
        x: `[..., N]`, float16, bfloat16 or float32.
        weight: `[N]`, any of the three dtypes.
        eps: a number added to the mean of the squares.
        weight_offset: a number added to the weight in fp32, 1 for Gemma's norms.

    Returns:
        `[..., N]` in the dtype of `x`, contiguous.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or value.

    Examples:
        >>> tmm.ops.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
        tensor([[0.8485, 1.1314]])
    """
    result: Tensor = _rms_norm(x, weight, eps=eps, weight_offset=weight_offset)
    return result


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Adds a residual. Returns the norm of the sum, and the sum.

    The sum is rounded to the dtype of `x`, as in PyTorch's addition. The norm is computed from the rounded sum.

    Args:
        x: `[..., N]`, float16, bfloat16 or float32.
        residual: like `x`.
        weight: `[N]`, any of the three dtypes.
        eps: as in `rms_norm`.
        weight_offset: as in `rms_norm`.

    Returns:
        The norm and the sum, both like `x` and contiguous.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or value.

    Examples:
        >>> y, total = tmm.ops.add_rms_norm(torch.ones(1, 2), torch.ones(1, 2), torch.ones(2), eps=0.0)
        >>> y, total
        (tensor([[1., 1.]]), tensor([[2., 2.]]))
    """
    norm, total = _add_rms_norm(x, residual, weight, eps=eps, weight_offset=weight_offset)
    return norm, total


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, per_pair: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates pairs of elements of queries and keys by the angles of their positions (RoPE, arXiv:2104.09864).

    Element i of a pair becomes `x_i cos_i - x_j sin_i` and element j `x_j cos_j + x_i sin_j`. Elements after the first
    R of a head are copied.

    Args:
        q: `[B, H, S, D]`, float16, bfloat16 or float32.
        k: `[B, any number of heads, S, D]`, the dtype of `q`.
        cos: `[B, S, R]` or `[1, S, R]` as in transformers, in any of the three dtypes. R is even and at most D. It has
            no derivative.
        sin: like `cos`.
        interleaved: True if a pair is elements 2i and 2i + 1, False if it is elements i and i + R/2.
        per_pair: True if `cos` and `sin` have one element per pair, so that their last dimension is R/2.

    Returns:
        The rotated q and k. If the heads of a token are adjacent in an input's memory, they are adjacent in the result.
        Otherwise the result is contiguous. PyTorch's attention orders its result in memory like q, so the attention's
        result needs no copy before the next product.

    Raises:
        ValueError: an argument has the wrong dtype, shape or device, or `cos` or `sin` requires grad.

    Examples:
        >>> q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 1, 5, 16)  # [B, heads, S, D]
        >>> angles = torch.arange(5)[:, None] / 10000 ** (torch.arange(0, 16, 2) / 16)
        >>> cos, sin = (f(angles.repeat(1, 2))[None] for f in (torch.cos, torch.sin))
        >>> q, k = tmm.ops.rotary(q, k, cos, sin)
    """
    rotated_q, rotated_k = _rotary(q, k, cos, sin, interleaved=interleaved, per_pair=per_pair)
    return rotated_q, rotated_k


def gated_activation(
    gate: Tensor,
    up: Tensor,
    *,
    activation: ActivationName = "silu",
    limit: float | None = None,
    alpha: float | None = None,
) -> Tensor:
    """Computes the activation of a gated feed-forward block, `activation(gate) * up`.

    Pass the two halves of one tensor as views: `gate_up.chunk(2, -1)` if they are concatenated, and `gate_up[..., ::2],
    gate_up[..., 1::2]` if they are interleaved.

    Args:
        gate: `[..., N]`, float16, bfloat16 or float32.
        up: like `gate`.
        activation: "silu"; "gelu" (with an error function that is accurate to 1.5e-7); "gelu_tanh" (the approximation
            of "gelu" with tanh); "clamped_silu" of gpt-oss, `g * sigmoid(alpha * g) * (u + 1)`; or "limited_silu" of
            DeepSeek-V4, `silu(g) * u`. In the last two, `g = min(gate, limit)`, and `u` is `up` clamped to -limit ...
            limit.
        limit: a number for "clamped_silu" and "limited_silu" only.
        alpha: a number for "clamped_silu" only.

    Returns:
        `[..., N]` in the dtype of `gate`, contiguous.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or value.

    Examples:
        >>> gate, up = torch.randn(2, 5, 128).chunk(2, -1)
        >>> torch.allclose(tmm.ops.gated_activation(gate, up), nn.functional.silu(gate) * up, atol=1e-6)
        True
    """
    result: Tensor = _gated_activation(gate, up, activation=activation, limit=limit, alpha=alpha)
    return result


def write_cache(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    """Writes the keys and values of S tokens into a static cache, in place, starting at position `start`.

    The position is a tensor, so on mps the host does not need its value and does not wait for the GPU. On mps, the
    operator therefore cannot raise an error if the tokens do not fit. Instead it writes NaN for S tokens, starting at
    position 0.

    Args:
        keys: `[B, H, L, D]`, float16, bfloat16 or float32, contiguous. Changed in place.
        values: `[B, H, L, DV]` in the dtype of `keys`, contiguous. Changed in place.
        k: `[B, H, S, D]` in the dtype of `keys`, with S of at most L.
        v: `[B, H, S, DV]` in the dtype of `keys`.
        start: int64 `[]` or `[1]`, from 0 to L - S.

    Raises:
        ValueError: an argument has the wrong dtype, shape, strides or device, requires grad, or, on the CPU, `start`
            has the wrong value.

    Examples:
        >>> keys, values = torch.zeros(2, 1, 32, 16), torch.zeros(2, 1, 32, 16)  # a static cache of 32 tokens
        >>> k, v = torch.randn(2, 1, 5, 16), torch.randn(2, 1, 5, 16)
        >>> tmm.ops.write_cache(keys, values, k, v, torch.tensor(7))
        >>> torch.equal(keys[:, :, 7:12], k)
        True
    """
    _write_cache(keys, values, k, v, start)
