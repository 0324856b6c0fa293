"""The variants that `bench --variant all` times, with the model's prediction and the least time at peak rates."""

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
        predicted_seconds: the model's time of one product.
        dram_bytes: bytes that the model expects one product to move from and to memory.
    """

    name: str
    chain: Chain
    predicted_seconds: float
    dram_bytes: float


def planned_variants(product: Product, M: int) -> tuple[GemmPlan, list[PlanCandidate]]:
    """Returns a product's plan by the model alone, and the cheapest candidate of each variant, cheapest first."""
    found = product.plan(M)
    cheapest: dict[str, PlanCandidate] = {}
    for candidate in found.candidates:
        cheapest.setdefault(candidate.variant, candidate)
    return found, list(cheapest.values())


def variants(product: Product, weight: PackedWeight, a: Tensor, cold_bytes: int = COLD_BYTES) -> list[VariantRow]:
    """Makes a chain of products for the cheapest tile of every variant, the model's choice first.

    Args:
        product: the product.
        weight: its weight, on mps.
        a: activations `[M, K]` on mps.
        cold_bytes: total bytes of the weight's copies, which are used in turn.
    """
    weights = rotating(weight, cold_bytes)
    found, cheapest = planned_variants(product, a.shape[0])
    cheapest.sort(key=lambda candidate: candidate.name != found.chosen.name)

    return [
        VariantRow(
            candidate.name,
            gemm_chain(a, weights, candidate.name),
            candidate.seconds,
            sum(dispatch.dram_bytes for dispatch in candidate.dispatches),
        )
        for candidate in cheapest
    ]


def roof_seconds(product: Product, M: int, dram_bytes: float, peak_bytes: float, peak_flops: float) -> float:
    """Returns the roof in seconds: the least time for a product that the peak rates of memory and matrix unit allow."""
    return max(dram_bytes / peak_bytes, 2 * M * product.N * product.K / peak_flops)
