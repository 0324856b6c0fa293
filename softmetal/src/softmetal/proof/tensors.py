"""Cases of MLX's kernels for the tensor units of the M5 ("NAX"): quantized, gathered and dense products by matmul2d.

Simdgroups in which all rows are inside the matrix take another branch than simdgroups with rows outside, and both
branches have barriers. Metal forbids this within a threadgroup, and the software device reports it. M and N are
therefore chosen so that no threadgroup has simdgroups of both kinds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from .case import FLOATS, Array, Case, Generator, Launch, Launches, numbers
from .gathered import EXPERTS, gathered_products, sorted_products, sorted_steel
from .libraries import MLX_WITH_TENSORS
from .matmul import flag, segment_products, split_products, steel_constants, steel_products
from .quantized import TYPES, Format, matrix_products
from .references import EPS, UNIT, Expected, error_of, product_bound

_HEADERS = ("steel/gemm/gemm_nax.h", "quantized_utils.h", "quantized_nax.h")
_DENSE_HEADERS = ("steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_fused_nax.h")
_SPLIT_HEADERS = ("steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_splitk_nax.h")
_SEGMENT_HEADERS = ("steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_segmented_nax.h")
_SORTED_HEADERS = ("steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_gather_nax.h")
_FP_HEADERS = ("steel/gemm/gemm_nax.h", "quantized_utils.h", "fp_quantized_nax.h")
_AFFINE = [Format("affine", group, bits) for group, bits in ((64, 4), (32, 4), (128, 4), (64, 8), (64, 3))]
_FP = [Format("mxfp4", 32, 4), Format("nvfp4", 16, 4), Format("mxfp8", 32, 8)]


def _name(form: Format, base: str, word: str, tile: int, end: str) -> str:
    return f"{form.mode}_{base}_nax_{word}_gs_{form.group}_b_{form.bits}_bm{tile}_bn64_bk64_wm2_wn2{end}"


def _quantized() -> Iterator[Case]:
    for name, word in TYPES.items():
        for form in (*_AFFINE, *_FP):
            headers, prefix = (_HEADERS, "affine") if form.is_affine else (_FP_HEADERS, "fp")
            for whole, tile, shape in ((True, 64, (84, 128, 128)), (False, 32, (71, 80, 256))):
                yield Case(
                    "tensor units",
                    _name(form, "qmm_t", word, tile, f"_alN_{flag(whole)}_batch_0"),
                    headers,
                    f"{prefix}_qmm_t_nax<{word}, {form.group}, {form.bits}, {flag(whole)}, false, {tile}, 64, 64, 2, 2>",
                    matrix_products(form, name, [shape], turned=True, tile=(tile, 64)),
                    wheel=MLX_WITH_TENSORS,
                    verify=partial(_verify, _product, form, name, True),
                )
        yield Case(
            "tensor units",
            _name(_AFFINE[0], "qmm_n", word, 64, "_batch_0"),
            _HEADERS,
            f"affine_qmm_n_nax<{word}, 64, 4, false, 64, 64, 64, 2, 2>",
            matrix_products(_AFFINE[0], name, [(84, 128, 128)], turned=False, tile=(64, 64)),
            wheel=MLX_WITH_TENSORS,
            verify=partial(_verify, _product, _AFFINE[0], name, False),
        )


def _gathered() -> Iterator[Case]:
    for name, word in TYPES.items():
        for form in (_AFFINE[0], *_FP[:2]):
            headers, prefix = (_HEADERS, "affine") if form.is_affine else (_FP_HEADERS, "fp")
            yield Case(
                "tensor units",
                _name(form, "gather_qmm_t", word, 64, "_alN_true"),
                headers,
                f"{prefix}_gather_qmm_t_nax<{word}, {form.group}, {form.bits}, true, 64, 64, 64, 2, 2>",
                gathered_products(form, name, (20, 64, 128), "qmm_t", (64, 64)),
                wheel=MLX_WITH_TENSORS,
                verify=partial(_verify, _gathered_product, form, name),
            )


def _sorted() -> Iterator[Case]:
    constants = (("align_M", False), ("align_N", True), ("align_K", True))
    for name, word in TYPES.items():
        for turned, tile, form in ((True, 64, _AFFINE[0]), (False, 64, _AFFINE[0]), (True, 32, _AFFINE[3]),
                                   (True, 64, _FP[0]), (False, 32, _FP[1])):  # fmt: skip
            headers, prefix = (_HEADERS, "affine") if form.is_affine else (_FP_HEADERS, "fp")
            yield Case(
                "tensor units, sorted",
                f"{form.mode}_gather_qmm_rhs_nax_{'nt' if turned else 'nn'}_{word}_gs_{form.group}_b_{form.bits}"
                f"_bm_{tile}_bn_64_bk_64_wm_2_wn_2",
                headers,
                f"{prefix}_gather_qmm_rhs_nax<{word}, {form.group}, {form.bits}, {tile}, 64, 64, 2, 2, {flag(turned)}>",
                sorted_products(form, name, turned, (71, 64), (tile, 64), (2, 2)),
                constants,
                MLX_WITH_TENSORS,
                partial(_verify, _sorted_product, form, name, turned),
            )


def _dense() -> Iterator[Case]:
    tile = (64, 128, 64, 2, 4)
    shapes = {"nn": (80, 148, 100), "nt": (64, 128, 128), "tn": (64, 128, 64), "tt": (16, 20, 80)}
    for name, metal in FLOATS.items():
        for turned, shape in shapes.items():
            has_source = turned == "tn"
            yield Case(
                "tensor units, dense",
                f"steel_gemm_fused_nax_{turned}_{name}_{name}_" + "bm{}_bn{}_bk{}_wm{}_wn{}".format(*tile),
                _DENSE_HEADERS,
                f"gemm<{metal}, {', '.join(map(str, tile))}, {flag(turned[0] == 't')}, {flag(turned[1] == 't')}, float>",
                steel_products(name, tile, turned, shape, has_source),
                steel_constants(tile, shape, has_source),
                MLX_WITH_TENSORS,
                partial(_verify, _dense_product, name, turned, has_source),
            )


def _dense_parts() -> Iterator[Case]:
    for name, metal in FLOATS.items():
        for turned, shape, whole in (("nn", (64, 64, 512), True), ("nt", (20, 24, 400), False)):
            yield Case(
                "tensor units, dense",
                f"steel_gemm_splitk_nax_{turned}_{name}_float32_bm64_bn64_bk256_wm2_wn2",
                _SPLIT_HEADERS,
                f"gemm_splitk_nax<{metal}, 64, 64, 256, 2, 2, false, {flag(turned == 'nt')}, float>",
                _in_a_row(split_products(name, turned, shape, 64, 256)),
                (("align_M", whole), ("align_N", whole)),
                MLX_WITH_TENSORS,
                partial(_verify, _split_product, name, turned),
            )
        for is_turned in (False, True):
            yield Case(
                "tensor units, dense",
                f"steel_gather_mm_rhs_nax_{'nt' if is_turned else 'nn'}_{name}_{name}_bm64_bn128_bk128_wm2_wn4",
                _SORTED_HEADERS,
                f"gather_mm_rhs_nax<{metal}, 64, 128, 128, 2, 4, false, {flag(is_turned)}, float>",
                sorted_steel(name, is_turned, (71, 64), 148, (64, 128, 128, 2, 4)),
                (("align_M", False), ("align_N", False), ("align_K", False)),
                MLX_WITH_TENSORS,
                partial(_verify, _sorted_dense_product, name, is_turned),
            )


def _segmented() -> Iterator[Case]:
    """Yields products of three segments, of which the second is empty.

    If a step has 64 k, the grid's first axis counts the segments.
    """
    bounds = (0, 256, 256, 328)
    for name, metal in FLOATS.items():
        for turned, k, whole, contiguous in (("nn", 64, True, True), ("nt", 64, False, False), ("tn", 128, False, True),
                                             ("tt", 256, True, False)):  # fmt: skip
            tile, shape = (64, 64, k, 2, 2), (64, 128) if whole else (84, 148)
            yield Case(
                "tensor units, dense",
                f"steel_segmented_mm_nax_{turned}_{name}_{name}_" + "bm{}_bn{}_bk{}_wm{}_wn{}".format(*tile),
                _SEGMENT_HEADERS,
                f"segmented_mm_nax<{metal}, {', '.join(map(str, tile))}, {flag(turned[0] == 't')}, "
                f"{flag(turned[1] == 't')}, float>",
                segment_products(name, turned, tile, contiguous, shape, bounds, segments_first=k == 64),
                (("segments_contiguous", contiguous), ("align_M", whole), ("align_N", whole)),
                MLX_WITH_TENSORS,
                partial(_verify, _segmented_product, name, turned, bounds),
            )


def _in_a_row(launches: Launches) -> Launches:
    """Changes the launches to a grid with one axis, as the kernels of tensor units expect for products in parts."""

    def flattened(rng: Generator) -> list[Launch]:
        return [
            replace(launch, groups=(math.prod(cast(tuple[int, ...], launch.groups)), 1, 1)) for launch in launches(rng)
        ]

    return flattened


def _verify(exact: Callable[..., Expected], *arguments: Any) -> str:
    *fixed, launch, results = arguments
    return error_of(exact(*fixed, launch), results)


def _matrix(form: Format, name: str, parts: list[Any], turned: bool, count: int = 1) -> tuple[Array, Array]:
    """Returns `count` weights as K x N matrices, and by how much rounding to the type can change each element."""
    values, sizes = form.values(*parts, name)
    split = [part.reshape(count, -1, part.shape[1]) for part in (values, 2 * UNIT[name] * sizes)]
    first, second = ([p.swapaxes(1, 2) for p in split]) if turned else split
    return first, second


def _product(form: Format, name: str, turned: bool, launch: Launch) -> Expected:
    *parts, x = launch.buffers[:4]
    (weight,), (rounding,) = _matrix(form, name, parts, turned)
    a = numbers(x, name)
    wanted = a @ weight
    return Expected(launch, 4, name, wanted, product_bound(name, wanted, a, weight, np.abs(a) @ rounding))


def _gathered_product(form: Format, name: str, launch: Launch) -> Expected:
    *parts, x, left, right = launch.buffers[:6]
    weights, roundings = _matrix(form, name, parts, True, EXPERTS)
    a = numbers(x, name)[left]
    wanted = a @ weights[right]
    return Expected(
        launch, 6, name, wanted, product_bound(name, wanted, a, weights[right], np.abs(a) @ roundings[right])
    )


def _sorted_product(form: Format, name: str, turned: bool, launch: Launch) -> Expected:
    x, *parts, starts = launch.buffers[:5]
    weights, roundings = _matrix(form, name, parts, turned, len(starts))
    return _sorted_rows(launch, 5, name, x, weights, starts, roundings)


def _sorted_rows(
    launch: Launch, slot: int, name: str, x: Array, weights: Array, starts: Array, roundings: Array | None = None
) -> Expected:
    a = numbers(x, name)
    expert = np.searchsorted(starts, np.arange(len(a)), side="right") - 1
    wanted = (a[:, None] @ weights[expert])[:, 0]
    errors = 64 * EPS * np.abs(weights) + (0.0 if roundings is None else roundings)
    extra = (np.abs(a)[:, None] @ errors[expert])[:, 0]
    return Expected(launch, slot, name, wanted, UNIT[name] * np.abs(wanted) + extra + 1e-7)


def _dense_product(name: str, turned: str, has_source: bool, launch: Launch) -> Expected:
    a, b, c, *_ = launch.buffers
    left, right = numbers(a, name), numbers(b, name)
    left, right = (left.T if turned[0] == "t" else left), (right.T if turned[1] == "t" else right)
    wanted = left @ right
    if has_source:  # alpha = 0.5, beta = 2 (steel_products)
        wanted = 0.5 * wanted + 2.0 * numbers(c, name)
    return Expected(launch, 3, name, wanted, product_bound(name, wanted, left, right))


def _split_product(name: str, turned: str, launch: Launch) -> Expected:
    a, b, *_ = launch.buffers
    left, right = numbers(a, name), numbers(b, name)
    right = right.T if turned == "nt" else right
    parts = [(left[:, k], right[k]) for k in (slice(0, 256), slice(256, None))]
    bounds = [product_bound("float32", x @ w, x, w) for x, w in parts]
    return Expected(launch, 2, "float32", np.stack([x @ w for x, w in parts]), np.stack(bounds))


def _segmented_product(name: str, turned: str, bounds: tuple[int, ...], launch: Launch) -> Expected:
    a, b, *_ = launch.buffers
    left, right = numbers(a, name), numbers(b, name)
    left, right = (left.T if turned[0] == "t" else left), (right.T if turned[1] == "t" else right)
    parts = [(left[:, slice(*pair)], right[slice(*pair)]) for pair in itertools.pairwise(bounds)]
    limits = [product_bound(name, x @ w, x, w) for x, w in parts]
    return Expected(launch, 3, name, np.stack([x @ w for x, w in parts]), np.stack(limits))


def _sorted_dense_product(name: str, turned: bool, launch: Launch) -> Expected:
    x, weights, starts = (launch.buffers[0], numbers(launch.buffers[1], name), launch.buffers[2])
    return _sorted_rows(launch, 3, name, x, weights.swapaxes(1, 2) if turned else weights, starts)


def cases() -> Iterator[Case]:
    yield from _quantized()
    yield from _gathered()
    yield from _sorted()
    yield from _dense()
    yield from _dense_parts()
    yield from _segmented()
