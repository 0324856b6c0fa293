"""Norm, rotary embedding and gated activation in fp64, from their definitions, and the error bound of the operators."""

import math

import torch

from tests.support import reference


def check(got: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Requires an error of at most one rounding to the result's dtype plus 16 fp32 roundings of `magnitude`."""
    bound = reference.UNIT_ROUNDOFF[got.dtype] * exact.abs() + reference.TINY[got.dtype] + 16 * 2.0**-24 * magnitude
    error = (got.cpu().double() - exact).abs()
    assert not error.isnan().any()
    assert (error <= bound).all(), f"{(error / bound).max():.3g} of the bound"


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


def exact_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Multiplies by the rotation matrix, which is built element by element from the definition."""
    R = cos.shape[-1]
    out = x.clone()
    for pair in range(R // 2):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + R // 2)
        out[..., i] = x[..., i] * cos[:, None, :, i] - x[..., j] * sin[:, None, :, i]
        out[..., j] = x[..., j] * cos[:, None, :, j] + x[..., i] * sin[:, None, :, j]
    return out


def rotary_magnitude(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Returns, for each element, the sum of the magnitudes of its two terms."""
    sizes = x.abs(), cos.abs(), sin.abs()
    one, other = (exact_rotary(*sizes[:2], sign * sizes[2], interleaved).abs() for sign in (1, -1))
    return torch.maximum(one, other)


def exact_activation(gate, up, activation: str, limit=None, alpha=None):
    if activation == "silu":
        return gate / (1 + (-gate).exp()) * up
    if activation == "gelu":
        return gate * (1 + torch.erf(gate / math.sqrt(2))) / 2 * up
    if activation == "gelu_tanh":
        return gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "limited_silu":
        return gate / (1 + (-gate).exp()) * up
    return gate / (1 + (-alpha * gate).exp()) * (up + 1)


CLAMPED = {"activation": "clamped_silu", "limit": 2.0, "alpha": 1.702}
ACTIVATIONS = [{"activation": "silu"}, {"activation": "gelu"}, {"activation": "gelu_tanh"}, CLAMPED]
ACTIVATIONS += [{"activation": "limited_silu", "limit": 2.0}]
