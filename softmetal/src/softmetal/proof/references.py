"""Compares kernels without public source, in Apple's compiled form, with torch's results on the CPU.

These are PyTorch's kernels, and MLX's norms and rope. The CPU computes in double precision. The error bound of each
element follows from the roundings in the kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import device
from . import libraries
from .air.compiler import load
from .case import Array, Generator, Launch, numbers, outputs, run, stored

EPS = 2.0**-23
UNIT = {"float32": EPS, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # relative spacing of a type's numbers
TORCH_NAMES = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}
_NO_BIAS = np.zeros(4, np.float32)


@dataclass(frozen=True)
class Expected:
    """One launch, the buffer slot of its result, and each element's expected value and error bound."""

    launch: Launch
    slot: int
    name: str  # element type of the result
    wanted: Array  # double precision
    bound: Array  # bound of each element's absolute error


@dataclass(frozen=True)
class Reference:
    """A kernel in Apple's compiled form, with launches and expected results."""

    family: str
    kernel: str
    library: Callable[[], Path]
    launches: Callable[[Generator], list[Expected]]
    constants: tuple[tuple[str, bool | int], ...] = ()


def error_of(expected: Expected, results: Sequence[Any]) -> str:
    """Returns the element of the buffers that is farthest outside of its bound, or ""."""
    got = numbers(results[expected.slot], expected.name).reshape(expected.wanted.shape)
    error = np.abs(got - expected.wanted)
    worst = np.unravel_index(np.argmax(np.nan_to_num(error - expected.bound, nan=np.inf)), error.shape)
    if error[worst] <= expected.bound[worst]:
        return ""
    return (
        f"{expected.launch.label}: element {tuple(map(int, worst))}: got {got[worst]}, "
        f"expected {expected.wanted[worst]} within {expected.bound[worst]:.3g}"
    )


def check(reference: Reference, *, seed: int = 0, checked: bool = False) -> list[str]:
    """Runs a kernel. Returns a message for each launch whose error exceeds the bound."""
    found = []
    try:
        library = load(reference.library(), reference.kernel, constants=dict(reference.constants), checked=checked)
        for expected in reference.launches(np.random.default_rng(seed)):
            if problem := error_of(expected, run(library, reference.kernel, expected.launch)):
                found.append(problem)
    except (device.CompileError, device.KernelFault) as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def product_bound(name: str, wanted: Array, x: Array, w: Array, extra: Array | float = 0.0) -> Array:
    """Returns the error bound of a product. The result is rounded once, and |x| |w| is summed in single precision."""
    return UNIT[name] * np.abs(wanted) + 64 * EPS * (np.abs(x) @ np.abs(w)) + extra + 1e-7


def int4_products(
    name: str, group: int, shapes: Sequence[tuple[int, int, int]] = ((1, 64, 512), (3, 36, 256))
) -> Callable[[Generator], list[Expected]]:
    """Returns launches of PyTorch's 4-bit product. A shape is (M, N, K)."""

    def launches(rng: Generator) -> list[Expected]:
        found = []
        for M, N, K in shapes:
            codes = rng.integers(0, 16, (N, K))
            scales = stored(rng.uniform(0.01, 0.1, (K // group, N)), name)
            zeros = stored(rng.uniform(-0.5, 0.5, (K // group, N)), name)
            both = np.ascontiguousarray(np.stack([scales, zeros], -1))
            packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
            x = stored(rng.normal(0, 1, (M, K)), name)
            s, z, a = (numbers(v, name) for v in (scales, zeros, x))
            weight = (codes - 8) * np.repeat(s.T, group, 1) + np.repeat(z.T, group, 1)
            # The kernel rounds 8 * s and z - 8 * s to the element type.
            off = UNIT[name] * np.repeat((np.abs(z) + 16 * np.abs(s)).T, group, 1)
            wanted = _torch_product(a, weight)
            spread = np.abs(weight).T + 16 * np.repeat(s, group, 0) + np.repeat(np.abs(z), group, 0)
            bound = product_bound(name, wanted, a, spread, np.abs(a) @ off.T)
            sizes = np.array([M, K, N, 0], np.uint32).tobytes()
            launch = Launch(f"M {M} N {N} K {K}", [x, packed, both, outputs((M, N), name), sizes], (64, 1, 1),
                            threads=(N // 4 * 32, 1, M))  # fmt: skip
            found.append(Expected(launch, 3, name, wanted, bound))
        return found

    return launches


def _torch_product(a: Array, weight: Array) -> Array:
    product: Array = torch.nn.functional.linear(torch.from_numpy(a), torch.from_numpy(weight)).numpy()
    return product


def _int4_packing(rng: Generator) -> list[Expected]:
    """Packs PyTorch's int32 words into the kernel's bytes: swaps the nibbles of each byte and reverses the bytes."""
    N, words = 24, 16
    w = rng.integers(-(1 << 31), 1 << 31, (N, words)).astype(np.int32)
    parts = w.view(np.uint8).reshape(N, words, 4)
    wanted = (parts >> 4 | parts << 4).astype(np.float64).reshape(N, -1)
    launch = Launch(f"{N} x {words}", [w, outputs((N, words * 4), "uint8"), np.array([N, words], np.uint32).tobytes()],
                    (8, 4), threads=(N, words))  # fmt: skip
    return [Expected(launch, 1, "uint8", wanted, np.zeros_like(wanted))]


def _int8(name: str, rows: tuple[int, ...], large: bool) -> Callable[[Generator], list[Expected]]:
    def launches(rng: Generator) -> list[Expected]:
        found = []
        for M in rows:
            N, K = 72, 128
            w = rng.integers(-127, 128, (N, K)).astype(np.int8)
            scales, x = stored(rng.uniform(0.001, 0.01, N), name), stored(rng.normal(0, 1, (M, K)), name)
            a, weight = numbers(x, name), w * numbers(scales, name)[:, None]
            wanted = _torch_product(a, weight)
            sizes = np.array([M, K, N, 0], np.uint32).tobytes()
            groups = (-(-M // 32), -(-N // 64), 1) if large else (N // 8, M, 1)
            launch = Launch(f"M {M} N {N} K {K}", [x, w, scales, outputs((M, N), name), sizes],
                            (128 if large else 64, 1, 1), groups=groups,
                            threadgroup_memory={0: 12288 if large else 32})  # fmt: skip
            found.append(Expected(launch, 3, name, wanted, product_bound(name, wanted, a, weight.T)))
        return found

    return launches


def _bmm(name: str) -> Callable[[Generator], list[Expected]]:
    def launches(rng: Generator) -> list[Expected]:
        found = []
        for B, M, N, K in ((2, 17, 33, 20), (3, 16, 16, 48)):
            a, b = stored(rng.normal(0, 1, (B, M, K)), name), stored(rng.normal(0, 1, (B, K, N)), name)
            x, y = numbers(a, name), numbers(b, name)
            wanted = torch.bmm(torch.from_numpy(x), torch.from_numpy(y)).numpy()
            strides = struct.pack("9Q", 1, K, M * K, 1, N, K * N, 1, N, M * N)
            sizes = np.array([M, K, N, B], np.uint32).tobytes()
            launch = Launch(f"{B} of M {M} N {N} K {K}", [a, b, outputs((B, M, N), name), strides, sizes], (16, 16, 1),
                            groups=(-(-N // 16), -(-M // 16), B))  # fmt: skip
            found.append(Expected(launch, 2, name, wanted, product_bound(name, wanted, x, y)))
        return found

    return launches


def _norm_bound(name: str, wanted: Array, x: Array, weight: Array) -> Array:
    """Returns the error bound of a norm. The result is rounded once; mean, square and root have single precision."""
    largest = np.abs(x).max(-1, keepdims=True) / x.std(-1, keepdims=True)
    return UNIT[name] * np.abs(wanted) + 256 * EPS * (largest**3 + 1) * (np.abs(weight) + 1)


def _norm(kind: str, name: str, looped: bool, is_torch: bool) -> Callable[[Generator], list[Expected]]:
    """Returns launches of a norm. `kind` is "layer" or "rms"."""

    def launches(rng: Generator) -> list[Expected]:
        found = []
        for size in (77, 4200) if looped else (20, 333):
            x, w, b = (stored(rng.normal(m, 1, s), name) for m, s in ((0.3, (3, size)), (1, size), (0, size)))
            X, W, B = (numbers(v, name) for v in (x, w, b))
            tensors = [torch.from_numpy(v) for v in (X, W, B)]
            y = outputs(x.shape, name)
            if kind == "layer":
                wanted = torch.nn.functional.layer_norm(tensors[0], [size], tensors[1], tensors[2], 1e-5).numpy()
                if is_torch:
                    mean, rstd = outputs(3, name), outputs(3, name)
                    buffers: list[Any] = [x, y, mean, rstd, np.uint32(size), 1e-5, 1, 1, w, b]
                else:
                    buffers = [x, w, b, y, 1e-5, np.uint32(size), np.uint32(1), np.uint32(1)]
            else:
                wanted = torch.nn.functional.rms_norm(tensors[0], [size], tensors[1], 1e-5).numpy()
                buffers = [x, w, y, 1e-5, np.uint32(size), np.uint32(1)]
            group = 1024 if looped else -(-size // 4 // 32) * 32 + 32
            slot = next(i for i, v in enumerate(buffers) if v is y)
            bound = _norm_bound(name, wanted, X, W)
            if not is_torch:  # MLX rounds twice: before and after the product with the weight
                bound += UNIT[name] * 2 * np.abs(wanted - (B if kind == "layer" else 0))
            found.append(Expected(Launch(f"3 x {size}", buffers, group, groups=3), slot, name, wanted,
                                  bound))  # fmt: skip
        return found

    return launches


def _group_norm(name: str) -> Callable[[Generator], list[Expected]]:
    def launches(rng: Generator) -> list[Expected]:
        batch, channels, groups, area = 2, 12, 3, 35
        each = channels // groups
        x = stored(rng.normal(0.3, 1, (batch, channels, area)), name)
        w, b = stored(rng.normal(1, 1, channels), "float32"), stored(rng.normal(0, 1, channels), "float32")
        X = numbers(x, name)
        wanted = torch.nn.functional.group_norm(
            torch.from_numpy(X), groups, torch.from_numpy(w.astype(np.float64)), torch.from_numpy(b.astype(np.float64))
        ).numpy()
        params = struct.pack("6If", area, groups, each, each * area, channels, batch * area, 1e-5)
        stats = [outputs(batch * groups, "float32") for _ in range(2)]
        launch = Launch(f"{batch} x {channels} x {area}", [outputs(x.shape, name), *stats, x, w, b, params], 64,
                        groups=batch * groups)  # fmt: skip
        rows = _norm_bound(name, wanted.reshape(batch * groups, -1), X.reshape(batch * groups, -1), np.abs(w).max())
        return [Expected(launch, 0, name, wanted, rows.reshape(wanted.shape))]

    return launches


def _attention(name: str, size: int, causal: bool) -> Callable[[Generator], list[Expected]]:
    def launches(rng: Generator) -> list[Expected]:
        heads, kv_heads, queries, n = 4, 2, 3 if causal else 2, 77
        q = stored(rng.normal(0, 1, (heads, queries, size)), name)
        k, v = (stored(rng.normal(0, 1, (kv_heads, n, size)), name) for _ in range(2))
        Q, K, V = (numbers(a, name) for a in (q, k, v))
        K, V = np.repeat(K, 2, 0), np.repeat(V, 2, 0)
        visible = np.arange(n) <= np.arange(queries)[:, None] if causal else np.ones((queries, n), bool)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(torch.from_numpy(a) for a in (Q, K, V)), attn_mask=torch.from_numpy(visible), scale=0.125
        ).numpy()
        strides = [
            np.array(s, np.uint32).tobytes() for s in ([queries * size, n * size, n * size, 0], [size] * 3 + [0])
        ]
        heads_and_batches = np.array(
            [heads * queries * size, kv_heads * n * size, kv_heads * n * size, heads], np.uint32
        )
        mask = np.zeros(4, np.uint8)
        buffers = [q, k, v, outputs(q.shape, name), np.uint32(heads // kv_heads), np.uint32(n), *strides, 0.125, mask,
                   np.zeros(4, np.uint32).tobytes(), heads_and_batches.tobytes()]  # fmt: skip
        launch = Launch(f"{queries} queries, {n} keys", buffers, (1024, 1, 1), groups=(heads, queries, 1))
        return [Expected(launch, 3, name, wanted, UNIT[name] * np.abs(wanted) + 256 * EPS * np.abs(V).max())]

    return launches


def _rope(name: str, traditional: bool) -> Callable[[Generator], list[Expected]]:
    def launches(rng: Generator) -> list[Expected]:
        heads, size, offset, base = 5, 40, 7, 13.287712  # log2 of 10000
        x = stored(rng.normal(0, 1, (heads, size)), name)
        X, half = numbers(x, name), size // 2
        angle = offset * np.exp2(-np.arange(half) / half * np.float32(base).astype(np.float64))
        first, second = (X[:, 0::2], X[:, 1::2]) if traditional else (X[:, :half], X[:, half:])
        pairs = (first * np.cos(angle) - second * np.sin(angle), first * np.sin(angle) + second * np.cos(angle))
        wanted = np.stack(pairs, -1).reshape(heads, size) if traditional else np.concatenate(pairs, 1)
        buffers: list[Any] = [x, outputs(x.shape, name), offset, 1.0, np.int64(size), *[None] * 5, base]
        launch = Launch(f"{heads} x {size}", buffers, (half, 1), threads=(half, heads))
        # The error of the angle is about 8 * EPS * angle, and the angle is at most `offset`.
        bound = UNIT[name] * np.abs(wanted) + 16 * EPS * (offset + 1) * 2 * np.abs(X).max()
        return [Expected(launch, 1, name, wanted, bound)]

    return launches


def racing() -> Iterator[Reference]:
    """Yields kernels of PyTorch that lack barriers, so that their results depend on the order of threads.

    The int8 product of many rows reads a tile of weights, then writes scales into the tile's memory, and then copies
    the result out. A threadgroup barrier is missing before the writes and again before the copy. Checked mode must
    report these races.
    """
    for name, word in TORCH_NAMES.items():
        yield Reference("torch int8", f"large_m_int8pack_mm_{word}", libraries.torch_library, _int8(name, (45,), True))


def references() -> Iterator[Reference]:
    """Yields all references."""
    torch_library, mlx = libraries.torch_library, libraries.mlx_library
    yield Reference("torch int4", "weight_to_int4pack", torch_library, _int4_packing)
    for name, word in TORCH_NAMES.items():
        for group in (32, 64, 128, 256):
            yield Reference("torch int4", f"int4pack_mm_{group}_{word}", torch_library, int4_products(name, group))
        yield Reference("torch int8", f"int8pack_mv_{word}", torch_library, _int8(name, (1, 3), False))
        yield Reference("torch bmm", f"naive_bmm_{word}", torch_library, _bmm(name))
        for looped in (False, True):
            layer = f"layer_norm_{'looped' if looped else 'single_row'}_{word}"
            yield Reference("torch norm", layer, torch_library, _norm("layer", name, looped, True))
            end = "_looped" if looped else ""
            yield Reference("torch norm", f"rms_norm{end}_{word}", torch_library, _norm("rms", name, looped, True))
            yield Reference("mlx norm", f"layer_norm{end}{name}", mlx, _norm("layer", name, looped, False))
            yield Reference("mlx norm", f"rms{end}{name}", mlx, _norm("rms", name, looped, False),
                            (("has_w", True),))  # fmt: skip
        yield Reference("torch norm", f"group_norm_{word}_float_float_float_uint32_t", torch_library, _group_norm(name))
        for size, causal in ((64, False), (128, True)):
            end = "_causal" if causal else ""
            yield Reference("torch attention", f"sdpa_vector_{word}_{size}_{size}_masknone{end}", torch_library,
                            _attention(name, size, causal))  # fmt: skip
        for traditional in (False, True):
            yield Reference("mlx rope", f"rope_single_{name}", mlx, _rope(name, traditional),
                            (("forward", True), ("traditional", traditional), ("hs_transpose", False)))  # fmt: skip
