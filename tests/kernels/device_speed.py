"""Measures the speed of the software Metal device in fast and in checked mode, in CPU time of one core.

python tests/kernels/device_speed.py
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["SOFTMETAL_THREADS"] = "1"
_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from softmetal import device  # noqa: E402
from tests.support.kernels.cases import problem  # noqa: E402
from tests.support.kernels.problems import run_gemv  # noqa: E402
from tests.support.kernels.tiles import run_staged  # noqa: E402

ROUNDS = 3
SOURCE = """
#include <metal_stdlib>
using namespace metal;
kernel void twice(device const float* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = 2 * x[i] + 1; }
kernel void barriers(device float* y, uint i [[thread_index_in_threadgroup]]) {
  for (uint k = 0; k < 64; ++k) threadgroup_barrier(mem_flags::mem_none);
  y[i] = 1;
}
kernel void sums(device float* y, uint i [[thread_index_in_threadgroup]]) {
  float x = i;
  for (uint k = 0; k < 64; ++k) x = simd_sum(x) * 0.03125f;
  y[i] = x;
}
"""


class Clock:
    """Measures the CPU seconds of kernel launches, without preparing and checking tensors."""

    seconds = 0.0

    def __enter__(self) -> "Clock":
        self._launch = device.Kernel.launch
        clock, launch = self, self._launch

        def timed(kernel: device.Kernel, **options: Any) -> device.Counters:
            before = time.process_time()
            counters = launch(kernel, **options)
            clock.seconds += time.process_time() - before
            return counters

        device.Kernel.launch = timed
        return self

    def __exit__(self, *_: object) -> None:
        device.Kernel.launch = self._launch


def seconds_of(work: Callable[[], object]) -> float:
    """Returns the shortest of several rounds, without the first round, which compiles."""
    work()
    taken = []
    for _ in range(ROUNDS):
        with Clock() as clock:
            work()
        taken.append(clock.seconds)
    return min(taken)


def small(kernel: str, threads: int, buffers: int, *, checked: bool) -> float:
    library = device.compile(SOURCE, checked=checked)
    arrays = [np.ones(threads, np.float32) for _ in range(buffers)]
    return seconds_of(lambda: library.kernel(kernel).launch(threads=threads, group=min(threads, 256), buffers=arrays))


def main() -> None:
    half = {"dtype": torch.float16, "group_size": 64}
    for checked in (False, True):
        threads = 1 << (18 if checked else 22)
        M, N, K = (64, 64, 512) if checked else (128, 128, 2048)
        tiles, row = (problem(m, n, K, weight_format="uint4", **half) for m, n in ((M, N), (1, 4 * N)))
        gemm = seconds_of(lambda: run_staged("gemm_double_buffered_64x64x32", tiles, checked=checked))  # noqa: B023
        gemv = seconds_of(lambda: run_gemv(row, rows=1, simdgroups=4, checked=checked))  # noqa: B023
        print("checked" if checked else "fast")
        print(
            f"  threads, y[i] = 2 x[i] + 1        {threads / small('twice', threads, 2, checked=checked) / 1e6:.1f} M/s"
        )
        print(f"  threadgroup barrier, 256 threads  {small('barriers', 256, 1, checked=checked) / 64 * 1e6:.1f} us")
        print(f"  simd_sum of a simdgroup           {small('sums', 256, 1, checked=checked) / 64 / 8 * 1e6:.1f} us")
        print(f"  gemm_double_buffered_64x64x32     {M * N * K / gemm / 1e9:.3f} GMAC/s")
        print(f"  gemv, one row                     {4 * N * K / gemv / 1e9:.3f} GMAC/s")


if __name__ == "__main__":
    main()
