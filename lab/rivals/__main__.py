"""Prints our predicted times beside those of llama.cpp and MLX at every number of rows from 1 to 64.

    python -m lab.rivals                      # the cells where our time is above 0.95 of theirs, and a summary
    python -m lab.rivals --all --csv all.csv  # all cells
    python -m lab.rivals --one-row            # one row on every chip: our time without the launch, over its bytes'

Nothing runs on a GPU. A cell is our time over the time of the fastest rival that reads files of the same format. Times
are those of the planner's choice by the lab's model, and of the rivals' kernels by the same model (rivals.py). Both
leave out tensor units.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.decisions import chosen
from lab.model import ExpertsProblem, Problem, costs
from lab.model.counts import NotCounted
from lab.rivals.rivals import Rival, seconds
from torch_marlin_metal.formats import WEIGHT_FORMATS
from torch_marlin_metal.profiling import AppleSiliconGPU

CHIPS = ("M1", "M1 Max", "M3 Max", "M4 Max", "M5 Max")
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096))
ROWS = range(1, 65)
EXPERTS, TOP_K = 8, 2
MOST = 0.95
# Below this ratio of issue and matrix time to memory time, the bytes decide.
BY_BYTES = 1.0


@dataclass(frozen=True)
class Form:
    """A format of files: our form of its weights, and the rivals' kernels for the same files."""

    name: str
    weight_format: str
    group_size: int
    scales: str | None
    rivals: tuple[Rival, ...]

    def problem(self, rows: int, N: int, K: int) -> Problem:
        """Returns a dense product."""
        return Problem(rows, N, K, self.weight_format, self.group_size, scales=self.scales)

    def mixture(self, tokens: int, N: int, K: int) -> ExpertsProblem:
        """Returns the same product with experts."""
        weight = {"weight_format": self.weight_format, "group_size": self.group_size, "scales": self.scales}
        return ExpertsProblem.of_tokens(tokens, TOP_K, EXPERTS, N, K, zeros=self.problem(1, N, K).zeros_type, **weight)


LLAMA = {name: Rival("llama.cpp", name) for name in ("q4_0", "q4_K", "q5_K", "q6_K", "q8_0", "mxfp4")}
FORMS = tuple(
    form
    for form in (
        Form("uint4b8 g32", "uint4b8", 32, None, (LLAMA["q4_0"], Rival("MLX", "affine4", 32))),
        Form("uint4b8 g64", "uint4b8", 64, None, (Rival("MLX", "affine4", 64),)),
        Form("uint4_bias g32", "uint4_bias", 32, None, (Rival("MLX", "affine4", 32),)),
        Form("uint4_bias g64", "uint4_bias", 64, None, (Rival("MLX", "affine4", 64),)),
        Form("Q4_K", "uint4_bias", 32, "uint8", (LLAMA["q4_K"],)),
        Form("Q5_K", "uint5_bias", 32, "uint8", (LLAMA["q5_K"],)),
        Form("Q6_K", "uint6b32", 16, "int8", (LLAMA["q6_K"],)),
        Form("MLX 6 bit g64", "uint6_bias", 64, None, (Rival("MLX", "affine6", 64),)),
        Form("Q8_0", "uint8b128", 32, None, (LLAMA["q8_0"],)),
        Form("MLX 8 bit g64", "uint8_bias", 64, None, (Rival("MLX", "affine8", 64),)),
        Form("MXFP4", "mxfp4", 32, None, (LLAMA["mxfp4"], Rival("MLX", "mxfp4"))),
        Form("NVFP4", "nvfp4", 16, None, (Rival("MLX", "nvfp4"),)),
        Form("MXFP8", "mxfp8", 32, None, (Rival("MLX", "mxfp8"),)),
        Form("FP8 in blocks of 128", "float8_e4m3", 128, None, (Rival("MLX", "mxfp8"),)),
    )
    if form.weight_format in WEIGHT_FORMATS
)


@dataclass(frozen=True)
class Cell:
    """Our time and the fastest rival's, in seconds, and what takes longest in ours."""

    form: str
    experts: bool
    chip: str
    N: int
    K: int
    rows: int
    ours: float
    theirs: float
    tiling: str
    memory: float
    bound: str
    rival_bytes: float

    @property
    def ratio(self) -> float:
        """Returns our time over theirs."""
        return self.ours / self.theirs

    @property
    def reason(self) -> str:
        """Returns why the ratio is not lower."""
        if self.bound in ("dram", "launch"):
            return (
                f"memory: {self.memory / self.ours:.0%} of our time is reading as many bytes x {self.rival_bytes:.2f}"
            )
        return f"{self.bound}: both loops take longer than memory ({self.memory / self.ours:.0%} of our time)"


def cells(chips: tuple[str, ...], rows: range | list[int]) -> Iterator[Cell]:
    """Yields the cells of all formats, dense and with experts, where the tool counted our kernels and theirs."""
    for form in FORMS:
        for chip in chips:
            gpu = AppleSiliconGPU.from_name(chip)
            for N, K in SHAPES:
                for experts in (0, EXPERTS):
                    for M in rows:
                        times = {r: seconds(r, M, N, K, gpu, experts, TOP_K) for r in form.rivals}
                        known = {r: time for r, time in times.items() if time is not None}
                        if len(known) < len(times):
                            continue
                        problem = form.mixture(M, N, K) if experts else form.problem(M, N, K)
                        tiling = chosen(gpu, problem)
                        try:
                            cost = costs(problem, tiling, gpu)
                        except NotCounted:
                            continue
                        longest = max(cost.dispatches, key=lambda dispatch: float(dispatch.seconds))
                        rival = min(known, key=lambda r: known[r])
                        ours_bytes = form.problem(M, N, K).weight_bytes
                        yield Cell(
                            form.name, bool(experts), chip, N, K, M, float(cost.seconds), known[rival],
                            f"{tiling.name} x{tiling.simdgroups} /{tiling.splits}", longest.dram_seconds,
                            longest.bound, ours_bytes / (N * K * rival.bytes_per_weight),
                        )  # fmt: skip


def one_row(form: Form, gpu: AppleSiliconGPU) -> float | None:
    """Returns the time of one row without launches, over the time of the bytes that it moves; None if not counted."""
    problem = form.problem(1, *SHAPES[1])
    try:
        dispatches = costs(problem, chosen(gpu, problem), gpu).dispatches
    except NotCounted:
        return None
    moved = sum(dispatch.dram_seconds for dispatch in dispatches)
    return float(sum(dispatch.seconds - dispatch.launch_seconds for dispatch in dispatches) / moved)


def print_one_row() -> None:
    """Prints a line for each chip, with a number for each format."""
    print("chip", *(form.name for form in FORMS), sep=" | ")
    for name in AppleSiliconGPU.names():
        gpu = AppleSiliconGPU.from_name(name)
        ratios = (one_row(form, gpu) for form in FORMS)
        print(name, *("not counted" if ratio is None else f"{ratio:.3f}" for ratio in ratios), sep=" | ")


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m lab.rivals", description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="print all cells")
    parser.add_argument("--csv", type=Path, help="write all cells into a file")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--chips", nargs="*", default=CHIPS)
    parser.add_argument("--one-row", action="store_true", help="print the time of one row over its bytes, and end")
    options = parser.parse_args()
    if options.one_row:
        print_one_row()
        return 0
    found = sorted(cells(tuple(options.chips), options.rows), key=lambda cell: -cell.ratio)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*Cell.__dataclass_fields__, "ratio", "reason"])
            for cell in found:
                writer.writerow([*vars(cell).values(), f"{cell.ratio:.3f}", cell.reason])
    for cell in found:
        if options.all or cell.ratio > MOST:
            kind = "experts" if cell.experts else "dense"
            print(
                f"{cell.ratio:.2f} {cell.form}, {kind}, {cell.chip}, {cell.N} x {cell.K}, {cell.rows} rows: "
                f"{1e6 * cell.ours:.0f} us, theirs {1e6 * cell.theirs:.0f} us, {cell.tiling}; {cell.reason}"
            )
    for form in dict.fromkeys(cell.form for cell in found):
        own = [cell.ratio for cell in found if cell.form == form]
        above = f"{sum(ratio > MOST for ratio in own)} above {MOST}, {sum(ratio > 1 for ratio in own)} above 1"
        print(f"{form}: {len(own)} cells, {above}, most {max(own):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
