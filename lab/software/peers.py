"""Counts the work per weight of 4-bit kernels: ours, and MLX's and PyTorch's as Apple's compiler compiled them.

python -m lab.software.peers          # prints the table; downloads the wheels if they are not cached
python -m lab.software.peers --write  # puts the table into lab/notes/kernel-costs.md
python -m lab.software.peers --ours   # prints the rows of this package, which need no wheels
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from softmetal import device
from softmetal.proof import libraries, quantized, references
from softmetal.proof.air.compiler import load
from softmetal.proof.case import Launch, counted
from tests.support.kernels import problems as kernel_problems
from tests.support.kernels import tiles as kernel_tiles
from tests.support.kernels.problems import Problem

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "lab" / "notes" / "kernel-costs.md"
HALF = "float16"
AFFINE, NVFP4, MXFP4 = (
    quantized.Format("affine", 64, 4),
    quantized.Format("nvfp4", 16, 4),
    quantized.Format("mxfp4", 32, 4),
)
# (M, N, K). If N is a multiple of all tiles, counts per weight do not depend on N.
SHAPES = ((1, 1024, 4096), (4, 512, 4096), (64, 128, 4096))


@dataclass(frozen=True)
class Row:
    """One line of the table: a kernel, a shape and the counts."""

    shape: tuple[int, int, int]
    owner: str
    kernel: str
    counters: list[device.Counters]

    def __str__(self) -> str:
        M, N, K = self.shape
        weights = N * K

        def total(field: str) -> float:
            return sum(getattr(c, field) or 0 for c in self.counters)

        numbers = [
            f"{total('device_bytes_read') / weights:.2f}",
            f"{total('distinct_bytes_read') / weights:.3f}",
            f"{total('threadgroup_bytes_read') / weights:.2f}",
            f"{1024 * total('threadgroup_barriers') / weights:.3f}",
            f"{1024 * total('mmas') / weights:.1f}",
            f"{1024 * total('simd_operations') / weights:.2f}",
        ]
        return "| " + " | ".join([f"{M} x {N} x {K}", self.owner, f"`{self.kernel}`", *numbers]) + " |"


def _apples(path: Path, kernel: str, launch: Launch) -> device.Counters:
    return counted(load(path, kernel, checked=True), kernel, launch)[1]


def _mlx(form: quantized.Format, shape: tuple[int, int, int]) -> Row:
    rng = np.random.default_rng(0)
    tail = f"float16_t_gs_{form.group}_b_{form.bits}"
    if 1 < shape[0] < 16:
        lanes = 8 if form.is_affine else 16
        kernel = f"{form.mode}_qmv_wide_{tail}_nv_{shape[0]}_kl_{lanes}_batch_0"
        (launch,) = quantized.wide_products(form, HALF, shape[0], lanes, [shape])(rng)
    elif shape[0] == 1:
        kernel = f"{form.mode}_qmv_fast_{tail}_batch_0_pr_0_hgs_0_r_4"
        (launch,) = quantized.vector_products(form, HALF, [shape], 8)(rng)
    else:
        kernel = f"{form.mode}_qmm_t_{tail}_alN_true_batch_0"
        (launch,) = quantized.matrix_products(form, HALF, [shape], turned=True)(rng)
    return Row(shape, "MLX", kernel, [_apples(libraries.mlx_library(), kernel, launch)])


def _torch(shape: tuple[int, int, int]) -> Row:
    (expected,) = references.int4_products(HALF, 64, [shape])(np.random.default_rng(0))
    kernel = "int4pack_mm_64_half"
    return Row(shape, "PyTorch", kernel, [_apples(libraries.torch_library(), kernel, expected.launch)])


@contextlib.contextmanager
def _recorded() -> Iterator[list[device.Counters]]:
    """Collects the counters of all dispatches inside the `with` block."""
    original, found = kernel_problems.launch, []

    def recording(*arguments: Any, **options: Any) -> device.Counters:
        counters: device.Counters = original(*arguments, **options)
        found.append(counters)
        return counters

    kernel_problems.launch = recording
    try:
        yield found
    finally:
        kernel_problems.launch = original


def _ours(weight_format: str, group: int, shape: tuple[int, int, int]) -> Row:
    M, N, K = shape
    problem = Problem(weight_format, M, N, K, group, torch.float16,
                      zeros_dtype=torch.uint8 if weight_format == "uint4" else None)  # fmt: skip
    with _recorded() as counters:
        if M < 16:
            kernel = "gemv"
            kernel_problems.run_gemv(problem, rows=min(M, 4), simdgroups=4)
        else:
            kernel = "gemm_double_buffered_64x64x32"
            kernel_tiles.run_staged(kernel, problem)
    return Row(shape, "ours", f"{kernel}, {weight_format}", counters)


def our_rows() -> Iterator[Row]:
    """Yields the lines of this package's kernels."""
    for shape in SHAPES:
        yield from (_ours("uint4", 64, shape), _ours("nvfp4", 16, shape), _ours("mxfp4", 32, shape))


def rows() -> Iterator[Row]:
    """Yields all lines of the table."""
    for shape in SHAPES:
        yield _ours("uint4", 64, shape)
        yield _mlx(AFFINE, shape)
        yield _torch(shape)
        yield _ours("nvfp4", 16, shape)
        yield _mlx(NVFP4, shape)
        yield _ours("mxfp4", 32, shape)
        yield _mlx(MXFP4, shape)


HEADER = """\
| M x N x K | whose | kernel | device bytes read / weight | distinct bytes / weight | threadgroup bytes read / weight \
| threadgroup barriers / 1024 weights | 8x8x8 products / 1024 weights | simd operations / 1024 weights |
|---|---|---|---|---|---|---|---|---|
"""


def write(table: str) -> None:
    pattern = re.compile(re.escape(HEADER) + r"(?:\|.*\n)*")
    text, replaced = pattern.subn(lambda _: table, PAGE.read_text())
    if replaced != 1:
        raise RuntimeError(f"peers.py: expected one table in {PAGE}, found {replaced}")
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--ours", action="store_true", help="only the rows of this package")
    what.add_argument("--write", action="store_true", help="put the table into the page on kernel costs")
    options = parser.parse_args()
    if options.ours:
        print(*our_rows(), sep="\n")
        return
    table = HEADER + "".join(f"{row}\n" for row in rows())
    if options.write:
        write(table)
    else:
        print(table, end="")


if __name__ == "__main__":
    main()
