"""Compares the times that a Mac measured with those that the model predicts.

    torch-marlin-metal bench --variant all --json > variants.json     # on the Mac
    python -m lab.mac.measured variants.json                          # anywhere

Prints, for each variant of each product, the measured time, the predicted time and their ratio, and then the median
ratio of each variant. The chip is the one in the file, unless --gpu names another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab import model
from lab.model.tilings import cheapest
from torch_marlin_metal.profiling import AppleSiliconGPU


@dataclass(frozen=True)
class Comparison:
    """One measured variant of one product, with times in seconds."""

    problem: model.Problem
    variant: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Returns the measured time divided by the predicted time."""
        return self.measured / self.predicted


def predicted(problem: model.Problem, name: str, gpu: AppleSiliconGPU) -> float:
    """Returns the model's time for a variant with a tile, for example "gemv:4x128x16".

    Raises:
        ValueError: no kernel of that name computes the product.
    """
    variant = name.partition(":")[0]
    found = [
        cheapest(group, model.costs(problem, group, gpu))[1]
        for group in model.families(problem, gpu, variant)
        if name in (variant, group.name)
    ]
    if not found:
        raise ValueError(f"variant: expected one that has a kernel for {problem}, got {name!r}")
    return min(found)


def comparisons(report: dict[str, Any], gpu: AppleSiliconGPU) -> Iterator[Comparison]:
    """Yields the comparison of each measured variant of a report of `bench --variant all --json`."""
    for row in report["results"]:
        problem = model.Problem(
            row["M"], row["N"], row["K"], row["weight_format"], row["group_size"], row["dtype"]
        )  # fmt: skip
        for name, found in row["variants"].items():
            yield Comparison(problem, name, found["seconds"], predicted(problem, name, gpu))


def gpu_of(report: dict[str, Any]) -> AppleSiliconGPU:
    """Returns the GPU that the report names, such as "Apple M1 Max, 32 cores".

    Raises:
        ValueError: the table of chips does not contain the GPU.
    """
    name, _, cores = report["machine"]["gpu"].partition(", ")
    return AppleSiliconGPU.from_name(name, int(cores.split()[0]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="what bench --variant all --json printed")
    parser.add_argument("--gpu", help="a chip's name")
    options = parser.parse_args()
    try:
        report = json.loads(options.report.read_text())
        gpu = AppleSiliconGPU.from_name(options.gpu) if options.gpu else gpu_of(report)
        found = list(comparisons(report, gpu))
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"no entry {error}" if isinstance(error, KeyError) else error
        print(
            f"measured.py: {options.report}: expected what bench --variant all --json prints: {what}", file=sys.stderr
        )
        return 2
    console = Console(width=120)
    table = Table("product", "M", "variant", "measured us", "predicted us", "measured / predicted", title=gpu.name)
    for one in found:
        p = one.problem
        name = f"{p.activations} x {p.weight_format} g{p.group} [{p.K}, {p.N}]"
        times = (f"{1e6 * one.measured:.1f}", f"{1e6 * one.predicted:.1f}", f"{one.ratio:.2f}")
        table.add_row(name, str(p.M), one.variant, *times)
    console.print(table)
    table = Table("variant", "points", "median", "least", "most", title="measured / predicted")
    for variant in dict.fromkeys(one.variant.partition(":")[0] for one in found):
        ratios = [one.ratio for one in found if one.variant.partition(":")[0] == variant]
        figures = (statistics.median(ratios), min(ratios), max(ratios))
        table.add_row(variant, str(len(ratios)), *(f"{figure:.2f}" for figure in figures))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
