"""Counts the instructions of `lab/model/counts.csv` with the compiler of instructions.py.

    python -m lab.counting.kernel_counts            # prints the rows
    python -m lab.counting.kernel_counts --write    # stores them
    python -m lab.counting.kernel_counts --check    # compares them; the exit code is 1 if they differ

tensor_instructions.py counts the rows of gemm_tensor.

gemv, fused and their variants for experts are counted with all formats and activations, because the format changes
their registers, and so the number of threadgroups on a core. Other kernels are counted with fp16 activations and one
format of each code kind. Groups have 64 codes, or the fixed size of the format. The group sizes of common files are
counted, too (forms() of instructions.py). Tensors are aligned, and no options are set. A kernel that the tool cannot
compile (UNCOUNTED of instructions.py) gets the counts of single_stage.

moe_gemv_blocks has a loop for each number of rows, and moe_fused has one for each number of row blocks. A row of the
table has the counts of the largest loop. The code outside the loops is counted in a copy of the kernel that has only
the largest loop.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.counting.instructions import (
    FUSED_K,
    SHARED_BODIES,
    Case,
    Loops,
    cases,
    forms,
    is_set_up,
    measure,
    measure_all,
    readable_copy,
)
from lab.model.counts import DTYPES, KernelCounts, differences, rows, store
from torch_marlin_metal.formats import WEIGHT_FORMATS

BY_FORMAT = {"gemv", "gemm_fused", *SHARED_BODIES}
FORMATS_OF_KINDS = tuple(
    {(row.code_kind, row.code_bits): name for name, row in reversed(WEIGHT_FORMATS.items())}.values()
)
FUSED_CHAIN_K = 256
# The kernels with several loops, and regular expressions of the conditions that choose a loop.
LARGEST_LOOPS = {"moe_gemv_blocks": r"rows\.count == \d", "moe_fused": r"rows\.count > (?:\d \* )?kBlock"}


def counted_cases(dtype: str) -> Iterator[Case]:
    """Yields the cases of one dtype that the planner can ask for, in the order of the table."""
    usual = set(forms(dtype))
    for case in cases():
        is_listed = case.kernel in BY_FORMAT or case.weight_format in FORMATS_OF_KINDS
        is_usual = (case.weight_format, case.group_size, case.levels) in usual
        if case.kernel == "moe_gemv_gated":  # the planner uses the counts of moe_gemv for moe_gemv_gated
            continue
        if is_listed and is_usual and case.dtype == dtype:
            yield case


def tile(case: Case) -> tuple[int, int, int]:
    if case.kernel.startswith(("gemv", "moe_gemv")):
        return case.rows, 128, 16
    if case.kernel in ("gemm_fused", "moe_fused"):
        return case.rows, 32, FUSED_K
    name = re.search(r"(\d+)x(\d+)x(\d+)$", case.kernel)
    assert name is not None, f"{case.kernel} has no tile in its name"
    M, N, K = map(int, name.groups())
    return M, N, K


def slots(part: dict[str, Any]) -> int:
    return int(part["issue"] + part["simd_cycles"])


def once(counted: dict[str, Any]) -> int:
    """Returns the issue slots of the code outside the loops, in a kernel with one outer loop."""
    return slots(counted["total"]) - slots(Loops.of(counted).outer)


def keep_largest_loop(folder: Path) -> None:
    """Removes all loops but the largest from the kernels with several loops."""
    for kernel, condition in LARGEST_LOOPS.items():
        path = folder / f"kernels/experts/{kernel}.metal"
        text, replaced = re.subn(condition, "true", path.read_text())
        if replaced == 0:
            raise RuntimeError(f"kernel_counts.py: found no {condition} in {path.name}")
        path.write_text(text)


def row(case: Case, counted: dict[str, Any], once: int) -> KernelCounts:
    """Returns a row of the table: counts of the innermost loop, of the loop around it, and of the code outside both."""
    loops = Loops.of(counted)
    hot = loops.hot
    return KernelCounts(
        case.dtype,
        case.kernel,
        case.weight_format,
        case.group_size,
        case.levels,
        *tile(case),
        issue=hot["issue"],
        complex=hot["ic_cycles"],
        matrix=hot["matrix_ops"],
        outer_issue=slots(loops.outer) - sum(slots(loop) for loop in loops.innermost),
        outer_k=FUSED_CHAIN_K if case.kernel in ("gemm_fused", "moe_fused") else 0,
        fixed_issue=once,
        half_registers=counted["half_registers"],
        waits=hot["waits"],
    )


def counted_rows(dtype: str, folder: Path, largest_loops: Path) -> Iterator[KernelCounts]:
    """Yields the rows of a dtype. `largest_loops` is a copy of the kernels that keep_largest_loop() has changed."""
    chosen = list(counted_cases(dtype))
    alone = [case for case in chosen if case.kernel in LARGEST_LOOPS]
    once_alone = dict(zip(alone, measure_all(largest_loops, alone), strict=True))
    for case, counted in zip(chosen, measure_all(folder, chosen), strict=True):
        if isinstance(counted, dict):
            single = once_alone.get(case, counted)
            if isinstance(single, str):
                raise RuntimeError(f"kernel_counts.py: {case.kernel} with one loop: {single}")
            yield row(case, counted, once(single))
            continue
        other = case.kernel.replace("double_buffered", "single_stage")
        stand_in = Case(other, case.library, case.weight_format, rows=case.rows, threads=case.threads)
        counted = measure(folder, stand_in)
        if isinstance(counted, str) or other == case.kernel:
            raise RuntimeError(f"kernel_counts.py: {case.kernel}: {counted}")
        yield row(case, counted, once(counted))


def count() -> list[KernelCounts]:
    """Counts the kernels and returns the rows of all dtypes."""
    with tempfile.TemporaryDirectory(prefix="kernels-") as parent:
        folder, largest_loops = Path(parent) / "whole", Path(parent) / "largest"
        readable_copy(folder)
        readable_copy(largest_loops)
        keep_largest_loop(largest_loops)
        return [found for dtype in DTYPES for found in counted_rows(dtype, folder, largest_loops)]


def write_or_check(found: list[KernelCounts], *, is_tensor: bool, check: bool) -> int:
    """Replaces rows of the stored table by the counted rows, or with `check` compares both.

    These are the rows of gemm_tensor if `is_tensor` is true, otherwise those of all other kernels. Returns the exit
    code: 1 if compared rows differ.
    """
    if not check:
        store([row for row in rows() if (row.kernel == "gemm_tensor") != is_tensor] + found)
        return 0
    stored = [row for row in rows() if (row.kernel == "gemm_tensor") == is_tensor]
    lines = differences(found, stored)
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare the rows with the stored ones")
    what.add_argument("--write", action="store_true", help="write the rows into lab/model/counts.csv")
    options = parser.parse_args()
    if not is_set_up():
        print("kernel_counts.py: the compiler is not here: run sh lab/agx/setup.sh", file=sys.stderr)
        return 2
    found = count()
    if options.check or options.write:
        return write_or_check(found, is_tensor=False, check=options.check)
    print(*found, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
