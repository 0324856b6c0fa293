"""Tiles and sizes of the kernels, from `kernels/gemm/geometry.h` and `kernels/shared/kernel_list.h`.

A test compares these numbers with the plans that the package makes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.model.problems import Problem

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "uint8": 1, "int8": 1}
CODE_TYPES = ("uint8", "int8")
SUPER_BLOCK = 256  # k that share a value of super_scales
SIMD_WIDTH = 32
BLOCK = 8  # rows and columns of a simdgroup_matrix
MAX_THREADGROUP_BYTES = 32 * 1024
PREFERRED_THREADGROUP_BYTES = 20 * 1024
ELEMENTWISE_WIDTH, ELEMENTWISE_HEIGHT = 64, 4
CODES_PER_WORD = 8
LUT_BYTES = 64
MIN_GROUP_SIZE = 16
CHAIN_LENGTH = 128

GEMV_COLUMNS, GEMV_K, GEMV_MAX_ROWS, GEMV_MAX_SIMDGROUPS, GEMV_MAX_LOADS_FIRST_ROWS = 128, 16, 8, 16, 4
FUSED_COLUMNS, FUSED_K, FUSED_MAX_ROWS, FUSED_MAX_SIMDGROUPS = 32, 64, 32, 8
TENSOR_ROWS, TENSOR_COLUMNS, TENSOR_K = 32, 32, 32
STRIPED_TILES = ((64, 64, 32), (32, 128, 32))
STAGED_TILES = (*STRIPED_TILES, (128, 64, 16), (128, 128, 16))
TENSOR_TILES = ((32, 64, 32), (32, 128, 32), (64, 64, 32), (64, 128, 32))

MOE_GEMV_ROWS = 4
MOE_REDUCE_MAX_SIMDGROUPS = 20
MOE_SORT_THREADS = 256
MOE_SORT_BYTES = 4 * 8 * (MOE_SORT_THREADS + 1)


def ceil_divide(a: Any, b: Any) -> Any:
    return -(-a // b)


def round_up(value: Any, multiple: Any) -> Any:
    return ceil_divide(value, multiple) * multiple


def stripe_slices(K: int, k_per_slice: int) -> int:
    """Returns the number of slices into which striped divides the K of a tile.

    The last slice includes the remainder.
    """
    return max(K // k_per_slice, 1)


def staged_threads(tile: tuple[int, int, int]) -> int:
    """Returns the threads of a threadgroup: a simdgroup computes 32 rows of 16 or 32 columns."""
    outputs = tile[0] * tile[1]
    return outputs // (32 * (32 if outputs > 64 * 64 else 16)) * SIMD_WIDTH


def staged_bytes(tile: tuple[int, int, int], activation_bytes: int, stages: int) -> int:
    """Returns the threadgroup memory of a staged kernel: activations, codes as half, scales and zeros as float."""
    M, N, K = tile
    groups = -(-K // MIN_GROUP_SIZE)
    return stages * (M * K * activation_bytes + K * N * 2 + 2 * groups * N * 4) + 80


def tensor_threads(tile: tuple[int, int, int]) -> int:
    return tile[0] // TENSOR_ROWS * (tile[1] // TENSOR_COLUMNS) * SIMD_WIDTH


def most_simdgroups(columns: int, rows: int, has_lut: bool, most: int) -> int:
    """Returns how many simdgroups of gemv or fused fit into the preferred threadgroup memory, at most `most`."""
    room = PREFERRED_THREADGROUP_BYTES - (LUT_BYTES if has_lut else 0)
    return min(most, room // (rows * columns * 4))


def threadgroup_bytes(
    variant: str, tile: tuple[int, int, int], stages: int, simdgroups: Any, problem: Problem, rows: int
) -> Any:
    """Returns the threadgroup memory of a kernel whose threadgroups compute `rows` rows."""
    if variant in ("gemv", "fused"):
        columns = GEMV_COLUMNS if variant == "gemv" else FUSED_COLUMNS
        return simdgroups * rows * columns * 4 + (LUT_BYTES if problem.traits.has_lut else 0)
    if stages:
        return staged_bytes(tile, problem.element_bytes, stages)
    return 0
