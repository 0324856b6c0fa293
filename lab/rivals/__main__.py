"""Compares our predicted times with those of llama.cpp and MLX at 1 to 64 rows.

    python -m lab.rivals              # the tables of lab/notes/few-rows.md, about 20 seconds
    python -m lab.rivals --write      # writes them there
    python -m lab.rivals --one-row    # one row on every chip: our time without the launch, over a read's time

No kernel is executed. A cell is our time divided by the time of the fastest rival that reads files of the same format.
Our time is what the lab's model predicts for the planner's choice. The same model predicts the times of the rivals'
kernels (rivals.py).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.choices import chosen
from lab.model import ExpertsProblem, Problem, Tiling, costs
from lab.rivals.rivals import Rival, Time, fastest, on_tensor_units
from scripts.page_section import main as print_or_write
from torch_marlin_metal.profiling import AppleSiliconGPU

PAGE = Path(__file__).resolve().parents[1] / "notes" / "few-rows.md"
CHIPS = ("M1", "M1 Max", "M3 Max", "M4 Max", "M5 Max")
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096))
ROWS = (1, 2, 4, 8, 16, 32, 64)
EXPERTS, TOP_K = 8, 2
MOST = 0.95
UNITS = {
    "dram": "bytes", "l2": "cache", "issue": "issue slots", "complex": "complex unit", "matrix": "matrix clocks",
    "occupancy": "waits", "launch": "launch", "tensor": "rate of tensor units",
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """A file format: the format that this package uses for its weights, and the rivals that read the same files."""

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
        weight: dict[str, Any] = {
            "weight_format": self.weight_format,
            "group_size": self.group_size,
            "scales": self.scales,
        }
        return ExpertsProblem.of_tokens(tokens, TOP_K, EXPERTS, N, K, zeros=self.problem(1, N, K).zeros_type, **weight)


LLAMA = {name: Rival("llama.cpp", name) for name in ("q4_0", "q4_K", "q5_K", "q6_K", "q8_0", "mxfp4")}
FORMS = (
    Form("uint4b8 g32", "uint4b8", 32, None, (LLAMA["q4_0"], Rival("MLX", "affine4", 32))),
    Form("uint4b8 g64", "uint4b8", 64, None, (Rival("MLX", "affine4", 64),)),
    Form("uint4_bias g32", "uint4_bias", 32, None, (Rival("MLX", "affine4", 32),)),
    Form("uint4_bias g64", "uint4_bias", 64, None, (Rival("MLX", "affine4", 64),)),
    Form("Q4_K", "uint4_bias", 32, "uint8", (LLAMA["q4_K"],)),
    Form("Q5_K", "uint5_bias", 32, "uint8", (LLAMA["q5_K"],)),
    Form("MLX 5 bit g64", "uint5_bias", 64, None, (Rival("MLX", "affine5", 64),)),
    Form("Q6_K", "uint6b32", 16, "int8", (LLAMA["q6_K"],)),
    Form("MLX 6 bit g64", "uint6_bias", 64, None, (Rival("MLX", "affine6", 64),)),
    Form("Q8_0", "uint8b128", 32, None, (LLAMA["q8_0"],)),
    Form("MLX 8 bit g64", "uint8_bias", 64, None, (Rival("MLX", "affine8", 64),)),
    Form("MXFP4", "mxfp4", 32, None, (LLAMA["mxfp4"], Rival("MLX", "mxfp4"))),
    Form("NVFP4", "nvfp4", 16, None, (Rival("MLX", "nvfp4"),)),
    Form("MXFP8", "mxfp8", 32, None, (Rival("MLX", "mxfp8"),)),
    Form("FP8, blocks of 128", "float8_e4m3", 128, None, (Rival("MLX", "mxfp8"),)),
)


@dataclass(frozen=True)
class Cell:
    """A cell of the table: the time of this package's kernel, and that of the fastest rival.

    Attributes:
        least: whether the rival's kernel runs on tensor units, so that its real time may be longer than predicted.
    """

    form: str
    experts: bool
    chip: str
    N: int
    K: int
    rows: int
    ours: Time
    theirs: Time
    byte_ratio: float
    least: bool

    @property
    def ratio(self) -> float:
        """Returns our time divided by theirs."""
        return self.ours.seconds / self.theirs.seconds

    @property
    def kind(self) -> str:
        """Returns "dense" or "experts"."""
        return "experts" if self.experts else "dense"

    @property
    def reason(self) -> str:
        """Returns why the ratio is not lower."""
        ours, theirs = UNITS[self.ours.bound], UNITS[self.theirs.bound]
        if self.least:
            return f"ours: {ours}; theirs on tensor units, at least: {theirs}"
        if self.ours.bound == self.theirs.bound == "dram":
            return f"both: bytes, ours {self.byte_ratio:.2f} of theirs"
        return f"both: {ours}" if ours == theirs else f"ours: {ours}; theirs: {theirs}"


def our_time(problem: Problem | ExpertsProblem, tiling: Tiling, gpu: AppleSiliconGPU) -> Time:
    """Returns the time of a tiling, and the bound of its longest dispatch."""
    cost = costs(problem, tiling, gpu)
    longest = max(cost.dispatches, key=lambda dispatch: float(dispatch.seconds))
    return Time(float(cost.seconds), longest.bound)


def cell(form: Form, experts: int, gpu: AppleSiliconGPU, N: int, K: int, rows: int) -> Cell:
    """Returns a cell. 0 experts mean a dense product."""
    problem = form.mixture(rows, N, K) if experts else form.problem(rows, N, K)
    times = {rival: fastest(rival, rows, N, K, gpu, experts, TOP_K) for rival in form.rivals}
    rival = min(times, key=lambda each: times[each].seconds)
    bytes_ratio = form.problem(rows, N, K).weight_bytes / (N * K * rival.bytes_per_weight)
    ours = our_time(problem, chosen(gpu, problem), gpu)
    least = on_tensor_units(rival, rows, gpu)
    return Cell(form.name, bool(experts), gpu.name, N, K, rows, ours, times[rival], bytes_ratio, least)


def cells(chips: tuple[str, ...] = CHIPS, rows: Iterable[int] = ROWS) -> Iterator[Cell]:
    """Yields the cells of all formats, dense and with experts."""
    for form in FORMS:
        for experts in (0, EXPERTS):
            for chip in chips:
                gpu = AppleSiliconGPU.from_name(chip)
                yield from (cell(form, experts, gpu, N, K, M) for M in rows for N, K in SHAPES)


def _grouped(found: Iterable[Cell], key: str) -> dict[tuple[object, ...], list[Cell]]:
    groups: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for each in found:
        groups[tuple(getattr(each, name) for name in key.split())].append(each)
    return groups


def _names(values: Iterable[object], order: Iterable[object]) -> str:
    """Joins the values in the order of `order`. If all of more than two values occur, returns "all"."""
    found, known = set(values), list(order)
    return "all" if len(known) > 2 and found == set(known) else ", ".join(str(each) for each in known if each in found)


def summary(found: list[Cell]) -> Iterator[str]:
    """Yields a table with a line for each format. Cells whose rival runs on tensor units are left out."""
    yield "| weights | cells | above 1 | above 0.95 | most, dense | most, experts |\n|---|---|---|---|---|---|"
    for (form,), own in _grouped((each for each in found if not each.least), "form").items():
        above = [sum(each.ratio > limit for each in own) for limit in (1, MOST)]
        most = [max(each.ratio for each in own if each.experts == experts) for experts in (False, True)]
        yield f"| {form} | {len(own)} | {above[0]} | {above[1]} | {most[0]:.2f} | {most[1]:.2f} |"


def above(found: list[Cell]) -> Iterator[str]:
    """Yields a table of the cells above 0.95. Cells with the same reason share a line.

    The largest ratios come first. Cells whose rival runs on tensor units come last, all formats together.
    """
    yield "| most | cells | weights | kind | rows | chips | reason |\n|---|---|---|---|---|---|---|"
    over = [each for each in found if each.ratio > MOST]
    alone = _grouped((each for each in over if not each.least), "form kind reason")
    on_units = _grouped((each for each in over if each.least), "kind reason")
    for groups in (alone, on_units):
        for own in sorted(groups.values(), key=lambda own: -max(each.ratio for each in own)):
            forms = _names((each.form for each in own), (form.name for form in FORMS))
            rows = _names((each.rows for each in own), ROWS)
            chips = _names((each.chip for each in own), CHIPS)
            most = max(each.ratio for each in own)
            yield f"| {most:.2f} | {len(own)} | {forms} | {own[0].kind} | {rows} | {chips} | {own[0].reason} |"


def section() -> str:
    found = list(cells())
    return "\n".join([*summary(found), "", "### Cells above 0.95", "", *above(found)])


def one_row(form: Form, gpu: AppleSiliconGPU) -> float:
    """Returns the time of one row without launches, divided by the time of the bytes that it moves."""
    problem = form.problem(1, *SHAPES[1])
    dispatches = costs(problem, chosen(gpu, problem), gpu).dispatches
    moved = sum(dispatch.dram_seconds for dispatch in dispatches)
    return float(sum(dispatch.seconds - dispatch.launch_seconds for dispatch in dispatches) / moved)


def print_one_row() -> None:
    print("chip", *(form.name for form in FORMS), sep=" | ")
    for name in AppleSiliconGPU.names():
        gpu = AppleSiliconGPU.from_name(name)
        print(name, *(f"{one_row(form, gpu):.3f}" for form in FORMS), sep=" | ")


if __name__ == "__main__":
    if sys.argv[1:] == ["--one-row"]:
        print_one_row()
    else:
        print_or_write(PAGE, "lab.rivals", section)
