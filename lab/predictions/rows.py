"""Prints what the model predicts for each M: issue time over memory time, and the cost of each additional row.

No kernel is executed. Times are those of the tilings that the model chooses, for weights of 4096 x 14336 that are in no
cache, fp16 activations and groups of 64 unless the format fixes the group size.
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from rich.console import Console
from rich.table import Table

from lab import model
from torch_marlin_metal.formats import WEIGHT_FORMATS
from torch_marlin_metal.profiling import AppleSiliconGPU

N, K = 4096, 14336
GROUP_SIZE = 64
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 24, 25, 32, 33, 40, 41, 64, 65, 128, 512, 4096)

MOST_ROWS = 140

MOST_FOR_FOUR_ROWS = 1.1
# The M5 Max has 40 cores and the fastest memory. The 32 threadgroups of gemv leave eight cores idle, and the other 32
# cores take longer than memory: 1.15 times as long as one row. A plan that splits K over all cores is only a little
# faster, because it needs a second dispatch of 6 us, and one row takes 62 us.
MORE_FOR_FOUR_ROWS = {"M5 Max": 1.13}


@dataclass(frozen=True)
class Bar:
    """One requirement on the model's figures."""

    what: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True)
class Choice:
    """The tiling that the model chooses, its time in seconds, and the seconds of it that launches take."""

    tiling: model.Tiling
    seconds: float
    launches: float


@cache
def best(M: int, gpu: str, weight_format: str = "uint4b8") -> Choice:
    group_size = WEIGHT_FORMATS[weight_format].fixed_group_size or GROUP_SIZE
    problem, found = model.Problem(M, N, K, weight_format, group_size), AppleSiliconGPU.from_name(gpu)
    tiling, seconds = model.best(problem, found)
    launches = sum(dispatch.launch_seconds for dispatch in model.costs(problem, tiling, found).dispatches)
    return Choice(tiling, seconds, launches)


def issue_over_memory(M: int, gpu: str, weight_format: str, *, peak: bool) -> float:
    """Returns the longer of gemv's issue time and complex-unit time, divided by its memory time.

    If `peak` is true, the memory time assumes the peak rate, otherwise the rate that reading kernels reach in practice.
    """
    problem, found = model.Problem(M, N, K, weight_format, GROUP_SIZE), AppleSiliconGPU.from_name(gpu)
    tiling, _ = model.best(problem, found, "gemv")
    dispatch = model.costs(problem, tiling, found).dispatches[0]
    fraction = found.figures["dram_fraction"].value if peak else 1.0
    return max(dispatch.issue_seconds, dispatch.complex_seconds) / (dispatch.dram_seconds * fraction)


def bars() -> Iterator[Bar]:
    """Yields the requirements that the model can check, each with the predicted value."""
    for gpu in ("M1", "M1 Max", "M2 Max", "M4 Max"):
        for weight_format, most in (("uint4b8", 4), ("float4_e2m1", 2)):
            for M in range(1, most + 1):
                value = issue_over_memory(M, gpu, weight_format, peak=True)
                yield Bar(f"{gpu}: gemv {weight_format}, {M} rows: issue over memory time at peak", value, 1.0)
    for gpu in AppleSiliconGPU.names():
        limit = MORE_FOR_FOUR_ROWS.get(gpu, MOST_FOR_FOUR_ROWS)
        missed = f", where {MOST_FOR_FOUR_ROWS} cannot be met" if limit > MOST_FOR_FOUR_ROWS else ""
        yield Bar(f"{gpu}: 4 rows over 1 row{missed}", best(4, gpu).seconds / best(1, gpu).seconds, limit)
    for gpu, limit in (("M1", 1.5), ("M2", 1.5), ("M3", 1.5), ("M4", 1.5), ("M1 Pro", 1.7), ("M1 Max", 1.7)):
        yield Bar(f"{gpu}: 8 rows over 1 row", best(8, gpu).seconds / best(1, gpu).seconds, limit)
    for weight_format in WEIGHT_FORMATS:
        yield from steps(weight_format)


def steps(weight_format: str) -> Iterator[Bar]:
    """Yields the largest cost of one additional row on any GPU, for rows that begin a block of 8 and for other rows.

    If the additional row needs one more dispatch, the launch of this dispatch does not count.
    """
    largest = {1.9: 0.0, 1.5: 0.0, 1.35: 0.0}
    for gpu in AppleSiliconGPU.names():
        plans = [best(M, gpu, weight_format) for M in range(1, MOST_ROWS + 1)]
        for M, (before, now) in enumerate(itertools.pairwise(plans), start=1):
            limit = {8: 1.9, 16: 1.5}.get(M, 1.35)
            added = max(0.0, now.launches - before.launches)
            largest[limit] = max(largest[limit], (now.seconds - added) / before.seconds)
    for limit, value in largest.items():
        where = {1.9: "8 to 9", 1.5: "16 to 17", 1.35: f"any other of the first {MOST_ROWS}"}[limit]
        yield Bar(f"{weight_format}: largest step of all GPUs, rows {where}", value, limit)


def ladder(weight_format: str) -> Table:
    """Returns a table by M and GPU: the time divided by the time of one row, and the chosen variant."""
    names = AppleSiliconGPU.names()
    table = Table(title=f"{weight_format}: time over the time of one row, and the variant", title_justify="left")
    table.add_column("M", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    first = {name: best(1, name, weight_format).seconds for name in names}
    for M in ROWS:
        chosen = [best(M, name, weight_format) for name in names]
        cells = [
            f"{c.seconds / first[n]:.2f} {c.tiling.variant[:2]}{c.tiling.tile[0]}"
            for n, c in zip(names, chosen, strict=True)
        ]
        table.add_row(str(M), *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=["uint4b8", "float4_e2m1"], help="weight formats of the ladder")
    arguments = parser.parse_args()
    console = Console(width=240)
    table = Table("requirement", "value", "at most", "holds")
    for bar in bars():
        table.add_row(bar.what, f"{bar.value:.3f}", f"{bar.limit:g}", "yes" if bar.holds else "NO")
    console.print(table)
    for weight_format in arguments.formats:
        console.print(ladder(weight_format))


if __name__ == "__main__":
    main()
