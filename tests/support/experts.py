"""Stacks of expert weights, and products with them in NumPy fp64, for tests of moe_gemm."""

from dataclasses import dataclass

import numpy as np
import torch

import torch_marlin_metal  # noqa: F401  registers the operators
from tests.support import reference

OPS = torch.ops.torch_marlin_metal


@dataclass
class Experts:
    """Packed weights of E experts, stacked, with the reference weight and the permutation of each expert."""

    weights: list[reference.Weight]
    perms: list[np.ndarray] | None
    b_packed: torch.Tensor
    scales: torch.Tensor
    arguments: dict

    def to(self, device: str) -> "Experts":
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.arguments.items()}
        return Experts(self.weights, self.perms, self.b_packed.to(device), self.scales.to(device), moved)


def make_experts(
    weight_format: str, E: int, K: int, N: int, group_size: int, *, use_perm: bool = False, **options
) -> Experts:
    """Returns random experts. The options are those of `reference.make_weight`."""
    weights = [reference.make_weight(weight_format, K, N, group_size, seed=seed, **options) for seed in range(E)]
    arguments = dict(weights[0].arguments)
    for name in ("zeros", "super_scales", "super_zeros", "global_scale", "b_high"):
        if name in arguments:
            arguments[name] = torch.stack([weight.arguments[name] for weight in weights])
    perms = None
    if use_perm:
        rng = np.random.default_rng(7)
        perms = [rng.permutation(K).astype(np.int32) for _ in range(E)]
        arguments["perm"] = torch.from_numpy(np.stack(perms))
    words = torch.stack([weight.b_packed for weight in weights])
    return Experts(weights, perms, words, torch.stack([weight.scales for weight in weights]), arguments)


def moe_gemm(
    a: torch.Tensor,
    experts: Experts,
    ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    reduce: bool = False,
    raw_codes: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the exact result for the rounded inputs, and the error bound of each element.

    The bound has three terms: the bound of `reference.gemm` for fp32 results; one fp32 rounding for each product with a
    row weight and for each sum; and the last rounding to the dtype of `a`.
    """
    T, top_k = ids.shape
    N = experts.weights[0].exact.shape[1]
    exact, bound = np.zeros((T, top_k, N)), np.zeros((T, top_k, N))
    wide = a.float()
    factors = np.ones((T, top_k)) if row_weights is None else reference.to_numpy(row_weights)
    for t in range(T):
        for s in range(top_k):
            e = int(ids[t, s])
            if not 0 <= e < len(experts.weights):
                continue
            row = wide[t] if a.dim() == 2 else wide[t, s]
            y, error = reference.gemm(
                row,
                experts.weights[e],
                None if bias is None else bias[e],
                None if experts.perms is None else experts.perms[e],
                raw_codes,
            )
            exact[t, s] = y * factors[t, s]
            bound[t, s] = (error + 2.0**-24 * np.abs(y)) * np.abs(factors[t, s])
    if reduce:
        bound = bound.sum(1) + (top_k + 1) * 2.0**-24 * (np.abs(exact) + bound).sum(1)
        exact = exact.sum(1)
    return exact, bound + reference.UNIT_ROUNDOFF[a.dtype] * (np.abs(exact) + bound) + reference.TINY[a.dtype]


def experts_of(weight_format: str, E: int = 5, K: int = 80, N: int = 41, **options) -> Experts:
    """Returns random experts. The group size is 16, unless the format fixes another one."""
    options |= {"global_scale_shape": (-1,)} if weight_format == "nvfp4" else {}
    return make_experts(weight_format, E, K, N, 16, **options)


def run(a: torch.Tensor, experts: Experts, ids: torch.Tensor, device: str = "cpu", **options) -> torch.Tensor:
    """Computes `moe_gemm` on a device and returns the result on the CPU."""
    held = experts.to(device)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return OPS.moe_gemm(a.to(device), held.b_packed, held.scales, ids.to(device), **{**held.arguments, **moved}).cpu()
