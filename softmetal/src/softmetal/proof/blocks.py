"""Cases of MLX's products with masked blocks, and of products of segments of the inner dimension."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .case import FLOATS, Array, Case, Launch, outputs, stored

Generator = np.random.Generator
Launches = Callable[[Generator], list[Launch]]
_GEMM_HEADERS = ("steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_masked.h")
_GEMV_HEADERS = ("gemv_masked.h",)
_SEGMENT_HEADERS = ("steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_segmented.h")
# Masks of the result and of the operands: none, a bool, or a factor of the element type.
_MASKS = (("bool", "none"), ("none", "bool"), ("bool", "number"), ("number", "number"))


def _flag(value: bool) -> str:
    return str(value).lower()


def _mask_name(kind: str, name: str) -> str:
    return {"none": "nomask", "bool": "bool_", "number": name}[kind]


def _mask_type(kind: str, metal: str) -> str:
    return {"none": "nomask_t", "bool": "bool", "number": metal}[kind]


def _mask(rng: Generator, kind: str, shape: tuple[int, ...], name: str) -> Array | None:
    """Returns a mask in which some blocks are off."""
    if kind == "none":
        return None
    is_on = rng.permutation(np.arange(np.prod(shape)) % 3 > 0).reshape(shape)
    return is_on if kind == "bool" else stored(is_on * rng.uniform(0.5, 2, shape), name)


def _gemm(name: str, masks: tuple[str, str], turned: str, shape: tuple[int, int, int], block: int) -> Launches:
    def launches(rng: Generator) -> list[Launch]:
        M, N, K = shape
        a = stored(rng.normal(0, 1, (K, M) if turned[0] == "t" else (M, K)), name)
        b = stored(rng.normal(0, 1, (N, K) if turned[1] == "t" else (K, N)), name)
        rows, columns, inner = (-(-size // block) for size in shape)
        leading = (M if turned[0] == "t" else K, K if turned[1] == "t" else N)
        params = struct.pack("8iqqqiii4x", M, N, K, *leading, N, columns, rows, 0, 0, 0, 0, K // 16, 1)
        masks_of = [_mask(rng, kind, s, name) for kind, s in zip(
            (masks[0], masks[1], masks[1]), ((rows, columns), (rows, inner), (inner, columns)), strict=True)]  # fmt: skip
        strides = [(1, columns), (1, inner), (1, columns)]
        used = [s for mask, pair in zip(masks_of, strides, strict=True) if mask is not None for s in pair]
        buffers: list[Any] = [a, b, None, outputs((M, N), name), params, None, np.array([1], np.int32)]
        buffers += [np.zeros(8, np.int64), None, None, *masks_of, np.array(used, np.int32)]
        return [Launch(f"M {M} N {N} K {K}", buffers, (32, 2, 2), groups=(columns, rows, 1))]

    return launches


def _gemms() -> Iterator[Case]:
    for name, metal in FLOATS.items():
        for masks, turned, shape in zip(_MASKS, ("nn", "nt", "tn", "tt"),
                                        ((96, 64, 64), (100, 72, 96), (64, 96, 50), (75, 45, 70)), strict=True):  # fmt: skip
            block = 32
            whole, whole_k = shape[0] % block == shape[1] % block == 0, shape[2] % 16 == 0
            words = ["taligned" if flag else "naligned" for flag in (whole, whole_k)]
            yield Case(
                "masked",
                f"steel_gemm_block_outmask_{_mask_name(masks[0], name)}_opmask_{_mask_name(masks[1], name)}_{turned}_{name}_"
                f"{name}_bm{block}_bn{block}_bk16_wm2_wn2_MN_{words[0]}_K_{words[1]}",
                _GEMM_HEADERS,
                f"block_masked_gemm<{metal}, {_mask_type(masks[0], metal)}, {_mask_type(masks[1], metal)}, {block}, "
                f"{block}, 16, 2, 2, {_flag(turned[0] == 't')}, {_flag(turned[1] == 't')}, {_flag(whole)}, {_flag(whole_k)}>",
                _gemm(name, masks, turned, shape, block),
            )


def _gemv(name: str, masks: tuple[str, str], tile: tuple[int, ...]) -> Launches:
    BM, BN, SM, SN, TM, TN = tile
    out, size, made, block = 150, 200, BM * SM * TM, BN * SN * TN

    def launches(rng: Generator) -> list[Launch]:
        matrix, vector = stored(rng.normal(0, 1, (out, size)), name), stored(rng.normal(0, 1, size), name)
        rows, inner = -(-out // block), -(-size // block)
        kinds = (masks[0], masks[1], masks[1])
        masks_of = [
            _mask(rng, kind, s, name) for kind, s in zip(kinds, ((rows,), (rows, inner), (inner,)), strict=True)
        ]
        strides = [(1, 1), (1, inner), (1, 1)]
        used = [s for mask, pair in zip(masks_of, strides, strict=True) if mask is not None for s in pair]
        zeros = np.zeros(4, np.int64)
        buffers: list[Any] = [matrix, vector, None, outputs(out, name), size, out, size, None, None, 1]
        buffers += [np.array([1], np.int32), zeros, zeros, *[None] * 7, *masks_of, np.array(used, np.int32), zeros]
        return [Launch(f"{out} x {size}", buffers, (32, BN, BM), groups=(-(-out // made), 1, 1))]

    return launches


def _gemvs() -> Iterator[Case]:
    tile = (2, 1, 4, 8, 4, 4)
    short = "_".join(f"{k}{v}" for k, v in zip(("bm", "bn", "sm", "sn", "tm", "tn"), tile, strict=True))
    for name, metal in FLOATS.items():
        for masks in _MASKS:
            yield Case("masked", f"gemv_outmask_{_mask_name(masks[0], name)}_opmask_{_mask_name(masks[1], name)}_{name}_"
                       f"{short}_nc0", _GEMV_HEADERS,
                       f"gemv_masked<{metal}, {_mask_type(masks[0], metal)}, {_mask_type(masks[1], metal)}, "
                       f"{', '.join(map(str, tile))}, false>", _gemv(name, masks, tile))  # fmt: skip


def segments(
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
        a = stored(rng.normal(0, 1, (K, M) if turned[0] == "t" else (M, K)), name)
        b = stored(rng.normal(0, 1, (N, K) if turned[1] == "t" else (K, N)), name)
        pairs = [k for pair in itertools.pairwise(bounds) for k in pair]
        segments = np.array(pairs if contiguous else bounds, np.uint32)
        count, tiles = len(bounds) - 1, (-(-N // tile[1]), -(-M // tile[0]))
        leading = (M if turned[0] == "t" else K, K if turned[1] == "t" else N)
        params = struct.pack("8iqqqiii4x", M, N, K, *leading, N, *tiles, 0, 0, M * N, 0, 0, 1)
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
                       f"segmented_mm<{metal}, {', '.join(map(str, tile))}, {_flag(turned[0] == 't')}, "
                       f"{_flag(turned[1] == 't')}>", segments(name, turned, tile, contiguous),
                       tuple(constants.items()))  # fmt: skip


def cases() -> Iterator[Case]:
    yield from _gemms()
    yield from _gemvs()
    yield from _segmented()
