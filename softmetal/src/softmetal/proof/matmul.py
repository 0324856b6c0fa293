"""Cases of MLX's kernels gemv and steel GEMM: fused, split over K, and with segments of K."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from .case import FLOATS, Case, Generator, Launch, Launches, outputs, stored

_NOTHING = np.zeros(4, np.int64)
_GEMV_HEADERS = ("steel/utils.h", "gemv.h")
_STEEL_HEADERS = ("steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_fused.h")
_SPLIT_HEADERS = ("steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_splitk.h")
_SEGMENT_HEADERS = ("steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_segmented.h")
_TILES = ((64, 64, 16, 2, 2), (64, 64, 16, 1, 2), (64, 32, 32, 2, 2), (32, 64, 16, 1, 2), (32, 32, 16, 2, 2),
          (64, 32, 8, 4, 1))  # fmt: skip


def flag(value: bool) -> str:
    return str(value).lower()


def _gemv_launches(name: str, tile: tuple[int, ...], axpby: bool, turned: bool,
                   sizes: list[tuple[int, int]]) -> Launches:  # fmt: skip
    """Returns launches of gemv. `sizes` has pairs (outputs, inputs).

    A threadgroup has BM x BN simdgroups of SM x SN threads, and a thread multiplies TM x TN elements of the matrix at a
    time. A threadgroup thus computes BM * SM * TM outputs, or BN * SN * TN outputs of a transposed matrix (`turned`).
    """
    BM, BN, SM, SN, TM, TN = tile
    made = BN * SN * TN if turned else BM * SM * TM

    def launches(rng: Generator) -> list[Launch]:
        found = []
        for out, size in sizes:
            matrix = stored(rng.normal(0, 1, (size, out) if turned else (out, size)), name)
            x, bias = stored(rng.normal(0, 1, size), name), stored(rng.normal(0, 1, out), name)
            scalars = [size, out, out if turned else size, 0.5 if axpby else 1.0, 2.0 if axpby else 0.0, 1]
            rest = [np.array([1], np.int32), _NOTHING, _NOTHING, _NOTHING, 1]
            buffers = [matrix, x, bias, outputs(out, name), *scalars, *rest]
            found.append(Launch(f"{out} x {size}", buffers, (32, BN, BM), groups=(-(-out // made), 1, 1)))
        return found

    return launches


def _gemv() -> Iterator[Case]:
    # BN > 1 is left out, because MLX then has a barrier in a branch that some lanes of a simdgroup do not execute.
    straight = [(4, 1, 1, 32, 4, 4), (8, 1, 1, 32, 4, 4), (1, 1, 8, 4, 4, 4), (4, 1, 1, 32, 1, 4)]
    turned = [(1, 2, 8, 4, 4, 1), (1, 2, 8, 4, 4, 4), (1, 4, 8, 4, 4, 4), (1, 16, 4, 8, 4, 4)]
    for name, metal in FLOATS.items():
        for base, tiles in (("gemv", straight), ("gemv_t", turned)):
            for tile in tiles:
                for axpby in (False, True):
                    if axpby and tile != tiles[0]:
                        continue
                    short = "_".join(f"{k}{v}" for k, v in zip(("bm", "bn", "sm", "sn", "tm", "tn"), tile, strict=True))
                    # gemv_t gets only full tiles, because threads beyond the last column return before the barrier.
                    whole = tile[1] * tile[3] * tile[5]
                    sizes = [(50, 130), (33, 1041)] if base == "gemv" else [(2 * whole, 130), (whole, 67)]
                    yield Case(
                        "gemv",
                        f"{base}_{name}_{short}_nc0_axpby{int(axpby)}",
                        _GEMV_HEADERS,
                        f"{base}<{metal}, {', '.join(map(str, tile))}, false, {flag(axpby)}>",
                        _gemv_launches(name, tile, axpby, base == "gemv_t", sizes),
                    )


def _operands(rng: Generator, name: str, M: int, N: int, K: int, turned: str) -> list[Any]:
    shapes = ((K, M) if turned[0] == "t" else (M, K), (N, K) if turned[1] == "t" else (K, N))
    return [stored(rng.normal(0, 1, shape), name) for shape in shapes]


def _leading(M: int, N: int, K: int, turned: str) -> tuple[int, int]:
    return (M if turned[0] == "t" else K, K if turned[1] == "t" else N)


def steel_constants(tile: tuple[int, ...], shape: tuple[int, int, int], source: bool) -> tuple[tuple[str, bool], ...]:
    """Returns a product's function constants: whether tiles divide M, N and K, and whether C is added (`source`)."""
    aligned = {f"align_{d}": s % t == 0 for d, s, t in zip("MNK", shape, tile[:3], strict=True)}
    return tuple({"has_batch": False, "use_out_source": source, "do_axpby": source, **aligned}.items())


def steel_products(name: str, tile: tuple[int, ...], turned: str, shape: tuple[int, int, int],
                    source: bool) -> Launches:  # fmt: skip
    def launches(rng: Generator) -> list[Launch]:
        M, N, K = shape
        BM, BN, BK, WM, WN = tile
        a, b = _operands(rng, name, M, N, K, turned)
        tiles = (-(-N // BN), -(-M // BM))
        params = struct.pack("8iqqqiii4x", M, N, K, *_leading(M, N, K, turned), N, *tiles, 0, 0, 0, 0, K // BK, 1)
        buffers: list[Any] = [a, b, None, outputs((M, N), name), params]
        if source:
            buffers[2] = stored(rng.normal(0, 1, (M, N)), name)
            buffers.append(struct.pack("2iq2f", N, 1, 0, 0.5, 2.0))
        return [Launch(f"M {M} N {N} K {K}", buffers, (32, WN, WM), groups=(*tiles, 1))]

    return launches


def _steel() -> Iterator[Case]:
    # Tiles divide the sizes of "nt", and do not divide the others. The cases with "tn" add a third matrix.
    shapes = {"nn": (100, 72, 50), "nt": (64, 128, 64), "tn": (45, 33, 40), "tt": (70, 40, 100)}
    for name, metal in FLOATS.items():
        for turned, shape in shapes.items():
            for tile in _TILES if turned == "nt" else (_TILES[0], _TILES[2], _TILES[4]):
                source = turned == "tn"
                yield Case(
                    "steel_gemm",
                    f"steel_gemm_fused_{turned}_{name}_{name}_" + "bm{}_bn{}_bk{}_wm{}_wn{}".format(*tile),
                    _STEEL_HEADERS,
                    f"gemm<{metal}, {', '.join(map(str, tile))}, "
                    f"{flag(turned[0] == 't')}, {flag(turned[1] == 't')}, float>",
                    steel_products(name, tile, turned, shape, source),
                    steel_constants(tile, shape, source),
                )


def split_products(name: str, turned: str, shape: tuple[int, int, int], tile: int, size: int) -> Launches:
    """Returns launches of a product in two parts: `size` k, and the remaining k.

    A threadgroup computes tile x tile outputs.
    """

    def launches(rng: Generator) -> list[Launch]:
        M, N, K = shape
        parts = 2
        a, b = _operands(rng, name, M, N, K, turned)
        tiles = (-(-N // tile), -(-M // tile))
        params = struct.pack("13i", M, N, K, *_leading(M, N, K, turned), N, *tiles, parts, M * N, size, 0, size // 16)
        buffers = [a, b, outputs((parts, M, N), "float32"), params]
        return [Launch(f"M {M} N {N} K {K} in {parts}", buffers, (32, 2, 2), groups=(*tiles, parts))]

    return launches


def _split() -> Iterator[Case]:
    for name, metal in FLOATS.items():
        for turned, shape, whole in (("nn", (32, 48, 64), True), ("nt", (19, 21, 75), False)):
            word = "taligned" if whole else "naligned"
            yield Case(
                "steel_gemm",
                f"steel_gemm_splitk_{turned}_{name}_float32_bm16_bn16_bk16_wm2_wn2_MN_{word}_K_{word}",
                _SPLIT_HEADERS,
                f"gemm_splitk<{metal}, float, 16, 16, 16, 2, 2, false, {flag(turned[1] == 't')}, "
                f"{flag(whole)}, {flag(whole)}>",
                split_products(name, turned, shape, 16, shape[2] // 32 * 16),
            )


def segment_products(
    name: str,
    turned: str,
    tile: tuple[int, ...],
    contiguous: bool,
    shape: tuple[int, int] = (45, 70),
    bounds: tuple[int, ...] = (0, 37, 37, 90),
    segments_first: bool = False,
) -> Launches:
    """Returns launches of M x N products, one for each segment of K between two neighboring numbers of `bounds`.

    The grid's axes are columns, rows and segments. With `segments_first` they are segments, columns and rows.
    """
    (M, N), K = shape, bounds[-1]

    def launches(rng: Generator) -> list[Launch]:
        a, b = _operands(rng, name, M, N, K, turned)
        pairs = [k for pair in itertools.pairwise(bounds) for k in pair]
        segments = np.array(pairs if contiguous else bounds, np.uint32)
        count, tiles = len(bounds) - 1, (-(-N // tile[1]), -(-M // tile[0]))
        params = struct.pack("8iqqqiii4x", M, N, K, *_leading(M, N, K, turned), N, *tiles, 0, 0, M * N, 0, 0, 1)
        buffers = [a, b, segments, outputs((count, M, N), name), params]
        groups = (count, *tiles) if segments_first else (*tiles, count)
        return [Launch(f"M {M} N {N} K {bounds}", buffers, (32, tile[4], tile[3]), groups=groups)]

    return launches


def _segmented() -> Iterator[Case]:
    tile = (32, 32, 16, 2, 2)
    for name, metal in FLOATS.items():
        for turned, contiguous in (("nn", True), ("nt", False), ("tn", True), ("tt", False)):
            constants = {"segments_contiguous": contiguous, "align_M": False, "align_N": False}
            yield Case("segmented", f"steel_segmented_mm_{turned}_{name}_{name}_" + "bm{}_bn{}_bk{}_wm{}_wn{}".format(*tile),
                       _SEGMENT_HEADERS,
                       f"segmented_mm<{metal}, {', '.join(map(str, tile))}, {flag(turned[0] == 't')}, "
                       f"{flag(turned[1] == 't')}>", segment_products(name, turned, tile, contiguous),
                       tuple(constants.items()))  # fmt: skip


def cases() -> Iterator[Case]:
    yield from _gemv()
    yield from _steel()
    yield from _split()
    yield from _segmented()
