"""Prints how much memory and how many registers each tile uses, and how many threadgroups a core holds.

    python -m lab.predictions.tiles --gpu M1 --dtype float16

Staged kernels (double_buffered, single_stage, striped) hold activations (A), decoded weights (B), scales and zero
points of each stage in threadgroup memory. gemv and fused hold only the sums of their simdgroups, of which the table
has as many as the preferred threadgroup memory allows; tensor holds nothing. Registers are counted for the M1, in INT4.
The last rows are tiles that no plan can have, because they need more than Metal's 32 KB.
"""

import argparse
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lab import model
from lab.model import counts
from lab.model.geometry import (
    BLOCK,
    ELEMENT_BYTES,
    FUSED_COLUMNS,
    FUSED_MAX_SIMDGROUPS,
    GEMV_COLUMNS,
    GEMV_MAX_SIMDGROUPS,
    MAX_THREADGROUP_BYTES,
    SIMD_WIDTH,
    most_simdgroups,
    staged_bytes,
    staged_threads,
)
from torch_marlin_metal.gpu.occupancy import Occupancy, occupancy_of
from torch_marlin_metal.profiling import AppleSiliconGPU


@dataclass(frozen=True)
class Budget:
    """What one tile of a variant uses.

    Attributes:
        variant: the kernel variant.
        tile: M, N and K of a threadgroup's step (for gemv and fused, of a simdgroup's step).
        simdgroups: simdgroups of a threadgroup.
        activation_bytes: bytes of activations in threadgroup memory, in all stages.
        code_bytes: bytes of decoded weights in threadgroup memory, in all stages.
        threadgroup_bytes: all bytes of threadgroup memory.
        accumulators: fp32 sums of a lane.
        matrix_operations: 8x8x8 products of a simdgroup's step.
        flop_per_byte: operations of a step for each byte that it loads from memory.
        half_registers: 16-bit registers of a thread; 0 if the tile does not fit.
        occupancy: how many threadgroups a core holds; None if the tile does not fit.
    """

    variant: str
    tile: tuple[int, int, int]
    simdgroups: int
    activation_bytes: int
    code_bytes: int
    threadgroup_bytes: int
    accumulators: int
    matrix_operations: int
    flop_per_byte: float
    half_registers: int = 0
    occupancy: Occupancy | None = None


def budgets(gpu: AppleSiliconGPU, dtype: str) -> list[Budget]:
    """Returns the tiles that exist for activations of a dtype, then those that do not fit."""
    found, seen = [], set()
    # With these sizes, every kernel has tilings, and none is padded.
    for group in model.families(model.Problem(128, 4096, 8192, activations=dtype), gpu):
        tiling = group.at(0)
        if tiling.name not in seen and tiling.variant != "two_pass":
            seen.add(tiling.name)
            found.append(_budget(tiling, dtype, gpu))
    for M in (64, 128):
        for N in (64, 128):
            for K in (32, 64):
                for variant, stages in (("double_buffered", 2), ("single_stage", 1)):
                    row = model.Tiling(variant, "", (M, N, K), stages)
                    if staged_bytes(row.tile, ELEMENT_BYTES[dtype], stages) > MAX_THREADGROUP_BYTES:
                        found.append(_budget(row, dtype, None))
    return found


def _budget(row: model.Tiling, dtype: str, gpu: AppleSiliconGPU | None) -> Budget:
    M, N, K = row.tile
    problem = model.Problem(M, N, K, activations=dtype)
    if row.variant in ("gemv", "fused"):
        columns, most = {"gemv": (GEMV_COLUMNS, GEMV_MAX_SIMDGROUPS), "fused": (FUSED_COLUMNS, FUSED_MAX_SIMDGROUPS)}[
            row.variant
        ]
        simdgroups, lanes = most_simdgroups(columns, M, False, most), SIMD_WIDTH
    else:
        simdgroups = staged_threads(row.tile) // SIMD_WIDTH if row.stages else int(row.simdgroups)
        lanes = simdgroups * SIMD_WIDTH
    element = ELEMENT_BYTES[dtype]
    memory = row.stages and staged_bytes(row.tile, element, row.stages)
    if row.variant in ("gemv", "fused"):
        memory = simdgroups * M * N * 4
    registers, held = 0, None
    if gpu is not None:
        registers = counts.counts_of(row, M, problem, gpu).half_registers
        held = occupancy_of(simdgroups * SIMD_WIDTH, registers, memory, gpu)
    products = 0 if row.variant == "gemv" else M * N * K // BLOCK**3 // (lanes // SIMD_WIDTH)
    return Budget(
        row.variant,
        row.tile,
        simdgroups,
        row.stages * M * K * element,
        row.stages * K * N * 2,
        memory,
        M * N // lanes,
        products,
        2 * M * N / (0.5 * N + M * element),
        registers,
        held,
    )


def table(gpu: AppleSiliconGPU, dtype: str) -> Table:
    """Returns the budgets as a table."""
    shown = Table(title=f"{dtype} activations on {gpu.name}; balance {gpu.balance:.1f} flop per byte")
    headings = ("simdgroups", "A bytes", "B bytes", "total", "of 32 KB", "threadgroups/core", "threads/core")
    for heading in ("variant", "tile", *headings, "limit", "accumulators", "half-registers", "MMA/step", "flop/byte"):
        shown.add_column(heading, justify="left" if heading in ("variant", "tile", "limit") else "right")
    for row in budgets(gpu, dtype):
        held = row.occupancy
        shown.add_row(
            row.variant,
            "x".join(map(str, row.tile)),
            str(row.simdgroups),
            str(row.activation_bytes),
            str(row.code_bytes),
            str(row.threadgroup_bytes),
            f"{row.threadgroup_bytes / MAX_THREADGROUP_BYTES:.0%}",
            str(held.threadgroups) if held else "refused",
            str(held.simdgroups * SIMD_WIDTH) if held else "",
            held.limit if held else "",
            str(row.accumulators),
            str(row.half_registers) if held else "",
            str(row.matrix_operations),
            f"{row.flop_per_byte:.1f}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="M1", help="a chip's name")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    options = parser.parse_args()
    Console(width=180).print(table(AppleSiliconGPU.from_name(options.gpu), options.dtype))


if __name__ == "__main__":
    main()
