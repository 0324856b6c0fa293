"""Compares PyTorch 2.15's products of grouped rows and of integers, as Apple compiled them, with torch on the CPU."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np
import torch

from . import libraries
from .case import Array, Generator, Launch, outputs, stored
from .references import TORCH_NAMES, Expected, Reference, numbers, product_bound

_COLUMNS = 64  # columns of a tile of grouped_mm


def _params(m: int, n: int, k: int, groups: int, b_strides: tuple[int, int], batch: int, *, is_wide: bool) -> bytes:
    """Returns PyTorch's GroupedMMParams for a row-major A and result."""
    kind = "Q" if is_wide else "I"
    return struct.pack(f"4I7{kind}", m, n, k, groups, k, 1, *b_strides, n, 1, batch)


def _product(a: Array, b: Array) -> Array:
    result: Array = torch.matmul(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    return result


def _rows(
    name: str, rows: int, *, is_few: bool = False, is_wide: bool = False
) -> Callable[[Generator], list[Expected]]:
    """Returns launches that multiply each group of rows with a different matrix. The second group has no rows."""

    def launches(rng: Generator) -> list[Expected]:
        m, n, k, ends = (3, 45, 200, (1, 1, 3)) if is_few else (61, 100, 50, (20, 20, 61))
        a = stored(rng.normal(0, 1, (m, k)), name)
        b = stored(rng.normal(0, 1, (3, n, k) if is_few else (3, k, n)), name)
        x, y = numbers(a, name), numbers(b, name)
        y = y.swapaxes(1, 2) if is_few else y
        starts = (0, *ends[:-1])
        parts = [(x[start:end], y[group]) for group, (start, end) in enumerate(zip(starts, ends, strict=True))]
        wanted = np.concatenate([_product(*part) for part in parts])
        bound = np.concatenate([product_bound(name, _product(*part), *part) for part in parts])
        params = _params(m, n, k, 3, (1, k) if is_few else (n, 1), n * k, is_wide=is_wide)
        buffers = [a, b, np.array(ends, np.int32), outputs((m, n), name), params]
        group, groups = (512, (-(-n // 16), m, 1)) if is_few else (64, (-(-n // _COLUMNS), -(-m // rows) + 3, 1))
        return [Expected(Launch(f"M {m} N {n} K {k}", buffers, (group, 1, 1), groups=groups), 3, name, wanted, bound)]

    return launches


def _inner(name: str, rows: int) -> Callable[[Generator], list[Expected]]:
    """Returns launches whose inner dimension is divided into groups."""

    def launches(rng: Generator) -> list[Expected]:
        m, n, k, ends = 33, 70, 90, (37, 37, 90)
        a, b = stored(rng.normal(0, 1, (m, k)), name), stored(rng.normal(0, 1, (k, n)), name)
        x, y = numbers(a, name), numbers(b, name)
        parts = [(x[:, start:end], y[start:end]) for start, end in zip((0, *ends[:-1]), ends, strict=True)]
        wanted = np.stack([_product(*part) for part in parts])
        bound = np.stack([product_bound(name, _product(*part), *part) for part in parts])
        params = _params(m, n, k, 3, (n, 1), m * n, is_wide=False)
        buffers = [a, b, np.array(ends, np.int32), outputs((3, m, n), name), params]
        groups = (-(-n // _COLUMNS), -(-m // rows), 3)
        launch = Launch(f"M {m} N {n} K {ends}", buffers, (64, 1, 1), groups=groups)
        return [Expected(launch, 3, name, wanted, bound)]

    return launches


def _integers(type_name: str) -> Callable[[Generator], list[Expected]]:
    def launches(rng: Generator) -> list[Expected]:
        m, n, k = 37, 45, 70
        low, high = (0, 256) if type_name == "uint8" else (-128, 128)
        a, b = rng.integers(low, high, (m, k)).astype(type_name), rng.integers(-128, 128, (k, n)).astype(np.int8)
        wanted = _product(a.astype(np.float64), b.astype(np.float64))
        strides, sizes = struct.pack("6Q", k, 1, n, 1, n, 1), struct.pack("3I4x", m, k, n)
        launch = Launch(f"M {m} N {n} K {k}", [a, b, outputs((m, n), "int32"), strides, sizes], (16, 16, 1),
                        groups=(-(-n // 16), -(-m // 16), 1))  # fmt: skip
        return [Expected(launch, 2, "int32", wanted, np.zeros_like(wanted))]

    return launches


def references() -> Iterator[Reference]:
    library = libraries.newest_torch_library
    for name, word in TORCH_NAMES.items():
        for rows in (16, 32):
            yield Reference("torch grouped", f"grouped_mm_rows_{word}_bm{rows}_u32", library, _rows(name, rows))
            yield Reference("torch grouped", f"grouped_mm_k_{word}_bm{rows}_u32", library, _inner(name, rows))
        yield Reference("torch grouped", f"grouped_mm_rows_{word}_bm16_u64", library, _rows(name, 16, is_wide=True))
        yield Reference("torch grouped", f"grouped_mm_few_rows_{word}_u32", library, _rows(name, 1, is_few=True))
    for word, type_name in (("char", "int8"), ("uchar", "uint8")):
        yield Reference("torch int_mm", f"int_mm_{word}", library, _integers(type_name))
