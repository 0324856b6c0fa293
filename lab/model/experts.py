"""Predicts the cost of products with experts, and lists their tilings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.model.cost import PlanCost, costed, elementwise_cost, load_without_bytes
from lab.model.geometry import (
    BLOCK,
    FUSED_COLUMNS,
    FUSED_MAX_ROWS,
    FUSED_MAX_SIMDGROUPS,
    GEMV_COLUMNS,
    GEMV_MAX_SIMDGROUPS,
    MOE_GEMV_ROWS,
    MOE_REDUCE_MAX_SIMDGROUPS,
    MOE_SORT_BYTES,
    MOE_SORT_THREADS,
    TENSOR_TILES,
    ceil_divide,
    most_simdgroups,
)
from lab.model.kernel import DispatchCost, KernelLoad, reads, stays
from lab.model.problems import ExpertsProblem, Tiling
from lab.model.tilings import (
    AUTOMATIC_TENSOR_ROWS,
    FUSED_MIN_SLICE,
    FUSED_MIN_SLICES,
    GEMV_MIN_SLICE,
    cheapest,
    fused_split,
    gemv_split,
    slices_between,
    tensor_split,
)
from torch_marlin_metal.profiling import AppleSiliconGPU

# A probability below this does not change an expected value.
NEGLIGIBLE = 1e-12
# A sum of probabilities may exceed an integer by less than this fraction, because its terms are rounded.
ROUNDING = 1e-9
# For larger exponents x, exp(-x) and the probabilities computed from it are too small for a double.
LARGEST_EXPONENT = 600

# Issue slots and complex-unit clocks of a simdgroup of moe_sort for 32 pairs, counted by lab/agx/agxstat.py --O1.
# moe_sort reads the pairs twice, and once more for each MOE_SORT_THREADS experts.
SORT_ISSUE = 616
SORT_COMPLEX = 24
SORT_WAITS = 9
SORT_PASS_ISSUE = 283
SORT_HALF_REGISTERS = 111

# Issue slots of a simdgroup of moe_gemv_reduce for each additional slice of its slot, and for each additional slot,
# counted by lab/agx/agxstat.py --O1.
SLICE_ISSUE = 13
SLOT_ISSUE = 10


@dataclass(frozen=True)
class Routing:
    """Expected values for random routing in which all experts are equally likely.

    Attributes:
        experts: how many experts have rows.
        blocks: the number of row blocks of all experts together.
        blocks_by_rows: element r - 1 is the number of blocks that have r rows.
    """

    experts: float
    blocks: float
    blocks_by_rows: NDArray[np.float64]


@lru_cache(maxsize=4096)
def expected_routing(tokens: int, top_k: int, experts: int, block_rows: int) -> Routing:
    """Returns the expected routing, because the real routing is unknown when a plan is made."""
    chosen = min(1.0, top_k / experts)
    mean = tokens * top_k / experts
    # The number of an expert's rows has a binomial distribution.
    exponent = 0.0 if chosen == 1 else -tokens * math.log1p(-chosen)
    others = 0.0
    if chosen == 1:
        rows, counts = np.array([math.ceil(mean)]), np.array([float(experts)])
    elif exponent > LARGEST_EXPONENT:
        # Assumes that each number of rows in an expert's last block is equally likely.
        rows = np.arange(1, block_rows + 1)
        counts = np.full(block_rows, experts / block_rows)
        others = experts * (mean / block_rows - 0.5 * (1 + 1 / block_rows))
    else:
        rows = np.arange(tokens + 1)
        ratios = (tokens - rows[:-1]) / (rows[:-1] + 1.0) * chosen / (1 - chosen)
        probabilities = math.exp(-exponent) * np.cumprod(np.concatenate(([1.0], ratios)))
        ends = np.flatnonzero((rows >= mean) & (probabilities <= NEGLIGIBLE))
        used = int(ends[0]) if len(ends) else len(rows)
        rows, counts = rows[:used], experts * probabilities[:used]
    rows, counts = rows[rows > 0], counts[rows > 0]
    by_rows = np.zeros(block_rows)
    np.add.at(by_rows, (rows - 1) % block_rows, counts)
    by_rows[-1] += float((counts * ((rows - 1) // block_rows)).sum()) + others
    blocks = float((counts * ceil_divide(rows, block_rows)).sum()) + others
    return Routing(float(counts.sum()), blocks, by_rows)


def experts_cost(tiling: Tiling, problem: ExpertsProblem, gpu: AppleSiliconGPU) -> PlanCost:
    """Returns the cost of each dispatch: moe_sort if the tiling needs it, the products, and moe_reduce if needed.

    Threadgroups without rows cost nothing.
    """
    total = PlanCost()
    if tiling.sorts_pairs:
        total.dispatches.append(_sort(problem, gpu))
    total.dispatches.append(_products(tiling, problem, gpu))
    if _combines(tiling, problem):
        total.dispatches.append(_combine(problem, gpu))
    return total


def _combines(tiling: Tiling, problem: ExpertsProblem) -> bool:
    """Returns whether a second kernel multiplies the pairs' fp32 products by row weights or adds them up."""
    return problem.combines_products and tiling.kernel != "moe_gemv_reduce"


def _sort(problem: ExpertsProblem, gpu: AppleSiliconGPU) -> DispatchCost:
    pairs = problem.product.M
    passes = ceil_divide(problem.experts + 1, MOE_SORT_THREADS)
    batches = ceil_divide(pairs, MOE_SORT_THREADS)
    ids = float(pairs) * (8 if problem.wide_ids else 4)
    load = KernelLoad(
        threads=MOE_SORT_THREADS,
        half_registers=SORT_HALF_REGISTERS,
        threadgroup_bytes=MOE_SORT_BYTES,
        issue=float(passes * (batches * SORT_ISSUE + SORT_PASS_ISSUE)),
        complex=float(passes * batches * SORT_COMPLEX),
        dram_waits=float(batches),
        cache_waits=float(passes * batches * SORT_WAITS - batches),
        dram_bytes=ids + 4.0 * pairs,
        l2_bytes=2 * passes * ids + 4.0 * pairs,
    )
    return costed(load, gpu, "moe_sort")


def _average_load(tiling: Tiling, problem: ExpertsProblem, routing: Routing, gpu: AppleSiliconGPU) -> KernelLoad:
    """Returns the load of all blocks. Instructions and waits are the averages of their simdgroups.

    gemv has a separate loop for each number of rows, fused for each multiple of 8. A block that is not full runs a
    shorter loop, so it takes less time.
    """
    product, most = problem.product, tiling.tile[0]
    average = load_without_bytes(tiling, product, gpu, most)
    unit = {"gemv": 1, "fused": BLOCK}.get(tiling.variant, most)
    if unit == most:
        return average
    averaged = ("issue", "complex", "matrix_operations", "dram_waits", "cache_waits")
    sums: dict[str, Any] = dict.fromkeys(averaged, 0.0)
    for rows in range(unit, most + 1, unit):
        share = float(routing.blocks_by_rows[rows - unit : rows].sum()) / routing.blocks
        load = load_without_bytes(tiling, product, gpu, rows)
        for name in averaged:
            sums[name] = sums[name] + share * getattr(load, name)
    return replace(average, **sums)


def _products(tiling: Tiling, problem: ExpertsProblem, gpu: AppleSiliconGPU) -> DispatchCost:
    product = problem.product
    routing = expected_routing(problem.tokens, problem.top_k, problem.experts, tiling.tile[0])
    columns = ceil_divide(product.N, tiling.tile[1])
    load = _average_load(tiling, problem, routing, gpu)
    load.threadgroups = math.ceil(routing.blocks * (1 - ROUNDING)) * columns
    if tiling.kernel == "moe_gemv_reduce":
        _add_slots(load, tiling, problem)
    load.weight_bytes = routing.experts * product.weight_bytes
    rows = float(product.M) * product.K * product.element_bytes
    distinct = rows if problem.rows_by_slot else rows / problem.top_k
    written = _written_bytes(tiling, problem)
    # The blocks of an expert run one after the other, and meanwhile the threadgroups read only this expert's weight.
    # gemv starts all rows of some columns before those of the next columns, so L2 serves all rows but the first.
    times = 1.0 if tiling.variant == "gemv" else max(1.0, routing.blocks / routing.experts)
    load.dram_bytes = (
        routing.experts * reads(product.weight_bytes, times, gpu) + reads(distinct, rows / distinct, gpu) + written
    )
    load.l2_bytes = routing.blocks * product.weight_bytes + columns * rows + written
    return costed(load, gpu, tiling.kernel)


def _add_slots(load: KernelLoad, tiling: Tiling, problem: ExpertsProblem) -> None:
    """Adds the work that only moe_gemv_reduce has.

    A threadgroup computes all slots of a token, waits for row weights and biases, and adds up the slots. The counts of
    the table contain one slice and one slot.
    """
    slices = tiling.simdgroups // problem.top_k
    load.threadgroups = problem.tokens * ceil_divide(problem.product.N, tiling.tile[1])
    load.issue = load.issue + (slices - 1) * SLICE_ISSUE + (problem.top_k - 1) * SLOT_ISSUE
    load.dram_waits = load.dram_waits + (1 if problem.has_row_weights or problem.has_bias else 0)


def _written_bytes(tiling: Tiling, problem: ExpertsProblem) -> float:
    product = problem.product
    row = float(product.N) * (4 if _combines(tiling, problem) else product.element_bytes)
    return row * (problem.tokens if tiling.kernel == "moe_gemv_reduce" else product.M)


def _combine(problem: ExpertsProblem, gpu: AppleSiliconGPU) -> DispatchCost:
    product = problem.product
    rows = problem.tokens if problem.reduce else product.M
    products = 4.0 * product.M * product.N
    read = 0.0 if stays(products, gpu) else products
    written = float(rows) * product.N * product.element_bytes
    return elementwise_cost("moe_reduce", product.N, rows, read, written, product, gpu)


def _fits_32_bits(problem: ExpertsProblem) -> bool:
    """Returns whether fused, which has 32-bit offsets, can address the activations."""
    K, top_k = problem.product.K, problem.top_k
    row_stride, slot_stride = (K * top_k, K) if problem.rows_by_slot else (K, 0)
    extent = (problem.tokens - 1) * row_stride + (top_k - 1) * slot_stride + K
    return extent <= 2**32


def expert_families(problem: ExpertsProblem, gpu: AppleSiliconGPU, variant: str = "all") -> Iterator[Tiling]:
    """Yields the tilings of each tile. Tilings that differ only in how they split K are one `Tiling` with arrays.

    Raises:
        ValueError: no variant for experts has this name.
    """
    groups = {"all": ("gemv", "fused", "tensor"), "auto": ("gemv", "fused")}
    if problem.product.M >= AUTOMATIC_TENSOR_ROWS:
        groups["auto"] = groups["all"]
    wanted = groups.get(variant, (variant,))
    if variant not in groups and variant not in groups["all"]:
        raise ValueError(
            f"expert_families: variant: expected all, auto or one of {', '.join(groups['all'])}, got {variant!r}"
        )
    product = problem.product
    has_lut = product.traits.has_lut
    if "gemv" in wanted:
        for rows in (1, MOE_GEMV_ROWS):
            most = most_simdgroups(GEMV_COLUMNS, rows, has_lut, GEMV_MAX_SIMDGROUPS)
            slices = slices_between(1, min(max(product.K // GEMV_MIN_SLICE, 1), most))
            yield gemv_split("moe_gemv" if rows == 1 else "moe_gemv_blocks", rows, product, slices)
            if rows == 1 and problem.reduce and problem.top_k <= MOE_REDUCE_MAX_SIMDGROUPS:
                room = min(MOE_REDUCE_MAX_SIMDGROUPS // problem.top_k, GEMV_MAX_SIMDGROUPS)
                slices = slices_between(1, min(max(product.K // GEMV_MIN_SLICE, 1), room))
                tilings = gemv_split("moe_gemv_reduce", rows, product, slices)
                yield replace(tilings, simdgroups=tilings.simdgroups * problem.top_k)
    if "fused" in wanted and _fits_32_bits(problem):
        for rows in range(FUSED_MAX_ROWS, 0, -8):
            most = min(max(product.K // FUSED_MIN_SLICE, 1), FUSED_MAX_SIMDGROUPS)
            most = min(most, most_simdgroups(FUSED_COLUMNS, rows, has_lut, FUSED_MAX_SIMDGROUPS))
            yield fused_split("moe_fused", rows, product, slices_between(min(most, FUSED_MIN_SLICES), most))
    if "tensor" in wanted and gpu.has_tensor_units and product.has_tensor_kernel:
        for tile in TENSOR_TILES:
            yield tensor_split("moe_tensor", tile, product, slices_between(1, 1))


def applies_gate(tiling: Tiling, problem: ExpertsProblem) -> bool:
    """Returns whether the dispatch of the products also applies the gated activation that follows."""
    return tiling.kernel == "moe_gemv" and not problem.reduce and problem.product.N % GEMV_COLUMNS == 0


def best_experts(problem: ExpertsProblem, gpu: AppleSiliconGPU, variant: str = "auto") -> tuple[Tiling, float] | None:
    """Returns the cheapest tiling and its time, or None if no kernel of the variant computes the problem."""
    found = [
        cheapest(tilings, experts_cost(tilings, problem, gpu), 1 if tilings.sorts_pairs else 0)
        for tilings in expert_families(problem, gpu, variant)
    ]
    return min(found, key=lambda entry: entry[1], default=None)
