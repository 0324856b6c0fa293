"""CPU: the package's `gemm` beside PyTorch's dense linear and PyTorch's own 4-bit kernel, in one interleaved run.

Every round runs each rival once, so that drifting clocks and neighbours hit all of them; what is printed are medians of
the per-round ratios. Weights are cold: each call takes the next of enough copies to exceed the last-level cache.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import torch_marlin_metal as tmm
from torch_marlin_metal.cli.bench import processor_name

GROUP_SIZE = 128
ROWS = (1, 2, 4, 8, 16, 64, 128, 512)
SHAPES = ((4096, 4096), (4096, 11008))
Call = Callable[[int], object]


def cold_bytes() -> int:
    """How many bytes of weights to rotate: more than twice the last-level cache where the system tells its size."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    largest = max((int(size[:-1]) * {"K": 2**10, "M": 2**20}[size[-1]] for size in sizes), default=32 * 2**20)
    return max(160 * 2**20, 5 * largest // 2)


def seconds(call: Call, index: int) -> float:
    """One timed call: with one thread its CPU time, which other processes disturb less, else wall time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    call(index)
    return clock() - begin


def stream_bandwidth() -> float:
    """Bytes per second of a plain read of 512 MiB by all threads; the best of five."""
    data = torch.zeros(2**27, dtype=torch.float32)
    data.sum()
    return data.nbytes / min(seconds(lambda _: data.sum(), 0) for _ in range(5))


class Weights:
    """Enough copies of one layer's weight in every rival's own format."""

    def __init__(self, K: int, N: int) -> None:
        copies = max(2, cold_bytes() // (K * N // 2))
        dense_copies = max(2, cold_bytes() // (K * N * 2))
        groups = K // GROUP_SIZE
        packed = torch.randint(-(2**31), 2**31 - 1, (K // 8, N), dtype=torch.int32)
        scales = torch.rand(groups, N).to(torch.bfloat16)
        self.packed = [(packed.clone(), scales.clone()) for _ in range(copies)]
        codes = torch.randint(0, 16, (N, K), dtype=torch.int32)
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self.aten = [pack(codes, 1) for _ in range(copies)]
        scales_and_zeros = torch.rand(groups, N, 2)
        self.aten_scales = {dtype: scales_and_zeros.to(dtype) for dtype in (torch.bfloat16, torch.float32)}
        dense = torch.randn(N, K)
        self.dense = {
            dtype: [dense.to(dtype) for _ in range(dense_copies)] for dtype in (torch.bfloat16, torch.float32)
        }

    def ours(self, a: torch.Tensor, index: int) -> object:
        """This package's operator."""
        words, scales = self.packed[index % len(self.packed)]
        return torch.ops.torch_marlin_metal.gemm(a, words, scales, weight_format="uint4b8", group_size=GROUP_SIZE)

    def int4pack(self, a: torch.Tensor, index: int) -> object:
        """PyTorch's 4-bit kernel, in its own layout."""
        words = self.aten[index % len(self.aten)]
        return torch.ops.aten._weight_int4pack_mm_for_cpu(a, words, GROUP_SIZE, self.aten_scales[a.dtype])

    def linear(self, a: torch.Tensor, index: int) -> object:
        """PyTorch's dense linear."""
        copies = self.dense[a.dtype]
        return torch.nn.functional.linear(a, copies[index % len(copies)])


def compare(weights: Weights, M: int, K: int, budget: float) -> dict[str, list[float]]:
    """Seconds of each rival, one entry a round; as many rounds as the budget in seconds allows, at least three.

    PyTorch's 4-bit kernel is scalar code in fp32 and takes seconds: it runs in the first round only.
    """
    a = {dtype: torch.randn(M, K).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}
    calls: dict[str, Call] = {
        "ours bf16": partial(weights.ours, a[torch.bfloat16]),
        "ours fp16": partial(weights.ours, a[torch.float16]),
        "ours fp32": partial(weights.ours, a[torch.float32]),
        "int4pack bf16": partial(weights.int4pack, a[torch.bfloat16]),
        "dense bf16": partial(weights.linear, a[torch.bfloat16]),
        "dense fp32": partial(weights.linear, a[torch.float32]),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(0)
    times["int4pack fp32"] = [seconds(partial(weights.int4pack, a[torch.float32]), 0)]
    begin = time.perf_counter()
    index = 0
    while index < 3 or (time.perf_counter() - begin < budget and index < 200):
        index += 1
        for name, call in calls.items():
            times[name].append(seconds(call, index))
    return times


def ratio(times: dict[str, list[float]], rival: str, ours: str) -> float:
    """The median over rounds of the rival's time by ours: above 1, ours is faster."""
    if len(times[rival]) == 1:
        return times[rival][0] / statistics.median(times[ours])
    return statistics.median(r / o for r, o in zip(times[rival], times[ours], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for each M and shape")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    capability = tmm.cpu_capability()
    print(f"{processor_name()}, {arguments.threads} threads, torch {torch.__version__}, group {GROUP_SIZE}, uint4b8")
    print(f"{capability}")
    for K, N in SHAPES:
        weights = Weights(K, N)
        bandwidth = stream_bandwidth()
        print(f"\nK x N = {K} x {N}; stream read {bandwidth * 1e-9:.1f} GB/s")
        print("    M | ours us: bf16    fp16    fp32 | bf16 GFLOP/s | bf16 times faster than int4pack  dense | "
              "fp32 than int4pack   dense | of stream")  # fmt: skip
        for M in arguments.rows:
            times = compare(weights, M, K, arguments.budget)
            ours = {dtype: statistics.median(times[f"ours {dtype}"]) for dtype in ("bf16", "fp16", "fp32")}
            print(
                f"{M:5d} | {ours['bf16'] * 1e6:13.0f} {ours['fp16'] * 1e6:7.0f} {ours['fp32'] * 1e6:7.0f} | "
                f"{2e-9 * M * K * N / ours['bf16']:12.0f} | "
                f"{ratio(times, 'int4pack bf16', 'ours bf16'):31.2f} {ratio(times, 'dense bf16', 'ours bf16'):6.2f} | "
                f"{ratio(times, 'int4pack fp32', 'ours fp32'):18.1f} {ratio(times, 'dense fp32', 'ours fp32'):7.2f} | "
                f"{K * N / 2 / ours['bf16'] / bandwidth:9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
