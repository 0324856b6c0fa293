"""Helpers for the tests of the MSL library: Metal's names of NumPy types, and kernels made from expressions."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

if shutil.which("clang++-19") is None:
    pytest.skip("needs clang++-19 (Debian package clang-19)", allow_module_level=True)

from softmetal import device
from softmetal.device import CompileError, Library
from softmetal.msl.compiler import compile_source
from softmetal.proof.case import to_bfloat

__all__ = [
    "HEADER",
    "INTEGERS",
    "CompileError",
    "Library",
    "assert_refused",
    "compile_metal",
    "evaluate",
    "from_bfloat",
    "refuse",
    "run",
    "to_bfloat",
    "type_name",
]

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
METAL_TYPES = {
    np.dtype(np.bool_): "bool",
    np.dtype(np.int8): "char",
    np.dtype(np.uint8): "uchar",
    np.dtype(np.int16): "short",
    np.dtype(np.uint16): "ushort",
    np.dtype(np.int32): "int",
    np.dtype(np.uint32): "uint",
    np.dtype(np.int64): "long",
    np.dtype(np.uint64): "ulong",
    np.dtype(np.float16): "half",
    np.dtype(np.float32): "float",
}
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
# The slots of `evaluate`: (w, j) is element j of a vector of width w.
SLOTS = [(w, j) for w in (1, 2, 3, 4) for j in range(w)]
_HELPERS = """
template <typename T, int N> vec<T, N> take(device const T* p, uint i, uint n) {
  vec<T, N> v;
  for (int j = 0; j < N; ++j) v[j] = p[(i + j) % n];
  return v;
}
template <typename T, int N> void give(device T* p, vec<T, N> v, uint i, uint n) {
  for (int j = 0; j < N; ++j) p[j * n + i] = v[j];
}
"""


def type_name(dtype: np.typing.DTypeLike) -> str:
    return METAL_TYPES[np.dtype(dtype)]


@functools.lru_cache(maxsize=64)
def _compiled(source: str, checked: bool) -> Library:
    return device.compile(source, checked=checked)


def compile_metal(source: str, checked: bool = False) -> Library:
    return _compiled(HEADER + source, checked)


def refuse(source: str) -> str:
    with pytest.raises(CompileError) as error:
        compile_metal(source)
    return str(error.value)


def assert_refused(source: str, message: str, *, kernel: str | None = None) -> None:
    """Asserts that the compiler refuses a source of one line, and names the line and the reason."""
    with pytest.raises(CompileError) as error:
        compile_source(f"{HEADER}{source}\n", file_name="bad.metal", kernel=kernel)
    assert message in str(error.value)
    assert re.match(r"bad\.metal:3:(\d+:)? error: ", str(error.value))


def run(source: str, *buffers: np.ndarray, threads: int = 1, group: int = 32, kernel: str = "k") -> None:
    """Compiles HEADER and the source, and runs a kernel."""
    compile_metal(source).kernel(kernel).launch(threads=threads, group=min(group, threads), buffers=buffers)


def _kernel(name: str, expression: str, inputs: Sequence[str], out: str, widths: Sequence[int]) -> str:
    letters = "abcd"[: len(inputs)]
    parameters = [
        f"device const {t}* {x.upper()} [[buffer({i})]]" for i, (x, t) in enumerate(zip(letters, inputs, strict=True))
    ]
    parameters += [f"device {out}* out [[buffer({len(inputs)})]]", f"constant uint& n [[buffer({len(inputs) + 1})]]"]
    lines = []
    for slot, (w, j) in enumerate(SLOTS):
        if j or w not in widths:
            continue
        loads = [f"{t} {x} = {x.upper()}[i];" for x, t in zip(letters, inputs, strict=True)]
        store = f"out[i] = {out}({expression});"
        if w > 1:
            loads = [
                f"vec<{t}, {w}> {x} = take<{t}, {w}>({x.upper()}, i, n);" for x, t in zip(letters, inputs, strict=True)
            ]
            store = f"give<{out}, {w}>(out + {slot} * n, vec<{out}, {w}>({expression}), i, n);"
        lines.append("{ " + " ".join([*loads, store]) + " }")
    body = "\n  ".join(["if (i >= n) return;", *lines])
    return f"kernel void {name}({', '.join(parameters)}, uint i [[thread_position_in_grid]]) {{\n  {body}\n}}\n"


def evaluate(
    expressions: Mapping[str, str],
    inputs: Sequence[np.ndarray],
    out: str,
    *,
    types: Sequence[str] | None = None,
    widths: Sequence[int] = (1, 2, 3, 4),
    only: Sequence[str] = (),
    perturb_seed: int = 0,
) -> dict[str, list[tuple[list[np.ndarray], np.ndarray]]]:
    """Evaluates expressions in `a`, `b`, ... on scalars and on vectors.

    Args:
        expressions: the expression of each kernel, by the kernel's name.
        inputs: arrays of the same length n.
        out: Metal's type of a result's elements. A "bfloat" is returned as its bits.
        types: Metal's types of the inputs, if they differ from the types of the arrays.
        widths: the vector widths; 1 means a scalar.
        only: names of the kernels to run. All are compiled, so that many tests share one library.
        perturb_seed: as for `Kernel.launch`.

    Returns:
        For each name a list. It has an entry for each width and each element of a vector: the n values of each input,
        and the n results.
    """
    types = types or [type_name(x.dtype) for x in inputs]
    names = {name: f"k_{name}" for name in expressions}
    source = _HELPERS + "".join(_kernel(names[n], e, types, out, widths) for n, e in expressions.items())
    library = compile_metal(source)
    n = inputs[0].size
    storage = {v: k for k, v in METAL_TYPES.items()} | {"bfloat": np.dtype(np.uint16)}
    results = {}
    for name in only or expressions:
        values = np.zeros((len(SLOTS), n), storage[out])
        buffers = [*inputs, values, np.uint32([n])]
        library.kernel(names[name]).launch(threads=n, group=min(n, 256), buffers=buffers, perturb_seed=perturb_seed)
        results[name] = [
            ([np.roll(x, -j) for x in inputs], values[slot]) for slot, (w, j) in enumerate(SLOTS) if w in widths
        ]
    return results


def from_bfloat(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
