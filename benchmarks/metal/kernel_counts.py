"""Counts the instructions for csrc/planner/cost/instruction_counts.h with the compiler of instructions.py.

--write stores the table. --check compares it with the stored one, and the exit code is 1 if they differ.

Counts one format of each code kind, with fp16 activations, groups of 64, aligned tensors and no options. A kernel that
the tool cannot compile gets the counts of single_stage.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instructions import FUSED_K, Case, cases, is_set_up, measure, readable_copy

HEADER = Path(__file__).resolve().parents[2] / "csrc/planner/cost/instruction_counts.h"
TABLE = re.compile(r"(inline constexpr std::array kKernelCounts\{\n)(.*?)(^\};\n)", re.DOTALL | re.MULTILINE)
FORMATS = ("uint4b8", "float4_e2m1", "lut4")
GEMV_TILE = "{{{rows}, 128, 16}}"
FUSED_CHAIN_K = 256


def counted_cases() -> Iterator[Case]:
    """Yields the cases that the planner can ask for, in the order of the table."""
    for case in cases():
        is_listed = case.weight_format in FORMATS and not case.kernel.startswith("moe_")
        if is_listed and case.dtype == "float16" and case.group_size == 64:
            yield case


def tile(case: Case) -> str:
    if case.kernel == "gemv":
        return GEMV_TILE.format(rows=case.rows)
    if case.kernel == "gemm_fused":
        return f"{{{case.rows}, 32, {FUSED_K}}}"
    name = re.search(r"(\d+)x(\d+)x(\d+)$", case.kernel)
    assert name is not None, f"{case.kernel} has no tile in its name"
    return "{" + ", ".join(name.groups()) + "}"


def slots(part: dict[str, Any]) -> int:
    return int(part["issue"] + part["simd_cycles"])


def row(case: Case, counted: dict[str, Any]) -> str:
    """Returns a row of the table: counts of the innermost loop, the loop around it, and the rest, which runs once."""
    loops = counted["loops"]
    hot = loops[counted["hot_loop"]]
    around = [o for o in loops if o["start"] <= hot["start"] and o["end"] >= hot["end"] and o is not hot]
    outer = min(around, key=lambda o: o["end"] - o["start"]) if around else hot
    step = f"{{{hot['issue']}, {hot['ic_cycles']}, {hot['matrix_ops']}}}"
    outer_k = FUSED_CHAIN_K if case.kernel == "gemm_fused" else 0
    around_steps = slots(outer) - slots(hot)
    once = slots(counted["total"]) - slots(outer)
    return (f'KernelCounts{{Kernel::{case.kernel}, WeightFormat::{case.weight_format}, {tile(case)}, {step}, '
            f'{around_steps}, {outer_k}, {once}, {counted["half_registers"]}, {hot["waits"]}}},')  # fmt: skip


def rows() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        readable_copy(Path(folder))
        for case in counted_cases():
            counted = measure(Path(folder), case)
            if isinstance(counted, dict):
                yield row(case, counted)
                continue
            other = case.kernel.replace("double_buffered", "single_stage")
            stand_in = Case(other, case.library, case.weight_format, rows=case.rows, threads=case.threads)
            counted = measure(Path(folder), stand_in)
            if isinstance(counted, str) or other == case.kernel:
                raise RuntimeError(f"kernel_counts.py: {case.kernel}: {counted}")
            yield "// The offline compiler fails on this kernel; single_stage's counts are used."
            yield row(case, counted)


def same_table(table: str) -> bool:
    """Prints the lines that only one of the two tables has. Returns true if there are none."""
    stored = TABLE.search(HEADER.read_text())
    assert stored is not None, f"no table in {HEADER}"
    kernel = re.compile(r"KernelCounts\{.*?\},(?=\s|$)", re.DOTALL)
    new, old = ({re.sub(r"\s", "", row) for row in kernel.findall(text)} for text in (table, stored[2]))
    print(*(f"counted {row}" for row in sorted(new - old)), *(f"stored {row}" for row in sorted(old - new)), sep="\n")
    return new == old


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare the table with instruction_counts.h")
    what.add_argument("--write", action="store_true", help="write the table into instruction_counts.h")
    options = parser.parse_args()
    if not is_set_up():
        print("kernel_counts.py: the compiler is not here: run sh benchmarks/agx/setup.sh", file=sys.stderr)
        return 2
    table = "".join(f"    {line}\n" for line in rows())
    if options.check:
        return 0 if same_table(table) else 1
    if not options.write:
        print(table, end="")
        return 0
    text, replaced = TABLE.subn(lambda match: match[1] + table + match[3], HEADER.read_text())
    if replaced != 1:
        raise RuntimeError(f"kernel_counts.py: expected one table in {HEADER}, found {replaced}")
    HEADER.write_text(text)
    subprocess.run(["clang-format", "-i", str(HEADER)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
