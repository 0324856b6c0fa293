"""Compares `gemm` on the CPU with PyTorch's dense linear, PyTorch's own 4-bit kernel and the machine's peak rates.

Every round runs each rival once, so that changing clocks and other programs affect all of them alike. The tables show
medians of the ratios of each round. Weights are in no cache: there are more copies of a weight than fit into the
last-level cache, and each call uses the next copy. For one row, each round also reads memory without computing. One run
measures all tables.
"""

import argparse
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import torch_marlin_metal as tmm
from lab.cpu.cpu_ceilings import fp32_peak, stream_read
from torch_marlin_metal.cli.bench import processor_name
from torch_marlin_metal.gpu.tuning.chains import median_ratio
from torch_marlin_metal.huge_pages import prefer_huge_pages

GROUP_SIZE = 128
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
FORMAT_ROWS = (1, 8, 64)
SHAPES = ("4096x4096", "4096x11008", "11008x4096", "4096x512")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALAR_SECONDS = 4.0  # PyTorch's fp32 4-bit kernel is scalar code. It is skipped if it would take longer than this.
Call = Callable[[int], object]
Times = dict[str, list[float]]


def cold_bytes() -> int:
    """Returns the bytes of all copies of a weight: more than twice the last-level cache, if its size is known."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    largest = max((int(size[:-1]) * {"K": 2**10, "M": 2**20}[size[-1]] for size in sizes), default=32 * 2**20)
    return max(96 * 2**20, 5 * largest // 2)


def seconds(call: Call, index: int) -> float:
    """Returns the wall time of one call. With one thread, returns the CPU time, which other processes disturb less."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    call(index)
    return clock() - begin


def time_calls(calls: dict[str, Call], budget: float, least: int = 5) -> Times:
    """Returns each call's seconds in each round, for as many rounds as the budget in seconds allows.

    Pass only calls that are finished when they return; `interleave` times asynchronous calls. Every call gets a new
    number, so that consecutive calls read different weights. A call changes the caches for the next call. The order
    within a round is therefore random, so that no call always follows the same other call.
    """
    times: Times = {name: [] for name in calls}
    for call in calls.values():
        call(0)
    wake = torch.zeros(2**17)
    begin = time.perf_counter()
    names, order = list(calls), random.Random(0)
    rounds = 0
    counter = itertools.count()
    while rounds < least or (time.perf_counter() - begin < budget and rounds < 200):
        rounds += 1
        order.shuffle(names)
        for name in names:
            wake.add_(1)  # This call wakes PyTorch's threads, because in a model they are awake between layers, too.
            times[name].append(seconds(calls[name], next(counter)))
    return times


def ratio(times: Times, rival: str, ours: str) -> float:
    """Returns the median over rounds of the rival's time divided by our time. Above 1, this package is faster."""
    return median_ratio(times[rival], times[ours])


class Layer:
    """One layer's weight in a format of this package, in more copies than fit into the caches."""

    def __init__(
        self, K: int, N: int, weight_format: str = "uint4b8", group_size: int = GROUP_SIZE, perm: bool = False
    ):
        self.K = K
        copies = max(2, cold_bytes() // (K * N // 2))
        groups = -(-K // group_size)
        packed = torch.randint(-(2**31), 2**31 - 1, (K // 8, N), dtype=torch.int32)
        scales = torch.rand(groups, N).to(torch.bfloat16)
        if weight_format in ("nvfp4", "mxfp4"):
            scales = torch.randint(112, 120, (groups, N), dtype=torch.uint8)  # typical for weights of about 0.01
        tensors: dict[str, torch.Tensor] = {}
        if weight_format == "uint4":
            tensors["zeros"] = torch.randint(0, 16, (groups, N), dtype=torch.uint8)
        if weight_format == "lut4":
            tensors["lut"] = torch.randn(16)
        if perm:
            tensors["perm"] = torch.randperm(K, dtype=torch.int32)
        # The words are in huge pages, like those of a loaded layer.
        words = [prefer_huge_pages(torch.empty_like(packed)).copy_(packed) for _ in range(copies)]
        self.weights = [tmm.PackedWeight(copy, scales.clone(), weight_format, group_size, **tensors) for copy in words]

    def __call__(self, a: torch.Tensor, index: int) -> object:
        return tmm.gemm(a, self.weights[index % len(self.weights)])


class Peers:
    """One layer's weight in every rival's format, each in more copies than fit into the caches."""

    def __init__(self, K: int, N: int) -> None:
        copies = max(2, cold_bytes() // (K * N // 2))
        dense_copies = max(2, cold_bytes() // (K * N * 2))
        codes = torch.randint(0, 16, (N, K), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.packed = [packed.clone() for _ in range(copies)]
        scales_and_zeros = torch.rand(K // GROUP_SIZE, N, 2)
        self.scales_and_zeros = {dtype: scales_and_zeros.to(dtype) for dtype in DTYPES.values()}
        dense = torch.randn(N, K)
        self.dense = {
            dtype: [dense.to(dtype) for _ in range(dense_copies)] for dtype in (torch.bfloat16, torch.float32)
        }

    def int4pack(self, a: torch.Tensor, index: int) -> object:
        words = self.packed[index % len(self.packed)]
        return torch.ops.aten._weight_int4pack_mm_for_cpu(a, words, GROUP_SIZE, self.scales_and_zeros[a.dtype])

    def linear(self, a: torch.Tensor, index: int) -> object:
        copies = self.dense[a.dtype]
        return torch.nn.functional.linear(a, copies[index % len(copies)])


class Stream:
    """Reads memory that is in no cache, as fast as the threads can."""

    def __init__(self, threads: int) -> None:
        self.data = torch.zeros(cold_bytes() // 4)
        self.threads = threads

    def bytes_per_second(self) -> float:
        return stream_read(self.data, self.threads)


def table(title: str, columns: list[str]) -> None:
    print(f"\n{title}\n\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)


def row(*cells: object) -> None:
    print(
        "| " + " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |", flush=True
    )


def compare(K: int, N: int, rows: list[int], budget: float, threads: int) -> None:
    """For every M, compares this package's products with bf16, fp16 and fp32 activations with PyTorch's kernels."""
    layer, peers = Layer(K, N), Peers(K, N)
    table(
        f"K x N = {K} x {N}, group {GROUP_SIZE}, uint4b8. Ratios above 1: this package is faster.",
        ["M", "us bf16", "us fp16", "us fp32", "GFLOP/s bf16", "fp16", "fp32", "fp32 of FMA peak", "bf16 / int4pack",
         "bf16 / dense bf16", "fp32 / int4pack", "fp32 / dense fp32"],
    )  # fmt: skip
    scalar_row = 0.0
    for M in rows:
        a = {name: torch.randn(M, K).to(dtype) for name, dtype in DTYPES.items()}
        calls: dict[str, Call] = {f"ours {name}": partial(layer, a[name]) for name in DTYPES}
        calls["int4pack bf16"] = partial(peers.int4pack, a["bf16"])
        calls["dense bf16"] = partial(peers.linear, a["bf16"])
        calls["dense fp32"] = partial(peers.linear, a["fp32"])
        times = time_calls(calls, budget)
        ours = {name: statistics.median(times[f"ours {name}"]) for name in DTYPES}
        scalar = "-"
        if scalar_row * M < SCALAR_SECONDS:
            once = seconds(partial(peers.int4pack, a["fp32"]), 0)
            scalar_row, scalar = once / M, f"{once / ours['fp32']:.0f}"
        rate = {name: 2 * M * K * N / ours[name] for name in DTYPES}
        peak = statistics.median(fp32_peak(threads) for _ in range(3))  # measured for each line, because clocks drift
        row(
            M, *(f"{ours[name] * 1e6:.0f}" for name in DTYPES), *(f"{rate[name] * 1e-9:.0f}" for name in DTYPES),
            rate["fp32"] / peak, ratio(times, "int4pack bf16", "ours bf16"), ratio(times, "dense bf16", "ours bf16"),
            scalar, ratio(times, "dense fp32", "ours fp32"),
        )  # fmt: skip


def few_rows(K: int, N: int, budget: float, stream: Stream) -> None:
    """Compares a product of one row with a read of memory, and eight rows with one row, in the same rounds."""
    layer = Layer(K, N)
    calls: dict[str, Call] = {}
    for M in (1, 8):
        for name, dtype in DTYPES.items():
            calls[f"{name} {M}"] = partial(layer, torch.randn(M, K).to(dtype))
    bandwidth: list[float] = []
    calls["stream"] = lambda _: bandwidth.append(stream.bytes_per_second())
    times = time_calls(calls, budget)
    bandwidth = bandwidth[1:]
    cells = [
        statistics.median(K * N / 2 / t / b for t, b in zip(times[f"{name} 1"], bandwidth, strict=True))
        for name in DTYPES
    ]
    growth = [ratio(times, f"{name} 8", f"{name} 1") for name in DTYPES]
    row(f"{K} x {N}", f"{statistics.median(bandwidth) * 1e-9:.1f}", *cells, *growth)


def formats(K: int, N: int, budget: float) -> None:
    """Prints each format's time divided by the time of uint4b8 at the same group size. Above 1, uint4b8 is faster."""
    table(
        f"K x N = {K} x {N}: time by that of uint4b8 at the same group size",
        ["M", "a", "lut4, group 128", "uint4 with zeros, group 128", "uint4b8 with perm, group 128", "mxfp4, group 32",
         "nvfp4, group 16"],
    )  # fmt: skip
    layers = {
        "lut4": (Layer(K, N, "lut4"), "plain 128"),
        "uint4": (Layer(K, N, "uint4"), "plain 128"),
        "perm": (Layer(K, N, perm=True), "plain 128"),
        "mxfp4": (Layer(K, N, "mxfp4", 32), "plain 32"),
        "nvfp4": (Layer(K, N, "nvfp4", 16), "plain 16"),
    }
    plain = {f"plain {group}": Layer(K, N, group_size=group) for group in (128, 32, 16)}
    for M in FORMAT_ROWS:
        for name, dtype in DTYPES.items():
            a = torch.randn(M, K).to(dtype)
            calls: dict[str, Call] = {key: partial(layer, a) for key, layer in plain.items()}
            calls |= {key: partial(layer, a) for key, (layer, _) in layers.items()}
            times = time_calls(calls, budget)
            row(M, name, *(ratio(times, key, base) for key, (_, base) in layers.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS), help="numbers of rows beside the peers")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="KxN")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for each line")
    parser.add_argument("--formats", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shapes = [tuple(int(size) for size in shape.split("x")) for shape in arguments.shapes]
    capability = tmm.cpu_capability()
    stream = Stream(arguments.threads)
    print(f"{processor_name()}, {arguments.threads} threads, torch {torch.__version__}")
    print(f"{capability.isa}: {capability.reason}; {' '.join(capability.features)}")
    print(f"fp32 multiply-adds on registers: {fp32_peak(arguments.threads) * 1e-9:.0f} GFLOP/s")
    table(
        f"One row: weight bytes a second by those of a plain read. Eight rows: time by one's. Group {GROUP_SIZE}.",
        ["K x N", "read GB/s", "bf16", "fp16", "fp32", "8 rows bf16", "8 rows fp16", "8 rows fp32"],
    )
    for K, N in shapes:
        few_rows(K, N, arguments.budget, stream)
    if arguments.formats:
        formats(*shapes[0], arguments.budget)
    if arguments.rows:
        for K, N in shapes:
            compare(K, N, arguments.rows, arguments.budget, arguments.threads)


if __name__ == "__main__":
    main()
