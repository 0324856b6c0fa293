"""Counts MLX's quantized products with the tool that counts ours, and compares our counts with MLX's and llama.cpp's.

    python -m lab.rivals.count            # prints a table of clocks from stored counts, in a second
    python -m lab.rivals.count --write    # writes it into lab/notes/few-rows.md
    python -m lab.rivals.count --check    # counts MLX's kernels, and exits with 1 if counts.csv has other counts
    python -m lab.rivals.count --store    # counts MLX's kernels, and stores the counts in counts.csv

The program downloads the wheel of MLX, which contains the source, if it is not cached. No package contains the source
of llama.cpp's kernels. Their rows were counted at the revisions in counts.csv, and this program does not change them.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from lab.counting import instructions
from lab.model import AppleSiliconGPU, Problem, Tiling
from lab.model.counts import KernelCounts, counts_of
from lab.model.geometry import FUSED_COLUMNS, FUSED_K, GEMV_COLUMNS, GEMV_K, SIMD_WIDTH
from lab.rivals.__main__ import FORMS, PAGE, Form
from lab.rivals.rivals import TABLE, Kernel, Rival, find, table
from scripts.page_section import section
from softmetal.proof.libraries import MLX, mlx_include

PROJECT, VERSION = "MLX", "0.32.4"
BASE = "mlx/backend/metal/kernels"
HEADERS = ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h")
GROUPS = {"affine": 64, "mxfp4": 32, "nvfp4": 16, "mxfp8": 32}
WIDE_ROWS = range(2, 6)
MATRIX_CLOCKS = 17
ROWS = (1, 4, 8, 32)


@dataclass(frozen=True)
class Source:
    """A kernel of MLX, the operands of its row in counts.csv, and how the tool compiles it.

    Attributes:
        kernel: "vector", "wide" or "matrix".
        format: the rival's format.
        rows: rows of a block.
        entry: the instance of the template, for example "affine_qmv_fast<half, 64, 4, false>".
        threads: threads of a threadgroup, as the option of the tool.
        weights: weights that a lane multiplies in one iteration of the innermost loop.
        level: the tool's optimization level.
    """

    kernel: str
    format: str
    rows: int
    entry: str
    threads: str
    weights: int
    level: str = "--O1"

    @property
    def header(self) -> str:
        """Returns the header that defines the kernel."""
        return "quantized.h" if self.format.startswith("affine") else "fp_quantized.h"


def sources() -> Iterator[Source]:
    """Yields the kernels in the order of counts.csv."""
    formats = ("affine4", "affine5", "affine6", "affine8", "mxfp4", "nvfp4", "mxfp8")
    for kernel in ("vector", "wide", "matrix"):
        for name in formats:
            is_affine = name.startswith("affine")
            bits, kind = int(name[-1]), "affine" if is_affine else "fp"
            group = GROUPS["affine" if is_affine else name]
            types = f"half, {group}, {bits}"
            if kernel == "vector":
                # With 5 bits, LLVM proves that a load is twice as long as its array, and removes the loop at -O1.
                values = {4: 16, 5: 16, 6: 8, 8: 8}[bits]
                level = "--O0" if bits == 5 else "--O1"
                yield Source(kernel, name, 1, f"{kind}_qmv_fast<{types}, false>", "64", 4 * values, level)
            elif kernel == "wide":
                lanes = 8 if is_affine else 16
                for rows in WIDE_ROWS:
                    entry = f"{kind}_qmv_wide<{types}, {rows}, {lanes}, false>"
                    yield Source(kernel, name, rows, entry, "64", group)
            else:
                yield Source(kernel, name, 32, f"{kind}_qmm_t<{types}, true, false>", "32x2x2", 8)


def counted(folder: Path, source: Source) -> Kernel:
    """Counts a kernel and returns its row.

    Raises:
        RuntimeError: the tool fails.
    """
    options = (source.entry, source.threads, source.level)
    found = instructions.run_tool(folder, f"{source.header}.metal", *options)
    # A second loop, for tiles at the edge, does the same work and checks its bounds.
    hot = min(
        (loop for loop in found["loops"] if loop["innermost"] and loop["device_load_bytes"]),
        key=lambda loop: loop["est_cycles"],
    )
    if found["spills"] or found["fills"]:
        raise RuntimeError(f"{source.entry}: expected no spills, got {found['spills']}")
    return Kernel(
        PROJECT, VERSION, source.kernel, source.format, source.rows, round(hot["est_cycles"] / source.weights, 1),
        hot["matrix_ops"] * MATRIX_CLOCKS / source.weights, found["half_registers"],
    )  # fmt: skip


def count() -> list[Kernel]:
    """Counts all kernels of MLX and returns their rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mlx").symlink_to(mlx_include(MLX) / "mlx")
        for header in {source.header for source in sources()}:
            lines = "".join(f'#include "{BASE}/{each}"\n' for each in (*HEADERS, header))
            (folder / f"{header}.metal").write_text(f"#include <metal_stdlib>\n{lines}")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda source: counted(folder, source), sources()))


def store(found: list[Kernel]) -> None:
    """Replaces MLX's rows of counts.csv."""
    kept = [row for row in table() if row.project != PROJECT]
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Kernel))
        writer.writerows([f"{value:g}" if isinstance(value, float) else value for value in astuple(row)]
                         for row in [*kept, *found])  # fmt: skip


def our_slots(row: KernelCounts, group_size: int) -> float:
    """Returns clocks of a scheduler per weight and lane, including matrix products and the ends of groups."""
    weights = row.N * row.K / SIMD_WIDTH
    ends = row.outer_issue * row.K / (row.outer_k or max(group_size, row.K))
    return max((row.issue + ends + MATRIX_CLOCKS * row.matrix) / weights, row.complex / weights)


def ours(form: Form, rows: int) -> float:
    """Returns the clocks for `rows` rows of gemv or fused, whichever takes fewer."""
    gpu = AppleSiliconGPU.from_name("M4")
    problem: Problem = form.problem(rows, 4096, 4096)
    tilings = [Tiling("fused", "gemm_fused", (-(-rows // 8) * 8, FUSED_COLUMNS, FUSED_K))]
    if rows <= 8:
        tilings.append(Tiling("gemv", "gemv", (rows, GEMV_COLUMNS, GEMV_K)))
    return min(our_slots(counts_of(tiling, tiling.tile[0], problem, gpu), form.group_size) for tiling in tilings)


def theirs(rival: Rival, rows: int) -> float | None:
    """Returns the rival's clocks for `rows` rows, or None if its kernel is not counted."""
    names = {"llama.cpp": ("vector", "columns", "few", "matrix"), "MLX": ("vector", "wide", "matrix")}[rival.project]
    clocks = []
    for name in names:
        row = find(rival, name, 1 if name == "vector" else rows) or find(rival, name, 1)
        if row is None or (name == "vector" and rows > 1) or (name != "vector" and rows == 1):
            continue
        blocks = -(-rows // row.rows) if name in ("wide", "matrix") else 1
        if name == "wide" and rows > 1:  # blocks of nearly equal sizes
            blocks = -(-rows // max(WIDE_ROWS))
            row = find(rival, name, max(2, -(-rows // blocks))) or row
        if row.clocks == 0:
            return None
        if rows <= row.rows * blocks:
            clocks.append(row.clocks * blocks)
    return min(clocks, default=None)


def clocks_table() -> str:
    lines = ["| weights | whose |" + "".join(f" {rows} |" for rows in ROWS), "|---" * (2 + len(ROWS)) + "|"]
    for form in FORMS:
        own = [ours(form, rows) for rows in ROWS]
        lines.append(f"| {form.name} | ours | " + " | ".join(f"{clocks:.1f}" for clocks in own) + " |")
        for rival in form.rivals:
            rows = [row for row in table() if (row.project, row.format) == (rival.project, rival.format)]
            versions = " and ".join(dict.fromkeys(row.version for row in rows))
            cells = (
                "not counted" if them is None else f"{them:.1f} ({us / them:.2f})"
                for them, us in zip((theirs(rival, M) for M in ROWS), own, strict=True)
            )
            lines.append(f"| | {rival.project} {versions} `{rival.format}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m lab.rivals.count", description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    for name in ("write", "check", "store"):
        what.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    if not (options.check or options.store):
        print(section(PAGE, "lab.rivals.count", clocks_table()) if options.write else clocks_table())
        return 0
    if not instructions.is_set_up():
        print("the compiler is not here: run sh lab/agx/setup.sh", file=sys.stderr)
        return 2
    found = count()
    if options.store:
        store(found)
        return 0
    stored = [row for row in table() if row.project == PROJECT]
    different = [*(("counted", row) for row in found if row not in stored),
                 *(("stored", row) for row in stored if row not in found)]  # fmt: skip
    for whose, row in different:
        print(whose, row)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
