"""Predicts the cost of a tiling: applies the model of `kernel.py` to each of the tiling's dispatches."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from lab.model.counts import KernelCounts, counts_of
from lab.model.geometry import (
    CHAIN_LENGTH,
    CODES_PER_WORD,
    ELEMENTWISE_HEIGHT,
    ELEMENTWISE_WIDTH,
    MIN_GROUP_SIZE,
    SIMD_WIDTH,
    ceil_divide,
    stripe_slices,
)
from lab.model.kernel import (
    DISPATCH_SECONDS,
    DispatchCost,
    KernelLoad,
    figure,
    finish,
    kernel_cost,
    occupancy,
    reads,
    stays,
)
from lab.model.problems import Problem, Tiling
from torch_marlin_metal.gpu.occupancy import Occupancy, occupancy_of
from torch_marlin_metal.profiling import AppleSiliconGPU

# PyTorch computes a dense product through MPSGraph. The launch time was measured on an M1 Pro. The fraction of the peak
# rate that the product reaches was measured on an M1 (4096^3, fp16).
DENSE_LAUNCH_SECONDS = 20e-6
DENSE_FRACTION = 0.88


@dataclass
class PlanCost:
    """The cost of a tiling.

    Attributes:
        dispatches: the costs of the dispatches, and of the dense product of two_pass.
        seconds: the sum of the seconds of all dispatches.
    """

    dispatches: list[DispatchCost] = field(default_factory=list)

    @property
    def seconds(self) -> Any:
        """Returns the time of all dispatches."""
        return sum(dispatch.seconds for dispatch in self.dispatches)


def cost(tiling: Tiling, problem: Problem, gpu: AppleSiliconGPU) -> PlanCost:
    """Returns the predicted cost of a tiling.

    If the tiling has arrays, so has the cost. It then always has a reduction, which takes 0 seconds in those tilings
    that have no partial sums.
    """
    if tiling.variant == "two_pass":
        return PlanCost([_dequantize(problem, gpu), _dense(problem, gpu)])
    total = PlanCost()
    for m_begin, rows, count in tiling.row_blocks(problem.M):
        load = product_load(tiling, problem, gpu, rows, m_begin, count)
        total.dispatches.append(costed(load, gpu, tiling.kernel))
    shares = np.asarray(tiling.splits) > 1
    if shares.any() or tiling.stripes_share_tiles:
        reduction = _reduce(tiling, problem, gpu)
        if np.ndim(tiling.splits) > 0:
            reduction.seconds = np.where(shares, reduction.seconds, 0.0)
        total.dispatches.append(reduction)
    return total


def costed(load: KernelLoad, gpu: AppleSiliconGPU, kernel: str) -> DispatchCost:
    """Returns the cost of a load. If the load's fields are numbers, not arrays, the cost has bound and occupancy."""
    found = kernel_cost(load, gpu, kernel)
    is_scalar = np.ndim(found.seconds) == 0
    return found.scalar(gpu, occupancy(load, gpu)) if is_scalar else found


def load_without_bytes(tiling: Tiling, problem: Problem, gpu: AppleSiliconGPU, rows: int, count: int = 1) -> KernelLoad:
    """Returns the load of `count` row blocks of `rows` rows, without the bytes that they read and write."""
    counts = counts_of(tiling, rows, problem, gpu)
    inner, outer = _steps(tiling, problem, counts, count)
    columns = ceil_divide(problem.N, tiling.tile[1])
    dram_waits, cache_waits = counts.step_waits
    return KernelLoad(
        threadgroups=tiling.stripes if tiling.variant == "striped" else count * columns * tiling.splits,
        threads=tiling.simdgroups * SIMD_WIDTH,
        half_registers=counts.half_registers,
        threadgroup_bytes=tiling.threadgroup_bytes(problem, rows),
        loads_ahead=tiling.variant in ("double_buffered", "striped"),
        issue=inner * counts.issue + outer * counts.outer_issue + counts.fixed_issue,
        complex=inner * counts.complex,
        matrix_operations=inner * _step_products(tiling, problem, counts),
        matrix_clocks=_matrix_clocks(tiling, problem, gpu),
        dram_waits=inner * dram_waits,
        cache_waits=inner * cache_waits,
    )


def product_load(
    tiling: Tiling, problem: Problem, gpu: AppleSiliconGPU, rows: int, m_begin: int, count: int
) -> KernelLoad:
    """Returns the load of one launch of a tiling's product kernel.

    In most kernels, the threadgroups of a row block start before those of the next row block, so each row block reads
    all weights again. In gemv, threadgroups that share weights run at the same time, so L2 serves all reads but the
    first. In striped, a stripe contains one column of tiles after another, so each column reads all activations again.
    """
    load = load_without_bytes(tiling, problem, gpu, rows, count)
    columns = ceil_divide(problem.N, tiling.tile[1])
    computed = min(count * rows, problem.M - m_begin)
    activations = float(computed) * problem.K * problem.element_bytes
    shares = np.logical_or(np.asarray(tiling.splits) > 1, tiling.stripes_share_tiles)
    written = np.where(shares, _partial_bytes(tiling, problem), _output_bytes(problem, computed))
    by_columns = tiling.variant == "striped"
    load.weight_bytes = problem.weight_bytes
    load.dram_bytes = (
        reads(load.weight_bytes, 1 if by_columns or tiling.variant == "gemv" else count, gpu)
        + reads(activations, columns if by_columns else 1, gpu)
        + written
    )
    load.l2_bytes = count * load.weight_bytes + columns * activations + written
    return load


def _step_k(tiling: Tiling, problem: Problem) -> int:
    """Returns the k of a step.

    With groups of 16, gemm_tensor takes steps of half the length, because each product of 16 k has its own scale. These
    steps are counted separately.
    """
    halves = (
        tiling.variant == "tensor"
        and not _tensor_scales_codes(problem)
        and problem.group == MIN_GROUP_SIZE
        and problem.K > MIN_GROUP_SIZE
    )
    return tiling.tile[2] // 2 if halves else tiling.tile[2]


def _tensor_scales_codes(problem: Problem) -> bool:
    """Returns whether gemm_tensor multiplies codes by their scales before the product."""
    return problem.traits.code_kind == "e2m1" and problem.traits.scale_coding == "e4m3"


def _steps(tiling: Tiling, problem: Problem, counts: KernelCounts, row_blocks: int) -> tuple[Any, Any]:
    """Returns the steps of one simdgroup along K, and the iterations of the loop around them."""
    k = np.minimum(tiling.k_per_slice, problem.K)
    steps = ceil_divide(k, _step_k(tiling, problem))
    chain = min(problem.group, CHAIN_LENGTH)
    if tiling.variant in ("gemv", "fused"):
        return steps, ceil_divide(k, counts.outer_k or chain)
    if tiling.variant == "tensor":
        return steps, ceil_divide(k, CHAIN_LENGTH if _tensor_scales_codes(problem) else chain)
    if tiling.variant == "striped":
        slices = stripe_slices(problem.K, int(tiling.k_per_slice))
        units = ceil_divide(row_blocks * ceil_divide(problem.N, tiling.tile[1]) * slices, tiling.stripes)
        return units * ceil_divide(ceil_divide(problem.K, slices), tiling.tile[2]), units
    return steps, 0


def _step_products(tiling: Tiling, problem: Problem, counts: KernelCounts) -> float:
    """Returns the number of 8x8x8 products in a step.

    If zero points are not in the codes, gemm_tensor also needs the sums of the activations: half as many products
    again.
    """
    if tiling.variant != "tensor":
        return counts.matrix
    role = problem.traits.zeros_role
    sums_activations = role == "bias" or (role == "zero_point" and problem.zeros_type != "uint8")
    return counts.matrix * _step_k(tiling, problem) / tiling.tile[2] * (1.5 if sums_activations else 1.0)


@cache
def _newest_tensor_clocks() -> float:
    return figure(AppleSiliconGPU.from_name(AppleSiliconGPU.names()[-1]), "tensor_clocks_fp16")


def _matrix_clocks(tiling: Tiling, problem: Problem, gpu: AppleSiliconGPU) -> float:
    if tiling.variant == "tensor":
        # A plan made on an M5 may be for an older chip, which has no tensor units. The rate of the newest chip is then
        # used.
        return figure(gpu, "tensor_clocks_fp16") or _newest_tensor_clocks()
    halves = tiling.variant != "fused" and problem.activations == "float16"
    return figure(gpu, "matrix_clocks_fp16" if halves else "matrix_clocks_fp32")


def _partial_bytes(tiling: Tiling, problem: Problem) -> Any:
    if tiling.stripes_share_tiles:
        return 4.0 * tiling.tile[0] * tiling.tile[1] * 2 * tiling.stripes
    return 4.0 * problem.M * problem.N * np.asarray(tiling.splits)


def _output_bytes(problem: Problem, rows: int) -> float:
    return float(rows) * problem.N * problem.element_bytes


@cache
def _elementwise_occupancy(chip: str) -> Occupancy:
    return occupancy_of(ELEMENTWISE_WIDTH * ELEMENTWISE_HEIGHT, 1, 0, AppleSiliconGPU.from_name(chip))


def elementwise_cost(
    kernel: str, columns: int, rows: int, read: Any, written: Any, problem: Problem, gpu: AppleSiliconGPU, deep: int = 1
) -> DispatchCost:
    """Returns the cost of a kernel with one thread per element. It depends only on memory and launch time."""
    threadgroups = float(ceil_divide(columns, ELEMENTWISE_WIDTH) * ceil_divide(rows, ELEMENTWISE_HEIGHT) * deep)
    held = _elementwise_occupancy(gpu.name)
    found = DispatchCost(
        kernel,
        launch_seconds=DISPATCH_SECONDS,
        waves=threadgroups / (gpu.cores * held.threadgroups),
        in_flight=held.simdgroups / held.threadgroups * min(held.threadgroups, threadgroups / gpu.cores),
        dram_bytes=read + written,
        l2_bytes=read + written,
    )
    finish(found, threadgroups, problem.weight_bytes, gpu)
    return found.scalar(gpu, held) if np.ndim(found.seconds) == 0 else found


def _reduce(tiling: Tiling, problem: Problem, gpu: AppleSiliconGPU) -> DispatchCost:
    partial = _partial_bytes(tiling, problem)
    read = np.where(stays(partial, gpu), 0.0, partial)
    written = _output_bytes(problem, problem.M)
    if not tiling.stripes_share_tiles:
        return elementwise_cost("reduce", problem.N, problem.M, read, written, problem, gpu)
    M, N, _ = tiling.tile
    return elementwise_cost("reduce_striped", N, M, read, written, problem, gpu, tiling.stripes - 1)


def _dequantize(problem: Problem, gpu: AppleSiliconGPU) -> DispatchCost:
    written = float(problem.K) * problem.N * problem.element_bytes
    rows = problem.K // CODES_PER_WORD
    return elementwise_cost("dequantize", problem.N, rows, problem.weight_bytes, written, problem, gpu)


def _dense(problem: Problem, gpu: AppleSiliconGPU) -> DispatchCost:
    M, N, K = float(problem.M), float(problem.N), float(problem.K)
    moved = (M * K + K * N + M * N) * problem.element_bytes
    flop = figure(gpu, "fp16_flop_per_clock" if problem.activations == "float16" else "fp32_flop_per_clock")
    seconds = 2 * M * N * K / (DENSE_FRACTION * flop * gpu.cores * gpu.clock_hz)
    found = DispatchCost("torch.matmul", launch_seconds=DENSE_LAUNCH_SECONDS, dram_bytes=moved, l2_bytes=moved)
    found.compute_seconds = found.matrix_seconds = seconds
    finish(found, gpu.cores, K * N * problem.element_bytes, gpu)
    plain = found.scalar(gpu, Occupancy(0, 0, ""))
    plain.bound = "dense" if plain.bound == "matrix" else plain.bound
    return plain
