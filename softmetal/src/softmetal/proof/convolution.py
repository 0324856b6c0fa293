"""Cases of MLX's convolutions as products of matrices, in two and three dimensions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .case import FLOATS, Array, Case, Launch, outputs, stored

Generator = np.random.Generator
_HEADERS = ("steel/gemm/mma.h", "steel/conv/conv.h", "steel/conv/params.h", "steel/conv/kernels/steel_conv{}.h")
_BLOCK = 16  # BK of every tile


@dataclass(frozen=True)
class Convolution:
    """A convolution of inputs N x space x C with weights O x window x C.

    Sizes and steps have one number per dimension.
    """

    batch: int
    channels: int
    outputs: int
    size: tuple[int, ...]
    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    input_dilation: tuple[int, ...] = ()
    flip: bool = False

    @property
    def spread(self) -> tuple[int, ...]:
        """The dilation of the input."""
        return self.input_dilation or (1,) * len(self.size)

    @property
    def made(self) -> tuple[int, ...]:
        """The spatial sizes of the output."""
        sizes = zip(self.size, self.window, self.stride, self.padding, self.dilation, self.spread, strict=True)
        return tuple(((s - 1) * i + 1 + 2 * p - d * (w - 1) - 1) // t + 1 for s, w, t, p, d, i in sizes)

    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of input, weights and output."""
        return [(self.batch, *self.size, self.channels), (self.outputs, *self.window, self.channels),
                (self.batch, *self.made, self.outputs)]  # fmt: skip

    def params(self) -> bytes:
        """MLX's MLXConvParams."""
        space = (self.size, self.window, self.made, self.stride, self.padding, self.dilation, self.spread)
        words = [self.batch, self.channels, self.outputs, *(x for sizes in space for x in sizes)]
        strides = [s for shape in self.shapes() for s in _strides(shape)]
        packed = struct.pack(f"{len(words)}i", *words)
        packed += b"\0" * (-len(packed) % 8)
        return packed + struct.pack(f"{len(strides)}qi?3x", *strides, 1, self.flip)

    def jumps(self) -> list[int]:
        """Returns the distances, in elements, by which the kernel moves the input pointer to get the next input.

        The first distances move it along the dimensions of the window, last dimension first. The last distance moves it
        to the next block of channels.
        """
        sign = -1 if self.flip else 1
        strides = _strides(self.shapes()[0])[1:-1]
        steps = [s * d for s, d in zip(strides, self.dilation, strict=True)]
        found, passed = [], 0
        for step, width in zip(reversed(steps), reversed(self.window), strict=True):
            found.append(sign * (step - passed))
            passed += (width - 1) * step
        return [*found, _BLOCK - sign * passed]


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _tile_name(tile: tuple[int, ...]) -> str:
    return "bm{}_bn{}_bk{}_wm{}_wn{}".format(*tile)


def _operands(rng: Generator, conv: Convolution, name: str) -> list[Array]:
    x, w, y = conv.shapes()
    return [stored(rng.normal(0, 1, x), name), stored(rng.normal(0, 1, w), name), outputs(y, name)]


def _launches(
    name: str, conv: Convolution, tile: tuple[int, ...], iterations: int
) -> Callable[[Generator], list[Launch]]:
    def launches(rng: Generator) -> list[Launch]:
        places, inner = math.prod(conv.made) * conv.batch, math.prod(conv.window) * conv.channels
        tiles = -(-conv.outputs // tile[1]), -(-places // tile[0])
        words = [places, conv.outputs, inner, iterations, *conv.jumps(), *tiles, 0]
        buffers = [*_operands(rng, conv, name), conv.params(), struct.pack(f"{len(words)}i", *words)]
        label = f"{conv.size} by {conv.window}, {conv.channels} channels"
        return [Launch(label, buffers, (32, tile[4], tile[3]), groups=(*tiles, 1))]

    return launches


_FLAT = Convolution(2, 32, 40, (9, 11), (3, 2), (2, 1), (1, 1), (1, 2))
_DEEP = Convolution(1, 16, 12, (5, 6, 7), (2, 3, 2), (1, 2, 1), (1, 0, 1), (1, 1, 2))
_SMALL_TILE, _WIDE_TILE, _TILE = (32, 8, 16, 4, 1), (64, 64, 16, 2, 2), (32, 32, 16, 2, 2)


def _with_channels(channels: int) -> Convolution:
    return Convolution(2, channels, 10, (9, 8), (3, 3), (1, 2), (1, 1), (1, 1))


def _direct() -> Iterator[Case]:
    for name, metal in FLOATS.items():
        for channels in (1, 2, 3, 4):
            conv = _with_channels(channels)
            depth = channels if channels < 3 else 4  # the kernel's step along K
            iterations = -(-math.prod(conv.window) * depth // _BLOCK)
            yield _flat_case(name, metal, conv, _SMALL_TILE, str(channels), False, iterations)
        for small, tile in ((True, _TILE), (False, _WIDE_TILE)):
            iterations = math.prod(_FLAT.window) * -(-_FLAT.channels // _BLOCK)
            yield _flat_case(name, metal, _FLAT, tile, "l", small, iterations)
            deep = math.prod(_DEEP.window) * -(-_DEEP.channels // _BLOCK)
            yield Case("convolution", f"implicit_gemm_conv_3d_{name}_{_tile_name(_TILE)}_filter_{'s' if small else 'l'}",
                       _headers("_3d"), f"implicit_gemm_conv_3d<{metal}, {_list(_TILE)}, {str(small).lower()}>",
                       _launches(name, _DEEP, _TILE, deep))  # fmt: skip


def _headers(kind: str) -> tuple[str, ...]:
    return tuple(h.format(kind) for h in _HEADERS)


def _list(tile: tuple[int, ...]) -> str:
    return ", ".join(map(str, tile))


def _flat_case(
    name: str, metal: str, conv: Convolution, tile: tuple[int, ...], channels: str, small: bool, iterations: int
) -> Case:
    return Case(
        "convolution",
        f"implicit_gemm_conv_2d_{name}_{_tile_name(tile)}_channel_{channels}_filter_{'s' if small else 'l'}",
        _headers(""),
        f"implicit_gemm_conv_2d<{metal}, {_list(tile)}, {0 if channels == 'l' else channels}, {str(small).lower()}>",
        _launches(name, conv, tile, iterations),
    )


def _general_launches(name: str, conv: Convolution, tile: tuple[int, ...]) -> Callable[[Generator], list[Launch]]:
    """Returns launches of the kernel for transposed strided convolutions, which also dilates its input."""

    def launches(rng: Generator) -> list[Launch]:
        lanes = list(zip(conv.spread, conv.dilation, conv.stride, strict=True))
        weight_jumps = [math.lcm(i, d) // d for i, d, _ in lanes]
        out_jumps = [math.lcm(i, t) // t for i, _, t in lanes]
        made = [-(-size // jump) for size, jump in zip(conv.made, out_jumps, strict=True)]
        places, inner = math.prod(made) * conv.batch, math.prod(conv.window) * conv.channels
        tiles = -(-conv.outputs // tile[1]), -(-places // tile[0])
        iterations = -(-conv.channels // _BLOCK)
        words = [math.prod(conv.made) * conv.batch, conv.outputs, inner, iterations, *conv.jumps(), *tiles, 0]
        jumps = struct.pack("8i", *weight_jumps, *out_jumps, *made, math.prod(made), places)
        bases = [_bases(conv, d, weight_jumps[d], out_jumps[d]) for d in range(2)]
        buffers = [*_operands(rng, conv, name), conv.params(), struct.pack(f"{len(words)}i", *words), jumps, *bases]
        label = f"{conv.size} spread by {conv.spread}, {conv.channels} channels"
        return [Launch(label, buffers, (32, tile[4], tile[3]), groups=(*tiles, math.prod(out_jumps)))]

    return launches


def _bases(conv: Convolution, dimension: int, weight_jump: int, out_jump: int) -> Array:
    """For each output position modulo the stride, returns the first weight tap that meets an input, and the number of
    taps.
    """
    stride, dilation, width = conv.stride[dimension], conv.dilation[dimension], conv.window[dimension]
    spread, step = conv.spread[dimension], -dilation if conv.flip else dilation
    found = []
    for residue in range(out_jump):
        place = residue * stride - conv.padding[dimension] + ((width - 1) * dilation if conv.flip else 0)
        base = 0
        while base < width and place % spread:
            base, place = base + 1, place + step
        found.append((base, -(-(width - base) // weight_jump)))
    return np.array(found, np.int32)


def _general() -> Iterator[Case]:
    for name, metal in FLOATS.items():
        for channels, tile in ((32, _TILE), (21, _SMALL_TILE)):
            conv = Convolution(2, channels, 24, (5, 6), (3, 3), (1, 1), (2, 2), (1, 1), (2, 3), flip=channels == 21)
            yield Case("convolution", f"implicit_gemm_conv_2d_general_{name}_{_tile_name(tile)}", _headers("_general"),
                       f"implicit_gemm_conv_2d_general<{metal}, {_list(tile)}>", _general_launches(name, conv, tile),
                       (("align_C", channels % _BLOCK == 0),))  # fmt: skip


def cases() -> Iterator[Case]:
    yield from _direct()
    yield from _general()
