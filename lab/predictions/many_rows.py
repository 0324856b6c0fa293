"""Compares, by the model, the products of FLUX with decoding the weight once and multiplying (`two_pass`).

Nothing runs on a GPU. A number of the table is the largest ratio, over the shapes and numbers of rows, of the time of
the tiling that the model takes to the time of `two_pass`. At most 1 means that decoding first is never faster. The
package takes `two_pass` and `tensor` only if asked, or if the tuner has measured that they are faster: `two_pass`
rounds the weights to 16 bits, and no time of tensor units is known.

    python -m lab.predictions.many_rows --write
"""

from pathlib import Path

from lab import model
from scripts import page_section
from torch_marlin_metal.profiling import AppleSiliconGPU

PAGE = Path(__file__).parents[2] / "docs/use/diffusion.md"
CHIPS = ("M1", "M1 Max", "M2", "M2 Max", "M3", "M3 Max", "M4", "M4 Pro", "M4 Max", "M5", "M5 Max")
ROWS = (1024, 1536, 2560, 4608)
# (N, K) of FLUX: projections, both layers of a block's MLP, and both layers of a single block.
SHAPES = ((3072, 3072), (12288, 3072), (3072, 12288), (21504, 3072), (3072, 15360))
FORMATS = {"uint4b8": 32, "uint4_bias": 32, "nvfp4": 16}


def ratio(weight_format: str, chip: str, variant: str) -> float:
    """Returns the largest ratio of the times of a variant and of `two_pass`."""
    gpu = AppleSiliconGPU.from_name(chip)
    problems = [model.Problem(M, N, K, weight_format, FORMATS[weight_format]) for M in ROWS for N, K in SHAPES]
    return max(model.best(one, gpu, variant)[1] / model.best(one, gpu, "two_pass")[1] for one in problems)


def row(chip: str) -> str:
    """Returns the row of a chip."""
    cells = [f"{ratio(name, chip, 'auto'):.2f}" for name in FORMATS]
    tensor = f"{ratio('uint4b8', chip, 'tensor'):.2f}" if chip.startswith("M5") else "-"
    return f"| {chip} | {' | '.join(cells)} | {tensor} |\n"


def table() -> str:
    """Returns the table in Markdown."""
    head = f"| GPU | {' | '.join(FORMATS)} | `tensor`, uint4b8 |\n|---|{'---|' * len(FORMATS)}---|\n"
    return head + "".join(map(row, CHIPS))


if __name__ == "__main__":
    page_section.main(PAGE, "lab.predictions.many_rows", table)
