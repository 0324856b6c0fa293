"""Compares the errors of weights with scales of two levels (`q4_k`) and with fp16 scales and zero points (`uint4`).

    python -m lab.whole_models.two_levels           # the table, as Markdown
    python -m lab.whole_models.two_levels --write   # and write it into docs/use/which-format.md

The weights are random, or those of all-MiniLM-L6-v2.
"""

import os
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from scripts import page_section
from torch_marlin_metal import quantize_weight

PAGE = Path(__file__).parents[2] / "docs/use/which-format.md"
WAYS = (("uint4", 32, "rtn"), ("q4_k", None, "rtn"), ("uint4", 32, "mse"), ("q4_k", None, "mse"))
SHAPE = (1024, 4096)


def weights() -> dict[str, list[Tensor]]:
    """Returns the weights of each row of the table."""
    from lab.whole_models.quality import linears
    from lab.whole_models.sentences import demo_encoder

    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(SHAPE, generator=generator)
    square = sum(torch.randn(SHAPE, generator=generator).square() for _ in range(3)) / 3
    return {
        "Gaussian": [normal],
        "Student's t with 3 degrees of freedom": [torch.randn(SHAPE, generator=generator) / square.sqrt()],
        "Linear layers of all-MiniLM-L6-v2": [layer.weight.detach() for layer in linears(demo_encoder()[0]).values()],
    }


def error(matrices: Iterable[Tensor], name: str, size: int | None, method: str) -> float:
    """Returns the relative error of all matrices together."""
    difference = norm = 0.0
    for matrix in matrices:
        kept = quantize_weight(matrix, name, size, method).dequantize().T
        difference += float((kept - matrix).double().square().sum())
        norm += float(matrix.double().square().sum())
    return float((difference / norm) ** 0.5)


def bits(name: str, size: int | None) -> float:
    """Returns the bits per weight if K is a multiple of 256."""
    tensors = quantize_weight(torch.randn(SHAPE), name, size).tensors().values()
    return 8 * sum(tensor.nbytes for tensor in tensors) / (SHAPE[0] * SHAPE[1])


def table() -> str:
    heads = [f"`{name}`{'' if size is None else f', {size}'}, {method}" for name, size, method in WAYS]
    lines = [f"| weights | {' | '.join(heads)} |", "|---" * (len(WAYS) + 1) + "|"]
    sizes = " | ".join(f"{bits(name, size):.4g}" for name, size, _ in WAYS)
    lines.append(f"| bits a weight, if K is a multiple of 256 | {sizes} |")
    for label, matrices in weights().items():
        numbers = " | ".join(f"{error(matrices, *way):.2%}" for way in WAYS)
        lines.append(f"| {label} | {numbers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    page_section.main(PAGE, "lab.whole_models.two_levels", table)
