"""The check of `doctor` that compares every kernel of `gemm` and `moe_gemm` on mps with fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.formats import WEIGHT_FORMATS
from torch_marlin_metal.gpu.planning import plan
from torch_marlin_metal.gpu.tuning.errors import check
from torch_marlin_metal.gpu.tuning.products import Product
from torch_marlin_metal.ops.experts import moe_gemm
from torch_marlin_metal.ops.gemm import gemm

DTYPES = ("float16", "bfloat16", "float32")
Kind = tuple[str, str]  # a weight format and the dtype of activations
ONE_KIND: tuple[Kind, ...] = (("uint4b8", "float16"),)
EVERY_KIND: tuple[Kind, ...] = tuple(product(WEIGHT_FORMATS, DTYPES))
ROWS = {"gemv": 1, "fused": 40, "double_buffered": 40, "single_stage": 40, "striped": 40, "two_pass": 40, "tensor": 40}
MOE_VARIANTS = ("gemv", "fused", "tensor")
TOKENS = 60
MOST_FAULTS = 5  # faults that an error message lists


def compare(kinds: Iterable[Kind]) -> dict[str, float]:
    """Compares every variant, and torch.matmul with the decoded weight, with fp64.

    All activations here are 2-D. On the virtual GPU of GitHub's runners, PyTorch's `linear` is wrong for 3-D
    activations (pytorch#192934), so a comparison with it would blame this package.

    Returns the largest error of each variant and dtype, relative to the largest result. Tries all products before it
    raises a RuntimeError that names the first few wrong ones.
    """
    errors: dict[str, float] = {}
    faults = []
    for weight_format, dtype in kinds:
        problem = Product(128, 256, weight_format, WEIGHT_FORMATS[weight_format].fixed_group_size or 64, dtype)
        for what, run, expected in cases(problem):
            try:
                error = check(run(), expected, f"{what} of {weight_format} in {dtype}")
            except RuntimeError as fault:
                faults.append(str(fault).splitlines()[0])
                continue
            name = f"error of {what} in {dtype}"
            errors[name] = max(errors.get(name, 0.0), error)
    if faults:
        more = f"; and {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
        raise RuntimeError("; ".join(faults[:MOST_FAULTS]) + more)
    return errors


def cases(problem: Product) -> Iterator[tuple[str, Callable[[], Tensor], Tensor]]:
    """Yields (name, function for the result on mps, exact result) for each kernel that this GPU supports."""
    available = {
        candidate.variant
        for M in set(ROWS.values())
        for candidate in plan(
            M, problem.N, problem.K, weight_format=problem.weight_format, group_size=problem.group_size,
            dtype=problem.torch_dtype, tuned=False,
        ).candidates
    }  # fmt: skip
    yield from _products(problem, [name for name in ROWS if name in available])
    yield from _mixtures(problem, [name for name in MOE_VARIANTS if name in available])


def _activations(problem: Product, rows: int) -> Tensor:
    return torch.randn(rows, problem.K, generator=torch.Generator().manual_seed(1), device="cpu").to(
        problem.torch_dtype
    )


def _products(problem: Product, variants: list[str]) -> Iterator[tuple[str, Callable[[], Tensor], Tensor]]:
    weight = problem.make_weight("cpu")
    a = _activations(problem, max(ROWS.values()))
    expected = a.double() @ weight.dequantize().double()
    moved, rows = weight.to("mps"), a.to("mps")
    for variant in variants:
        M = ROWS[variant]
        yield variant, partial(gemm, rows[:M], moved, variant=variant), expected[:M]
    dense = weight.dequantize(problem.torch_dtype)
    yield "torch.matmul", partial(torch.matmul, rows, dense.to("mps")), a.double() @ dense.double()


def _mixtures(problem: Product, variants: list[str]) -> Iterator[tuple[str, Callable[[], Tensor], Tensor]]:
    """Multiplies by two experts. In every three rows, one row selects both, and two select one and an invalid id."""
    weight = problem.make_weight("cpu")
    a = _activations(problem, TOKENS)
    ids = torch.stack([torch.arange(TOKENS, device="cpu") % 3, torch.arange(1, TOKENS + 1, device="cpu") % 3], dim=1)
    # The second expert is the first with its columns in reverse order.
    columns = torch.arange(problem.N - 1, -1, -1, device="cpu")
    dense = weight.dequantize().double()
    products = torch.stack([a.double() @ dense, a.double() @ dense[:, columns]])
    expected = torch.zeros(TOKENS, 2, problem.N, dtype=torch.float64, device="cpu")
    for expert in range(2):
        expected[ids == expert] = products[expert][(ids == expert).any(1)]
    stacked: Any = {}
    for name, part in weight.tensors().items():
        both = part if name == "lut" else torch.stack([part, part[:, columns] if part.dim() > 1 else part])
        stacked[name] = both.to("mps")
    stack, rows, chosen = replace(weight, **stacked), a.to("mps"), ids.to("mps")

    def multiply(variant: str, tokens: int = TOKENS, *, reduce: bool = False) -> Tensor:
        return moe_gemm(rows[:tokens], stack, chosen[:tokens], variant=variant, reduce=reduce)

    for variant in variants:
        yield f"{variant} with experts", partial(multiply, variant), expected
    # With `reduce`, one kernel multiplies and adds up all slots of a token.
    yield "gemv with a sum of experts", partial(multiply, "gemv", 3, reduce=True), expected[:3].sum(1)
