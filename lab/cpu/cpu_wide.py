"""Compares `gemm` on the CPU, for every width of codes, with ggml, PyTorch's kernels and dense products.

    python -m lab.cpu.cpu_wide --library FOLDER [--isas avx2 avx512 amx] [--threads 2 16] [--record FILE]
    python -m lab.cpu.cpu_wide --library FOLDER --count [--record FILE]

FOLDER has a folder with ggml's libraries for each instruction set, such as FOLDER/avx2. Each instruction set runs in a
separate process, in which environment variables limit this package, PyTorch and oneDNN to it. ggml multiplies in each
of its layouts, and the table has its fastest. ggml rounds activations to 8 bits and takes them in fp32 only. PyTorch's
kernels take the same activations as this package. The weights are in no cache and all kernels of a line take turns, as
in cpu_gemm.py. Each line also measures a plain read, the rates of the product instructions, and this package's kernel
with a part of the weight that stays in the second-level caches.

With `--count`, small products are executed in single-step mode. The record then stores the instructions per weight of
all kernels, by kind. cpu_wide_table.py makes the page from both records.
"""

import argparse
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

import torch_marlin_metal as tmm
from lab.cpu.cpu_ceilings import KINDS, instruction_rate
from lab.cpu.cpu_gemm import Call, Stream, Times, cold_bytes, ratio, time_calls
from lab.cpu.cpu_ggml import Ggml, layouts, quantize
from lab.cpu.cpu_instructions import each_weight
from lab.cpu.record import Record
from torch_marlin_metal.checkpoints.formats.gguf_blocks import DECODERS
from torch_marlin_metal.cli.bench import processor_name
from torch_marlin_metal.huge_pages import prefer_huge_pages
from torch_marlin_metal.repack import unpack_codes

ROWS = (1, 2, 4, 8, 16, 64, 512)
COUNTED_ROWS = (1, 2, 8, 64)
COUNTED_N = 64, 128
LIMITS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "amx": {},
}
KINDS_OF = {"avx2": KINDS[0:3:2], "avx512": KINDS[:5], "amx": KINDS}
TYPES = {"Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}  # ggml_type
WEIGHTS_OF_A_BLOCK = {"Q4_0": 32, "Q8_0": 32}  # the others have 256
INT8PACK, INT4PACK, DENSE, ONE_LEVEL = "int8pack", "int4pack", "dense", "Q4_K one level"
# Further weights of this package: format and group size. None means one group.
QUANTIZED: dict[str, tuple[str, int | None]] = {
    "uint4b8 g128": ("uint4b8", 128),
    "uint8b128 gK": ("uint8b128", None),
    "uint8 g128": ("uint8", 128),
    "uint8_bias g64": ("uint8_bias", 64),
    "float8_e4m3 g128": ("float8_e4m3", 128),
    "mxfp8 g32": ("mxfp8", 32),
}
RIVALS: dict[str, tuple[str, ...]] = {
    **{name: (f"ggml {name}", DENSE) for name in TYPES},
    "uint4b8 g128": (INT4PACK, DENSE),
    **dict.fromkeys((*list(QUANTIZED)[1:], "Q8_0"), ("ggml Q8_0", INT8PACK, DENSE)),
}
RIVALS["Q4_K"] = (*RIVALS["Q4_K"], ONE_LEVEL)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SCALAR_ROWS = 2  # with fp32, PyTorch's int8 kernel is scalar code: more rows would take seconds
CACHED_K = 128  # rows of the weight per thread in a product from caches: 1.4 MB of 8-bit codes
SLOW = 1.3  # skips a layout of ggml if its first call takes this many times as long as the fastest layout's
CHECKED = 256  # columns whose errors are measured
# Limits of the relative errors of the rivals. Those of this package are 1e-6, or 4e-3 with bf16.
MAX_ERROR = {"ggml": 0.02, INT8PACK: 0.02, INT4PACK: 0.02, DENSE: 0.01}


def weights(ggml: Ggml, K: int, N: int) -> tuple[dict[str, tmm.PackedWeight], dict[str, np.ndarray]]:
    """Returns one weight in each of this package's formats, and the same weight in blocks of ggml's types."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0), device="cpu")
    ours, blocks = {}, {}
    for name, of_type in TYPES.items():
        block, decode = DECODERS[name]
        blocks[name] = quantize(ggml, weight.numpy(), of_type, K // WEIGHTS_OF_A_BLOCK.get(name, 256) * block)
        ours[name] = decode(torch.from_numpy(blocks[name]).reshape(N, -1, block))
    ours[ONE_LEVEL] = ours["Q4_K"].one_level()
    for name, (weight_format, group_size) in QUANTIZED.items():
        ours[name] = tmm.quantize_weight(weight, weight_format, group_size or K)
    return ours, blocks


def number_of(size: int) -> int:
    """Returns how many copies of `size` bytes are needed so that a copy has left the caches before its next use."""
    return max(2, cold_bytes() // size + 1)


def copies_of(weight: tmm.PackedWeight, number: int) -> list[tmm.PackedWeight]:
    """Returns copies of a weight whose words are in huge pages, like those of a loaded layer."""
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
        for _ in range(number)
    ]


def first_rows(weight: tmm.PackedWeight, K: int) -> tmm.PackedWeight:
    parts = {
        name: tensor[: max(1, tensor.size(0) * K // weight.K)].contiguous() if tensor.dim() == 2 else tensor
        for name, tensor in weight.tensors().items()
    }
    return tmm.PackedWeight(weight_format=weight.weight_format, group_size=min(weight.group_size, K), **parts)


class Comparison:
    """All kernels for one shape, with some columns of each kernel's weight in fp64."""

    def __init__(self, ggml: Ggml, K: int, N: int, cold: bool = True) -> None:
        self.K, self.N = K, N
        ours, blocks = weights(ggml, K, N)
        number = number_of if cold else lambda _: 1
        self.checked = torch.randperm(N)[:CHECKED]
        self.exact = {name: weight.columns(self.checked).dequantize().double() for name, weight in ours.items()}
        self.ours = {name: copies_of(weight, number(weight.b_packed.nbytes)) for name, weight in ours.items()}
        self.nbytes = {name: sum(part.nbytes for part in weight.tensors().values()) for name, weight in ours.items()}
        self.ggml = {
            (f"ggml {name}", layout): product
            for name, found in blocks.items()
            for layout, product in layouts(ggml, found, K, N, number(found.nbytes), TYPES[name]).items()
        }
        whole = ours["uint8b128 gK"]
        codes = (unpack_codes(whole.b_packed, 8).to(torch.int16) - 128).to(torch.int8).t().contiguous()
        self.int8 = [codes.clone() for _ in range(number(codes.nbytes))]
        self.int8_scales = whole.scales.flatten()
        grouped = ours["uint4b8 g128"]
        nibbles = unpack_codes(grouped.b_packed, 4).to(torch.int32).t().contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1)
        self.int4 = [packed.clone() for _ in range(number(packed.nbytes))]
        self.int4_scales = torch.stack([grouped.scales, torch.zeros_like(grouped.scales)], 2)
        dense = ours["Q8_0"].dequantize().t().contiguous()
        self.dense = {
            name: [dense.to(dtype, copy=True) for _ in range(number(K * N * dtype.itemsize))]
            for name, dtype in DTYPES.items()
        }
        exact = self.exact
        exact |= {f"ggml {name}": exact[name] for name in TYPES}
        exact |= {INT8PACK: exact["uint8b128 gK"], INT4PACK: exact["uint4b8 g128"], DENSE: exact["Q8_0"]}
        self.nbytes |= {f"ggml {name}": found.nbytes for name, found in blocks.items()}
        self.nbytes |= {INT8PACK: codes.nbytes, INT4PACK: packed.nbytes}

    def int8pack(self, a: torch.Tensor, index: int) -> torch.Tensor:
        """Multiplies with PyTorch's int8 kernel, whose weight has one scale for each column."""
        return torch.ops.aten._weight_int8pack_mm(a, self.int8[index % len(self.int8)], self.int8_scales.to(a.dtype))

    def int4pack(self, a: torch.Tensor, index: int) -> torch.Tensor:
        words = self.int4[index % len(self.int4)]
        return torch.ops.aten._weight_int4pack_mm_for_cpu(a, words, 128, self.int4_scales.to(a.dtype))

    def calls(self, M: int, dtype: str) -> tuple[dict[str, Call], dict[str, Call], np.ndarray]:
        """Returns the calls of the kernels, functions that return the kernels' results, and the activations."""
        x = np.random.default_rng(M).standard_normal((M, self.K), np.float32)
        a = torch.from_numpy(x).to(DTYPES[dtype])
        calls: dict[str, Call] = {
            name: partial(lambda copies, index: tmm.gemm(a, copies[index % len(copies)]), copies)
            for name, copies in self.ours.items()
        }
        if dtype == "bf16":
            calls[INT4PACK] = partial(self.int4pack, a)
        if dtype == "bf16" or M <= SCALAR_ROWS:
            calls[INT8PACK] = partial(self.int8pack, a)
        dense = self.dense[dtype]
        calls[DENSE] = lambda index: torch.nn.functional.linear(a, dense[index % len(dense)])
        results: dict[str, Call] = dict(calls)
        for (name, layout), product in self.ggml.items():
            calls[f"{name} {layout}"], read = product.of(x)
            results[f"{name} {layout}"] = lambda _, read=read: torch.from_numpy(read())
        return calls, results, x

    def cached(self, M: int, dtype: str, K: int) -> dict[str, float]:
        """Returns, for each kernel of this package, the seconds for all rows of the weight at its speed from caches."""
        a = torch.randn(M, K).to(DTYPES[dtype])
        parts = {name: copies_of(first_rows(copies[0], K), 1)[0] for name, copies in self.ours.items()}
        found = {}
        # kernels run one after the other, so that each kernel's weight stays in the caches
        for name, part in parts.items():
            times = time_calls({name: lambda _, part=part: tmm.gemm(a, part)}, budget=0.0, least=12 if M < 64 else 3)
            found[name] = statistics.median(times[name]) * self.K / K
        return found

    def times(self, M: int, dtype: str, budget: float, least: int) -> tuple[Times, dict[str, float]]:
        """Returns the seconds of each kernel in each round, and its relative error over at most eight rows."""
        calls, results, x = self.calls(M, dtype)
        first = time_calls({name: call for name, call in calls.items() if name.startswith("ggml")}, 0, least=1)
        for of_type in {name for name, _ in self.ggml}:
            layouts = [name for name in first if name.startswith(of_type)]
            fastest = min(first[name][0] for name in layouts)
            for name in layouts:
                if first[name][0] > SLOW * fastest:
                    del calls[name]
        times = time_calls(calls, budget, least)
        errors = {}
        for name in calls:
            key = " ".join(name.split()[:2]) if name.startswith("ggml") else name
            exact = torch.from_numpy(x[:8]).double() @ self.exact[key]
            got = results[name](0)[:8, self.checked].double()
            errors[name] = float((got - exact).norm() / exact.norm())
            limit = MAX_ERROR.get(name.split()[0], 0.005 if dtype == "bf16" else 1e-5)
            if not errors[name] <= limit:
                sys.exit(
                    f"cpu_wide: {name}, {M} rows {dtype}: expected an error of at most {limit}, got {errors[name]}"
                )
        return times, errors


def fastest_of(medians: dict[str, float], rival: str) -> str | None:
    """Returns the name of a rival's fastest layout, or None if the rival was not measured."""
    found = [name for name in medians if name == rival or (rival.startswith("ggml") and name.startswith(rival))]
    return min(found, key=medians.__getitem__, default=None)


def compare(ggml: Ggml, comparison: Comparison, arguments: argparse.Namespace, threads: int, record: Record) -> None:
    """Measures every number of rows with `threads` threads."""
    torch.set_num_threads(threads)
    ggml.call("backend_cpu_set_n_threads", ggml.backend, threads)
    isa = tmm.cpu_capability().isa
    stream = Stream(threads)
    for dtype in DTYPES:
        for M in arguments.rows:
            read = max(stream.bytes_per_second() for _ in range(3))
            rates = {
                kind: max(instruction_rate(kind, threads, min(M, 16)) for _ in range(3))
                for kind in KINDS_OF[arguments.within]
            }
            times, errors = comparison.times(M, dtype, arguments.budget, least=2 if M > 64 else 3)
            medians = {name: statistics.median(taken) for name, taken in times.items()}
            cached = comparison.cached(M, dtype, min(CACHED_K * threads, comparison.K))
            for name, rivals in RIVALS.items():
                found = {rival: fastest for rival in rivals if (fastest := fastest_of(medians, rival))}
                line = {
                    "isa": isa, "threads": threads, "shape": arguments.shape, "M": M, "a": dtype, "weight": name,
                    "us": medians[name] * 1e6, "error": errors[name], "bytes": comparison.nbytes[name],
                    "ratios": {rival: ratio(times, layout, name) for rival, layout in found.items()},
                    "rivals": found,
                    "rival_us": {rival: medians[layout] * 1e6 for rival, layout in found.items()},
                    "errors": {rival: errors[layout] for rival, layout in found.items()},
                    "read": read, "rates": rates, "cached_us": cached[name] * 1e6,
                }  # fmt: skip
                record.add(**line)
                ratios = ", ".join(f"{rival} {value:.2f}" for rival, value in line["ratios"].items())
                print(f"{isa} {threads}, {M} rows {dtype}, {name}: {line['us']:.0f} us; {ratios}", flush=True)


def count(ggml: Ggml, record: Record, kernels: list[str] | None) -> None:
    """Counts the instructions per weight with one thread, for all kernels or for those in `kernels`."""
    torch.set_num_threads(1)
    isa = tmm.cpu_capability().isa
    for M in COUNTED_ROWS:
        K = 512 if M < 8 else 256
        small, large = (Comparison(ggml, K, N, cold=False) for N in COUNTED_N)
        for dtype in DTYPES:
            less, more = small.calls(M, dtype)[0], large.calls(M, dtype)[0]
            for name in sorted(less, key=lambda name: name.endswith(" CPU")):  # the slowest last
                if (kernels and name not in kernels) or (name.startswith("ggml") and dtype != "fp32"):
                    continue
                counts = each_weight(partial(less[name], 0), partial(more[name], 0), K * (large.N - small.N))
                record.add(isa=isa, M=M, a=dtype, kernel=name, counts=counts)
                print(f"{isa}, {M} rows {dtype}, {name}: {counts}", flush=True)


def parser_of(description: str | None, rows: tuple[int, ...], budget: float) -> argparse.ArgumentParser:
    """Returns a parser with the options of a program that measures on several instruction sets."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="ggml's libraries, in a folder for each set")
    parser.add_argument("--isas", nargs="+", default=["avx2", "avx512"], choices=list(LIMITS))
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--rows", type=int, nargs="+", default=list(rows))
    parser.add_argument("--shape", default="4096x11008", metavar="KxN")
    parser.add_argument("--budget", type=float, default=budget, help="seconds for each line")
    parser.add_argument("--record", type=Path, help="file to which the results are appended")
    parser.add_argument("--within", choices=list(LIMITS), help=argparse.SUPPRESS)  # the process of an instruction set
    return parser


def run_on_each(module: str, arguments: argparse.Namespace) -> None:
    """Runs this program again for each instruction set, in a process that is limited to it."""
    if arguments.library is None:
        sys.exit(f"{module}: --library: expected a folder with ggml's libraries")
    for isa in arguments.isas:
        limits = {"TORCH_MARLIN_METAL_CPU_ISA": isa, **LIMITS[isa]}
        command = [sys.executable, "-m", module, *sys.argv[1:], "--within", isa]
        subprocess.run(command, check=True, env={**os.environ, **limits})


def main() -> None:
    parser = parser_of(__doc__, ROWS, 3.0)
    parser.add_argument("--count", action="store_true", help="counts instructions instead of measuring times")
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="counts only these, such as 'mxfp8 g32'")
    arguments = parser.parse_args()
    if arguments.within is None:
        run_on_each("lab.cpu.cpu_wide", arguments)
        return
    K, N = (int(size) for size in arguments.shape.split("x"))
    ggml = Ggml(arguments.library / arguments.within, 1 if arguments.count else max(arguments.threads))
    record = Record(arguments.record)
    if arguments.count:
        count(ggml, record, arguments.kernels)
        return
    print(f"{processor_name()}, torch {torch.__version__}", flush=True)
    comparison = Comparison(ggml, K, N)
    for threads in arguments.threads:
        compare(ggml, comparison, arguments, threads, record)


if __name__ == "__main__":
    main()
