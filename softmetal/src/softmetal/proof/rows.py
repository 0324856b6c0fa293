"""Cases of MLX's kernels along an axis: softmax, log-sum-exp, cross entropy, scan, sort, search and reduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .case import FLOATS, STORAGE, Array, Case, Generator, Launch, Launches, outputs, stored

_NOTHING = np.zeros(4, np.int64)
_INTEGERS = {"int32": "int32_t", "int64": "int64_t", "uint8": "uint8_t", "int16": "int16_t"}
_TYPES = {**FLOATS, **_INTEGERS, "bool_": "bool"}
_REDUCE_HEADERS = ("atomic.h", "reduction/ops.h", "reduce.h")
_SCAN_HEADERS = ("binary_ops.h", "scan.h")


def _values(rng: Generator, shape: int | tuple[int, ...], name: str) -> Array:
    if name in FLOATS:
        return stored(rng.normal(0, 2, shape), name)
    return rng.integers(0, 2 if name == "bool_" else 100, shape).astype(STORAGE[name])


def _row_launches(name: str, out: str, sizes: tuple[int, ...], looped: bool, width: int) -> Launches:
    """Returns launches with one threadgroup and `width` outputs per row. Width 0 means one output for each element."""

    def launches(rng: Generator) -> list[Launch]:
        found = []
        for size in sizes:
            x = _values(rng, (3, size), name)
            group = 1024 if looped else -(-size // 4 // 32) * 32 + 32
            found.append(Launch(f"3 x {size}", [x, outputs((3, width or size), out), size], group, groups=3))
        return found

    return launches


def _softmax() -> Iterator[Case]:
    for name, metal in FLOATS.items():
        for precise in (False, True) if name != "float32" else (False,):
            middle, accumulated = ("precise_", "float") if precise else ("", metal)
            for word, base, sizes in (("block", "single_row", (7, 300)), ("looped", "looped", (63, 4300))):
                yield Case("softmax", f"{word}_softmax_{middle}{name}", ("softmax.h",),
                           f"softmax_{base}<{metal}, {accumulated}>",
                           _row_launches(name, name, sizes, word == "looped", 0))  # fmt: skip
        for word, base, sizes in (("block", "logsumexp", (7, 300)), ("looped", "logsumexp_looped", (63, 4300))):
            yield Case("softmax", f"{word}_logsumexp_{name}", ("logsumexp.h",), f"{base}<{metal}>",
                       _row_launches(name, name, sizes, word == "looped", 1))  # fmt: skip
        yield Case("softmax", f"cross_entropy_{name}", ("cross_entropy.h",), f"cross_entropy<{metal}>", _entropy(name))


def _entropy(name: str) -> Launches:
    def launches(rng: Generator) -> list[Launch]:
        found = []
        for size in (9, 500):
            targets = rng.integers(0, size, 4).astype(np.int32)
            buffers = [_values(rng, (4, size), name), targets, outputs(4, "float32"), size]
            found.append(Launch(f"4 x {size}", buffers, 96, groups=4))
        return found

    return launches


def _scan_launches(name: str, out: str, strided: bool) -> Launches:
    def launches(rng: Generator) -> list[Launch]:
        if strided:
            x = _values(rng, (2, 45, 70), name)
            blocks = -(-70 // 32)
            buffers = [x, outputs(x.shape, out), np.uint64(45), np.uint64(70), np.uint64(blocks)]
            return [Launch("2 x 45 x 70", buffers, (256, 1, 1), groups=(1, 2 * blocks, 1))]
        found = []
        for size in (33, 700):
            x = _values(rng, (3, size), name)
            found.append(Launch(f"3 x {size}", [x, outputs(x.shape, out), np.uint64(size)], 64, groups=(1, 3)))
        return found

    return launches


def _scans() -> Iterator[Case]:
    operations = {"sum": "CumSum", "prod": "CumProd", "max": "CumMax", "min": "CumMin", "logaddexp": "CumLogaddexp"}
    for name, metal in {**FLOATS, "int32": "int32_t", "uint8": "uint8_t"}.items():
        for word, op in operations.items():
            if word == "logaddexp" and name not in FLOATS:
                continue
            for inclusive, reverse, strided in ((True, False, False), (False, True, False), (True, True, True)):
                kind = "strided" if strided else "contig"
                base = "strided_scan" if strided else "contiguous_scan"
                flags = f"{str(inclusive).lower()}, {str(reverse).lower()}"
                yield Case(
                    "scan",
                    f"{kind}_scan_{'reverse_' if reverse else ''}{'in' if inclusive else 'ex'}clusive_{word}_{name}_{name}",
                    _SCAN_HEADERS,
                    f"{base}<{metal}, {metal}, {op}<{metal}>, 4, {flags}>",
                    _scan_launches(name, name, strided),
                )


def _sort_launches(name: str, out: str, threads: int) -> Launches:
    def launches(rng: Generator) -> list[Launch]:
        found = []
        for size in (5, 4 * threads - 3):
            x = _values(rng, (3, size), name)
            buffers = [x, outputs(x.shape, out), size, 1, 1, size, size]
            found.append(Launch(f"3 x {size}", buffers, threads, groups=(1, 3)))
        return found

    return launches


def _search_launches(name: str) -> Launches:
    def launches(rng: Generator) -> list[Launch]:
        size, count = 77, 40
        line = np.sort(rng.normal(0, 2, size).astype(np.float32))
        x = stored(line, name)
        wanted = rng.choice(x, count)
        buffers = [x, wanted, outputs(count, "uint32"), np.uint32(size), np.int64(1)]
        return [Launch(f"{count} in {size}", buffers, count, threads=count)]

    return launches


def _sorts() -> Iterator[Case]:
    for name, metal in {**FLOATS, "int32": "int32_t", "uint8": "uint8_t"}.items():
        for threads in (32, 128):
            for word, out, metal_out in (("c", name, metal), ("carg", "uint32", "uint32_t")):
                yield Case("sort", f"{word}_block_sort_{name}_{out}_bn{threads}_tn4", ("sort.h",),
                           f"block_sort<{metal}, {metal_out}, {str(word == 'carg').lower()}, {threads}, 4>",
                           _sort_launches(name, out, threads))  # fmt: skip
        if name in FLOATS:
            for side in ("left", "right"):
                yield Case("sort", f"searchsorted_{name}_{side}", ("sort.h", "searchsorted.h"),
                           f"searchsorted<{metal}, {str(side == 'right').lower()}>", _search_launches(name))  # fmt: skip


def _spread(rng: Generator, shape: tuple[int, ...], name: str, op: str) -> Array:
    """Returns values whose product neither overflows nor underflows."""
    if op == "prod" and name in FLOATS:
        return stored(rng.uniform(0.9, 1.1, shape), name)
    return _values(rng, shape, name)


def _all_launches(name: str, out: str, op: str) -> Launches:
    def launches(rng: Generator) -> list[Launch]:
        found = []
        for size in (77, 2500):
            buffers = [_spread(rng, (size,), name, op), outputs(1, out), np.uint64(size), np.uint64(size)]
            found.append(Launch(f"{size}", buffers, 128, groups=1))
        return found

    return launches


def _row_reduce_launches(base: str, name: str, out: str, op: str) -> Launches:
    def launches(rng: Generator) -> list[Launch]:
        rows, size = 9, 333 if base != "row_reduce_small" else 7
        x = _spread(rng, (rows, size), name, op)
        y = outputs(rows, out)
        if base == "row_reduce_simple":
            return [Launch(f"{rows} x {size}", [x, y, np.uint64(size), np.int64(rows)], 64, groups=(1, -(-rows // 4)))]
        rest: list[Any] = [np.int32([rows]), np.int64([size]), 1, np.int32([1]), np.int64([0]), 1]
        buffers = [x, y, np.int64(size), np.int64(1), *rest]
        if base == "row_reduce_small":
            return [Launch(f"{rows} x {size}", buffers, rows, threads=rows)]
        return [Launch(f"{rows} x {size}", buffers, 64, groups=(1, rows))]

    return launches


def _column_reduce_launches(base: str, name: str, out: str, op: str) -> Launches:
    def launches(rng: Generator) -> list[Launch]:
        rows, size = (21, 37) if base == "col_reduce_small" else (333, 70)
        if base == "col_reduce_longcolumn":
            size = 5
        x = _spread(rng, (rows, size), name, op)
        wide = np.uint64 if base == "col_reduce_longcolumn" else np.int64
        rest: list[Any] = [_NOTHING, _NOTHING, 0, np.int32([rows]), np.int64([size]), 1, np.uint64(1)]
        buffers = [x, outputs(size, out), np.uint64(rows), wide(size), *rest]
        label = f"{rows} x {size}"
        if base == "col_reduce_small":
            return [Launch(label, buffers, (-(-size // 4), 4), groups=(1, 1, 1))]
        if base == "col_reduce_longcolumn":
            return [Launch(label, [*buffers, np.uint64(size)], (size, 8), groups=(1, 1, 1))]
        return [Launch(label, [*buffers, np.int64(0)], 256, groups=(-(-size // 32), 1, 1))]

    return launches


def _reductions() -> Iterator[Case]:
    operations = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "and": "And"}
    for name, metal in {**FLOATS, "int32": "int32_t", "bool_": "bool"}.items():
        for word, op in operations.items():
            if (word == "and") != (name == "bool_"):
                continue
            out, metal_out = (name, metal)
            types = f"{metal}, {metal_out}, {op}<{metal_out}>"
            yield Case("reduce", f"all_reduce_{word}{name}", _REDUCE_HEADERS, f"all_reduce<{types}>",
                       _all_launches(name, out, word))  # fmt: skip
            yield Case("reduce", f"row_reduce_simple_{word}{name}", _REDUCE_HEADERS, f"row_reduce_simple<{types}>",
                       _row_reduce_launches("row_reduce_simple", name, out, word))  # fmt: skip
            for base in ("row_reduce_looped", "row_reduce_small"):
                yield Case("reduce", f"{base}_1_reduce_{word}{name}", _REDUCE_HEADERS, f"{base}<{types}, int, 1>",
                           _row_reduce_launches(base, name, out, word))  # fmt: skip
            for base, tile in (
                ("col_reduce_small", ""),
                ("col_reduce_longcolumn", ""),
                ("col_reduce_looped", ", 32, 32"),
            ):
                place = "_1_32_32" if tile else "_1"
                yield Case("reduce", f"{base}{place}_reduce_{word}{name}", _REDUCE_HEADERS,
                           f"{base}<{types}, int, 1{tile}>", _column_reduce_launches(base, name, out, word))  # fmt: skip


def cases() -> Iterator[Case]:
    yield from _softmax()
    yield from _scans()
    yield from _sorts()
    yield from _reductions()
