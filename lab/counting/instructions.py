"""Counts instructions in the hot loops of the Metal matrix kernels for an M1 GPU, with Mesa's compiler.

The program executes no kernel and needs no Mac. `sh lab/agx/setup.sh` builds the compiler once. The counts are not
times, and Apple's compiler may differ by 10 to 20 %; lab/agx/README.md has the limits.

Counts are per weight and lane in the innermost loop. "all" also counts the code at the ends of groups and the code that
adds partial sums to the totals. The exit code is 0 if every count is within its limit, 1 if a count exceeds its limit,
and 2 if the compiler is missing.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch_marlin_metal.formats import WEIGHT_FORMATS, WeightFormat

ROOT = Path(__file__).resolve().parents[2]
AGXSTAT = ROOT / "lab" / "agx" / "agxstat.py"
FORMATS = tuple(WEIGHT_FORMATS)
ELEMENT_TYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "uint8": 3, "int8": 4}
# Group size and scale type of the file formats with two levels of scales: Q4_K, IQ4_XS, Q5_K, Q6_K.
TWO_LEVELS = {
    "uint4_bias": (32, "uint8"),
    "lut4": (32, "int8"),
    "uint5_bias": (32, "uint8"),
    "uint6b32": (16, "int8"),
}
# Group sizes of common files (Q8_0). These groups are so short that scales take more of fused's loop than with groups
# of 64.
SHORT_GROUPS = {"uint8b128": 32}
# Mesa's compiler fails on this kernel, because it does not unroll the loops over the array of accumulators.
UNCOUNTED = ("gemm_double_buffered_128x128x16", "lut4")
# The tile of 128 x 128 needs more registers than a thread has. The model never prefers it.
MOST_SPILLS = {"gemm_double_buffered_128x128x16": 16}
# For each kind of codes, the limits of gemv's loop for one row: instructions and complex-unit clocks per weight.
ONE_ROW = {"int4": (1.9, 1.0), "e2m1": (3.8, 2.0), "int8": (2.3, 1.0), "e4m3": (4.5, 2.0)}
# Iterations of fused's innermost loop for each chain of sums.
FUSED_CHAIN = 4
FUSED_K = 64
# For each kernel for experts, the kernel with the same body.
SHARED_BODIES = {
    "moe_gemv": ("gemv", "gemm/gemv"),
    "moe_gemv_gated": ("gemv", "gemm/gemv"),
    "moe_gemv_reduce": ("gemv", "gemm/gemv"),
    "moe_gemv_blocks": ("gemv", "gemm/gemv"),
    "moe_fused": ("gemm_fused", "gemm/fused"),
}
# Limit of the instructions in an experts kernel's hot loop, as a multiple of those of the kernel with the same body.
MOST_OF_SHARED_BODY = 1.02
HELD = "held"
LIST_KERNELS = """
#include <cstdio>
#include "kernels/shared/kernel_list.h"
#define TILE(M, N, K, ...) std::printf("tile %dx%dx%d %u\\n", M, N, K, marlin::tile_threads({M, N, K}));
int main() {
  for (const auto& kernel : marlin::kKernels) {
    std::printf("%s %s\\n", std::string(kernel.library).c_str(), std::string(kernel.name).c_str());
  }
  MARLIN_TILES(TILE)
}
"""


@dataclass(frozen=True)
class Case:
    """One specialised kernel."""

    kernel: str
    library: str
    weight_format: str
    dtype: str = "float16"
    group_size: int = 64
    rows: int = 0  # per threadgroup
    threads: int = 128
    weights: int = 64  # weights that a lane multiplies in one iteration of the innermost loop
    levels: int = 1  # of the scales

    @property
    def traits(self) -> WeightFormat:
        """Returns the entry of `weight_format` in WEIGHT_FORMATS."""
        return WEIGHT_FORMATS[self.weight_format]

    def constants(self) -> dict[str, int]:
        """Returns the function constants of the fastest case: aligned tensors, whole tiles, no options."""
        scales = "uint8" if self.traits.has_coded_scales else "float16"
        zeros = "uint8" if self.traits.zeros_role == "zero_point" else "float16"
        if self.levels == 2:
            scales = TWO_LEVELS[self.weight_format][1]
            zeros = "uint8"
        return {
            "vector_columns": 1,
            "vector_activations": 1,
            "rows_per_threadgroup": self.rows,
            "subnormal_codes": 1,
            "scales_type": ELEMENT_TYPES[scales],
            "zeros_type": ELEMENT_TYPES[zeros],
            "super_type": ELEMENT_TYPES["float16"],
            "has_global_scale": int(self.traits.has_global_scale),
            "short_group_size": self.group_size if self.group_size < FUSED_K else 0,
        }


# A line of the table: the value of each column.
Row = dict[str, Any]


def usual_group(weight_format: str) -> int:
    return WEIGHT_FORMATS[weight_format].fixed_group_size or 64


def forms(dtype: str) -> Iterator[tuple[str, int, int]]:
    """Yields the formats to count, each with a group size and the levels of its scales.

    With bf16 and fp32 activations, it yields all formats of 4-bit codes, one format of every other kind of codes, and
    no scales of two levels.
    """
    kinds = set()
    for weight_format, traits in WEIGHT_FORMATS.items():
        kind = (traits.code_kind, traits.code_bits)
        if dtype == "float16" or traits.code_bits == 4 or kind not in kinds:
            yield weight_format, usual_group(weight_format), 1
        kinds.add(kind)
        if dtype != "float16":
            continue
        if weight_format in SHORT_GROUPS:
            yield weight_format, SHORT_GROUPS[weight_format], 1
        if weight_format in TWO_LEVELS:
            yield weight_format, TWO_LEVELS[weight_format][0], 2


def cases() -> Iterator[Case]:
    """Yields the cases to count.

    gemv, fused and their variants for experts are counted with all formats and activations, the other kernels with all
    formats and fp16.
    """
    shapes = [("gemv", "gemm/gemv", rows, 256) for rows in range(1, 9)]
    shapes += [("gemm_fused", "gemm/fused", rows, 128) for rows in (8, 16, 24, 32)]
    for kernel, library, rows, threads in shapes:
        for weight_format in ("uint4b8", "float4_e2m1"):
            for group in (16, 32, 128):
                yield Case(kernel, library, weight_format, group_size=group, rows=rows, threads=threads)
    experts = [("moe_gemv", "experts/moe_gemv", 1, 256), ("moe_gemv_gated", "experts/moe_gemv_gated", 1, 256)]
    experts += [("moe_gemv_reduce", "experts/moe_gemv_reduce", 1, 512)]
    experts += [("moe_gemv_blocks", "experts/moe_gemv_blocks", rows, 256) for rows in range(1, 5)]
    experts += [("moe_fused", "experts/moe_fused", rows, 128) for rows in (8, 16, 24, 32)]
    for kernel, library, rows, threads in (*shapes, *experts):
        for dtype in ("float16", "bfloat16", "float32"):
            for weight_format, group, levels in forms(dtype):
                yield Case(kernel, library, weight_format, dtype, group, rows, threads, levels=levels)
    for library, kernel, (m, n, k), threads in staged_kernels():
        for weight_format in FORMATS:
            group = usual_group(weight_format)
            weights = n * k // threads
            yield Case(kernel, library, weight_format, group_size=group, rows=m, threads=threads, weights=weights)


def staged_kernels() -> Iterator[tuple[str, str, tuple[int, int, int], int]]:
    """Yields library, name, tile and threads of each kernel with a tile in its name, as kernel_list.h lists them."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "kernels"
        compiler = [os.environ.get("CXX", "c++"), "-std=c++20", "-I", str(ROOT), "-x", "c++", "-", "-o", str(program)]
        subprocess.run(compiler, input=LIST_KERNELS, text=True, check=True)
        listed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split("\n")
    threads = {line.split()[1]: int(line.split()[2]) for line in listed if line.startswith("tile ")}
    for library, kernel in (line.split() for line in listed if line.count(" ") == 1):
        tile = re.search(r"\d+x\d+x\d+$", kernel)
        if tile:
            m, n, k = map(int, tile[0].split("x"))
            yield library, kernel, (m, n, k), threads[tile[0]]


def readable_copy(folder: Path) -> None:
    """Copies the kernels, and rewrites what the tool cannot read: macros of function constants, const references."""
    shutil.copytree(ROOT / "kernels", folder / "kernels")
    rows = re.findall(r"X\((\d+), (\w+), (\w+), \w+\)", (folder / "kernels/shared/slots.h").read_text())
    declarations = "\n".join(f"constant {kind} {name} [[function_constant({i})]];" for i, kind, name in rows)
    for path in filter(Path.is_file, folder.rglob("*")):
        text = path.read_text().replace("MARLIN_FUNCTION_CONSTANTS(MARLIN_DECLARE_CONSTANT)", declarations)
        path.write_text(re.sub(r"\b(?:thread const|const thread) (?=[\w<>, ]+&)", "__private const ", text))


def is_set_up() -> bool:
    """Returns whether setup.sh has built the compiler, in its default folder or in AGX_DIR."""
    return (Path(os.environ.get("AGX_DIR", ROOT / "build" / "agx")) / "usr/local/bin/asahi_clc").exists()


def measure_all(folder: Path, chosen: Iterable[Case]) -> list[dict[str, Any] | str]:
    """Measures all cases, several at a time."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda case: measure(folder, case), chosen))


def defines(constants: dict[str, int]) -> list[str]:
    """Returns the options that give function constants their values."""
    return [argument for name, value in constants.items() for argument in ("-D", f"{name}={value}")]


def run_tool(folder: Path, source: str, entry: str, threads: int | str, *options: str) -> dict[str, Any]:
    """Returns the tool's counts of one kernel of a source below `folder`.

    Raises:
        RuntimeError: the tool fails. The message has the kernel and the tool's last line.
    """
    command = [sys.executable, str(AGXSTAT), source, "-I", ".", "--entry", entry, "--threads", str(threads), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{entry}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    counted: dict[str, Any] = json.loads(done.stdout)
    return counted


@cache
def measure(folder: Path, case: Case) -> dict[str, Any] | str:
    """Returns the tool's counts for one kernel, or the tool's error message."""
    entry = f"{case.kernel}_{case.weight_format}_{case.dtype}"
    try:
        source = f"kernels/{case.library}.metal"
        return run_tool(folder, source, entry, case.threads, *defines(case.constants()), "--O1")
    except RuntimeError as error:
        return str(error)


def shared_body(case: Case) -> Case | None:
    """Returns the case of the kernel with the same body as an experts kernel, or None for other kernels."""
    if case.kernel not in SHARED_BODIES:
        return None
    kernel, library = SHARED_BODIES[case.kernel]
    return replace(case, kernel=kernel, library=library)


def count(folder: Path, case: Case) -> Row | str:
    counted = measure(folder, case)
    if isinstance(counted, str):
        return counted
    body = shared_body(case)
    if body is None:
        return figures(case, counted)
    shared = measure(folder, body)
    if isinstance(shared, str):
        return shared
    return figures(case, counted, MOST_OF_SHARED_BODY * figures(body, shared)["instr."])


@dataclass(frozen=True)
class Loops:
    """The loops of a kernel that determine its speed.

    With bf16 and fp32 activations, gemv has two innermost loops. The slower loop handles very small activations.

    Attributes:
        hot: the faster innermost loop.
        innermost: both innermost loops, or the only one.
        outer: the loop around the innermost loops, or `hot` if there is none.
    """

    hot: dict[str, Any]
    innermost: tuple[dict[str, Any], ...]
    outer: dict[str, Any]

    @classmethod
    def of(cls, counted: dict[str, Any]) -> "Loops":
        """Finds the loops in the tool's counts of a kernel."""
        loops = counted["loops"]
        hot = loops[counted["hot_loop"]]
        same = [o for o in loops if o["innermost"] and o["device_load_bytes"] == hot["device_load_bytes"]]
        hot = min(same, key=lambda o: o["est_cycles"])
        around = [o for o in loops if o["start"] <= hot["start"] and o["end"] >= hot["end"] and o is not hot]
        outer = min(around, key=lambda o: o["end"] - o["start"]) if around else hot
        return cls(hot, tuple(same), outer)


def figures(case: Case, counted: dict[str, Any], most_instructions: float | None = None) -> Row:
    """Returns the counts of the hot loop, plus a share of the counts of the loop around it.

    Args:
        case: what was counted.
        counted: what `measure` returned.
        most_instructions: an additional limit of the hot loop's instructions per weight.
    """
    loops = Loops.of(counted)
    hot, outer = loops.hot, loops.outer
    # An iteration of the outer loop is a group in gemv and a chain in fused.
    weights_k = case.weights // 4
    trips = (
        FUSED_CHAIN if case.kernel in ("gemm_fused", "moe_fused") else max(min(case.group_size, 128) // weights_k, 1)
    )

    def whole(name: str) -> float:
        return float(hot[name] + (outer[name] - sum(o[name] for o in loops.innermost)) / trips) / case.weights

    matrix = hot["matrix_cycles"]
    row: Row = {
        "kernel": case.kernel,
        "format": case.weight_format,
        "activations": case.dtype,
        "group": case.group_size,
        "levels": case.levels,
        "rows": case.rows,
        "instr.": hot["instructions"] / case.weights,
        "instr. all": whole("instructions"),
        "conv.": hot["converts"] / case.weights,
        "complex cycles": hot["ic_cycles"] / case.weights,
        "matrix clocks": matrix / case.weights,
        "estimate": hot["est_cycles"] / case.weights,
        "estimate all": whole("est_cycles"),
        "load bytes": hot["device_load_bytes"] / case.weights,
        "est. per MMA": hot["est_cycles"] / hot["matrix_ops"] if matrix else 0.0,
        "est. / matrix": hot["est_cycles"] / matrix if matrix else 0.0,
        "half-regs": counted["half_registers"],
        "spills": counted["spills"] + counted["fills"],
        "loop bytes": hot["code_bytes"],
        "code bytes": counted["code_bytes"],
    }
    return row | {"bars": "; ".join(missed_bars(case, row, most_instructions)) or HELD}


def missed_bars(case: Case, row: Row, most_instructions: float | None) -> Iterator[str]:
    """Yields the limits that a case exceeds.

    Limits of gemv apply only to fp16 in groups of 64 or of the format's fixed size.
    """
    kind = {"integer": f"int{case.traits.code_bits}"}.get(case.traits.code_kind, case.traits.code_kind)
    bars: dict[str, float] = {"spills": MOST_SPILLS.get(case.kernel, 0)}
    if most_instructions is not None:
        bars["instr."] = most_instructions
    is_usual = case.dtype == "float16" and case.group_size == usual_group(case.weight_format)
    if case.kernel == "gemv" and kind in ONE_ROW and is_usual:
        bars["conv."] = 0
        if case.rows == 1:
            bars["instr."], bars["complex cycles"] = ONE_ROW[kind]
            bars["half-regs"] = 104
        if case.rows == 4 and kind == "int4":
            bars["instr."] = 5.2
    if case.kernel == "gemm_fused":
        bars["half-regs"] = 208
        bars["loop bytes"] = 12 * 1024
        ratio = {"int4": {8: 1.40, 16: 1.28, 32: 1.20}, "e2m1": {8: 1.60, 16: 1.40, 32: 1.25}}.get(kind, {})
        if case.rows in ratio:
            bars["est. / matrix"] = ratio[case.rows]
    for name, limit in bars.items():
        if round(row[name], 3) > limit:
            yield f"{name} {row[name]:.2f} > {limit:g}"


def print_table(rows: list[Row]) -> None:
    cells = [list(rows[0])] if rows else []
    cells += [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="kernels whose host name contains this")
    options = parser.parse_args()
    if not is_set_up():
        print("instructions.py: the compiler is not here: run sh lab/agx/setup.sh", file=sys.stderr)
        return 2
    chosen = [c for c in cases() if options.only in f"{c.kernel}_{c.weight_format}_{c.dtype}"]
    left_out = [c for c in chosen if (c.kernel, c.weight_format) == UNCOUNTED]
    chosen = [c for c in chosen if c not in left_out]
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        readable_copy(Path(folder))
        bodies = [body for body in map(shared_body, chosen) if body is not None]
        measure_all(Path(folder), dict.fromkeys([*chosen, *bodies]))
        counted = [count(Path(folder), case) for case in chosen]
    rows = [row for row in counted if isinstance(row, dict)]
    failures = [row for row in counted if isinstance(row, str)]
    print_table(rows)
    print(*failures, sep="\n", end="\n" if failures else "")
    print(*(f"not counted, see UNCOUNTED: {c.kernel}_{c.weight_format}" for c in left_out), sep="\n")
    return 1 if failures or any(row["bars"] != HELD for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
