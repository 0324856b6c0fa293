"""`gemm` with so many rows of bf16 that the CPU kernel's blocks of rows share decoded codes."""

import pytest
import torch

import torch_marlin_metal  # noqa: F401  registers the operators
from tests.support import reference

OPS = torch.ops.torch_marlin_metal
FORMATS = ("uint4", "uint4_bias", "nvfp4", "uint5b16", "uint6_bias", "uint8b128", "mxfp8")


@pytest.mark.parametrize("name", FORMATS)
def test_many_rows_are_within_the_bound(name) -> None:
    weight = reference.make_weight(name, 160, 40, 32)
    a = reference.random(61, 160, dtype=torch.bfloat16)
    got = OPS.gemm(a, weight.b_packed, weight.scales, **weight.arguments)
    exact, bound = reference.gemm(a, weight)
    reference.check_gemm(got, exact, bound)
