"""Compares `gemm` with activations of 8 bits with ggml's products, which also round activations to 8 bits.

    python -m lab.cpu.cpu_int8 --library FOLDER [--isas avx2 avx512 amx] [--threads 2 16] --record FILE
    python -m lab.cpu.cpu_int8 --page FILE ...
    python -m lab.cpu.cpu_int8 --model SENTENCES

The first command measures, as cpu_wide.py does: FOLDER has ggml's libraries for each instruction set, weights are in no
cache, and all kernels of a line take turns. The second command makes the tables of cpu_int8.md from records. The third
command prints how far quantized weights and activations of 8 bits move the embeddings of the demo's sentence encoder.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

import torch_marlin_metal as tmm
from lab.cpu.cpu_gemm import Call, Stream, Times, time_calls
from lab.cpu.cpu_ggml import Ggml, layouts, quantize
from lab.cpu.cpu_wide import DTYPES, SLOW, copies_of, number_of, parser_of, run_on_each
from lab.cpu.cpu_wide_table import ISAS, table
from lab.cpu.record import Record
from scripts.page_section import section
from torch_marlin_metal.checkpoints.formats.gguf_blocks import DECODERS
from torch_marlin_metal.cli.bench import processor_name

PAGE = Path(__file__).with_suffix(".md")
ROWS = (1, 2, 4, 8, 16, 64)
TYPES = {"Q4_0": (2, 32), "Q8_0": (8, 32), "Q4_K": (12, 256), "Q5_K": (13, 256), "Q6_K": (14, 256), "MXFP4": (39, 32)}
# Formats of this package, and the type of ggml that each is compared with.
QUANTIZED = {
    "uint4b8 g128": ("uint4b8", 128, "Q4_0"),
    "uint4 g128": ("uint4", 128, "Q4_0"),
    "uint8 g128": ("uint8", 128, "Q8_0"),
}
MODES = ("int8", "exact")
CHECKED = 256  # columns whose errors are measured
MAX_ERROR = 0.02


def least(times: Times, name: str) -> float:
    """Returns the minimum of a kernel's times in microseconds, because other programs can only add to a time."""
    return min(times[name]) * 1e6


def measure(ggml: Ggml, name: str, arguments: argparse.Namespace, record: Record) -> None:
    K, N = (int(size) for size in arguments.shape.split("x"))
    dense = torch.randn(N, K, generator=torch.Generator().manual_seed(0), device="cpu")
    rival = QUANTIZED[name][2] if name in QUANTIZED else name
    of_type, weights_of_a_block = TYPES[rival]
    block, decode = DECODERS[rival]
    blocks = quantize(ggml, dense.numpy(), of_type, K // weights_of_a_block * block)
    theirs = decode(torch.from_numpy(blocks).reshape(N, -1, block))
    weight = tmm.quantize_weight(dense, *QUANTIZED[name][:2]) if name in QUANTIZED else theirs
    ours = copies_of(weight, number_of(weight.b_packed.nbytes))
    products = layouts(ggml, blocks, K, N, number_of(blocks.nbytes), of_type)
    checked = torch.arange(CHECKED) * (N // CHECKED)
    exact = weight.columns(checked).dequantize().double(), theirs.columns(checked).dequantize().double()
    nbytes = sum(tensor.nbytes for tensor in weight.tensors().values())
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        ggml.call("backend_cpu_set_n_threads", ggml.backend, threads)
        stream = Stream(threads)
        for M in arguments.rows:
            x = np.random.default_rng(M).standard_normal((M, K), np.float32)
            rows = {dtype: torch.from_numpy(x).to(kind) for dtype, kind in DTYPES.items()}
            calls: dict[str, Call] = {
                f"{mode} {dtype}": lambda i, a=a, mode=mode: tmm.gemm(
                    a, ours[i % len(ours)], activations=None if mode == "exact" else mode
                )
                for dtype, a in rows.items()
                for mode in ("exact", "int8")
            }
            reads = {}
            for layout, product in products.items():
                calls[layout], reads[layout] = product.of(x)
            first = time_calls({layout: calls[layout] for layout in products}, 0, least=1)
            slowest = SLOW * min(taken[0] for taken in first.values())
            for layout in products:
                if first[layout][0] > slowest:
                    del calls[layout]
            times = time_calls(calls, arguments.budget)
            fastest = min((layout for layout in products if layout in calls), key=partial(least, times))
            errors = {}
            for mode, result, true in (
                *((mode, calls[mode](0).double(), exact[0]) for mode in ("int8 fp32", "int8 bf16")),
                ("ggml", torch.from_numpy(reads[fastest]()).double(), exact[1]),
            ):
                wanted = torch.from_numpy(x).double() @ true
                errors[mode] = float((result[:, checked] - wanted).norm() / wanted.norm())
                if not errors[mode] <= MAX_ERROR:
                    sys.exit(f"cpu_int8: {mode}, {name}, {M} rows: expected at most {MAX_ERROR}, got {errors[mode]}")
            line = {
                "threads": threads, "M": M, "weight": name, "ggml": fastest, "us": {n: least(times, n) for n in calls},
                "bytes": nbytes, "read": max(stream.bytes_per_second() for _ in range(5)), "errors": errors,
            }  # fmt: skip
            record.add(**line)
            found = {n: f"{line['us'][fastest] / line['us'][n]:.2f}" for n in calls if n not in products}
            print(f"{threads} threads, {M} rows, {name}: ggml {line['us'][fastest]:.0f} us, {found}", flush=True)


def model(count: int) -> None:
    from lab.whole_models import fit
    from lab.whole_models.sentences import batches, demo_encoder, embed, sentences

    encoder, tokenizer = demo_encoder()
    tokens = batches(tokenizer, sentences(count, calibrate=False))
    exact = embed(encoder, tokens)
    for weight_format, group_size in (("uint4b8", 32), ("uint4b8", 128), ("uint8b128", 32)):
        packed, _ = fit.quantized(encoder, weight_format, group_size)
        plain = embed(packed, tokens)
        tmm.set_activations(packed, "int8")
        rounded = embed(packed, tokens)
        found = {
            "weights": (exact, plain),
            "weights and activations": (exact, rounded),
            "activations": (plain, rounded),
        }
        distances = ", ".join(f"{name} {float((1 - (a * b).sum(1)).mean()):.1e}" for name, (a, b) in found.items())
        print(f"{weight_format} g{group_size}: 1 - cosine, {count} sentences: {distances}", flush=True)


def page(records: list[Path]) -> None:
    lines = [json.loads(line) for path in records for line in path.read_text().splitlines()]
    names = list(dict.fromkeys(line["weight"] for line in lines))
    found: dict[tuple[str, str, int, int], dict[str, dict]] = {}
    for line in lines:
        found.setdefault((line["cpu"], line["isa"], line["threads"], line["M"]), {})[line["weight"]] = line

    def ratio(line: dict, kind: str) -> float:
        return line["us"][line["ggml"]] / line["us"][kind]

    def ratios(line: dict) -> str:
        return ", ".join(" ".join(f"{ratio(line, f'{mode} {dtype}'):.2f}" for mode in MODES) for dtype in DTYPES)

    def shares(line: dict) -> str:
        return ", ".join(f"{line['bytes'] / line['us'][f'{mode} bf16'] * 1e6 / line['read']:.2f}" for mode in MODES)

    def rows(cell: Callable[[dict], str], most_rows: int) -> list[list[str]]:
        made = []
        for (cpu, isa, threads, M), cells in worst_first:
            if most_rows >= M:
                known = next((name for name in ("Xeon", "EPYC") if name in cpu), cpu)
                shown = [cell(cells[name]) if name in cells else "" for name in names]
                made.append([f"{known}, {ISAS[isa]}, {threads}", str(M), *shown])
        return made

    int8 = [ratio(line, f"int8 {dtype}") for line in lines for dtype in DTYPES]
    worst_first = sorted(found.items(), key=lambda entry: min(
        ratio(line, f"int8 {dtype}") for line in entry[1].values() for dtype in DTYPES
    ))  # fmt: skip
    below = sum(value < 1 for value in int8)
    tables = {
        f"ggml's time by this package's: {below} of {len(int8)} cells of int8 are below 1.0": rows(ratios, max(ROWS)),
        "One row: share of a plain read": rows(shares, 1),
    }
    made = [f"## {title}\n\n{table(['', 'rows', *names], cells)}" for title, cells in tables.items()]
    section(PAGE, "lab.cpu.cpu_int8", "\n".join(made))


def main() -> None:
    parser = parser_of(__doc__, ROWS, 1.0)
    parser.add_argument("--weights", nargs="+", default=[*TYPES, *QUANTIZED])
    parser.add_argument("--page", type=Path, nargs="+", help="makes the page from these records")
    parser.add_argument("--model", type=int, metavar="SENTENCES", help="prints the errors of a model")
    arguments = parser.parse_args()
    if arguments.page:
        page(arguments.page)
    elif arguments.model:
        model(arguments.model)
    elif arguments.within is None:
        run_on_each("lab.cpu.cpu_int8", arguments)
    else:
        ggml = Ggml(arguments.library / arguments.within, max(arguments.threads))
        record = Record(arguments.record, isa=arguments.within, cpu=processor_name(), shape=arguments.shape)
        for name in arguments.weights:
            measure(ggml, name, arguments, record)


if __name__ == "__main__":
    main()
