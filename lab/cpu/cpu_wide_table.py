"""Writes the tables of cpu_wide.md from the records of cpu_wide.py.

    python -m lab.cpu.cpu_wide_table TIMES COUNTS

A cell compares one weight with one rival. For each cell below 1.0, a letter says what limits this package's kernel
(`reason`). The letter is derived from three comparisons of the same line: the rate of reading the weight with that of a
plain read, the time of the product instructions with the kernel's time, and the number of instructions with the
rival's.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.cpu.cpu_wide import ONE_LEVEL
from scripts.page_section import section

PAGE = Path(__file__).with_name("cpu_wide.md")
MEMORY, UNIT, MORE, CACHED, BOTH = 0.85, 0.7, 1.05, 0.7, 0.9  # the borders of `reason`
ISAS = {"avx2": "AVX2", "avx512": "AVX-512", "amx": "AMX"}
Counts = dict[tuple[str, str, int, str], dict[str, float]]
Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def counts_of(lines: list[Line]) -> Counts:
    """Returns the instructions per weight. The keys are instruction set, activations, rows and kernel."""
    found = {}
    for line in lines:
        dtypes = ("bf16", "fp32") if line["kernel"].startswith("ggml") else (line["a"],)
        for dtype in dtypes:
            found[line["isa"], dtype, line["M"], line["kernel"]] = line["counts"]
    return found


def counted(counts: Counts, line: Line, kernel: str) -> tuple[int, dict[str, float]] | None:
    """Returns (M, counts) of a kernel for the largest counted M that is at most the line's M.

    Counts of 64 rows are used for 512. Otherwise, if the line's M is at least four times the counted M, the result is
    None: with such different numbers of rows, a program may choose other kernels.
    """
    rows = [M for isa, dtype, M, name in counts if (isa, dtype, name) == (line["isa"], line["a"], kernel)]
    rows = [M for M in rows if M <= line["M"] < 4 * M or M == 64 < line["M"]]
    return (max(rows), counts[line["isa"], line["a"], max(rows), kernel]) if rows else None


def product_us(counts: Counts, line: Line) -> float:
    """Returns the time of this package's product instructions, if the threads executed nothing else."""
    rows, kinds = counted(counts, line, line["weight"]) or (1, {})
    K, N = (int(size) for size in line["shape"].split("x"))
    weights, total = K * N, 0.0
    for kind, rate in line["rates"].items():
        tiles = kind.startswith("tile")
        times = -(-line["M"] // 16) / -(-rows // 16) if tiles else line["M"] / rows
        total += kinds.get(kind, 0.0) * times * weights / rate
    return total * 1e6


def reason(line: Line, counts: Counts, rival: str) -> str:
    """Returns the letter for what makes this package's kernel slower than the rival's; cpu_wide.md explains it."""
    products = product_us(counts, line)
    if line["bytes"] / line["us"] * 1e6 >= MEMORY * line["read"]:
        return "m"
    if products >= min(line["rival_us"][rival], UNIT * line["us"]):
        return "p"
    ours, theirs = counted(counts, line, line["weight"]), counted(counts, line, line["rivals"][rival])
    if ours and theirs and ours[1]["all"] / ours[0] > MORE * theirs[1]["all"] / theirs[0]:
        return "i"
    if line["cached_us"] >= min(line["rival_us"][rival], CACHED * line["us"]):
        return "c"
    return "b" if line["cached_us"] + line["bytes"] / line["read"] * 1e6 >= BOTH * line["us"] else "w"


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (columns, *rows)]
    lines.insert(1, "|" + "---|" * len(columns))
    return "\n".join(lines) + "\n"


def by_weight(lines: list[Line], cell: Callable[[Line], str]) -> str:
    """Returns a table with a column for each weight. The lines with the smallest ratio come first."""
    weights = list(dict.fromkeys(line["weight"] for line in lines))
    rows: dict[tuple[str, int, str, int], dict[str, Line]] = {}
    for line in lines:
        rows.setdefault((line["isa"], line["threads"], line["a"], line["M"]), {})[line["weight"]] = line

    def smallest(key: tuple[str, int, str, int]) -> float:
        return min(ratio for line in rows[key].values() for ratio in line["ratios"].values())

    return table(
        ["", "rows", *weights],
        [
            [f"{ISAS[key[0]]}, {key[1]}, {key[2]}", str(key[3]), *(cell(rows[key][weight]) for weight in weights)]
            for key in sorted(rows, key=smallest)
        ],
    )


def summary(lines: list[Line], counts: Counts) -> str:
    rows = []
    for rival in dict.fromkeys(rival for line in lines for rival in line["ratios"] if rival != ONE_LEVEL):
        for isa, name in ISAS.items():
            part = [line for line in lines if line["isa"] == isa and rival in line["ratios"]]
            ratios = [line["ratios"][rival] for line in part]
            why = Counter(reason(line, counts, rival) for line in part if line["ratios"][rival] < 1).most_common()
            numbers = [str(len(part)), str(sum(number for _, number in why)), f"{min(ratios):.2f}"]
            letters = ", ".join(f"{number} {letter}" for letter, number in why)
            rows.append([rival, name, *numbers, f"{statistics.median(ratios):.2f}", letters])
    return table(["rival", "instructions", "cells", "below 1.0", "lowest", "median", "reasons"], rows)


def instructions(lines: list[Line], counts: Counts) -> str:
    """Lists the instructions per weight of this package's kernels and of the rivals' fastest layouts."""
    names = dict.fromkeys(line["weight"] for line in lines)
    layouts = {rival: [] for line in lines for rival in line["rivals"]}
    for line in lines:
        for rival, layout in line["rivals"].items():
            if layout not in layouts[rival]:
                layouts[rival].append(layout)
    names |= dict.fromkeys(layout for found in layouts.values() for layout in sorted(found))
    rows = []
    for isa, dtype, M in dict.fromkeys(key[:3] for key in counts):
        found = [counts.get((isa, dtype, M, name)) for name in names]
        if any(found):
            cells = [f"{kinds['all']:.2f}" if kinds else "" for kinds in found]
            rows.append([f"{ISAS[isa]}, {dtype}", str(M), *cells])
    return table(["", "rows", *names], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=Path)
    parser.add_argument("counts", type=Path)
    arguments = parser.parse_args()
    lines, counts = read(arguments.times), counts_of(read(arguments.counts))

    def ratios(line: Line) -> str:
        cells = line["ratios"].items()
        letters = {rival: reason(line, counts, rival) for rival, ratio in cells if ratio < 1 and rival != ONE_LEVEL}
        return ", ".join(f"{ratio:.2f} {letters.get(rival, '')}".strip() for rival, ratio in cells)

    found = [ratio for line in lines for rival, ratio in line["ratios"].items() if rival != ONE_LEVEL]
    below = sum(ratio < 1 for ratio in found)
    sections = {
        f"Rivals: {below} of {len(found)} cells are below 1.0": summary(lines, counts),
        "All cells": by_weight(lines, ratios),
        "Profile: instructions for each weight": instructions(lines, counts),
    }
    section(PAGE, "lab.cpu.cpu_wide_table", "\n".join(f"## {title}\n\n{body}" for title, body in sections.items()))


if __name__ == "__main__":
    main()
