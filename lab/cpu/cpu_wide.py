"""Compares `gemm` on the CPU, for weights of 8 bits and scales of two levels, with ggml, PyTorch and dense products.

    python -m lab.cpu.cpu_wide --library FOLDER [--isas avx2 avx512 amx] [--threads 2 16] [--record FILE]
    python -m lab.cpu.cpu_wide --table FILE

FOLDER has a folder with ggml's libraries for each instruction set, such as FOLDER/avx2. Each instruction set runs in a
process of its own, in which this package, PyTorch and oneDNN are limited to it by their environment variables. ggml
multiplies in each of its layouts, and its fastest counts. It rounds activations to 8 bits, so it always gets them in
fp32; PyTorch's kernels get the activations that this package gets. The weights are cold and all kernels of a line take
turns, as in cpu_gemm.py. `--table` prints the lines of a record, the smallest ratio first.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

import torch_marlin_metal as tmm
from lab.cpu.cpu_gemm import Call, cold_bytes, ratio, row, table, time_calls
from lab.cpu.cpu_ggml import GGML_TYPE_Q4_K, GGML_TYPE_Q8_0, Ggml, layouts, quantize
from lab.cpu.record import Record
from torch_marlin_metal.checkpoints.formats.gguf_blocks import DECODERS
from torch_marlin_metal.cli.bench import processor_name
from torch_marlin_metal.huge_pages import prefer_huge_pages
from torch_marlin_metal.repack import unpack_codes

ROWS = (1, 8, 64, 512)
LIMITS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "amx": {},
}
Q8, Q4 = "ggml Q8_0", "ggml Q4_K"
INT8PACK, DENSE, ONE_LEVEL = "int8pack", "dense", "one level"
RIVALS_OF_8 = (Q8, INT8PACK, DENSE)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SCALAR_ROWS = 8  # PyTorch's int8 kernel is scalar code for fp32: with more rows it would take seconds
CHECKED = 256  # columns whose errors are measured
MAX_ERROR = {Q8: 0.02, Q4: 0.02, INT8PACK: 0.02, DENSE: 0.01}  # relative; ours have 1e-6 in fp32 and 4e-3 in bf16


def weights(ggml: Ggml, K: int, N: int) -> tuple[dict[str, tmm.PackedWeight], dict[str, tuple[int, np.ndarray]]]:
    """Returns one weight in each of this package's formats, and the blocks of ggml's types."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0), device="cpu")
    ours, blocks = {}, {}
    for name, type_name, of_type, size in (
        (Q8, "Q8_0", GGML_TYPE_Q8_0, K // 32 * 34), (Q4, "Q4_K", GGML_TYPE_Q4_K, K // 256 * 144)
    ):  # fmt: skip
        found = quantize(ggml, weight.numpy(), of_type, size)
        block, decode = DECODERS[type_name]
        blocks[name] = of_type, found
        ours[type_name] = decode(torch.from_numpy(found).reshape(N, -1, block))
    ours[ONE_LEVEL] = ours["Q4_K"].one_level()
    for weight_format, group_size in (
        ("uint8b128", K), ("uint8b128", 128), ("uint8", 128), ("uint8_bias", 64), ("float8_e4m3", 128), ("mxfp8", 32)
    ):  # fmt: skip
        name = f"{weight_format} g{'K' if group_size == K else group_size}"
        ours[name] = tmm.quantize_weight(weight, weight_format, group_size)
    return ours, blocks


def number_of(size: int) -> int:
    """Returns how many copies of a weight are needed so that each is out of the caches when its turn comes."""
    return max(2, cold_bytes() // size + 1)


def copies_of(weight: tmm.PackedWeight) -> list[tmm.PackedWeight]:
    """Returns cold copies of a weight, whose words lie in huge pages as those of a loaded layer do."""
    tensors = weight.tensors()
    return [
        tmm.PackedWeight(
            b_packed=prefer_huge_pages(torch.empty_like(weight.b_packed)).copy_(weight.b_packed),
            weight_format=weight.weight_format,
            group_size=weight.group_size,
            **{
                name: tensor.clone(memory_format=torch.contiguous_format)
                for name, tensor in tensors.items()
                if name != "b_packed"
            },
        )
        for _ in range(number_of(weight.b_packed.nbytes))
    ]


class Comparison:
    """All kernels for one shape, with some columns of the weight that each multiplies, in fp64."""

    def __init__(self, ggml: Ggml, K: int, N: int) -> None:
        self.K = K
        ours, blocks = weights(ggml, K, N)
        self.checked = torch.randperm(N)[:CHECKED]
        self.exact = {name: weight.columns(self.checked).dequantize().double() for name, weight in ours.items()}
        self.ours = {name: copies_of(weight) for name, weight in ours.items()}
        self.ggml = {
            (name, layout): product
            for name, (of_type, found) in blocks.items()
            for layout, product in layouts(ggml, found, K, N, number_of(found.nbytes), of_type).items()
        }
        whole = ours["uint8b128 gK"]
        codes = (unpack_codes(whole.b_packed, 8).to(torch.int16) - 128).to(torch.int8).t().contiguous()
        self.int8 = [codes.clone() for _ in range(number_of(codes.nbytes))]
        self.int8_scales = whole.scales.flatten()
        dense = ours["Q8_0"].dequantize().t().contiguous()
        self.dense = {
            name: [dense.to(dtype, copy=True) for _ in range(number_of(K * N * dtype.itemsize))]
            for name, dtype in DTYPES.items()
        }
        exact = self.exact
        exact |= {Q8: exact["Q8_0"], Q4: exact["Q4_K"], INT8PACK: exact["uint8b128 gK"], DENSE: exact["Q8_0"]}

    def int8pack(self, a: torch.Tensor, index: int) -> torch.Tensor:
        """Multiplies with PyTorch's kernel for int8 with a scale for each column."""
        return torch.ops.aten._weight_int8pack_mm(a, self.int8[index % len(self.int8)], self.int8_scales.to(a.dtype))

    def times(self, M: int, dtype: str, budget: float) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Returns the seconds of each kernel in each round, and its relative error over at most eight rows."""
        x = np.random.default_rng(M).standard_normal((M, self.K), np.float32)
        a = torch.from_numpy(x).to(DTYPES[dtype])
        calls: dict[str, Call] = {
            name: partial(lambda copies, index: tmm.gemm(a, copies[index % len(copies)]), copies)
            for name, copies in self.ours.items()
        }
        if dtype != "fp32" or M <= SCALAR_ROWS:
            calls[INT8PACK] = partial(self.int8pack, a)
        dense = self.dense[dtype]
        calls[DENSE] = lambda index: torch.nn.functional.linear(a, dense[index % len(dense)])
        results: dict[str, Call] = dict(calls)
        for (name, layout), product in self.ggml.items():
            calls[f"{name} {layout}"], read = product.of(x)
            results[f"{name} {layout}"] = lambda _, read=read: torch.from_numpy(read())
        times = time_calls(calls, budget, least=3)
        errors = {}
        for name, result in results.items():
            key = next(of for of in (Q8, Q4, name) if name.startswith(of))
            exact = torch.from_numpy(x[:8]).double() @ self.exact[key]
            got = result(0)[:8, self.checked].double()
            errors[name] = float((got - exact).norm() / exact.norm())
            limit = MAX_ERROR.get(key, 0.005 if dtype == "bf16" else 1e-5)
            if not errors[name] <= limit:
                sys.exit(
                    f"cpu_wide: {name}, {M} rows {dtype}: expected an error of at most {limit}, got {errors[name]}"
                )
        return times, errors


def compare(ggml: Ggml, comparison: Comparison, arguments: argparse.Namespace, threads: int, record: Record) -> None:
    """Measures every number of rows with some threads."""
    torch.set_num_threads(threads)
    ggml.call("backend_cpu_set_n_threads", ggml.backend, threads)
    isa = tmm.cpu_capability().isa
    for dtype in DTYPES:
        for M in arguments.rows:
            times, errors = comparison.times(M, dtype, arguments.budget)
            medians = {name: statistics.median(taken) for name, taken in times.items()}
            fastest = {
                of: min((name for name in times if name.startswith(of)), key=medians.__getitem__) for of in (Q8, Q4)
            }
            fastest |= {name: name for name in (INT8PACK, DENSE, ONE_LEVEL) if name in times}
            for name in comparison.ours:
                of = (Q4, DENSE, ONE_LEVEL) if name == "Q4_K" else () if name == ONE_LEVEL else RIVALS_OF_8
                rivals = [rival for rival in of if rival in fastest]
                line = {
                    "isa": isa, "threads": threads, "shape": arguments.shape, "M": M, "a": dtype, "weight": name,
                    "us": medians[name] * 1e6, "error": errors[name],
                    "ratios": {rival: ratio(times, fastest[rival], name) for rival in rivals},
                    "rivals": {rival: fastest[rival] for rival in rivals},
                    "errors": {rival: errors[fastest[rival]] for rival in rivals},
                }  # fmt: skip
                if rivals:
                    record.add(**line)
                    ratios = ", ".join(f"{rival} {value:.2f}" for rival, value in line["ratios"].items())
                    print(
                        f"{isa} {threads}, {M} rows {dtype}, {name}: {medians[name] * 1e6:.0f} us; {ratios}", flush=True
                    )


def print_table(path: Path) -> None:
    """Prints a record: a line for each number of rows, those with the smallest ratio first, by weight."""
    lines: dict[tuple[str, int, str, int], dict[str, str]] = {}
    smallest: dict[tuple[str, int, str, int], float] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        key = line["isa"], line["threads"], line["a"], line["M"]
        lines.setdefault(key, {})[line["weight"]] = ", ".join(f"{value:.2f}" for value in line["ratios"].values())
        smallest[key] = min(smallest.get(key, 1e9), *line["ratios"].values())
    weights = list(dict.fromkeys(weight for cells in lines.values() for weight in cells))
    table("Time of each rival by ours.", ["", "rows", *weights])
    for key in sorted(lines, key=smallest.__getitem__):
        isa, threads, dtype, M = key
        row(f"{isa}, {threads}, {dtype}", M, *(lines[key].get(weight, "") for weight in weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="folder with ggml's libraries, in a folder for each set")
    parser.add_argument("--isas", nargs="+", default=["avx2", "avx512"], choices=list(LIMITS))
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--shape", default="4096x11008", metavar="KxN")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for each line")
    parser.add_argument("--record", type=Path, help="file to which the results are appended")
    parser.add_argument("--within", choices=list(LIMITS), help=argparse.SUPPRESS)  # the process of an instruction set
    parser.add_argument("--table", type=Path, help="prints a record and measures nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print_table(arguments.table)
        return
    if arguments.within is None:
        for isa in arguments.isas:
            limits = {"TORCH_MARLIN_METAL_CPU_ISA": isa, **LIMITS[isa]}
            command = [sys.executable, "-m", "lab.cpu.cpu_wide", *sys.argv[1:], "--within", isa]
            subprocess.run(command, check=True, env={**os.environ, **limits})
        return
    K, N = (int(size) for size in arguments.shape.split("x"))
    ggml = Ggml(arguments.library / arguments.within, max(arguments.threads))
    print(f"{processor_name()}, torch {torch.__version__}", flush=True)
    comparison = Comparison(ggml, K, N)
    for threads in arguments.threads:
        compare(ggml, comparison, arguments, threads, Record(arguments.record))


if __name__ == "__main__":
    main()
