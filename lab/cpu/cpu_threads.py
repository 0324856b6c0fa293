"""Times products of few rows with several numbers of threads, and plain reads of memory by the same numbers.

    python -m lab.cpu.cpu_threads [--threads 1 2 4 8 16] [--rows 1 8 16] [--shapes 4096x4096 ...]

Weights are `uint4b8` in groups of 128 and in no cache; activations are bf16. All numbers of threads take turns, so that
changing clocks and other programs affect all of them alike. The tables have medians: the time of a product and, for one
row of activations, its rate divided by the rate of a plain read. The last columns name the fastest number of threads,
and how much time it saves compared with the largest number.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator

import torch

import torch_marlin_metal as tmm
from lab.cpu.cpu_gemm import Layer, Stream, row, table
from torch_marlin_metal.cli.bench import processor_name

SHAPES = ("1024x1024", "2048x2048", "4096x1024", "4096x4096", "4096x14336", "14336x4096")
CALLS = 12  # timed calls in a turn, after two calls that wake the threads


def turn(layer: Layer, a: torch.Tensor, threads: int, copies: Iterator[int]) -> float:
    """Returns the median seconds of CALLS products with `threads` threads.

    Each call uses the next copy of the weight.
    """
    torch.set_num_threads(threads)
    taken = []
    for index in range(-2, CALLS):
        begin = time.perf_counter()
        layer(a, next(copies))
        if index >= 0:
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def compare(K: int, N: int, counts: list[int], rows: list[int], budget: float) -> None:
    layer, copies = Layer(K, N), itertools.count()
    streams = {threads: Stream(threads) for threads in counts}
    for M in rows:
        a = torch.randn(M, K, dtype=torch.bfloat16)
        seconds: dict[int, list[float]] = {threads: [] for threads in counts}
        shares: dict[int, list[float]] = {threads: [] for threads in counts}
        begin = time.perf_counter()
        while len(seconds[counts[0]]) < 3 or time.perf_counter() - begin < budget:
            for threads in counts:
                seconds[threads].append(turn(layer, a, threads, copies))
                if M == 1:
                    rate = K * N / 2 / seconds[threads][-1]
                    shares[threads].append(rate / streams[threads].bytes_per_second())
        medians = {threads: statistics.median(seconds[threads]) for threads in counts}
        best = min(medians, key=lambda threads: medians[threads])
        cells = [
            f"{medians[t] * 1e6:.0f} us" + (f", {statistics.median(shares[t]):.2f}" if M == 1 else "") for t in counts
        ]
        row(f"{K}x{N}", M, *cells, best, f"{1 - medians[best] / medians[counts[-1]]:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="numbers of threads")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="KxN")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for each line")
    arguments = parser.parse_args()
    counts = sorted({threads for threads in arguments.threads if threads <= len(os.sched_getaffinity(0))})
    if not counts:
        parser.error(f"--threads: expected at least one number up to {len(os.sched_getaffinity(0))}, the CPUs")
    capability = tmm.cpu_capability()
    print(f"{processor_name()}, torch {torch.__version__}, {capability.isa}: {' '.join(capability.features)}")
    table(
        "Time of a product; for one row also its share of a plain read by as many threads",
        ["K x N", "M", *(f"{threads} threads" for threads in counts), "fastest", "saves"],
    )
    for shape in arguments.shapes:
        K, N = map(int, shape.split("x"))
        compare(K, N, counts, arguments.rows, arguments.budget)


if __name__ == "__main__":
    main()
