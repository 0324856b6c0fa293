"""gemv and the staged GEMMs against fp64, within the design's error bound per element.

Small shapes run in checked mode: an access out of bounds, a read of memory that nobody wrote or a race fails the test.
What lies beside the tensors is NaN.
"""

import pytest
import torch
from kernel_cases import COMMON, FLOATS, FORMATS, pairwise, plain_problems, problem
from kernel_problems import Problem, check, run_gemv, run_staged

STAGED = ["gemm_double_buffered", "gemm_single_stage"]
# Columns: one, a lane's edge, a simdgroup's and a tile's on either side, more than one of each.
COLUMNS = [1, 7, 8, 40, 63, 64, 65, 100, 128, 200]
GEMV_AXES = COMMON | {
    "M": [1, 2, 3, 4, 5, 9],
    "N": COLUMNS,
    "K": [8, 24, 64, 136, 264, 520],
    "rows": [1, 2, 3, 4],
    "simdgroups": [1, 2, 4, 8],
    "splits": [1, 2, 3],
    "subnormal_codes": [True, False],
}
STAGED_AXES = COMMON | {
    "M": [1, 8, 9, 17, 33, 63, 64, 65, 130],
    "N": COLUMNS,
    "K": [8, 24, 32, 64, 72, 136, 264, 520],
    "kernel": STAGED,
    "slices": [1, 2, 3],
}


def run(kernel: str, p: Problem, **options) -> torch.Tensor:
    if kernel == "gemv":
        return run_gemv(p, **{"rows": 4, "simdgroups": 4} | options)
    return run_staged(kernel, p, **options)


@pytest.mark.parametrize(("p", "options"), pairwise(GEMV_AXES, ["rows", "simdgroups", "splits", "subnormal_codes"]))
def test_gemv(p: Problem, options: dict) -> None:
    check(p, run_gemv(p, **options), raw_codes=True)


@pytest.mark.parametrize(("p", "options"), pairwise(STAGED_AXES, ["kernel", "slices"]))
def test_staged(p: Problem, options: dict) -> None:
    check(p, run_staged(**options, problem=p), raw_codes=False)


@pytest.mark.parametrize("kernel", ["gemv", *STAGED])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_same_bits_in_any_order(kernel: str, weight_format: str, dtype: torch.dtype) -> None:
    p = problem(5, 72, 200, weight_format=weight_format, dtype=dtype, bias_dtype=torch.float32)
    options = {"splits": 2} if kernel == "gemv" else {"slices": 2}
    first, second = (run(kernel, p, seed=seed, **options) for seed in (1, 2))
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.parametrize("p", plain_problems(4, 256, 16384, group_size=128, all_positive=True))
def test_gemv_long_sums(p: Problem) -> None:
    check(p, run_gemv(p, rows=4, simdgroups=8, checked=False), raw_codes=True)


@pytest.mark.parametrize("p", plain_problems(66, 136, 16384, group_size=128, all_positive=True))
def test_staged_long_sums(p: Problem) -> None:
    check(p, run_staged("gemm_double_buffered", p, checked=False), raw_codes=False)


@pytest.mark.parametrize("kernel", ["gemv", *STAGED])
def test_all_weights_positive(kernel: str) -> None:
    """No cancellation at all: rounding errors of a chain have nothing to hide behind."""
    for K in (128, 1024, 4096):
        p = problem(4, 64, K, weight_format="uint4_bias", dtype=torch.float32, group_size=16, all_positive=True)
        check(p, run(kernel, p, checked=False), raw_codes=True)
