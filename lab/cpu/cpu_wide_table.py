"""Writes the tables of cpu_wide.md from the records of cpu_wide.py.

    python -m lab.cpu.cpu_wide_table TIMES COUNTS

A cell is one weight beside one rival. For each cell below 1.0 the table says what limits this package's kernel, by
`reason`, from numbers of the same line: bytes read beside a plain read, product instructions beside the rate at which
the threads execute nothing else, and all instructions beside the rival's.
"""

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from lab.cpu.cpu_wide import ONE_LEVEL

PAGE = Path(__file__).with_name("cpu_wide.md")
BEGIN = "<!-- The lines from here on are written by lab.cpu.cpu_wide_table. -->\n"
MEMORY, UNIT, MORE = 0.85, 0.7, 1.05  # the borders of `reason`
ISAS = {"avx2": "AVX2", "avx512": "AVX-512", "amx": "AMX"}
Counts = dict[tuple[str, str, int, str], dict[str, float]]
Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """Returns the lines of a record."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def counts_of(lines: list[Line]) -> Counts:
    """Returns the instructions for each weight, by instruction set, activations, rows and kernel."""
    found = {}
    for line in lines:
        dtypes = ("bf16", "fp32") if line["kernel"].startswith("ggml") else (line["a"],)
        for dtype in dtypes:
            found[line["isa"], dtype, line["M"], line["kernel"]] = line["counts"]
    return found


def counted(counts: Counts, line: Line, kernel: str) -> tuple[int, dict[str, float]] | None:
    """Returns the counts of a kernel at the largest counted number of rows that is at most the line's, and that number.

    64 rows stand for 512. Otherwise the line has less than four times as many rows, or the result is None: with other
    numbers of rows, a program may choose other kernels.
    """
    rows = [M for isa, dtype, M, name in counts if (isa, dtype, name) == (line["isa"], line["a"], kernel)]
    rows = [M for M in rows if M <= line["M"] < 4 * M or M == 64 < line["M"]]
    return (max(rows), counts[line["isa"], line["a"], max(rows), kernel]) if rows else None


def product_us(counts: Counts, line: Line) -> float:
    """Returns the time of this package's product instructions if the threads executed nothing else."""
    rows, kinds = counted(counts, line, line["weight"]) or (1, {})
    K, N = (int(size) for size in line["shape"].split("x"))
    weights, total = K * N, 0.0
    for kind, rate in line["rates"].items():
        tiles = kind.startswith("tile")
        times = -(-line["M"] // 16) / -(-rows // 16) if tiles else line["M"] / rows
        total += kinds.get(kind, 0.0) * times * weights / rate
    return total * 1e6


def reason(line: Line, rival: str, products: float, instructions: tuple[float, float] | None) -> str:
    """Says what keeps this package's kernel from being as fast as the rival's."""
    if line["bytes"] / line["us"] * 1e6 >= MEMORY * line["read"]:
        return "memory"
    if products >= line["rival_us"][rival]:
        return "products alone"
    if products >= UNIT * line["us"]:
        return "products"
    if instructions and instructions[0] > MORE * instructions[1]:
        return "instructions"
    return "open"


def cells(lines: list[Line], counts: Counts) -> list[Line]:
    """Returns one line for each cell."""
    found = []
    for line in lines:
        products = product_us(counts, line)
        ours = counted(counts, line, line["weight"])
        for rival, ratio in line["ratios"].items():
            if rival == ONE_LEVEL:
                continue
            theirs = counted(counts, line, line["rivals"][rival])
            both = None
            if ours and theirs:
                rows = min(ours[0], theirs[0])
                both = ours[1]["all"] * rows / ours[0], theirs[1]["all"] * rows / theirs[0]
            found.append(
                {
                    **{name: line[name] for name in ("isa", "threads", "a", "M", "weight")},
                    "rival": rival,
                    "ratio": ratio,
                    "read": line["bytes"] / line["us"] * 1e6 / line["read"],
                    "unit": products / line["us"],
                    "instructions": both,
                    "reason": reason(line, rival, products, both),
                }
            )
    return found


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(line) + " |" for line in (columns, *rows)]
    lines.insert(1, "|" + "---|" * len(columns))
    return "\n".join(lines) + "\n"


def summary(found: list[Line]) -> str:
    """Counts the cells of each rival and instruction set."""
    rows = []
    for rival in dict.fromkeys(cell["rival"] for cell in found):
        for isa in dict.fromkeys(cell["isa"] for cell in found):
            part = [cell for cell in found if (cell["rival"], cell["isa"]) == (rival, isa)]
            below = [cell for cell in part if cell["ratio"] < 1]
            why = Counter(cell["reason"] for cell in below).most_common()
            ratios = [cell["ratio"] for cell in part]
            numbers = [str(len(part)), str(len(below)), f"{min(ratios):.2f}", f"{statistics.median(ratios):.2f}"]
            rows.append([rival, ISAS[isa], *numbers, ", ".join(f"{name} {count}" for name, count in why)])
    return table(["rival", "instructions", "cells", "below 1.0", "lowest", "median", "reasons"], rows)


def below(found: list[Line]) -> str:
    """Lists the cells below 1.0, the smallest ratio first."""
    rows = []
    for cell in sorted((cell for cell in found if cell["ratio"] < 1), key=lambda cell: cell["ratio"]):
        both = cell["instructions"]
        rows.append(
            [f"{ISAS[cell['isa']]}, {cell['threads']}, {cell['a']}", str(cell["M"]), cell["weight"], cell["rival"]]
            + [f"{cell[name]:.2f}" for name in ("ratio", "read", "unit")]
            + [f"{both[0]:.2f}, {both[1]:.2f}" if both else "", cell["reason"]]
        )
    columns = ["", "rows", "weight", "rival", "ratio", "of a plain read", "of the unit", "instructions", "reason"]
    return table(columns, rows)


def everything(lines: list[Line]) -> str:
    """Lists the ratios of all cells, by weight."""
    weights = list(dict.fromkeys(line["weight"] for line in lines))
    rows: dict[tuple[str, int, str, int], dict[str, str]] = {}
    for line in lines:
        key = line["isa"], line["threads"], line["a"], line["M"]
        rows.setdefault(key, {})[line["weight"]] = ", ".join(f"{value:.2f}" for value in line["ratios"].values())
    return table(
        ["", "rows", *weights],
        [
            [f"{ISAS[isa]}, {threads}, {dtype}", str(M), *(row.get(weight, "") for weight in weights)]
            for (isa, threads, dtype, M), row in rows.items()
        ],
    )


def one_row(lines: list[Line]) -> str:
    """Lists, for one row, the bytes a second of each weight by those of a plain read."""
    weights = list(dict.fromkeys(line["weight"] for line in lines))
    rows: dict[tuple[str, int, str], dict[str, Line]] = {}
    for line in lines:
        if line["M"] == 1:
            rows.setdefault((line["isa"], line["threads"], line["a"]), {})[line["weight"]] = line
    return table(
        ["", "plain read, GB/s", *weights],
        [
            [f"{ISAS[isa]}, {threads}, {dtype}", f"{next(iter(row.values()))['read'] * 1e-9:.0f}"]
            + [f"{row[name]['bytes'] / row[name]['us'] * 1e6 / row[name]['read']:.2f}" for name in weights]
            for (isa, threads, dtype), row in rows.items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=Path)
    parser.add_argument("counts", type=Path)
    arguments = parser.parse_args()
    lines, counts = read(arguments.times), counts_of(read(arguments.counts))
    found = cells(lines, counts)
    text = PAGE.read_text()
    if BEGIN not in text:
        raise ValueError(f"{PAGE} has no line {BEGIN.strip()!r}")
    number = len([cell for cell in found if cell["ratio"] < 1])
    sections = {
        f"Rivals: {number} of {len(found)} cells are below 1.0": summary(found),
        "One row, by a plain read": one_row(lines),
        "Cells below 1.0": below(found),
        "All cells": everything(lines),
    }
    tables = "\n".join(f"## {title}\n\n{body}" for title, body in sections.items())
    PAGE.write_text(text[: text.index(BEGIN)] + BEGIN + "\n" + tables)


if __name__ == "__main__":
    main()
