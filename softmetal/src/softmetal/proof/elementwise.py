"""Cases of MLX's elementwise kernels: conversions and functions of one, two and three arguments."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .case import FLOATS, STORAGE, Array, Case, Generator, Launch, outputs, stored

_COUNT = 1001  # not a multiple of any threadgroup's size
_METAL = {**FLOATS, "bool_": "bool", **{f"{u}int{n}": f"{u}int{n}_t" for u in ("", "u") for n in (8, 16, 32, 64)}}
_UNARY = (
    *("Abs", "ArcCos", "ArcSin", "ArcTan", "ArcTanh", "Ceil", "Cos", "Cosh", "Erf", "ErfInv", "Exp", "Expm1", "Floor"),
    *("Log", "Log1p", "Log2", "Negative", "Round", "Rsqrt", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Square", "Tan"),
    "Tanh",
)
_BINARY = ("Add", "Divide", "Maximum", "Minimum", "Multiply", "Power", "Remainder", "LogAddExp", "ArcTan2", "Subtract")
_COMPARISONS = ("Equal", "Greater", "LessEqual", "NotEqual")


def _per_thread(name: str) -> int:
    return max(1, 8 // np.dtype(STORAGE[name]).itemsize)


def _word(base: str, name: str) -> str:
    """Returns MLX's name of the kernel with several elements per thread, or `base` if the type has no such kernel."""
    return base + "n" if _per_thread(name) > 1 else base


def _threads(name: str) -> int:
    return -(-_COUNT // _per_thread(name))


def _mixed(rng: Generator, name: str) -> Array:
    """Returns ordinary values and edge cases: ties, zeros, the largest and smallest values, infinities, NaN."""
    if name == "bool_":
        return rng.integers(0, 2, _COUNT).astype(np.bool_)
    if name not in FLOATS:
        info = np.iinfo(STORAGE[name])
        return rng.integers(info.min, info.max, _COUNT, STORAGE[name], endpoint=True)
    x = rng.normal(0, 300, _COUNT).astype(np.float32)
    x[:200] = rng.integers(-4000, 4000, 200) / 2  # ties
    x[200:212] = [0, -0.0, 1, -1, 65504, -65504, 3e38, -3e38, 1e-7, np.inf, -np.inf, np.nan]
    x[212:400] = np.exp(rng.uniform(-20, 20, 188)) * rng.choice([-1, 1], 188)
    return stored(x, name)


def _copies() -> Iterator[Case]:
    pairs = [(a, b) for a in FLOATS for b in FLOATS if a != b]
    pairs += [(a, b) for a in ("int8", "uint8", "int16", "int32", "uint32", "int64", "bool_") for b in FLOATS]
    pairs += [(a, b) for a in FLOATS for b in ("int8", "uint8", "int32", "uint32", "int64", "bool_")]
    for source, target in pairs:

        def launches(rng: Generator, source: str = source, target: str = target) -> list[Launch]:
            buffers = [_mixed(rng, source), outputs(_COUNT, target), np.uint32(_COUNT)]
            return [Launch(f"{_COUNT}", buffers, 64, threads=_threads(target))]

        yield Case("convert", f"{_word('v', target)}_copy{source}{target}", ("copy.h",), f"copy_v<{_METAL[source]}, {_METAL[target]}>",
                   launches)  # fmt: skip


def _unary() -> Iterator[Case]:
    for name, metal in FLOATS.items():
        for op in _UNARY:

            def launches(rng: Generator, name: str = name, op: str = op) -> list[Launch]:
                low, high = {"ArcCos": (-1, 1), "ArcSin": (-1, 1), "ArcTanh": (-0.9, 0.9), "ErfInv": (-0.9, 0.9)}.get(
                    op, (0.01, 9) if op in ("Log", "Log1p", "Log2", "Rsqrt", "Sqrt") else (-9, 9)
                )
                buffers = [stored(rng.uniform(low, high, _COUNT), name), outputs(_COUNT, name), np.uint32(_COUNT)]
                return [Launch(f"{_COUNT}", buffers, 64, threads=_threads(name))]

            yield Case("unary", f"{_word('v', name)}_{op}{name}{name}", ("unary_ops.h", "fp8.h", "unary.h"),
                       f"unary_v<{metal}, {metal}, {op}>", launches)  # fmt: skip


def _binary() -> Iterator[Case]:
    for name, metal in FLOATS.items():
        for op in (*_BINARY, *_COMPARISONS):
            out, metal_out = ("bool_", "bool") if op in _COMPARISONS else (name, metal)

            def launches(rng: Generator, name: str = name, op: str = op, out: str = out) -> list[Launch]:
                a, b = rng.uniform(-6, 6, (2, _COUNT))
                a = np.abs(a) if op == "Power" else a
                a[::7] = b[::7]
                buffers = [stored(a, name), stored(b, name), outputs(_COUNT, out), np.uint32(_COUNT)]
                return [Launch(f"{_COUNT}", buffers, 32, threads=_threads(name))]

            yield Case("binary", f"{_word('vv', name)}_{op}{name}",
                       ("binary_ops.h", "binary.h"), f"binary_vv<{metal}, {metal_out}, {op}>", launches)  # fmt: skip


def cases() -> Iterator[Case]:
    yield from _copies()
    yield from _unary()
    yield from _binary()
