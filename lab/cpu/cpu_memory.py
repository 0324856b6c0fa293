"""Compares `dequantize`, the repacks and the unpacking of zero points with a copy, on the CPU in one interleaved run.

Every round runs each operator once, and two copies of 32 MiB: `Tensor.copy_`, and a `memcpy` of one half on each of two
threads. The table compares bytes moved per second: the bytes of each input and output of an operator, and of the source
and destination of a copy. Each number in the table is a median of the ratios of all rounds. Inputs are in no cache. The
allocator does not return freed memory to the system, so no output causes page faults.
"""

import argparse
import ctypes
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

import torch_marlin_metal as tmm
from lab.cpu.cpu_gemm import Call, ratio, row, table, time_calls
from torch_marlin_metal.cli.bench import processor_name

K, N = 4096, 4096
COPY_BYTES = 32 * 2**20
COLD_BYTES = 192 * 2**20
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FORMATS = {"uint4b8": 128, "uint4": 128, "uint4_bias": 64, "float4_e2m1": 128, "nvfp4": 16, "mxfp4": 32, "lut4": 64}
ops = torch.ops.torch_marlin_metal


def keep_freed_memory() -> None:
    libc = ctypes.CDLL(None)
    for parameter, value in ((-4, 0), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
        if libc.mallopt(parameter, value) != 1:
            raise OSError(f"mallopt({parameter}, {value}) failed")


class Copies:
    """The copies with which operators are compared. Each call copies COPY_BYTES to the next destination."""

    def __init__(self) -> None:
        count = COLD_BYTES // COPY_BYTES
        self.sources = [torch.ones(COPY_BYTES // 4) for _ in range(count)]
        self.destinations = [torch.ones(COPY_BYTES // 4) for _ in range(count)]
        self.pool = ThreadPoolExecutor(1)

    def copy(self, index: int) -> None:
        """Copies with PyTorch, using all its threads."""
        self.destinations[index % len(self.destinations)].copy_(self.sources[index % len(self.sources)])

    def memcpy(self, index: int) -> None:
        """Copies with the C library, one half on each of two threads."""
        to = self.destinations[index % len(self.destinations)].data_ptr()
        source = self.sources[index % len(self.sources)].data_ptr()
        half = COPY_BYTES // torch.get_num_threads() // 4096 * 4096
        others = [
            self.pool.submit(ctypes.memmove, to + i * half, source + i * half, half)
            for i in range(1, torch.get_num_threads())
        ]
        ctypes.memmove(to, source, half)
        for other in others:
            other.result()


def packed_weights(weight_format: str, group_size: int) -> list[dict[str, object]]:
    """Returns clones of a weight, so many that a clone has left the caches before it is used again."""
    info = tmm.WEIGHT_FORMATS[weight_format]
    groups = K // group_size
    copies = COLD_BYTES // (K * N // 2)
    coded = info.scale_coding != "floating"
    scales = torch.randint(118, 127, (groups, N), dtype=torch.uint8) if coded else torch.rand(groups, N).half()
    weights = []
    for _ in range(copies):
        words = torch.randint(-(2**31), 2**31 - 1, (K // 8, N), dtype=torch.int32)
        weight: dict[str, object] = {"b_packed": words, "scales": scales.clone(), "weight_format": weight_format}
        weight["group_size"] = group_size
        if weight_format == "uint4":
            weight["zeros"] = torch.randint(0, 16, (groups, N), dtype=torch.uint8)
        if weight_format == "uint4_bias":
            weight["zeros"] = torch.rand(groups, N).half()
        if weight_format == "nvfp4":
            weight["global_scale"] = torch.tensor(0.01)
        if weight_format == "lut4":
            weight["lut"] = torch.linspace(-1, 1, 16)
        weights.append(weight)
    return weights


def moved(inputs: list[object], output: torch.Tensor) -> int:
    return sum(t.nbytes for t in [*inputs, output] if isinstance(t, torch.Tensor))


def measure(label: str, calls: dict[str, tuple[Call, int]], copies: Copies, rounds: int) -> None:
    """Prints a line with, for each call, its microseconds, and its rate divided by those of copy_ and of memcpy."""
    everything = {"copy_": (copies.copy, 2 * COPY_BYTES), "memcpy": (copies.memcpy, 2 * COPY_BYTES), **calls}
    times = time_calls({name: call for name, (call, _) in everything.items()}, 0, least=rounds)
    cells = []
    for name, (_, count) in everything.items():
        rates = (count / (2 * COPY_BYTES) * ratio(times, rival, name) for rival in ("copy_", "memcpy"))
        cells.append(f"{statistics.median(times[name]) * 1e6:.0f} us, " + ", ".join(f"{rate:.2f}" for rate in rates))
    row(label, *cells)


def dequantize_calls(weights: list[dict[str, object]], **options: object) -> dict[str, tuple[Call, int]]:

    def call(dtype: torch.dtype, index: int) -> torch.Tensor:
        result: torch.Tensor = ops.dequantize(**weights[index % len(weights)], **options, dtype=dtype)
        return result

    return {str(d): (partial(call, d), moved(list(weights[0].values()), call(d, 0))) for d in DTYPES}


def repack_calls() -> dict[str, tuple[Call, int]]:
    """Returns calls of the repacks, and of the unpacking of zero points for groups of 32.

    Each call reads the next copy of its input, because the last copy is still in a cache.
    """
    copies = COLD_BYTES // (K * N // 2)
    words = [torch.randint(-(2**31), 2**31 - 1, (K // 8, N), dtype=torch.int32) for _ in range(copies)]
    awq = [w.reshape(K, N // 8) for w in words]
    zeros = [w[: K // 256].reshape(K // 32, N // 8) for w in words]
    perm = torch.randperm(K, dtype=torch.int32)
    cases: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[torch.Tensor]]] = {
        "gptq_repack": (ops.gptq_repack, words),
        "with perm": (partial(ops.gptq_repack, perm=perm), words),
        "awq_repack": (ops.awq_repack, awq),
        "gptq_zeros": (partial(ops.gptq_unpack_zeros, checkpoint_version=1), zeros),
        "awq_zeros": (ops.awq_unpack_zeros, zeros),
    }

    def call(
        function: Callable[[torch.Tensor], torch.Tensor], tensors: list[torch.Tensor], first: int, index: int
    ) -> torch.Tensor:
        return function(tensors[(first + index) % len(tensors)])

    apart = copies // len(cases)
    return {
        name: (partial(call, function, tensors, position * apart), moved([tensors[0]], function(tensors[0])))
        for position, (name, (function, tensors)) in enumerate(cases.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    copies = Copies()
    print(f"{processor_name()}, {arguments.threads} threads, torch {torch.__version__}, K x N = {K} x {N}")
    print(f"{tmm.cpu_capability()}")
    table("Time, rate by copy_'s, rate by memcpy's", ["dequantize to", "copy_", "memcpy", *map(str, DTYPES)])
    for weight_format, group_size in FORMATS.items():
        calls = dequantize_calls(packed_weights(weight_format, group_size))
        measure(f"{weight_format} {group_size}", calls, copies, arguments.rounds)
    permuted = dequantize_calls(packed_weights("uint4b8", 128), perm=torch.randperm(K, dtype=torch.int32))
    measure("uint4b8 perm", permuted, copies, arguments.rounds)
    calls = repack_calls()
    table("The same", ["", "copy_", "memcpy", *calls])
    measure("repacks", calls, copies, arguments.rounds)


if __name__ == "__main__":
    main()
