"""Compares the planner's choices for FLUX with `two_pass`, which decodes the weight once, by predicted times.

No kernel is executed. The table has the predicted time of the planner's choice divided by that of `two_pass`: the
largest such ratio over all shapes, numbers of rows, and activations in fp16 and bf16. With "rounded", which layers of
diffusers' models use, the planner can choose `two_pass`, which rounds the weights. With "auto" it cannot.

    python -m lab.predictions.many_rows --write
"""

from pathlib import Path

from lab import model
from lab.choices import chosen
from scripts import page_section
from torch_marlin_metal.profiling import AppleSiliconGPU

PAGE = Path(__file__).parents[2] / "docs/use/diffusion.md"
CHIPS = ("M1", "M1 Max", "M2", "M2 Max", "M3", "M3 Max", "M4", "M4 Pro", "M4 Max", "M5", "M5 Max")
ROWS = (1024, 1536, 2560, 4608)
# (N, K) of FLUX's products: projections, both layers of a block's MLP, and both layers of a single block.
SHAPES = ((3072, 3072), (12288, 3072), (3072, 12288), (21504, 3072), (3072, 15360))
FORMATS = {"uint4b8": 32, "uint4_bias": 32, "nvfp4": 16}


def ratio(weight_format: str, chip: str, variant: str) -> float:
    """Returns the largest ratio of the times of the planner's choice and of `two_pass`.

    Args:
        weight_format: one of `FORMATS`.
        chip: the GPU.
        variant: "auto" or "rounded".
    """
    gpu = AppleSiliconGPU.from_name(chip)
    problems = [
        model.Problem(M, N, K, weight_format, FORMATS[weight_format], activations)
        for M in ROWS
        for N, K in SHAPES
        for activations in ("float16", "bfloat16")
    ]
    return max(
        float(model.predict(one, chosen(gpu, one, variant), gpu)) / model.best(one, gpu, "two_pass")[1]
        for one in problems
    )


def row(chip: str) -> str:
    rounded = max(ratio(name, chip, "rounded") for name in FORMATS)
    exact = [f"{ratio(name, chip, 'auto'):.2f}" for name in FORMATS]
    return f"| {chip} | {rounded:.2f} | {' | '.join(exact)} |\n"


def table() -> str:
    exact = " | ".join(f"auto, {name}" for name in FORMATS)
    head = f"| GPU | rounded | {exact} |\n|---|---|{'---|' * len(FORMATS)}\n"
    return head + "".join(map(row, CHIPS))


if __name__ == "__main__":
    page_section.main(PAGE, "lab.predictions.many_rows", table)
