"""Counts the bytes that a step of products on tensor units moves.

Compares our gemm_tensor with MLX's kernels as Apple compiled them.

A step multiplies a tile of 64 or 32 rows and 64 columns by 64 k. Both kernels run on the software Metal device in
checked mode, which observes every load and store. The count of a step is the difference between the counts for two
values of K, so it does not contain the work that is done once per tile. No time is measured. The program downloads the
wheel of MLX if it is not cached.

    python -m lab.software.tensor_peers           # prints the table
    python -m lab.software.tensor_peers --write   # puts the table into lab/notes/tensor-units.md
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from scripts import page_section
from softmetal.proof import quantized
from softmetal.proof.air.compiler import load
from softmetal.proof.case import counted
from softmetal.proof.libraries import MLX_WITH_TENSORS, mlx_library
from softmetal.reports import Counters
from tests.support.kernels.problems import Problem
from tests.support.kernels.tensor import count_tensor

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "lab" / "notes" / "tensor-units.md"
COLUMNS, STEP = 64, 64
LENGTHS = (256, 512)  # the two K
# For each format of this package, MLX's format with the same codes.
FORMATS = {
    "uint4_bias": quantized.Format("affine", 64, 4),
    "mxfp4": quantized.Format("mxfp4", 32, 4),
    "nvfp4": quantized.Format("nvfp4", 16, 4),
}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Step:
    """The bytes of one step, and the barriers that each thread executes in it.

    `device` counts a byte each time that a lane loads or stores it, `different` counts each byte once.
    """

    device: float
    different: float
    threadgroup_written: float
    threadgroup_read: float
    barriers: float

    @property
    def total(self) -> float:
        return self.device + self.threadgroup_written + self.threadgroup_read


def step(shorter: Counters, longer: Counters) -> Step:
    """Returns the counts of a step. The arguments are the counts of one tile with the two values of K."""
    steps = (LENGTHS[1] - LENGTHS[0]) / STEP

    def each(name: str) -> float:
        return float(getattr(longer, name) - getattr(shorter, name)) / steps

    return Step(
        each("device_bytes_read") + each("device_bytes_written"),
        each("distinct_bytes_read") + each("distinct_bytes_written"),
        each("threadgroup_bytes_written"),
        each("threadgroup_bytes_read"),
        each("threadgroup_barriers"),
    )


def ours(weight_format: str, dtype: str, rows: int) -> Step:
    """Counts gemm_tensor. Scales and zeros have the same dtypes as MLX's."""
    form, element = FORMATS[weight_format], DTYPES[dtype]
    kinds = {"scales_dtype": element, "zeros_dtype": element} if form.is_affine else {}
    counts = [
        count_tensor(Problem(weight_format, rows, COLUMNS, K, form.group, element, **kinds), f"{rows}x{COLUMNS}x32")
        for K in LENGTHS
    ]
    return step(*counts)


def mlx(weight_format: str, dtype: str, rows: int) -> Step:
    """Counts MLX's kernel for weights of N x K in which N is a multiple of the tile's columns."""
    form, word = FORMATS[weight_format], quantized.TYPES[dtype]
    name = f"{form.mode}_qmm_t_nax_{word}_gs_{form.group}_b_4_bm{rows}_bn64_bk64_wm2_wn2_alN_true_batch_0"
    library = load(mlx_library(MLX_WITH_TENSORS), name, checked=True)
    counts = []
    for K in LENGTHS:
        launches = quantized.matrix_products(form, dtype, [(rows, COLUMNS, K)], turned=True, tile=(rows, COLUMNS))
        (launch,) = launches(np.random.default_rng(0))
        counts.append(counted(library, name, launch)[1])
    return step(*counts)


def table() -> str:
    """Counts all cases. Returns them as a Markdown table."""
    lines = [
        "| format, activations, rows | | device | different | threadgroup, written | and read | all | barriers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rows in (64, 32):
        for weight_format in FORMATS:
            for dtype in DTYPES:
                for who, counts in (("ours", ours), ("MLX", mlx)):
                    found = counts(weight_format, dtype, rows)
                    case = f"{weight_format}, {dtype}, {rows}" if who == "ours" else ""
                    near = (found.threadgroup_written, found.threadgroup_read)
                    parts = (found.device, found.different, *near, found.total)
                    cells = " | ".join(f"{part / 1024:.2f}" for part in parts)
                    lines.append(f"| {case} | {who} | {cells} | {found.barriers:g} |")
                    print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


if __name__ == "__main__":
    page_section.main(PAGE, "lab.software.tensor_peers", table)
