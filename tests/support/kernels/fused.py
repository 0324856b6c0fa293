"""Launches the fused kernel, and checks how many words and activations it reads and how much it multiplies."""

from typing import Any

import torch

from tests.support import reference
from tests.support.kernels.launch import Counters, facts, number
from tests.support.kernels.problems import Problem, check_reads, run_product, sliced


def run_fused(
    problem: Problem,
    *,
    rows: int,
    simdgroups: int,
    splits: int = 1,
    subnormal_codes: bool = True,
    counted: bool = True,
    **options: Any,
) -> torch.Tensor:
    step, columns = number("kFusedK"), number("kFusedColumns")
    k_per_slice = -(-problem.K // (step * simdgroups * splits)) * step
    splits = -(-problem.K // (k_per_slice * simdgroups))  # every split has at least one slice
    options |= {
        "group": (32 * simdgroups, 1, 1),
        "groups": (-(-problem.N // columns), -(-problem.M // rows), splits),
        "threadgroup_bytes": facts()["fused_bytes"][problem.weight_format][simdgroups][rows // 8],
    }
    short = problem.group_size < min(step, problem.K)
    constants = {
        "rows_per_threadgroup": rows,
        "subnormal_codes": subnormal_codes,
        "short_group_size": problem.group_size if short else 0,
        "ragged_k": problem.K % step != 0,
        "ragged_n": problem.N % columns != 0,
    }
    result, counters = run_product("gemm_fused", problem, k_per_slice, constants, options, sliced(problem, splits))
    if counted:
        check_fused_work(problem, rows, k_per_slice, counters)
    return result


def check_fused_work(problem: Problem, rows: int, k_per_slice: int, counters: Counters) -> None:
    """Checks the work of each row block: it reads each word once, and each activation once for every 32 columns.

    The number of matrix products is the smallest that covers M, N and K.
    """
    columns, step = number("kFusedColumns"), number("kFusedK")
    row_blocks, strips = -(-problem.M // rows), -(-problem.N // columns)
    spans = [min(k_per_slice, problem.K - k) for k in range(0, problem.K, k_per_slice)]
    steps = row_blocks * strips * sum(-(-span // step) for span in spans)
    assert counters.mmas == steps * rows * columns * step // 512, "8x8x8 products"
    barriers = 2 if problem.weight_format == "lut4" else 1
    assert counters.threadgroup_barriers == barriers * counters.threadgroups, "threadgroup barriers"
    words = row_blocks * reference.word_bytes(problem.weight_format, problem.K, problem.N)
    activations = row_blocks * strips * rows * problem.K
    # for each word of codes, a lane also loads the word of the second plane that holds the upper bits
    high = words if problem.weight_format in reference.PLANES else 0
    check_reads(counters, words, high, activations * problem.dtype.itemsize)
