"""Lists the tilings of a product, and chooses the one that the model finds cheapest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lab.model.cost import PlanCost, cost
from lab.model.counts import counts_of
from lab.model.geometry import (
    FUSED_COLUMNS,
    FUSED_K,
    FUSED_MAX_ROWS,
    FUSED_MAX_SIMDGROUPS,
    GEMV_COLUMNS,
    GEMV_K,
    GEMV_MAX_ROWS,
    GEMV_MAX_SIMDGROUPS,
    MAX_THREADGROUP_BYTES,
    SIMD_WIDTH,
    STAGED_TILES,
    STRIPED_TILES,
    TENSOR_K,
    TENSOR_ROWS,
    TENSOR_TILES,
    ceil_divide,
    most_simdgroups,
    round_up,
    staged_bytes,
    staged_threads,
    stripe_slices,
    tensor_threads,
)
from lab.model.problems import AUTOMATIC, Problem, Tiling
from torch_marlin_metal.gpu.occupancy import occupancy_of
from torch_marlin_metal.profiling import AppleSiliconGPU

MAX_SLICES = 64
# The shortest slices of K. With shorter slices, adding up costs more than splitting K gains.
GEMV_MIN_SLICE = 64
FUSED_MIN_SLICE = FUSED_K
STAGED_MIN_SLICE = 256
# The fewest slices in fused. A threadgroup has one simdgroup for each slice. In published measurements on an M1 (the
# mlx-omarchy project), threadgroups of two simdgroups reached two thirds of the matrix rate of larger threadgroups.
FUSED_MIN_SLICES = 4
# The length of a slice of striped. It is a multiple of every tile's K and of every group size, so that stripes end
# where groups end. Shorter slices would balance the stripes better, but they would need more partial sums.
STRIPED_SLICE = 256
# If stripes of whole tiles would leave more than an eighth of the threadgroups' time idle, striped splits K.
IDLE_SHARE = 8
# With more rows, the model finds fused at least as fast as gemv, so "auto" does not try gemv.
AUTOMATIC_GEMV_ROWS = 24
# With fewer rows, "auto" does not try tensor (csrc/planner/variants.cpp).
AUTOMATIC_TENSOR_ROWS = 9
# Costs that differ by less than this factor count as equal, because the model is not more accurate than that.
EQUAL_COST = 1.02
# The model assumes that a core gains nothing from more simdgroups in flight than this: three per scheduler.
ENOUGH_IN_FLIGHT = 12


def slices_between(least: int, most: int) -> Any:
    """Returns the numbers of slices to try, including both ends."""
    return np.arange(least, most + 1, dtype=np.int64)


def max_slices(K: int, step: int, min_slice: int, most: int = MAX_SLICES) -> int:
    """Returns the largest number of slices of whole steps of K with at least `min_slice` elements in each slice."""
    slices: int = min(max(round_up(K, step) // min_slice, 1), most)
    return slices


def slice_length(problem: Problem, slices: Any, unit: int) -> Any:
    """Returns the length of a slice if K is split into about `slices` slices.

    The length is a multiple of `unit`, and no slice is empty. If `unit` permits, a slice contains whole groups, or a
    group contains whole slices.
    """
    group = problem.group
    even = round_up(ceil_divide(problem.K, slices), unit)
    within = round_up(group // np.maximum(group // even, 1), unit)
    whole = round_up(even, group) if group % unit == 0 else even
    return np.where(even < group, within, whole)


def gemv_split(kernel: str, rows: int, problem: Problem, slices: Any) -> Tiling:
    """Returns the tilings of gemv with about `slices` slices of K. K is split over simdgroups before threadgroups."""
    k_per_slice = slice_length(problem, slices, GEMV_K)
    filled = ceil_divide(problem.K, k_per_slice)
    most = most_simdgroups(GEMV_COLUMNS, rows, problem.traits.has_lut, GEMV_MAX_SIMDGROUPS)
    splits = ceil_divide(filled, np.minimum(filled, most))
    return Tiling(
        "gemv", kernel, (rows, GEMV_COLUMNS, GEMV_K),
        simdgroups=ceil_divide(filled, splits), k_per_slice=k_per_slice, splits=splits,
    )  # fmt: skip


def fused_split(kernel: str, rows: int, problem: Problem, slices: Any, rest_rows: int = 0) -> Tiling:
    """Returns the tilings of fused with about `slices` slices of K. K is split over simdgroups before threadgroups."""
    k_per_slice = round_up(ceil_divide(problem.K, slices), FUSED_K)
    filled = ceil_divide(problem.K, k_per_slice)
    most = most_simdgroups(FUSED_COLUMNS, rows, problem.traits.has_lut, FUSED_MAX_SIMDGROUPS)
    splits = ceil_divide(filled, most)
    return Tiling(
        "fused", kernel, (rows, FUSED_COLUMNS, FUSED_K), rest_rows=rest_rows,
        simdgroups=ceil_divide(filled, splits), k_per_slice=k_per_slice, splits=splits,
    )  # fmt: skip


def tensor_split(kernel: str, tile: tuple[int, int, int], problem: Problem, slices: Any) -> Tiling:
    """Returns the tilings of tensor that split K over threadgroups."""
    k_per_slice = slice_length(problem, slices, TENSOR_K)
    splits = ceil_divide(problem.K, k_per_slice)
    simdgroups = np.full_like(splits, tensor_threads(tile) // SIMD_WIDTH)
    return Tiling("tensor", kernel, tile, simdgroups=simdgroups, k_per_slice=k_per_slice, splits=splits)


def _gemv(problem: Problem, gpu: AppleSiliconGPU) -> Iterator[Tiling]:
    """Row blocks of all sizes are candidates.

    If the columns are few, more and smaller blocks use more cores. A block with more rows than the problem has may keep
    more simdgroups on a core.
    """
    slices = slices_between(1, max_slices(problem.K, GEMV_K, GEMV_MIN_SLICE))
    for rows in range(1, GEMV_MAX_ROWS + 1):
        yield gemv_split("gemv", rows, problem, slices)


def _fused(problem: Problem, gpu: AppleSiliconGPU) -> Iterator[Tiling]:
    most = max_slices(problem.K, FUSED_K, FUSED_MIN_SLICE)
    slices = slices_between(min(FUSED_MIN_SLICES, most), most)
    rounded = round_up(problem.M, 8)
    for rows in range(FUSED_MAX_ROWS, 0, -8):
        if rows > rounded:
            continue
        yield fused_split("gemm_fused", rows, problem, slices)
        if rounded % rows:
            yield fused_split("gemm_fused", rows, problem, slices, round_up(problem.M % rows, 8))


def _staged(stages: int) -> Callable[[Problem, AppleSiliconGPU], Iterator[Tiling]]:
    variant = "single_stage" if stages == 1 else "double_buffered"

    def tilings(problem: Problem, gpu: AppleSiliconGPU) -> Iterator[Tiling]:
        """K is split if there are fewer tiles than the GPU can hold threadgroups at once."""
        for tile in STAGED_TILES:
            row = Tiling(variant, f"gemm_{variant}_{'x'.join(map(str, tile))}", tile, stages)
            if staged_bytes(tile, problem.element_bytes, stages) > MAX_THREADGROUP_BYTES:
                continue
            tiles = ceil_divide(problem.N, tile[1]) * ceil_divide(problem.M, tile[0])
            wanted = ceil_divide(_resident(row, problem, gpu), tiles)
            slices = min(max(wanted, 1), max_slices(problem.K, tile[2], STAGED_MIN_SLICE))
            k_per_slice = int(slice_length(problem, slices, tile[2]))
            simdgroups = staged_threads(tile) // SIMD_WIDTH
            splits = ceil_divide(problem.K, k_per_slice)
            yield replace(row, simdgroups=simdgroups, k_per_slice=k_per_slice, splits=splits)

    return tilings


def _striped(problem: Problem, gpu: AppleSiliconGPU) -> Iterator[Tiling]:
    """Launches as many threadgroups as the GPU holds at once. Each computes an equal stripe of the work."""
    K = problem.K
    for tile in STRIPED_TILES:
        row = Tiling("striped", f"gemm_striped_{'x'.join(map(str, tile))}", tile, 2)
        if staged_bytes(tile, problem.element_bytes, 2) > MAX_THREADGROUP_BYTES:
            continue
        resident = _resident(row, problem, gpu)
        tiles = ceil_divide(problem.M, tile[0]) * ceil_divide(problem.N, tile[1])
        rounds = ceil_divide(tiles, resident)
        whole_tiles_fill = (rounds * resident - tiles) * IDLE_SHARE <= rounds * resident
        k_per_slice = round_up(K, tile[2]) if whole_tiles_fill else STRIPED_SLICE
        slices = stripe_slices(K, k_per_slice)
        units = tiles * slices
        if units >= 2**32:
            continue
        stripes = min(resident, units)
        begins = np.arange(1, stripes) * (units // stripes) + np.minimum(np.arange(1, stripes), units % stripes)
        yield replace(
            row, simdgroups=staged_threads(tile) // SIMD_WIDTH, k_per_slice=k_per_slice, stripes=stripes,
            stripes_share_tiles=bool((begins % slices != 0).any()),
        )  # fmt: skip


def _tensor(problem: Problem, gpu: AppleSiliconGPU) -> Iterator[Tiling]:
    if not gpu.has_tensor_units or not problem.has_tensor_kernel:
        return
    slices = slices_between(1, max_slices(problem.K, TENSOR_K, STAGED_MIN_SLICE))
    for tile in TENSOR_TILES:
        if tile[0] <= round_up(problem.M, TENSOR_ROWS):
            yield tensor_split("gemm_tensor", tile, problem, slices)


def _two_pass(problem: Problem, gpu: AppleSiliconGPU) -> Iterator[Tiling]:
    yield Tiling("two_pass", "dequantize", (0, 0, 0))


_VARIANTS: dict[str, Callable[[Problem, AppleSiliconGPU], Iterator[Tiling]]] = {
    "gemv": _gemv,
    "fused": _fused,
    "double_buffered": _staged(2),
    "single_stage": _staged(1),
    "striped": _striped,
    "tensor": _tensor,
    "two_pass": _two_pass,
}


def _resident(row: Tiling, problem: Problem, gpu: AppleSiliconGPU) -> int:
    """Returns how many threadgroups of a staged kernel all cores hold at once."""
    counts = counts_of(row, row.tile[0], problem, gpu)
    held = occupancy_of(
        staged_threads(row.tile),
        counts.half_registers,
        staged_bytes(row.tile, problem.element_bytes, row.stages),
        gpu,
    )
    return gpu.cores * held.threadgroups


def gemm_families(problem: Problem, gpu: AppleSiliconGPU, variant: str = "all") -> Iterator[Tiling]:
    """Yields the tilings of each tile. Tilings that differ only in how they split K are one `Tiling` with arrays.

    Raises:
        ValueError: no variant has this name.
    """
    groups = {"all": tuple(_VARIANTS), "auto": AUTOMATIC}
    if variant not in groups and variant not in _VARIANTS:
        raise ValueError(
            f"gemm_families: variant: expected all, auto or one of {', '.join(_VARIANTS)}, got {variant!r}"
        )
    if problem.M >= AUTOMATIC_TENSOR_ROWS:
        groups["auto"] = (*AUTOMATIC, "tensor")
    for name in groups.get(variant, (variant,)):
        if name == "gemv" and variant == "auto" and problem.M > AUTOMATIC_GEMV_ROWS:
            continue
        yield from _VARIANTS[name](problem, gpu)


def cheapest(tilings: Tiling, total: PlanCost, product: int = 0) -> tuple[Tiling, float]:
    """Returns the cheapest of tilings that differ only in how they split K, and its time.

    If the cheapest tiling has few simdgroups in flight, a tiling of equal cost with more simdgroups is returned
    instead, because more simdgroups also hide latencies that the model does not count.

    Args:
        tilings: the tilings, with arrays.
        total: their costs.
        product: the index of the dispatch that computes the products.
    """
    seconds = np.broadcast_to(total.seconds, len(tilings))
    in_flight = np.broadcast_to(total.dispatches[product].in_flight, len(tilings))
    best = int(np.argmin(seconds))
    most = seconds[best] * EQUAL_COST
    for other in range(len(tilings)):
        if in_flight[best] >= ENOUGH_IN_FLIGHT:
            break
        if seconds[other] <= most and in_flight[other] > in_flight[best]:
            best = other
    return tilings.at(best), float(seconds[best])


def best_gemm(problem: Problem, gpu: AppleSiliconGPU, variant: str = "auto") -> tuple[Tiling, float] | None:
    """Returns the cheapest tiling and its time, or None if no kernel of the variant computes the problem."""
    found: list[tuple[Tiling, float]] = []
    for tilings in gemm_families(problem, gpu, variant):
        found.append(cheapest(tilings, cost(tilings, problem, gpu)))
    return min(found, key=lambda entry: entry[1], default=None)
