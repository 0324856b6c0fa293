"""Cases of MLX's products that choose their matrices by index: gathered and sorted rows of a mixture of experts."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from .case import FLOATS, Array, Case, Generator, Launch, Launches, outputs, stored
from .quantized import AFFINE_HEADERS, FP_HEADERS, TYPES, Format

_AFFINE, _MXFP4, _NVFP4 = Format("affine", 64, 4), Format("mxfp4", 32, 4), Format("nvfp4", 16, 4)
EXPERTS, _LEFT, _CHOSEN = 3, 2, 4  # matrices, batches of x, products
_GEMV_HEADERS = ("steel/utils.h", "gemv.h")
_STEEL_HEADERS = ("steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_gather.h")


def _indices(rng: Generator) -> list[Array]:
    """Returns the indices of x and of the matrix for each product."""
    return [rng.integers(0, count, _CHOSEN).astype(np.uint32) for count in (_LEFT, EXPERTS)]


def _i32(*values: int) -> Array:
    return np.array(values, np.int32)


def _i64(*values: int) -> Array:
    return np.array(values, np.int64)


def _experts(form: Format, rng: Generator, rows: int, columns: int, name: str) -> list[Any]:
    """Returns the weights' arrays, each concatenated over the experts, and a list of int64 strides.

    A stride is the distance between two experts in one of the arrays.
    """
    parts = form.weights(rng, EXPERTS * rows, columns, name)
    strides = [_i64(rows * p.shape[1]) for p in (parts if form.is_affine else parts[:2])]
    return [*parts, strides]


def gathered_products(
    form: Format, name: str, shape: tuple[int, int, int], base: str, tile: tuple[int, int] = (32, 32)
) -> Launches:
    """Returns launches of a gathered product of the shape (M, N, K). Products of matrices have tiles of BM x BN."""
    M, N, K = shape

    def launches(rng: Generator) -> list[Launch]:
        by_rows = base.startswith("qmv") or base == "qmm_t"
        *w, strides = _experts(form, rng, *((N, K) if by_rows else (K, N)), name)
        x = stored(rng.normal(0, 1, (_LEFT, M, K)), name)
        left, right = _indices(rng)
        sizes = [K, N, M] if base.startswith("qmm") else [K, N]
        batches = [1, _i32(_LEFT, M, K), _i64(M * K, K, 1), 1, _i32(EXPERTS, N, K), *strides]
        buffers = [
            *w,
            x,
            left,
            right,
            outputs((_CHOSEN, M, N), name),
            *sizes,
            *batches,
            1,
            _i32(_CHOSEN),
            _i64(1),
            _i64(1),
        ]
        label = f"{_CHOSEN} of M {M} N {N} K {K}"
        if base.startswith("qmm"):
            return [Launch(label, buffers, (32, 2, 2), groups=(-(-N // tile[1]), -(-M // tile[0]), _CHOSEN))]
        columns = 64 if base == "qvm" else 8
        return [Launch(label, buffers, (32, 2, 1), groups=(M, -(-N // columns), _CHOSEN))]

    return launches


def _quantized_cases() -> Iterator[Case]:
    for name, word in TYPES.items():
        for form in (_AFFINE, _MXFP4, _NVFP4):
            for base, suffix, flags, shape in (
                ("qmv_fast", "", "", (1, 16, 512)),
                ("qmv", "", "", (2, 13, 192)),
                ("qvm", "", "", (1, 128, 128)),
                ("qmm_t", "_alN_true", ", true", (7, 64, 128)),
                ("qmm_t", "_alN_false", ", false", (33, 45, 128)),
                ("qmm_n", "", "", (7, 128, 64)),
            ):
                prefix = "affine" if form.is_affine else "fp"
                yield Case(
                    "gather",
                    f"{form.mode}_gather_{base}_{word}_gs_{form.group}_b_{form.bits}{suffix}",
                    AFFINE_HEADERS if form.is_affine else FP_HEADERS,
                    f"{prefix}_gather_{base}<{word}, {form.group}, {form.bits}{flags}>",
                    gathered_products(form, name, shape, base),
                )


def sorted_products(form: Format, name: str, turned: bool, rows: tuple[int, int], tile: tuple[int, int],
                    simdgroups: tuple[int, int]) -> Launches:  # fmt: skip
    """Returns launches whose rows are sorted by expert. The second expert has no rows.

    Args:
        form: the storage format of the weights.
        name: the name of the element type.
        turned: whether the weights are N x K.
        rows: the number of rows of all experts together, and of the first expert.
        tile: rows and columns that a threadgroup computes.
        simdgroups: the simdgroups of a threadgroup, across and down.
    """
    (M, first), N, K = rows, 64, 128
    starts = _i32(0, first, first)

    def launches(rng: Generator) -> list[Launch]:
        *w, _ = _experts(form, rng, *((N, K) if turned else (K, N)), name)
        x = stored(rng.normal(0, 1, (M, K)), name)
        buffers = [x, *w, starts, outputs((M, N), name), M, N, K, EXPERTS]
        tiles = -(-M // tile[0]) + EXPERTS
        return [Launch(f"M {M} N {N} K {K}", buffers, (32, *simdgroups), groups=(-(-N // tile[1]), tiles, 1))]

    return launches


def sorted_steel(name: str, turned: bool, rows: tuple[int, int], columns: int, tile: tuple[int, ...]) -> Launches:
    """Like `sorted_products`, but with a product of floats. A tile is (BM, BN, BK, WM, WN)."""
    (M, first), N, K = rows, columns, 50
    starts = _i32(0, first, first)

    def launches(rng: Generator) -> list[Launch]:
        a = stored(rng.normal(0, 1, (M, K)), name)
        b = stored(rng.normal(0, 1, (EXPERTS, N, K) if turned else (EXPERTS, K, N)), name)
        tiles = -(-N // tile[1]), -(-M // tile[0]) + EXPERTS
        params = _gemm_params((M, N, K), K if turned else N, tiles, (0, N * K, 0), tile[2])
        buffers = [a, b, starts, outputs((M, N), name), params, EXPERTS]
        return [Launch(f"M {M} N {N} K {K}", buffers, (32, tile[4], tile[3]), groups=(*tiles, 1))]

    return launches


def _gemm_params(shape: tuple[int, int, int], ldb: int, tiles: tuple[int, int], strides: tuple[int, int, int],
                 block: int) -> bytes:  # fmt: skip
    """Returns MLX's GEMMParams for a row-major A and C."""
    M, N, K = shape
    return struct.pack("8iqqqiii4x", M, N, K, K, ldb, N, *tiles, *strides, 0, K // block, 1)


def _steel(name: str, turned: bool, tile: tuple[int, ...]) -> Launches:
    M, N, K = 37, 70, 50

    def launches(rng: Generator) -> list[Launch]:
        a = stored(rng.normal(0, 1, (_LEFT, M, K)), name)
        b = stored(rng.normal(0, 1, (EXPERTS, N, K) if turned else (EXPERTS, K, N)), name)
        left, right = _indices(rng)
        tiles = -(-N // tile[1]), -(-M // tile[0])
        params = _gemm_params((M, N, K), K if turned else N, tiles, (1, 1, M * N), tile[2])
        buffers = [a, b, left, right, outputs((_CHOSEN, M, N), name), params, _i32(_CHOSEN), _i64(1), _i64(1)]
        buffers += [1, _i32(_LEFT), _i64(M * K), 1, _i32(EXPERTS), _i64(N * K)]
        return [Launch(f"{_CHOSEN} of M {M} N {N} K {K}", buffers, (32, tile[4], tile[3]), groups=(*tiles, _CHOSEN))]

    return launches


def _sorted_and_steel() -> Iterator[Case]:
    tile = (32, 32, 16, 2, 2)
    for name, metal in FLOATS.items():
        for turned in (False, True):
            word, flag = "nt" if turned else "nn", f"false, {str(turned).lower()}"
            whole = {"align_M": False, "align_N": True, "align_K": True}
            yield Case("gather", f"affine_gather_qmm_rhs_{word}_{TYPES[name]}_gs_64_b_4_bm_16_bn_32_bk_32_wm_1_wn_2",
                       AFFINE_HEADERS, f"affine_gather_qmm_rhs<{TYPES[name]}, 64, 4, 16, 32, 32, 1, 2, {flag[7:]}>",
                       sorted_products(_AFFINE, name, turned, (45, 20), (16, 32), (2, 1)), tuple(whole.items()))  # fmt: skip
            ragged = {"has_batch": False, "align_M": False, "align_N": False, "align_K": False}
            yield Case("gather", f"steel_gather_mm_rhs_{word}_{name}_{name}_bm16_bn64_bk16_wm1_wn2", _STEEL_HEADERS,
                       f"gather_mm_rhs<{metal}, 16, 64, 16, 1, 2, {flag}>",
                       sorted_steel(name, turned, (45, 20), 70, (16, 64, 16, 1, 2)),
                       tuple(ragged.items()))  # fmt: skip
            yield Case("gather", f"steel_gather_mm_{word}_{name}_{name}_" + "bm{}_bn{}_bk{}_wm{}_wn{}".format(*tile),
                       _STEEL_HEADERS, f"gather_mm<{metal}, {', '.join(map(str, tile))}, {flag}>",
                       _steel(name, turned, tile), tuple(ragged.items()))  # fmt: skip


def _gemv_launches(name: str, tile: tuple[int, ...], turned: bool) -> Launches:
    BM, BN, SM, SN, TM, TN = tile
    made = BN * SN * TN if turned else BM * SM * TM
    out, size = (2 * made, 67) if turned else (50, 130)

    def launches(rng: Generator) -> list[Launch]:
        matrices = stored(rng.normal(0, 1, (EXPERTS, size, out) if turned else (EXPERTS, out, size)), name)
        vectors = stored(rng.normal(0, 1, (_LEFT, size)), name)
        left, right = _indices(rng)
        buffers = [matrices, vectors, None, outputs((_CHOSEN, out), name), size, out, out if turned else size, 1.0, 0.0]
        buffers += [1, _i32(_CHOSEN), _i64(1, 1), 1, _i32(_LEFT), _i64(size), 1, _i32(EXPERTS), _i64(out * size)]
        buffers += [left, right]
        groups = (-(-out // made), 1, _CHOSEN)
        return [Launch(f"{_CHOSEN} of {out} x {size}", buffers, (32, BN, BM), groups=groups)]

    return launches


def _gemv() -> Iterator[Case]:
    for name, metal in FLOATS.items():
        for base, turned, tile in (("gemv", False, (4, 1, 1, 32, 4, 4)), ("gemv_t", True, (1, 2, 8, 4, 4, 4))):
            short = "_".join(f"{k}{v}" for k, v in zip(("bm", "bn", "sm", "sn", "tm", "tn"), tile, strict=True))
            yield Case("gather", f"{base}_gather_{name}_{short}", _GEMV_HEADERS,
                       f"{base}_gather<{metal}, {', '.join(map(str, tile))}>",
                       _gemv_launches(name, tile, turned))  # fmt: skip


def cases() -> Iterator[Case]:
    yield from _quantized_cases()
    yield from _sorted_and_steel()
    yield from _gemv()
