"""Stores how many instructions a simdgroup of each kernel executes: the rows of `counts.csv`.

The instructions are counted in code that Mesa's compiler generates for the M1's GPU (-O1; aligned tensors, no options).
The counts are static: an instruction that only some steps execute, such as one at the end of a group in a staged
kernel, is counted in every step.

`lab/counting/kernel_counts.py --write` counts gemv, fused and their variants for experts with all activations. It
counts the other kernels with float16, and the model uses these counts for all activations.

No tool compiles for tensor units, so `lab/counting/tensor_instructions.py --write` counts gemm_tensor in code in which
other instructions replace each product. They are subtracted from the counts, but the registers include them.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from functools import cache
from pathlib import Path

from lab.model.geometry import GEMV_MAX_LOADS_FIRST_ROWS, MIN_GROUP_SIZE
from lab.model.problems import Problem, Tiling
from torch_marlin_metal.formats import WEIGHT_FORMATS
from torch_marlin_metal.profiling import AppleSiliconGPU

TABLE = Path(__file__).with_name("counts.csv")
# Groups longer than 64 have the same loop as groups of 64.
MODELLED_GROUP = 64
DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class KernelCounts:
    """What one simdgroup executes.

    The innermost loop executes one step along K in each iteration. The loop around it adds work at the end of each
    group, chain (gemv) or unit (striped).

    Attributes:
        activations: dtype of the activations.
        kernel: the kernel's name.
        weight_format: the counted format. A format without a row uses the row of a format with the same codes.
        group_size: the counted group size. Other group sizes use the nearest row.
        levels: levels of the scales.
        M: rows of the tile.
        N: columns of the tile.
        K: k of a step. For gemm_tensor with groups of 16, twice the k of a step.
        issue: issue slots of a scheduler in a step.
        complex: clocks of the unit for slow integer and complex instructions in a step. It runs in parallel with the
            scheduler.
        matrix: 8x8x8 products of a step.
        outer_issue: issue slots of an iteration of the outer loop, without its inner loop.
        outer_k: elements of K that an iteration of the outer loop covers; 0 means a group, chain or unit.
        fixed_issue: issue slots outside all loops.
        half_registers: 16-bit registers of a thread.
        waits: how often a step waits for loads.
    """

    activations: str
    kernel: str
    weight_format: str
    group_size: int
    levels: int
    M: int
    N: int
    K: int
    issue: int
    complex: int
    matrix: int
    outer_issue: int
    outer_k: int
    fixed_issue: int
    half_registers: int
    waits: int

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.M, self.N, self.K

    @property
    def step_waits(self) -> tuple[int, int]:
        """Returns how often a step waits for memory, and how often for a cache.

        If gemv loads a step's words first, it waits for memory once, and twice otherwise. fused waits for memory twice.
        Their other waits are for activations in a cache. The kernels for experts have the same loops. The tool counts
        no waits of gemm_tensor. The staged kernels load ahead, so the model does not add their waits to their
        instructions. Waits at the end of a group or chain are not counted.
        """
        if self.kernel == "gemv" or self.kernel.startswith("moe_gemv"):
            loads_first = not WEIGHT_FORMATS[self.weight_format].has_lut and self.M <= GEMV_MAX_LOADS_FIRST_ROWS
            return (1, self.waits - 1) if loads_first else (2, self.waits - 2)
        if self.kernel in ("gemm_fused", "moe_fused"):
            return 2, self.waits - 2
        return (1, 1) if self.kernel == "gemm_tensor" else (1, 0)


class NotCounted(LookupError):
    """The instructions of a kernel have not been counted. The message names the kernel and its operands."""


@cache
def rows() -> tuple[KernelCounts, ...]:
    with TABLE.open(newline="") as file:
        return tuple(
            KernelCounts(**{  # type: ignore[arg-type]
                field.name: row[field.name] if field.type == "str" else int(row[field.name])
                for field in fields(KernelCounts)
            })
            for row in csv.DictReader(file)
        )  # fmt: skip


def store(found: Iterable[KernelCounts]) -> None:
    """Writes the table, ordered by dtype. Within a dtype, the rows keep their order, and gemm_tensor comes last."""
    ordered = sorted(found, key=lambda row: (DTYPES.index(row.activations), row.kernel == "gemm_tensor"))
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(KernelCounts))
        writer.writerows(astuple(row) for row in ordered)


def differences(counted: Iterable[KernelCounts], stored: Iterable[KernelCounts]) -> list[str]:
    """Returns a line for each row that only one of two tables has."""
    new, old = set(counted), set(stored)
    lines = [*(("counted", row) for row in new - old), *(("stored", row) for row in old - new)]
    return [f"{whose} {','.join(map(str, astuple(row)))}" for whose, row in sorted(lines, key=str)]


@cache
def _find(
    activations: str, kernel: str, weight_format: str, tile: tuple[int, int, int], group_size: int, levels: int
) -> KernelCounts | None:
    """Returns the row of the format with the nearest group size, or a row of another format with the same codes."""
    wanted = WEIGHT_FORMATS[weight_format]

    def distance(row: KernelCounts) -> tuple[bool, bool, float]:
        other = WEIGHT_FORMATS[row.weight_format]
        scales = (other.scale_coding, other.zeros_role) == (wanted.scale_coding, wanted.zeros_role)
        return row.weight_format != weight_format, not scales, abs(math.log2(row.group_size / group_size))

    alike = [
        row
        for row in rows()
        if (row.activations, row.kernel, row.tile) == (activations, kernel, tile)
        and (WEIGHT_FORMATS[row.weight_format].code_kind, WEIGHT_FORMATS[row.weight_format].code_bits)
        == (wanted.code_kind, wanted.code_bits)
    ]
    own_levels = [row for row in alike if row.levels == levels and row.weight_format == weight_format]
    return min(own_levels or [row for row in alike if row.levels == 1], key=distance, default=None)


def counts_of(tiling: Tiling, rows_of_tile: int, problem: Problem, gpu: AppleSiliconGPU) -> KernelCounts:
    """Returns the counts of a tiling whose threadgroups compute `rows_of_tile` rows.

    On GPUs with bfloat arithmetic, bfloat is assumed to cost as much as float16.

    Raises:
        NotCounted: the kernel has not been counted.
    """
    form = (min(problem.group, MODELLED_GROUP), 2 if problem.has_two_levels else 1)
    if tiling.variant == "tensor":
        # Only groups of 16 have a different loop.
        form = (form[0] if form[0] == MIN_GROUP_SIZE else MODELLED_GROUP, form[1])
        found = _find(problem.activations, "gemm_tensor", problem.weight_format, (32, 32, 32), *form)
    else:
        tile = (rows_of_tile, *tiling.tile[1:])
        emulated = problem.activations == "bfloat16" and not gpu.has_bfloat
        own = problem.activations if problem.activations == "float32" or emulated else "float16"
        found = _find(own, tiling.kernel, problem.weight_format, tile, *form) or _find(
            "float16", tiling.kernel, problem.weight_format, tile, *form
        )
    if found is None:
        raise NotCounted(
            f"counts_of: expected a kernel that was counted, got {tiling.kernel} of {tiling.name} with {rows_of_tile} "
            f"rows, {problem.weight_format} weights and {problem.activations} activations"
        )
    return found
