"""Launches the kernel for tensor units, and checks that it reads each operand once and has no barrier."""

from typing import Any

import torch

from tests.support import reference
from tests.support.kernels.launch import Counters, facts, number
from tests.support.kernels.problems import Problem, check_reads, run_product, sliced

TILES = [name for name in facts()["tensor_tiles"] if name != "end"]


def _launch(problem: Problem, tile: str, splits: int, options: dict[str, Any]) -> tuple[torch.Tensor, Counters]:
    rows, columns, step = map(int, tile.split("x"))
    k_per_slice = -(-problem.K // (step * splits)) * step
    splits = -(-problem.K // k_per_slice)  # every split has at least one slice
    options |= {
        "group": (facts()["tensor_tiles"][tile], 1, 1),
        "groups": (-(-problem.N // columns), -(-problem.M // rows), splits),
    }
    constants = {
        "rows_per_threadgroup": rows,
        "short_group_size": 16 if problem.group_size == 16 < problem.K else 0,
        "ragged_k": problem.K % step != 0,
        "ragged_n": problem.N % number("kTensorColumns") != 0,
        "subnormal_codes": options.pop("subnormal_codes", True),
    }
    return run_product("gemm_tensor", problem, k_per_slice, constants, options, sliced(problem, splits))


def run_tensor(problem: Problem, *, tile: str, splits: int = 1, counted: bool = True, **options: Any) -> torch.Tensor:
    """Runs a product. `tile` is a name such as "64x128x32"; `run_gemv` describes the other options."""
    result, counters = _launch(problem, tile, splits, options)
    if counted:
        p, row_blocks = problem, -(-problem.M // number("kTensorRows"))
        check_tensor_reads(p.weight_format, p.K, p.N, p.group_size, p.dtype, row_blocks, counters)
    return result


def count_tensor(problem: Problem, tile: str) -> Counters:
    """Runs a product in checked mode and returns its counters."""
    return _launch(problem, tile, 1, {"checked": True})[1]


def check_tensor_reads(
    weight_format: str, K: int, N: int, group_size: int, dtype: torch.dtype, row_blocks: int, counters: Counters
) -> None:
    """Checks the reads of a simdgroup for its 32 rows of 32 columns, and that it has no barrier.

    Each activation is read once. Each word is read once, or twice if a group of 16 leaves a lane only half of a word of
    4-bit codes. `row_blocks` is the number of blocks of 32 rows.
    """
    assert counters.threadgroup_barriers == 0
    strips = -(-N // number("kTensorColumns"))
    reads_halves = group_size == 16 < K and weight_format != "nvfp4" and weight_format not in reference.EIGHT_BITS
    words = row_blocks * reference.word_bytes(weight_format, K, N) * (2 if reads_halves else 1)
    activations = row_blocks * number("kTensorRows") * K * strips
    high = words if weight_format in reference.PLANES else 0  # one word of upper bits for each word
    check_reads(counters, words, high, activations * dtype.itemsize)
