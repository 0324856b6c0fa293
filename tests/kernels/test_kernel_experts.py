"""The kernels of mixtures, in checked mode: the sorted table is exact, and all products are within the bound.

In checked mode, a read of memory that no kernel has written is a fault. Blocks beyond the last block, and ids that name
no expert, must therefore read nothing.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import experts as reference_experts
from tests.support import reference
from tests.support.experts import make_experts
from tests.support.kernels.cases import TENSOR_FLOATS, TENSOR_FORMATS
from tests.support.kernels.decoder import ACTIVATIONS, run_activation
from tests.support.kernels.experts import ALPHA, GEMV_KERNELS, LIMIT, Mixture, expected_table, run_experts, run_sort
from tests.support.kernels.launch import number
from tests.support.kernels.tensor import TILES

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


# tokens, top_k, experts, rows of a block, dtype of the ids
SORTS = [
    (1, 1, 1, 8, torch.int64),
    (40, 2, 5, 16, torch.int32),
    (40, 3, 512, 8, torch.int64),  # more experts than threads
    (70, 1, 2, 32, torch.int64),
    (300, 1, 256, 8, torch.int32),  # with as many experts as threads, ids that name no expert need a second pass
]


@pytest.mark.parametrize(("tokens", "top_k", "experts", "block_rows", "dtype"), SORTS)
def test_sort(tokens: int, top_k: int, experts: int, block_rows: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng([tokens, experts])
    ids = torch.from_numpy(rng.integers(-1, experts + 2, (tokens, top_k))).to(dtype)
    table, words = run_sort(ids, experts, block_rows), number("kMoeBlockWords")
    blocks, pairs = expected_table(ids, experts, block_rows)
    got = table.read((-1,), torch.int32).numpy()
    entries = got[: len(got) - ids.numel()].reshape(-1, words)
    assert (got[len(got) - ids.numel() :] == pairs).all()
    assert (entries[: len(blocks)] == blocks).all()
    assert len(entries) > len(blocks)
    assert (entries[len(blocks) :, 2] == 0).all()


def mixture(
    weight_format: str, dtype: torch.dtype, ids: list[list[int]], *, E: int, K: int, N: int, **options
) -> Mixture:
    """Returns random rows and E experts of K rows and N columns. `ids` has the experts of each token's slots.

    Options are those of `Mixture`, `group_size` and `use_perm`, and four more: `by_slot` gives each slot its own row,
    `weighted` is the dtype of row weights, and `two_levels` and `block_scales` choose the kind of scales.
    """
    group = min(reference.FIXED_GROUP_SIZES.get(weight_format, options.pop("group_size", 16)), K)
    scale = {"global_scale_shape": (-1,)} if weight_format == "nvfp4" else {}
    if options.pop("two_levels", False):
        scale |= {"scales_dtype": torch.uint8, "zeros_dtype": torch.uint8, "super_dtype": HALF}
    scale |= {"block_scales": options.pop("block_scales", False)}
    held = make_experts(weight_format, E, K, N, group, use_perm=options.pop("use_perm", False), **scale)
    chosen = torch.tensor(ids)
    rng = np.random.default_rng([K, N])
    rows = (*chosen.shape, K) if options.pop("by_slot", False) else (len(ids), K)
    weighted = options.pop("weighted", None)
    return Mixture(
        held, weight_format, group, torch.from_numpy(rng.standard_normal(rows)).to(dtype), chosen,
        bias=torch.from_numpy(rng.standard_normal((E, N))).to(HALF) if options.pop("bias", False) else None,
        row_weights=torch.from_numpy(rng.random(chosen.shape)).to(weighted) if weighted else None,
        **options,
    )  # fmt: skip


def check(p: Mixture, kernel: str, **options: int | str) -> torch.Tensor:
    got = run_experts(kernel, p, **options)
    exact, bound = reference_experts.moe_gemm(
        p.a, p.experts, p.ids, p.bias, p.row_weights, p.reduce, raw_codes=kernel in GEMV_KERNELS
    )
    reference.check_gemm(got, exact, bound)
    return got


IDS = [[0, 2], [2, 3], [-1, 2], [1, 1]] + [[2, 0]] * 9  # expert 2 has more than a block of rows; 3 names no expert


def case_of_one_sum(kernel: str, **options: int | str) -> None:
    options_of_call = {"bias": True, "weighted": FLOAT, "reduce": True, "by_slot": True}
    check(mixture("uint4_bias", HALF, IDS, E=3, K=264, N=41, two_levels=True, **options_of_call), kernel, **options)


def case_of_pairs(kernel: str, **options: int | str) -> None:
    check(mixture("nvfp4", BFLOAT, IDS, E=3, K=144, N=132, bias=True, use_perm=True), kernel, **options)


def case_of_planes(kernel: str, **options: int | str) -> None:
    """The last word of an expert's second plane is partly filled."""
    check(mixture("uint5_bias", HALF, IDS[:4], E=3, K=72, N=36), kernel, **options)


def case_of_blocks(kernel: str, **options: int | str) -> None:
    """A scale is for a block of 128 columns, so an expert has fewer scales than columns."""
    blocks = {"group_size": 128, "block_scales": True}
    check(mixture("float8_e4m3", HALF, IDS[:4], E=3, K=264, N=256, **blocks), kernel, **options)


PRODUCTS = [case_of_one_sum, case_of_pairs, case_of_planes, case_of_blocks]
KERNELS = [
    ("moe_gemv", {"simdgroups": 2}),
    ("moe_gemv_blocks", {"rows": 4, "simdgroups": 2}),
    ("moe_fused", {"rows": 8, "simdgroups": 2}),
    ("moe_tensor", {"tile": "32x64x32"}),
]


@pytest.mark.parametrize(("kernel", "options"), KERNELS)
@pytest.mark.parametrize("case", PRODUCTS)
def test_products(case, kernel: str, options: dict[str, int | str]) -> None:
    case(kernel, **options)


# The number of rows of five experts: full blocks, and last blocks for which the kernels have special loops.
ROWS_OF_EXPERTS = {"moe_gemv_blocks": (1, 2, 3, 4, 7), "moe_fused": (5, 13, 22, 31, 37)}
MOST_ROWS = {"moe_gemv_blocks": (4,), "moe_fused": (32, 24, 16)}  # maximum rows of a block; the values are used in turn


def case_of_rows(kernel: str, turn: int, dtype: torch.dtype) -> None:
    """Multiplies experts with different numbers of rows. Formats, sizes and options are used in turn."""
    counts = ROWS_OF_EXPERTS[kernel]
    ids = np.random.default_rng(turn).permutation(np.repeat(np.arange(len(counts)), counts))
    p = mixture(
        reference.FORMATS[turn], dtype, ids[:, None].tolist(), E=len(counts), K=(72, 136, 264)[turn % 3],
        N=(132, 41, 64, 70)[turn % 4], group_size=(32, 16, 128, 64)[turn % 4], by_slot=turn % 2 == 0,
        bias=turn % 3 != 1, use_perm=turn % 3 == 0,
        weighted=FLOAT if turn % 3 == 2 else None,
    )  # fmt: skip
    rows = MOST_ROWS[kernel][turn % len(MOST_ROWS[kernel])]
    check(p, kernel, rows=rows, simdgroups=1 + turn % 3, subnormal_codes=turn % 3 != 2)


@pytest.mark.parametrize("kernel", ROWS_OF_EXPERTS)
@pytest.mark.parametrize("turn", range(len(reference.FORMATS)))
def test_last_blocks(turn: int, kernel: str, everything: bool) -> None:
    for dtype in reference.dtypes_in_turn(turn, everything):
        case_of_rows(kernel, turn, dtype)


def every_second(count: int, first: int) -> list[Any]:
    """Returns all turns, of which every second one is in the sample. Two tests have complementary samples."""
    return [pytest.param(turn, marks=() if turn % 2 == first else pytest.mark.whole) for turn in range(count)]


# top_k, slices of K, K, and the dtype of activations and results. Only fp32 results depend on the order of a sum.
SLOTS = [
    (1, 4, 264, HALF),
    (2, 3, 136, FLOAT),
    (3, 1, 72, BFLOAT),
    (8, 2, 72, FLOAT),
    (10, 2, 136, HALF),
    (16, 1, 72, BFLOAT),
    (20, 1, 264, FLOAT),
]


def case_of_summed_slots(turn: int, dtype: torch.dtype | None = None) -> None:
    """Multiplies and adds with `moe_gemv_reduce`, and compares the bits with `moe_gemv` and `moe_reduce`.

    Formats, sizes and options are used in turn. A token's experts are random, so some repeat and some ids name no
    expert. The last token has no expert, and its weights are NaN.
    """
    top_k, slices, K, usual = SLOTS[turn]
    ids = np.random.default_rng(turn).integers(-1, 5, (3, top_k))
    ids[2] = 4
    p = mixture(
        reference.FORMATS[turn], dtype or usual, ids.tolist(), E=4, K=K, N=(132, 41, 128)[turn % 3],
        group_size=(32, 16, 128, 64)[turn % 4], by_slot=turn % 3 != 0, bias=turn % 3 != 1, use_perm=turn % 4 == 2,
        weighted=(HALF, FLOAT, None, BFLOAT)[turn % 4], reduce=True,
    )  # fmt: skip
    if p.row_weights is not None:
        p.row_weights[2] = torch.nan
    if turn % 2 == 1:
        p = dataclasses.replace(p, ids=p.ids.int())
    got = check(p, "moe_gemv_reduce", simdgroups=slices)
    assert torch.equal(got.view(torch.uint8), run_experts("moe_gemv", p, simdgroups=slices).view(torch.uint8))
    assert (got[2] == 0).all()


@pytest.mark.parametrize("turn", every_second(len(SLOTS), first=0))
def test_slots_summed_in_one_dispatch(turn: int, everything: bool) -> None:
    for dtype in reference.DTYPES if everything else (None,):
        case_of_summed_slots(turn, dtype)


# simdgroups, K, dtype
GATED = [
    (1, 264, HALF),
    (3, 136, FLOAT),
    (2, 72, BFLOAT),
    (4, 264, FLOAT),
    (2, 136, HALF),
    (16, 264, BFLOAT),
    (1, 72, FLOAT),
]


def case_of_a_gate(turn: int, dtype: torch.dtype | None = None) -> None:
    """Multiplies with `moe_gemv_gated`, and compares the bits with `moe_gemv` and `gated_activation`.

    Formats, sizes and options are used in turn.
    """
    simdgroups, K, usual = GATED[turn]
    p = mixture(
        reference.FORMATS[turn], dtype or usual, IDS[:4], E=3, K=K, N=(256, 128)[turn % 3 == 2],
        group_size=(32, 16, 128, 64)[turn % 4], by_slot=turn % 3 == 0, bias=turn % 3 != 1, use_perm=turn % 4 == 2,
        activation=ACTIVATIONS[turn % 5], interleaved=turn % 2 == 1,
    )  # fmt: skip
    if turn % 2 == 0:
        p = dataclasses.replace(p, ids=p.ids.int())
    products = check(p, "moe_gemv", simdgroups=simdgroups)
    expected = run_activation(products.flatten(0, 1), p.activation, interleaved=p.interleaved, limit=LIMIT, alpha=ALPHA)
    got = run_experts("moe_gemv_gated", p, simdgroups=simdgroups)
    assert torch.equal(got.flatten(0, 1).view(torch.uint8), expected.view(torch.uint8))
    assert (got[2, 0] == 0).all() and got.any()


@pytest.mark.parametrize("turn", every_second(len(GATED), first=1))
def test_an_activation_in_the_same_dispatch(turn: int, everything: bool) -> None:
    for dtype in reference.DTYPES if everything else (None,):
        case_of_a_gate(turn, dtype)


# Expert 1 has 71 rows, more than a block of 32 or 64; expert 0 has 32 rows, and expert 2 none. 3 ids name no expert.
SKEWED = [[1, 0]] * 32 + [[1, -1]] * 2 + [[1, 7]] + [[1, 1]] * 18


def case_of_skewed_rows(turn: int, dtype: torch.dtype) -> None:
    """Multiplies with `moe_tensor` in a format. Tiles, sizes and options are used in turn."""
    p = mixture(
        TENSOR_FORMATS[turn], dtype, SKEWED, E=3, K=(72, 136, 264)[turn % 3], N=(132, 41, 64, 70)[turn % 4],
        group_size=(32, 16, 128, 64)[turn % 4], by_slot=turn % 3 == 0, bias=turn % 3 != 1, use_perm=turn % 2 == 0,
        weighted=FLOAT if turn % 3 == 2 else None, reduce=turn % 4 == 3,
    )  # fmt: skip
    check(p, "moe_tensor", tile=TILES[turn % 4], perturb_seed=turn % 3, subnormal_codes=turn % 5 != 2)


@pytest.mark.parametrize("turn", range(len(TENSOR_FORMATS)))
def test_tensor_units_with_skewed_rows(turn: int, everything: bool) -> None:
    for dtype in TENSOR_FLOATS if everything else (TENSOR_FLOATS[turn % 2],):
        case_of_skewed_rows(turn, dtype)
