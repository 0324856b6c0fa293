"""Counts the instructions of the planner's tables in csrc/planner/cost/ with the compiler of instructions.py.

--write stores the tables. --check compares them with the stored ones, and the exit code is 1 if they differ.

All kernels are counted with fp16 activations and one format of each code kind. gemv, fused and their forms for experts
are also counted with bf16 and fp32 activations and all formats, because their registers, and so the threadgroups on a
core, differ by format.
Groups have 64 codes or the fixed size of the format, tensors are aligned, and there are no options. A kernel that the
tool cannot compile gets the counts of single_stage.

moe_gemv_blocks has a loop for each number of rows, and moe_fused one for each number of row blocks. A row of the table
has the counts of the largest loop. What runs once is counted in a copy of the kernel that has this loop only.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instructions import (
    FIXED_GROUPS,
    FORMATS,
    FUSED_K,
    Case,
    Loops,
    cases,
    is_set_up,
    measure,
    measure_all,
    readable_copy,
)

FOLDER = Path(__file__).resolve().parents[2] / "csrc/planner/cost"
# The array and the header of each dtype of activations.
TABLES = {
    "float16": ("kKernelCounts", FOLDER / "instruction_counts.h"),
    "bfloat16": ("kBfloat16Counts", FOLDER / "activation_counts.h"),
    "float32": ("kFloat32Counts", FOLDER / "activation_counts.h"),
}
FORMATS_OF_KINDS = ("uint4b8", "float4_e2m1", "lut4")
GEMV_TILE = "{{{rows}, 128, 16}}"
FUSED_CHAIN_K = 256
# The kernels with several loops, and the conditions that choose a loop.
LARGEST_LOOPS = {"moe_gemv_blocks": r"rows\.count == \d", "moe_fused": r"rows\.count > (?:\d \* )?kBlock"}


def table_of(array: str) -> re.Pattern[str]:
    return re.compile(rf"(inline constexpr std::array {array}\{{\n)(.*?)(^\}};\n)", re.DOTALL | re.MULTILINE)


def counted_cases(dtype: str) -> Iterator[Case]:
    """Yields the cases of one dtype that the planner can ask for, in the order of the table."""
    for case in cases():
        is_listed = case.weight_format in (FORMATS_OF_KINDS if dtype == "float16" else FORMATS)
        is_usual = case.group_size == FIXED_GROUPS.get(case.weight_format, 64)
        if case.kernel == "moe_gemv_gated":  # the planner takes the counts of moe_gemv for it
            continue
        if is_listed and is_usual and case.dtype == dtype:
            yield case


def tile(case: Case) -> str:
    if case.kernel.startswith(("gemv", "moe_gemv")):
        return GEMV_TILE.format(rows=case.rows)
    if case.kernel in ("gemm_fused", "moe_fused"):
        return f"{{{case.rows}, 32, {FUSED_K}}}"
    name = re.search(r"(\d+)x(\d+)x(\d+)$", case.kernel)
    assert name is not None, f"{case.kernel} has no tile in its name"
    return "{" + ", ".join(name.groups()) + "}"


def slots(part: dict[str, Any]) -> int:
    return int(part["issue"] + part["simd_cycles"])


def once(counted: dict[str, Any]) -> int:
    """Returns the slots of what runs once, in a kernel with one outer loop."""
    return slots(counted["total"]) - slots(Loops.of(counted).outer)


def keep_largest_loop(folder: Path) -> None:
    """Removes all loops but the largest from the kernels with several."""
    for kernel, condition in LARGEST_LOOPS.items():
        path = folder / f"kernels/experts/{kernel}.metal"
        text, replaced = re.subn(condition, "true", path.read_text())
        if replaced == 0:
            raise RuntimeError(f"kernel_counts.py: found no {condition} in {path.name}")
        path.write_text(text)


def row(case: Case, counted: dict[str, Any], once: int) -> str:
    """Returns a row of the table: counts of the innermost loop, the loop around it, and the rest, which runs once."""
    loops = Loops.of(counted)
    hot, outer = loops.hot, loops.outer
    step = f"{{{hot['issue']}, {hot['ic_cycles']}, {hot['matrix_ops']}}}"
    outer_k = FUSED_CHAIN_K if case.kernel in ("gemm_fused", "moe_fused") else 0
    around_steps = slots(outer) - sum(slots(loop) for loop in loops.innermost)
    return (f'KernelCounts{{Kernel::{case.kernel}, WeightFormat::{case.weight_format}, {tile(case)}, {step}, '
            f'{around_steps}, {outer_k}, {once}, {counted["half_registers"]}, {hot["waits"]}}},')  # fmt: skip


def rows(dtype: str, folder: Path, largest_loops: Path) -> Iterator[str]:
    """Yields the rows of a dtype's table.

    Args:
        dtype: the dtype.
        folder: a copy of the kernels.
        largest_loops: another copy, after keep_largest_loop().
    """
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
        yield "// The offline compiler fails on this kernel; single_stage's counts are used."
        yield row(case, counted, once(counted))


def tables() -> Iterator[tuple[str, Path, str]]:
    """Yields the name of each table's array, its header, and the table as it is counted now."""
    with tempfile.TemporaryDirectory(prefix="kernels-") as parent:
        folder, largest_loops = Path(parent) / "whole", Path(parent) / "largest"
        readable_copy(folder)
        readable_copy(largest_loops)
        keep_largest_loop(largest_loops)
        for dtype, (array, header) in TABLES.items():
            yield array, header, "".join(f"    {line}\n" for line in rows(dtype, folder, largest_loops))


def kernels_in(table: str) -> set[str]:
    """Returns the rows of a table, each without spaces and comments."""
    text = re.sub(r"//[^\n]*", "", table)
    return {re.sub(r"\s", "", row) for row in re.split(r"(?=KernelCounts\{)", text) if row.strip()}


def differences(counted: str, stored: str) -> list[str]:
    """Returns a line for each row that only one of two tables has."""
    new, old = kernels_in(counted), kernels_in(stored)
    return [*(f"counted {row}" for row in sorted(new - old)), *(f"stored {row}" for row in sorted(old - new))]


def write(array: str, header: Path, table: str) -> None:
    text, replaced = table_of(array).subn(lambda match: match[1] + table + match[3], header.read_text())
    if replaced != 1:
        raise RuntimeError(f"kernel_counts.py: expected one table {array} in {header}, found {replaced}")
    header.write_text(text)
    subprocess.run([str(Path(sys.executable).with_name("clang-format")), "-i", str(header)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare the tables with the stored ones")
    what.add_argument("--write", action="store_true", help="write the tables into the headers")
    options = parser.parse_args()
    if not is_set_up():
        print("kernel_counts.py: the compiler is not here: run sh benchmarks/agx/setup.sh", file=sys.stderr)
        return 2
    found: list[str] = []
    for array, header, table in tables():
        if options.check:
            stored = table_of(array).search(header.read_text())
            assert stored is not None, f"no table {array} in {header}"
            found += [f"{array}: {line}" for line in differences(table, stored[2])]
        elif options.write:
            write(array, header, table)
        else:
            print(f"{array}:\n{table}", end="")
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
