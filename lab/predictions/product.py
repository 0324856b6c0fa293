"""Prints what the model predicts for one product: the cheapest tiling of every variant, and where its time goes.

    python -m lab.predictions.product 8 4096 14336 --gpu "M1 Max" --group-size 64

Each dispatch has four times: launch, memory, L2, and the busiest core. To explain the time of the busiest core, the
table also has the times of instructions, complex instructions and matrix products if they were spread evenly over the
cores. SIMD/core is the number of simdgroups that a core holds. "bound" is what takes longest. "occupancy" means
waiting, because too few simdgroups hide latency or some cores have less work than others. The arrow marks the variant
that the model chooses.
"""

import argparse
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lab import model
from torch_marlin_metal.formats import WEIGHT_FORMATS
from torch_marlin_metal.profiling import AppleSiliconGPU


@dataclass(frozen=True)
class Candidate:
    """The cheapest tiling of a variant, and its cost."""

    tiling: model.Tiling
    cost: model.PlanCost


def candidates(problem: model.Problem, gpu: AppleSiliconGPU) -> list[Candidate]:
    """Returns the cheapest tiling of each variant that has a kernel for the product, in the order of their times."""
    found = []
    for variant in dict.fromkeys(group.variant for group in model.families(problem, gpu)):
        tiling, _ = model.best(problem, gpu, variant)
        found.append(Candidate(tiling, model.costs(problem, tiling, gpu)))
    return sorted(found, key=lambda candidate: float(candidate.cost.seconds))


def table(problem: model.Problem, gpu: AppleSiliconGPU) -> Table:
    title = f"{problem.activations} [{problem.M}, {problem.K}] x {problem.weight_format} g{problem.group} on {gpu.name}"
    times = ("us", "launch us", "DRAM us", "L2 us", "compute us", "issue us", "complex us", "matrix us")
    shown = Table(title=title, title_justify="left")
    for heading in ("", "variant", "splits", *times, "DRAM MB", "waves", "SIMD/core", "limit", "bound"):
        shown.add_column(heading, justify="left" if heading in ("", "variant", "limit", "bound") else "right")
    taken, _ = model.best(problem, gpu)
    for candidate in candidates(problem, gpu):
        tiling = candidate.tiling
        for index, dispatch in enumerate(candidate.cost.dispatches):
            seconds = (
                *(dispatch.seconds, dispatch.launch_seconds, dispatch.dram_seconds, dispatch.l2_seconds),
                *(dispatch.compute_seconds, dispatch.issue_seconds, dispatch.complex_seconds, dispatch.matrix_seconds),
            )
            held = dispatch.occupancy
            shown.add_row(
                "->" if tiling == taken and index == 0 else "",
                tiling.name if index == 0 else f"  then {dispatch.kernel}",
                str(tiling.splits) if index == 0 else "",
                *(f"{1e6 * part:.1f}" for part in seconds),
                f"{dispatch.dram_bytes / 1e6:.2f}",
                f"{dispatch.waves:.2f}",
                str(held.simdgroups) if held else "",
                held.limit if held else "",
                dispatch.bound,
            )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("M", "N", "K"):
        parser.add_argument(name, type=int)
    parser.add_argument("--gpu", default="M1", help="a chip's name")
    parser.add_argument("--cores", type=int)
    parser.add_argument("--weight-format", default="uint4b8", choices=list(WEIGHT_FORMATS))
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    options = parser.parse_args()
    group_size = WEIGHT_FORMATS[options.weight_format].fixed_group_size or options.group_size
    problem = model.Problem(options.M, options.N, options.K, options.weight_format, group_size, options.dtype)
    gpu = AppleSiliconGPU.from_name(options.gpu, options.cores)
    Console(width=200).print(table(problem, gpu))


if __name__ == "__main__":
    main()
