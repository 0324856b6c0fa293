"""Compares `moe_gemm` on the CPU with loops over the experts and PyTorch's `grouped_mm`, in one interleaved run.

The benchmark times the experts of one layer: the gate and up products, silu(gate) * up, and the down product, weighted
and summed over the experts of a token. The routing is random and uniform, and the same for all rivals of a round:

- loops over the experts that have rows, of this package's `gemm` and of `torch.nn.functional.linear`;
- `torch.nn.functional.grouped_mm` on rows sorted by expert;
- with `--ggml`, ggml's `mul_mat_id` in each of its layouts that supports this product. Its shared libraries come from
  an installed `llama-cpp-python` or from the folder that the option names.

PyTorch's functions multiply unquantized weights. ggml multiplies the same packed weights, and rounds activations to 8
bits. Before a rival is timed, its result must agree with that of `moe_gemm`. Its memory is measured in a separate
process.

    python -m lab.cpu.cpu_experts [--minutes 4] [--layers qwen3-30b] [--experts 8] [--ggml [DIR]]
"""

import argparse
import copy
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, silu

import torch_marlin_metal as tmm
from lab.cpu.cpu_gemm import Call, cold_bytes, ratio, row, table, time_calls
from lab.cpu.cpu_ggml import Ggml, folder_of_libraries
from lab.cpu.ggml_experts import Stack, blocks_of, layouts
from lab.cpu.peak_memory import reset_peak, resident
from torch_marlin_metal.cli.bench import processor_name

OPS = torch.ops.torch_marlin_metal

TOKENS = (1, 4, 16, 64, 512)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# The largest relative root mean square error, for each dtype and for ggml, which rounds activations to 8 bits.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4, "ggml": 2e-2}
ROUTINGS = 16  # consecutive rounds use different experts
MOST_COPIES = 32
OURS, *_ = VARIANTS = ("moe_gemm", "gemm loop", "grouped_mm", "linear loop")


class Shape(NamedTuple):
    """The sizes of a layer's experts, from the model's configuration, and the format of their weights."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    weight_format: str = "uint4b8"
    group_size: int = 128


LAYERS = {
    "mixtral-8x7b": Shape(8, 4096, 14336, 2),
    "qwen3-30b": Shape(128, 2048, 768, 8),
    "gpt-oss-20b": Shape(32, 2880, 2880, 4, "mxfp4", 32),
    "tiny": Shape(4, 64, 96, 2, "uint4b8", 32),
}


class Projection:
    """The weights of one projection for all experts, packed and, on demand, in floats."""

    def __init__(self, shape: Shape, K: int, N: int) -> None:
        self.options: dict[str, Any] = {"weight_format": shape.weight_format, "group_size": shape.group_size}
        E, groups = shape.experts, -(-K // shape.group_size)
        self.words = torch.randint(-(2**31), 2**31 - 1, (E, K // 8, N), dtype=torch.int32)
        if shape.weight_format == "mxfp4":
            self.scales = torch.randint(118, 122, (E, groups, N), dtype=torch.uint8)
        else:
            self.scales = (torch.rand(E, groups, N) * 0.01).to(torch.bfloat16)

    def grouped(self, a: Tensor, ids: Tensor, **options: Any) -> Tensor:
        return OPS.moe_gemm(a, self.words, self.scales, ids, **options, **self.options)

    def clone(self) -> "Projection":
        made = copy.copy(self)
        made.words, made.scales = self.words.clone(), self.scales.clone()
        return made

    def stack(self) -> Stack:
        return Stack(self.words, self.scales, **self.options)

    def one(self, expert: int, a: Tensor) -> Tensor:
        return OPS.gemm(a, self.words[expert], self.scales[expert], **self.options)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Returns the weights as `[E, N, K]`, the layout of PyTorch's linear and of transformers."""
        E, words, N = self.words.shape
        weights = torch.empty(E, N, 8 * words, dtype=dtype)
        for expert in range(E):
            columns = OPS.dequantize(self.words[expert], self.scales[expert], dtype=dtype, **self.options)
            weights[expert] = columns.t()
        return weights


class Routing(NamedTuple):
    """The experts [T, top_k] of each token and their weights."""

    ids: Tensor
    weights: Tensor


def route(shape: Shape, tokens: int) -> Routing:
    """Chooses different experts for each token."""
    found = torch.rand(tokens, shape.experts).topk(shape.top_k)
    return Routing(found.indices, found.values / found.values.sum(1, keepdim=True))


def gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return silu(gate) * up


def fused(gate_up: Projection, down: Projection, x: Tensor, routing: Routing) -> Tensor:
    """Computes the experts with two calls of `moe_gemm` and one of `gated_activation`, as `MarlinExperts` does."""
    inner = tmm.ops.gated_activation(*gate_up.grouped(x, routing.ids).chunk(2, -1))
    return down.grouped(inner, routing.ids, row_weights=routing.weights, reduce=True)


Product = Callable[[int, Tensor], Tensor]


def looped(gate_up: Product, down: Product, x: Tensor, routing: Routing) -> Tensor:
    """Computes the experts with two products for each expert that has rows."""
    out = torch.zeros_like(x)
    for expert in torch.unique(routing.ids).tolist():
        token, slot = torch.where(routing.ids == expert)
        rows = down(expert, gated(gate_up(expert, x[token])))
        out.index_add_(0, token, (rows * routing.weights[token, slot, None]).to(x.dtype))
    return out


def sorted_by_expert(gate_up: Tensor, down: Tensor, x: Tensor, routing: Routing) -> Tensor:
    """Computes the experts with two calls of `grouped_mm` on rows sorted by expert, as transformers does."""
    ids = routing.ids.flatten()
    order = ids.argsort()
    ends = torch.bincount(ids, minlength=len(down)).cumsum(0).to(torch.int32)
    rows = gated(grouped_mm(x[order // routing.ids.shape[1]], gate_up.transpose(1, 2), offs=ends))
    rows = grouped_mm(rows, down.transpose(1, 2), offs=ends) * routing.weights.flatten()[order, None]
    return rows[order.argsort()].view(*routing.ids.shape, -1).sum(1).to(x.dtype)


class Block:
    """Several copies of the experts of one layer. Each variant can call each copy.

    There are so many copies that a copy has left the caches before it is used again.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, variants: tuple[str, ...] = VARIANTS, ggml: Ggml | None = None
    ) -> None:
        packed = shape.experts * 3 * shape.hidden * shape.intermediate // 2
        # MOST_COPIES limits only the tiny layer, whose times are not used.
        copies = min(MOST_COPIES, -(-cold_bytes() // packed)) if len(variants) > 1 else 1
        self.calls: dict[str, list[Callable[[Tensor, Routing], Tensor]]] = {name: [] for name in variants}
        projections = (
            Projection(shape, shape.hidden, 2 * shape.intermediate),
            Projection(shape, shape.intermediate, shape.hidden),
        )
        has_dense = bool(set(variants) & {"grouped_mm", "linear loop"})
        dense = [projection.dense(dtype) for projection in projections] if has_dense else []
        stacks = projections[0].stack(), projections[1].stack()
        blocks = blocks_of(stacks) if ggml is not None else []
        for number in range(copies):
            gate_up, down = projections if number == 0 else [projection.clone() for projection in projections]
            made = {OURS: partial(fused, gate_up, down), "gemm loop": partial(looped, gate_up.one, down.one)}
            if has_dense:
                first, second = dense if number == 0 else [weights.clone() for weights in dense]
                made["grouped_mm"] = partial(sorted_by_expert, first, second)
                made["linear loop"] = partial(
                    looped, lambda e, a, w=first: linear(a, w[e]), lambda e, a, w=second: linear(a, w[e])
                )
            if ggml is not None:
                made |= layouts(ggml, stacks, blocks, shape.top_k)
            for name in (*variants, *(name for name in made if name.startswith("ggml"))):
                self.calls.setdefault(name, []).append(made[name])

    def rivals(self) -> list[str]:
        return [name for name in self.calls if name != OURS]

    def check(self, x: Tensor, routing: Routing) -> None:
        """Raises AssertionError if the result of a variant differs from that of `moe_gemm`."""
        for place, ours in enumerate(self.calls[OURS]):
            expected = ours(x, routing).double()
            for name in self.rivals():
                error = (self.calls[name][place](x, routing).double() - expected).norm() / expected.norm()
                assert error < TOLERANCE["ggml" if name.startswith("ggml") else x.dtype], (
                    f"{name} and {OURS} differ by {error:.1e} of the result"
                )

    def timed(self, x: Tensor, routings: list[Routing]) -> dict[str, Call]:
        """Returns the calls for `time_calls`. All calls of a round use the same weights and the same routing."""

        def call(name: str, index: int) -> Tensor:
            turn = index // len(self.calls)
            copies = self.calls[name]
            return copies[turn % len(copies)](x, routings[turn % len(routings)])

        return {name: partial(call, name) for name in self.calls}


def measure_memory(pipe: Connection, variant: str, shapes: list[Shape], tokens: int, threads: int) -> None:
    """Sends two numbers for each shape, in bf16: the bytes of the weights, and the peak bytes that a call allocates."""
    torch.set_num_threads(threads)
    for shape in [LAYERS["tiny"], *shapes]:  # the tiny layer loads libraries, so that the measured layers do not
        before = resident("VmRSS")
        x = torch.randn(tokens, shape.hidden).to(torch.bfloat16)
        call = Block(shape, torch.bfloat16, (variant,)).calls[variant][0]
        reset_peak()
        weights = resident("VmRSS")
        call(x, route(shape, tokens))
        pipe.send((weights - before, resident("VmHWM") - weights))
        del call


def compare_memory(layers: dict[str, Shape], tokens: int, threads: int) -> None:
    """Prints the memory of each variant. Each variant runs in its own process, all at the same time."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    share = max(1, threads // len(VARIANTS))
    for variant in VARIANTS:
        pipes[variant], theirs = context.Pipe()
        arguments = (theirs, variant, list(layers.values()), tokens, share)
        context.Process(target=measure_memory, args=arguments, daemon=True).start()
        theirs.close()  # Otherwise a process that fails would leave this process waiting.
    table(f"MB of the weights, and peak MB of a call with {tokens} tokens beyond them, bf16", ["layer", *VARIANTS])
    for name in (None, *layers):
        try:
            found = {variant: pipe.recv() for variant, pipe in pipes.items()}
        except EOFError:
            print("\nmemory not measured: a process failed, as it says above", flush=True)
            return
        if name is None:  # the tiny layer
            continue
        row(name, *(f"{weights / 1e6:.0f} + {peak / 1e6:.0f}" for weights, peak in found.values()))


def compare(options: argparse.Namespace, layers: dict[str, Shape], deadline: float, ggml: Ggml | None = None) -> None:
    """Prints a table for every layer and dtype. Skips a table if the deadline is too near, and says so."""
    cases = [(name, dtype) for name in layers for dtype in options.dtypes]
    made = 0.0  # seconds that constructing the last Block took
    for number, (name, dtype) in enumerate(cases):
        shape, begin = layers[name], time.monotonic()
        if begin + made > deadline:
            print(f"\nleft out for want of time: {name} in {dtype}", flush=True)
            continue
        block = Block(shape, DTYPES[dtype], ggml=ggml)
        block.check(torch.randn(4, shape.hidden).to(DTYPES[dtype]), route(shape, 4))
        made = time.monotonic() - begin
        table(
            f"{name}: {shape.experts} experts of {shape.hidden} x {shape.intermediate}, top {shape.top_k}, "
            f"{shape.weight_format} in groups of {shape.group_size}, {dtype}. Ratios above 1: moe_gemm is faster.",
            ["tokens", "experts used", *(f"us {name}" for name in block.calls), *block.rivals(), "rounds"],
        )
        for place, tokens in enumerate(options.tokens):
            left = deadline - time.monotonic() - made * (len(cases) - number - 1)
            lines = len(options.tokens) * (len(cases) - number) - place
            if left < 0:
                print(f"left out for want of time: {tokens} tokens", flush=True)
                continue
            routings = [route(shape, tokens) for _ in range(ROUTINGS)]
            x = torch.randn(tokens, shape.hidden).to(DTYPES[dtype])
            times = time_calls(block.timed(x, routings), left / lines, least=3)
            middle = {variant: 1e6 * statistics.median(times[variant]) for variant in times}
            ratios = {rival: ratio(times, rival, OURS) for rival in block.rivals()}
            used = statistics.median(len(routing.ids.unique()) for routing in routings)
            rounds = len(times[OURS])
            row(tokens, f"{used:g}", *(f"{us:.0f}" for us in middle.values()), *ratios.values(), rounds)
        del block  # before the next one is made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=[name for name in LAYERS if name != "tiny"])
    parser.add_argument("--experts", type=int, help="use this many experts instead of the model's, for less memory")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--minutes", type=float, default=4.0, help="for everything; lines beyond it are left out")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ggml", type=Path, nargs="?", const="", metavar="DIR", help="folder of ggml's libraries")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    layers = {name: LAYERS[name] for name in options.layers}
    if options.experts:
        layers = {name: shape._replace(experts=options.experts) for name, shape in layers.items()}
    for name, shape in layers.items():
        if shape.experts < shape.top_k:
            parser.error(f"--experts: expected at least {shape.top_k}, the top_k of {name}, got {shape.experts}")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    capability = tmm.cpu_capability()
    print(f"{processor_name()}, {options.threads} threads, torch {torch.__version__}")
    print(f"{capability.isa}: {capability.reason}; {' '.join(capability.features)}", flush=True)
    with torch.inference_mode():
        if options.memory:
            compare_memory(layers, max(options.tokens), options.threads)
        libraries = None if options.ggml is None else folder_of_libraries(options.ggml if options.ggml.name else None)
        compare(options, layers, deadline, libraries and Ggml(libraries, options.threads))


if __name__ == "__main__":
    main()
