"""Counts the instructions for csrc/planner/instruction_counts.h with the tool of instructions.py; --write stores them.

Counts one format of each code kind, with fp16 activations, groups of 64, aligned tensors and no options. A kernel that
the tool cannot compile gets the counts of single_stage.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instructions import FUSED_K, Case, cases, measure, readable_copy

HEADER = Path(__file__).resolve().parents[2] / "csrc" / "planner" / "instruction_counts.h"
TABLE = re.compile(r"(inline constexpr std::array kKernelCounts\{\n)(.*?)(^\};\n)", re.DOTALL | re.MULTILINE)
FORMATS = ("uint4b8", "float4_e2m1", "lut4")
GEMV_TILE = "{{{rows}, 128, 16}}"
FUSED_CHAIN_K = 256


def counted_cases() -> Iterator[Case]:
    """Yields the cases that the planner can ask for, in the order of the table."""
    for case in cases():
        if case.weight_format in FORMATS and case.dtype == "float16" and case.group_size == 64:
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


def rows(agxstat: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        readable_copy(Path(folder))
        for case in counted_cases():
            counted = measure(agxstat, Path(folder), case)
            if isinstance(counted, dict):
                yield row(case, counted)
                continue
            other = case.kernel.replace("double_buffered", "single_stage")
            stand_in = Case(other, case.library, case.weight_format, rows=case.rows, threads=case.threads)
            counted = measure(agxstat, Path(folder), stand_in)
            if isinstance(counted, str) or other == case.kernel:
                raise RuntimeError(f"kernel_counts.py: {case.kernel}: {counted}")
            yield "// The offline compiler fails on this kernel; single_stage's counts are used."
            yield row(case, counted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agxstat", default=os.environ.get("AGXSTAT") or shutil.which("agxstat"), help="the tool")
    parser.add_argument("--write", action="store_true", help="write the table into csrc/planner/instruction_counts.h")
    options = parser.parse_args()
    if not options.agxstat or "AGX_DIR" not in os.environ:
        print("kernel_counts.py: agxstat is not here: see instructions.py", file=sys.stderr)
        return 2
    table = "".join(f"    {line}\n" for line in rows(options.agxstat))
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
