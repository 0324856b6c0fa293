"""The variants that `bench --variant all` times, and the lower bound of a product's time from peak rates."""

from __future__ import annotations

from torch import Tensor

from torch_marlin_metal.gpu.planning import first_of_each_variant
from torch_marlin_metal.gpu.tuning.chains import Chain, gemm_chain, rotating
from torch_marlin_metal.gpu.tuning.products import Product
from torch_marlin_metal.packed_weight import PackedWeight


def variants(product: Product, weight: PackedWeight, a: Tensor, cold_bytes: int) -> dict[str, Chain]:
    """Makes a chain of products for one tile of each variant, with the planner's choice first.

    The keys of the result are the arguments `variant` of `gemm`. All chains use the same clones of the weight, which
    have at least `cold_bytes` bytes.
    """
    weights = rotating(weight, cold_bytes)
    planned = product.plan(a.shape[0])
    timed = first_of_each_variant((planned.chosen, *planned.candidates))
    return {candidate.name: gemm_chain(a, weights, candidate.name) for candidate in timed}


def moved_bytes(weight: PackedWeight, a: Tensor) -> float:
    """Returns the minimum bytes that a product `[M, K]` x `[K, N]` must read and write."""
    read = sum(tensor.nbytes for tensor in weight.tensors().values()) + a.nbytes
    return float(read + a.shape[0] * weight.N * a.element_size())


def roof_seconds(product: Product, M: int, moved: float, peak_bytes: float, peak_flops: float) -> float:
    """Returns the minimum seconds of a product, from the peak rates of memory and matrix unit (its roofline)."""
    return max(moved / peak_bytes, 2 * M * product.N * product.K / peak_flops)
