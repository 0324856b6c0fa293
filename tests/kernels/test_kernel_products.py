"""Kernels of products agree with fp64 within the error bound of docs/use/operators.md.

Small shapes run in checked mode: an access out of bounds, a read of uninitialized memory or a race fails the test.
Memory around the tensors is NaN.
"""

import random
from collections.abc import Sequence

import pytest
import torch

from softmetal.device import KernelFault
from tests.support.kernels.cases import (
    COMMON,
    TENSOR_FLOATS,
    TENSOR_FORMATS,
    pairwise,
    plain_problems,
    problem,
)
from tests.support.kernels.fused import run_fused
from tests.support.kernels.problems import Problem, check, run_gemv
from tests.support.kernels.tensor import TILES, run_tensor
from tests.support.kernels.tiles import STAGED, STRIPED, Tile, run_striped, run_tiles

# One column; values around the number of columns of a lane, a simdgroup and a tile; several lanes, simdgroups and
# tiles.
COLUMNS = [1, 7, 8, 40, 63, 64, 65, 100, 128, 200]
GEMV_AXES = COMMON | {
    "M": [1, 2, 3, 4, 5, 6, 7, 8, 9, 17],
    "N": COLUMNS,
    "K": [8, 24, 64, 136, 264, 520],
    "rows": [1, 2, 3, 4, 5, 6, 7, 8],
    "simdgroups": [1, 2, 4, 8],
    "splits": [1, 2, 3],
    "subnormal_codes": [True, False],
}
FUSED_AXES = COMMON | {
    "M": [1, 5, 9, 16, 31, 33],
    "N": [1, 7, 40, 64, 65, 200],
    "K": [8, 24, 64, 72, 256, 520],
    "rows": [8, 16, 24, 32],
    "simdgroups": [1, 2, 4, 7],
    "splits": [1, 2, 3],
    "subnormal_codes": [True, False],
}
TILE_AXES = COMMON | {
    "M": [1, 8, 17, 33, 64, 65, 130],
    "N": [1, 7, 40, 64, 65, 128, 200],
    "K": [8, 24, 32, 72, 136, 264, 520],
    "kernel": [*STAGED, *STRIPED],
    "parts": [1, 2, 3, 5],
}
TENSOR_AXES = COMMON | {
    "weight_format": TENSOR_FORMATS,
    "dtype": TENSOR_FLOATS,
    "M": [1, 16, 31, 33, 64, 70],
    "N": [1, 7, 40, 64, 65, 200],
    "K": [8, 24, 64, 72, 264, 520],
    "tile": TILES,
    "splits": [1, 2, 3],
    "subnormal_codes": [True, False],
    "perturb_seed": [0, 1, 2, 3],
}
# The axes that are launch options; all other axes belong to the problem.
DIRECT_LAUNCH = ["rows", "simdgroups", "splits", "subnormal_codes"]
TILE_LAUNCH = ["kernel", "parts"]
TENSOR_LAUNCH = ["tile", "splits", "subnormal_codes", "perturb_seed"]


def run(kernel: str, problem: Problem, **options) -> torch.Tensor:
    if kernel == "gemv":
        return run_gemv(problem, **{"rows": 4, "simdgroups": 4} | options)
    if kernel == "fused":
        return run_fused(problem, **{"rows": 16, "simdgroups": 3} | options)
    if kernel == "tensor":
        return run_tensor(problem, **{"tile": "32x64x32"} | options)
    return run_tiles(kernel, problem, **options)


@pytest.mark.parametrize(("problems", "options"), pairwise(GEMV_AXES, DIRECT_LAUNCH))
def test_gemv_agrees_with_fp64(problems: list[Problem], options: dict) -> None:
    for p in problems:
        check(p, run_gemv(p, **options), raw_codes=True)


@pytest.mark.parametrize(("problems", "options"), pairwise(FUSED_AXES, DIRECT_LAUNCH))
def test_fused_agrees_with_fp64(problems: list[Problem], options: dict) -> None:
    for p in problems:
        check(p, run_fused(p, **options), raw_codes=False)


@pytest.mark.parametrize(("problems", "options"), pairwise(TENSOR_AXES, TENSOR_LAUNCH))
def test_tensor_agrees_with_fp64(problems: list[Problem], options: dict) -> None:
    for p in problems:
        check(p, run_tensor(p, **options), raw_codes=False)


@pytest.mark.parametrize(("problems", "options"), pairwise(TILE_AXES, TILE_LAUNCH))
def test_staged_kernels_agree_with_fp64(problems: list[Problem], options: dict) -> None:
    for p in problems:
        check(p, run_tiles(**options, problem=p), raw_codes=False)


EVERY_M = [*range(1, 10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 130]
SAMPLE = (130, 65)  # M and N
# Values of K that end inside a tile or a group.
STRADDLING_K = {"K": [8, 40, 72, 136, 264, 328]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "matrix_row" in metafunc.fixturenames:
        # Without --everything, one shape per kernel is enough, because the tests of random axes sample the shapes.
        whole = metafunc.config.getoption("--everything")
        rows = [(M, COLUMNS) for M in EVERY_M] if whole else [(SAMPLE[0], SAMPLE[1:])]
        metafunc.parametrize("matrix_row", rows, ids=[f"M={M}" for M, _ in rows])


def drawn(kernel: str, M: int, N: int) -> tuple[Problem, dict]:
    """Returns a problem and launch options. Formats, dtypes and options are random, with a fixed seed per shape.

    The problems of the shape SAMPLE suit three tests, so that these compile one kernel instead of three: K is long
    enough to be split, and only the table of lut4 fills the threadgroup memory of staged kernels to the end.
    """
    axes, launch = {
        "gemv": (GEMV_AXES, DIRECT_LAUNCH),
        "fused": (FUSED_AXES, DIRECT_LAUNCH),
        "tensor": (TENSOR_AXES, TENSOR_LAUNCH),
    }.get(kernel, (TILE_AXES, TILE_LAUNCH))
    draw = random.Random(f"{M} {N} {kernel}")
    fields = {name: draw.choice(values) for name, values in (axes | STRADDLING_K).items()} | {"M": M, "N": N}
    if (M, N) == SAMPLE:
        fields |= {"K": max(STRADDLING_K["K"])} | ({"splits": 2} if "splits" in launch else {"parts": 3})
        fields |= {"weight_format": "lut4"} if kernel.startswith("gemm_") else {}
    options = {name: fields.pop(name) for name in launch} | {"kernel": kernel}
    return problem(**fields), options


every_kernel = pytest.mark.parametrize("kernel", ["gemv", "fused", "tensor", *STAGED, *STRIPED])


@every_kernel
def test_every_shape_agrees_with_fp64(kernel: str, matrix_row: tuple[int, Sequence[int]]) -> None:
    M, columns = matrix_row
    for N in columns:
        p, options = drawn(kernel, M, N)
        check(p, run(problem=p, **options), raw_codes=kernel == "gemv")


@every_kernel
def test_the_order_of_threadgroups_changes_no_bit(kernel: str) -> None:
    p, options = drawn(kernel, *SAMPLE)
    first, second = (run(problem=p, seed=seed, **options) for seed in (1, 2))
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.parametrize("kernel", [*STAGED, *STRIPED])
def test_threadgroup_memory_is_what_the_kernel_uses(kernel: str) -> None:
    """The host requests only the threadgroup memory that the kernel uses.

    The kernel uses a multiple of 4 bytes, which the host rounds up to a multiple of 16. Without the last 12 bytes the
    kernel may still run; without the last 16 bytes it accesses memory out of bounds.
    """
    p, options = drawn(kernel, *SAMPLE)
    bytes_needed = Tile.of(kernel).options(p, (1, 1, 1))["threadgroup_bytes"]
    check(p, run(problem=p, threadgroup_bytes=bytes_needed - 12, **options), raw_codes=False)
    with pytest.raises(KernelFault, match="threadgroup"):
        run(problem=p, threadgroup_bytes=bytes_needed - 16, **options)


@pytest.mark.parametrize("kernel", STRIPED)
def test_any_number_of_stripes_agrees_with_fp64(kernel: str) -> None:
    """Covers one stripe for all tiles, idle stripes, a longer last slice, and a stripe border at a tile's edge."""
    p = problem(66, 130, 104, weight_format="uint4", dtype=torch.float16, group_size=32, bias_dtype=torch.float16)
    # 6 tiles of three slices; and of a single slice, so that no stripe shares a tile
    for k_per_slice, stripe_counts in ((32, (1, 3, 5, 6, 13, 60)), (128, (1, 5, 60))):
        for stripes in stripe_counts:
            check(p, run_striped(kernel, p, k_per_slice=k_per_slice, stripes=stripes), raw_codes=False)


@pytest.mark.parametrize("p", plain_problems(4, 40, 16384, group_size="K", all_positive=True))
def test_gemv_sums_a_long_k_within_the_bound(p: Problem) -> None:
    check(p, run_gemv(p, rows=4, simdgroups=8, checked=False), raw_codes=True)


@pytest.mark.parametrize("p", plain_problems(10, 40, 16384, group_size="K", all_positive=True))
def test_fused_sums_a_long_k_within_the_bound(p: Problem) -> None:
    check(p, run_fused(p, rows=8, simdgroups=1, checked=False), raw_codes=False)


@pytest.mark.parametrize(
    "p",
    plain_problems(10, 40, 16384, TENSOR_FORMATS, TENSOR_FLOATS, group_size="K", all_positive=True, bias_cancels=True),
)
def test_tensor_sums_a_long_k_within_the_bound(p: Problem) -> None:
    check(p, run_tensor(p, tile="32x64x32", checked=False), raw_codes=False)


@pytest.mark.parametrize("p", plain_problems(10, 40, 16384, group_size="K", all_positive=True))
def test_staged_kernels_sum_a_long_k_within_the_bound(p: Problem) -> None:
    check(p, run_tiles("gemm_double_buffered_64x64x32", p, checked=False), raw_codes=False)


@pytest.mark.parametrize("kernel", [STAGED[0], STAGED[-1], STRIPED[-1]])
def test_every_kind_of_tile_sums_a_long_k_within_the_bound(kernel: str) -> None:
    p = problem(10, 40, 16384, weight_format="uint4_bias", dtype=torch.float32, group_size=16384, all_positive=True)
    check(p, run_tiles(kernel, p, checked=False), raw_codes=False)
