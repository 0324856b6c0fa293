"""Cases of MLX's 1 to 8 bit kernels: affine (a scale and a bias for each group) and floating (mxfp4, mxfp8, nvfp4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .case import Array, Case, Generator, Launch, Launches, numbers, outputs, stored

AFFINE_HEADERS = ("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
FP_HEADERS = ("steel/gemm/gemm.h", "quantized_utils.h", "fp_quantized.h")
TYPES = {"float32": "float", "float16": "float16_t", "bfloat16": "bfloat16_t"}
_NOTHING = np.zeros(4, np.int64)  # for an argument that the kernel does not read in this case


@dataclass(frozen=True)
class Format:
    """A storage format of weights."""

    mode: str  # "affine", "mxfp4", ...
    group: int
    bits: int

    @property
    def is_affine(self) -> bool:
        return self.mode == "affine"

    def weights(self, rng: Generator, rows: int, columns: int, name: str) -> list[Any]:
        """Returns a random matrix with groups along its rows: [words, scales, biases or the global scale]."""
        words = rng.integers(0, 1 << 32, (rows, columns * self.bits // 32), np.uint32)
        groups = (rows, columns // self.group)
        if self.is_affine:
            scales = stored(rng.uniform(-0.1, 0.1, groups), name)
            return [words, scales, stored(rng.uniform(-0.5, 0.5, groups), name)]
        if self.mode == "mxfp8":
            words = words & np.uint32(0x77777777)  # leaves out the codes that are NaN
        middle = 56 if self.group == 16 else 127  # the code of 1.0 in e4m3, or in e8m0
        return [words, rng.integers(middle - 8, middle + 4, groups).astype(np.uint8), np.float32([0.75])]

    def values(self, words: Array, scales: Array, biases: Array, name: str) -> tuple[Array, Array]:
        """Decodes the arrays that `weights` made. Returns the values, and magnitudes that bound their rounding errors.

        For the floating formats, `biases` is the global scale, and these values leave it out.
        """
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").reshape(words.shape[0], -1, self.bits)
        codes = bits @ (1 << np.arange(self.bits))
        if self.is_affine:
            s, b = (np.repeat(numbers(part, name), self.group, 1) for part in (scales, biases))
            return s * codes + b, np.abs(s) * codes + np.abs(b)
        steps = np.ldexp(1.0, scales.astype(int) - 127) if self.group == 32 else _floating(scales.astype(int), 4, 3)
        values = _floating(codes, 4, 3) if self.bits == 8 else _floating(codes, 2, 1)
        values = values * np.repeat(steps, self.group, 1)
        return values, np.abs(values)


def _floating(codes: Array, exponent: int, mantissa: int) -> Array:
    """Decodes floats: a sign, `exponent` bits with bias 2^(exponent - 1) - 1, and `mantissa` bits. No code is a NaN."""
    e, m = codes >> mantissa & (1 << exponent) - 1, codes & (1 << mantissa) - 1
    size = np.ldexp(m + (e > 0) * 2.0**mantissa, np.maximum(e, 1) - mantissa - (1 << exponent - 1) + 1)
    return np.where(codes >> exponent + mantissa != 0, -size, size)


_BATCH: list[Any] = [1, _NOTHING, _NOTHING, 1, _NOTHING, _NOTHING, _NOTHING]


def _batch(form: Format) -> list[Any]:
    """Returns the arguments that describe batches: counts, shapes and strides of x, w, the scales and the biases."""
    return [*_BATCH, _NOTHING] if form.is_affine else _BATCH


def vector_products(form: Format, name: str, shapes: list[tuple[int, int, int]], columns: int, *, has_global: bool = True,
             turned: bool = False) -> Launches:  # fmt: skip
    """Returns launches of products with few rows. A shape is (M, N, K). A threadgroup computes `columns` outputs."""

    def launches(rng: Generator) -> list[Launch]:
        found = []
        for M, N, K in shapes:
            w = form.weights(rng, *((K, N) if turned else (N, K)), name)
            x = stored(rng.normal(0, 1, (M, K)), name)
            buffers = [*(w if form.is_affine or has_global else w[:2]), x, outputs((M, N), name), K, N, *_batch(form)]
            found.append(Launch(f"M {M} N {N} K {K}", buffers, (32, 2, 1), groups=(M, -(-N // columns), 1)))
        return found

    return launches


def _quads(form: Format, name: str, K: int) -> Launches:
    def launches(rng: Generator) -> list[Launch]:
        found = []
        for M, N in ((1, 64), (3, 88)):
            w = form.weights(rng, N, K, name)[: 3 if form.is_affine else 2]
            x = stored(rng.normal(0, 1, (M, K)), name)
            buffers = [*w, x, outputs((M, N), name), K, N, *_batch(form)]
            found.append(Launch(f"M {M} N {N} K {K}", buffers, (32, 1, 1), groups=(M, -(-N // 64), 1)))
        return found

    return launches


def wide_products(form: Format, name: str, vectors: int, lanes: int, shapes: list[tuple[int, int, int]]
                  ) -> Launches:  # fmt: skip
    """Returns launches of products in which a threadgroup computes `vectors` rows. A shape is (M, N, K)."""

    def launches(rng: Generator) -> list[Launch]:
        found = []
        for M, N, K in shapes:
            w = form.weights(rng, N, K, name)[: 3 if form.is_affine else 2]
            x = stored(rng.normal(0, 1, (M, K)), name)
            buffers = [*w, x, outputs((M, N), name), K, N, M, *_batch(form)]
            groups = (-(-M // vectors), -(-N // (64 // lanes)), 1)
            found.append(Launch(f"M {M} N {N} K {K}", buffers, (32, 2, 1), groups=groups))
        return found

    return launches


def matrix_products(form: Format, name: str, shapes: list[tuple[int, int, int]], *, turned: bool,
              has_global: bool = True, tile: tuple[int, int] = (32, 32)
              ) -> Launches:  # fmt: skip
    """Returns launches of a product by tiles of BM x BN. If `turned`, the weight is N x K."""

    def launches(rng: Generator) -> list[Launch]:
        found = []
        for M, N, K in shapes:
            w = form.weights(rng, *((N, K) if turned else (K, N)), name)
            x = stored(rng.normal(0, 1, (M, K)), name)
            buffers = [*(w if form.is_affine or has_global else w[:2]), x, outputs((M, N), name)]
            groups = (-(-N // tile[1]), -(-M // tile[0]), 1)
            found.append(Launch(f"M {M} N {N} K {K}", [*buffers, K, N, M, *_batch(form)], (32, 2, 2), groups=groups))
        return found

    return launches


def _split(form: Format, name: str) -> Launches:
    def launches(rng: Generator) -> list[Launch]:
        found = []
        for M, N, K, parts in ((7, 64, 256, 2), (40, 32, 384, 3)):
            x = stored(rng.normal(0, 1, (M, K)), name)
            buffers = [
                *form.weights(rng, N, K, name)[: 3 if form.is_affine else 2],
                x,
                outputs((parts, M, N), "float32"),
            ]
            buffers += [K, N, M, K // parts, M * N]
            groups = (-(-N // 32), -(-M // 32), parts)
            found.append(Launch(f"M {M} N {N} K {K} in {parts}", buffers, (32, 2, 2), groups=groups))
        return found

    return launches


def _conversions(form: Format, name: str, rows: int, *, back: bool) -> Launches:
    """Returns launches that quantize, or that dequantize if `back` is true."""

    def launches(rng: Generator) -> list[Launch]:
        columns = 4 * form.group
        w, scales, biases = form.weights(rng, rows, columns, name)
        pack_bytes = {3: 3, 5: 5, 6: 3}.get(form.bits, 1)
        pack = 8 * pack_bytes // form.bits
        count = rows * columns // pack
        label = f"{rows} x {columns}"
        codes = w.view(np.uint8).reshape(-1)
        if back:
            buffers = [codes, scales, biases, outputs((rows, columns), name)]
            return [Launch(label, buffers, (64, 1), threads=(count, 1))]
        values = stored(rng.normal(0, 1, (rows, columns)), name)
        out = outputs(codes.size, "uint8")
        if form.is_affine:
            buffers = [values, out, outputs(scales.shape, name), outputs(scales.shape, name)]
            threads = rows * columns // (form.group // 32)
            return [Launch(label, buffers, (64, 1), threads=(threads, 1))]
        buffers = [values, out, outputs(scales.shape, "uint8"), biases]
        return [Launch(label, buffers, (64, 1), threads=(rows * columns, 1))]

    return launches


_FORMATS = [
    Format("affine", g, b) for g, b in ((64, 4), (32, 4), (128, 4), (64, 8), (32, 2), (64, 3), (128, 5), (64, 6))
]
_FP_FORMATS = [Format("mxfp4", 32, 4), Format("nvfp4", 16, 4), Format("mxfp8", 32, 8)]


def _case(form: Format, name: str, base: str, suffix: str, arguments: str, launches: Any) -> Case:
    typed = TYPES[name]
    prefix = "affine" if form.is_affine else "fp"
    return Case(
        family="affine" if form.is_affine else "fp_quantized",
        kernel=f"{form.mode}_{base}_{typed}_gs_{form.group}_b_{form.bits}{suffix}",
        headers=AFFINE_HEADERS if form.is_affine else FP_HEADERS,
        instance=f"{prefix}_{base}<{typed}, {form.group}, {form.bits}{arguments}>",
        launches=launches,
    )


def _products(form: Format, name: str) -> Iterator[Case]:
    wide = 512 if form.bits in (1, 2, 4, 8) else 256
    many = [(1, 16, 2 * wide), (3, 24, wide)]
    odd = [(1, 13, 3 * form.group), (2, 21, wide + 2 * form.group)]
    rest, flags = "_batch_0_pr_0_hgs_0_r_4", ", false, false, false, 4"
    yield _case(form, name, "qmv_fast", rest, flags, vector_products(form, name, many, 8))
    yield _case(form, name, "qmv", rest, flags, vector_products(form, name, odd, 8))
    tiles = [(7, 64, form.group * 2), (45, 96, form.group)]
    ragged = [(33, 45, form.group * 2)]
    yield _case(
        form, name, "qmm_t", "_alN_true_batch_0", ", true, false", matrix_products(form, name, tiles, turned=True)
    )
    yield _case(
        form, name, "qmm_t", "_alN_false_batch_0", ", false, false", matrix_products(form, name, ragged, turned=True)
    )


def _more_products(form: Format, name: str) -> Iterator[Case]:
    turned = [(1, 128, 2 * form.group), (2, 128, 96)]
    yield _case(form, name, "qvm", "_batch_0", ", false", vector_products(form, name, turned, 64, turned=True))
    blocks = [(7, 128, 64), (40, 128, 96)]
    yield _case(form, name, "qmm_n", "_batch_0", ", false",
                matrix_products(form, name, blocks, turned=False, has_global=False))  # fmt: skip
    lanes = 8 if form.is_affine else 16
    for vectors in (2, 5):
        yield _case(form, name, "qmv_wide", f"_nv_{vectors}_kl_{lanes}_batch_0", f", {vectors}, {lanes}, false",
                    wide_products(form, name, vectors, lanes, [(vectors, 24, 512), (vectors + 1, 21, 256)]))  # fmt: skip
    yield _case(form, name, "qmv_quad", "_d_64_batch_0", ", 64, false", _quads(form, name, 64))
    yield _case(form, name, "qmv_quad", "_d_128_batch_0", ", 128, false", _quads(form, name, 128))
    yield _case(form, name, "qmm_t_splitk", "_alN_true", ", true", _split(form, name))


def _converting(form: Format, name: str) -> Iterator[Case]:
    rest, flags = ("", "") if form.is_affine else ("_hgs_false", ", false")
    yield _case(form, name, "quantize", rest, flags, _conversions(form, name, 6, back=False))
    yield _case(form, name, "dequantize", rest, flags, _conversions(form, name, 6, back=True))
    if form.mode == "nvfp4":
        yield _case(form, name, "dequantize", "_hgs_true", ", true", _conversions(form, name, 5, back=True))


def cases() -> Iterator[Case]:
    for name in TYPES:
        for form in _FORMATS:
            yield from _products(form, name)
            yield from _converting(form, name)
        for form in (_FORMATS[0], *_FP_FORMATS):
            yield from _more_products(form, name)
        for form in _FP_FORMATS:
            yield from _products(form, name)
            yield from _converting(form, name)
