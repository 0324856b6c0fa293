"""The variants that `bench --variant all` times, and the least time of a product at peak rates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from torch_marlin_metal.gpu.planning import GemmPlan, PlanCandidate
from torch_marlin_metal.gpu.tuning.chains import COLD_BYTES, Chain, gemm_chain, rotating
from torch_marlin_metal.gpu.tuning.products import Product
from torch_marlin_metal.packed_weight import PackedWeight


@dataclass(frozen=True)
class VariantRow:
    """One variant of a product, before it is measured.

    Attributes:
        name: the argument `variant` of `gemm`.
        chain: products of this variant.
    """

    name: str
    chain: Chain


def planned_variants(product: Product, M: int) -> tuple[GemmPlan, list[PlanCandidate]]:
    """Returns a product's plan without measurements, and the first candidate of each variant."""
    found = product.plan(M)
    first: dict[str, PlanCandidate] = {}
    for candidate in found.candidates:
        first.setdefault(candidate.variant, candidate)
    return found, list(first.values())


def variants(product: Product, weight: PackedWeight, a: Tensor, cold_bytes: int = COLD_BYTES) -> list[VariantRow]:
    """Makes a chain of products for one tile of every variant, the planner's choice first.

    Args:
        product: the product.
        weight: its weight, on mps.
        a: activations `[M, K]` on mps.
        cold_bytes: total bytes of the weight's clones, which are cycled through.
    """
    weights = rotating(weight, cold_bytes)
    found, planned = planned_variants(product, a.shape[0])
    planned.sort(key=lambda candidate: candidate.name != found.chosen.name)

    return [VariantRow(candidate.name, gemm_chain(a, weights, candidate.name)) for candidate in planned]


def moved_bytes(weight: PackedWeight, a: Tensor) -> float:
    """Returns the bytes that a product `[M, K]` x `[K, N]` must read and write at least."""
    read = sum(tensor.nbytes for tensor in weight.tensors().values()) + a.nbytes
    return float(read + a.shape[0] * weight.N * a.element_size())


def roof_seconds(product: Product, M: int, moved: float, peak_bytes: float, peak_flops: float) -> float:
    """Returns the roof in seconds: the least time for a product that the peak rates of memory and matrix unit allow."""
    return max(moved / peak_bytes, 2 * M * product.N * product.K / peak_flops)
