"""Cases of MLX's kernels that add products of vectors: the dot product and the Fourier transform."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .case import FLOATS, Case, Generator, Launch, Launches, outputs, stored

_SIZES = (16384 + 4099, 77)
_RADICES = (13, 11, 8, 7, 6, 5, 4, 3, 2)
# Size of a transform -> (radix -> number of steps, elements that one thread computes).
_TRANSFORMS = {63: ({7: 1, 3: 2}, 7), 90: ({5: 1, 3: 2, 2: 1}, 5), 256: ({4: 4}, 4), 143: ({13: 1, 11: 1}, 11)}


def _dot_launches(name: str) -> Launches:
    def launches(rng: Generator) -> list[Launch]:
        found = []
        for size in _SIZES:
            a, b = (stored(rng.normal(0, 1, size), name) for _ in range(2))
            groups = -(-size // (512 * 32))
            found.append(Launch(f"{size}", [a, b, outputs(groups, "float32"), size], 512, groups=groups))
        return found

    return launches


def _dots() -> Iterator[Case]:
    for name, metal in FLOATS.items():
        yield Case("dot", f"dot_product_{name}_it32_tg512_sg16", ("dot.h",), f"dot_product<{metal}, 32, 512, 16>",
                   _dot_launches(name))  # fmt: skip


def _transforms() -> Iterator[Case]:
    for size, (steps, elements) in _TRANSFORMS.items():
        memory = max(256, 1 << (size - 1).bit_length())
        for is_inverse in (False, True):
            constants: list[tuple[str, bool | int]] = [("0", is_inverse), ("1", size == 256), ("2", elements), ("3", 1)]
            constants += [(str(4 + i), steps.get(radix, 0)) for i, radix in enumerate(_RADICES)]
            constants += [(str(13 + i), 0) for i in range(len(_RADICES))] + [("22", False)]

            def launches(rng: Generator, size: int = size, elements: int = elements) -> list[Launch]:
                x = rng.normal(0, 1, (3, size, 2)).astype(np.float32)
                threads = -(-size // elements)
                buffers = [x, outputs(x.shape, "float32"), size, 3]
                return [Launch(f"3 x {size}", buffers, (1, 1, threads), groups=(3, 1, 1))]

            yield Case("fft", f"fft_mem_{memory}_float2_float2", ("fft.h",), f"fft<{memory}, float2, float2>", launches,
                       tuple(constants))  # fmt: skip


def cases() -> Iterator[Case]:
    yield from _dots()
    yield from _transforms()
