"""The cost model: predicts the time of every way to compute a product on an Apple GPU. Nothing here is measured.

`Problem` and `ExpertsProblem` describe products. `AppleSiliconGPU` of the package describes the GPU. A `Tiling` is one
way to compute a product. If the numbers of a `Tiling` are arrays, the times are arrays, too.
"""

from __future__ import annotations

from typing import Any

from lab.model.cost import PlanCost, cost
from lab.model.experts import Routing, best_experts, expected_routing, expert_families, experts_cost
from lab.model.kernel import DispatchCost, KernelLoad, kernel_cost, reads, stays, traffic_seconds
from lab.model.problems import ExpertsProblem, Problem, Tiling
from lab.model.tilings import best_gemm, gemm_families
from torch_marlin_metal.profiling import AppleSiliconGPU

__all__ = [
    "AppleSiliconGPU", "DispatchCost", "ExpertsProblem", "KernelLoad", "PlanCost", "Problem", "Routing", "Tiling",
    "best", "candidates", "costs", "expected_routing", "families", "kernel_cost", "predict", "reads", "stays",
    "traffic_seconds",
]  # fmt: skip


def costs(problem: Problem | ExpertsProblem, tiling: Tiling, gpu: AppleSiliconGPU) -> PlanCost:
    """Returns the predicted cost of each dispatch of a tiling.

    Raises:
        NotCounted: a kernel's instructions have not been counted.
    """
    if isinstance(problem, ExpertsProblem):
        return experts_cost(tiling, problem, gpu)
    return cost(tiling, problem, gpu)


def predict(problem: Problem | ExpertsProblem, tiling: Tiling, gpu: AppleSiliconGPU) -> Any:
    """Returns the predicted time of a tiling in seconds. If the tiling has arrays, so has the result.

    Raises:
        NotCounted: a kernel's instructions have not been counted.
    """
    return costs(problem, tiling, gpu).seconds


def families(problem: Problem | ExpertsProblem, gpu: AppleSiliconGPU, variant: str = "all") -> list[Tiling]:
    """Returns all tilings of a product. Tilings that differ only in how they split K are one `Tiling` with arrays.

    Args:
        problem: the product.
        gpu: the GPU.
        variant: the name of a variant, "all", or "auto" for the variants that need no measurement.

    Raises:
        ValueError: no variant has this name.
    """
    if isinstance(problem, ExpertsProblem):
        return list(expert_families(problem, gpu, variant))
    return list(gemm_families(problem, gpu, variant))


def candidates(problem: Problem | ExpertsProblem, gpu: AppleSiliconGPU, variant: str = "all") -> list[Tiling]:
    """Returns all tilings of a product one by one. Arguments and errors are those of `families`."""
    return [tiling for group in families(problem, gpu, variant) for tiling in group.each()]


def best(problem: Problem | ExpertsProblem, gpu: AppleSiliconGPU, variant: str = "auto") -> tuple[Tiling, float]:
    """Returns the tiling that the model chooses, and its time in seconds.

    For each tile, the model chooses the cheapest split of K, or a split within 2 % of it that keeps more simdgroups in
    flight.

    Raises:
        ValueError: no kernel of the variant computes the product.
    """
    if isinstance(problem, ExpertsProblem):
        found = best_experts(problem, gpu, variant)
    else:
        found = best_gemm(problem, gpu, variant)
    if found is None:
        raise ValueError(f"best: variant: expected one that has a kernel for {problem}, got {variant!r}")
    return found
