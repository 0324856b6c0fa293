"""Compares `gemm` on the CPU with diffusers' layers of GGUF files, for the products of FLUX.

    python -m lab.cpu.cpu_diffusion [--rows 1024 4608] [--types Q4_0 Q4_K Q8_0] [--shapes 3072x3072 12288x3072]

Each line compares four products with bf16 activations: diffusers' `GGUFLinear`, which decodes the weight at each call
and multiplies in bf16; PyTorch's dense product with an already decoded weight; `MarlinLinear`, which rounds the weight
to bf16 as in models of diffusers; and `MarlinLinear` without this rounding. They run in turns. A ratio is the median
over rounds of another product's time divided by the time of the rounding layer. If it is above 1, this package is
faster.
"""

import argparse
import copy

import gguf
import numpy as np
import torch
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from torch import nn

import torch_marlin_metal as tmm
from lab.cpu.cpu_gemm import ratio, time_calls
from torch_marlin_metal.cli.bench import processor_name
from torch_marlin_metal.convert import replace_linear_layers

OURS, EXACT, THEIRS, DENSE = "ours", "exact", "GGUFLinear", "dense"
SHAPES = ("3072x3072", "12288x3072", "3072x12288", "3072x15360", "21504x3072")
MAX_ERROR = 0.02  # relative, of either: both round to bf16
CHECKED = 16  # rows


def theirs(kind: str, N: int, K: int) -> GGUFLinear:
    """Makes diffusers' layer with a random weight `[N, K]`."""
    of_type = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[of_type]
    generator = np.random.default_rng(0)
    if kind == "Q4_K":  # gguf does not write this type
        blocks = generator.integers(0, 256, (N, K // block, size), np.uint8)
        blocks[..., :4] = np.array([0.001, 0.01], np.float16).view(np.uint8)
        stored = blocks.reshape(N, -1)
    else:
        stored = gguf.quantize(generator.standard_normal((N, K), np.float32) * K**-0.5, of_type)
    layer = GGUFLinear(K, N, compute_dtype=torch.bfloat16)
    layer.weight = GGUFParameter(torch.from_numpy(stored), quant_type=of_type)
    return layer


def line(kind: str, M: int, N: int, K: int, rounds: int) -> str:
    """Times the products in turns, compares their results, and returns a row of the table."""
    original = theirs(kind, N, K)
    decoded = gguf.dequantize(original.weight.as_tensor().numpy(), original.weight.quant_type)
    weight = torch.from_numpy(decoded.astype(np.float32))
    packed = nn.Sequential(original)
    replace_linear_layers(packed, progress=False)
    layer, other, dense = packed[0], theirs(kind, N, K), weight.bfloat16()
    exact_layer = copy.copy(layer)
    layer.rounds_weights = True
    a = torch.randn(M, K, generator=torch.Generator().manual_seed(1), device="cpu").bfloat16()
    calls = {
        OURS: lambda index: layer(a),
        EXACT: lambda index: exact_layer(a),
        THEIRS: lambda index: other(a),
        DENSE: lambda index: nn.functional.linear(a, dense),
    }
    exact = a[:CHECKED].double() @ weight.double().t()
    for name, call in calls.items():
        error = float((call(0)[:CHECKED].double() - exact).norm() / exact.norm())
        if error > MAX_ERROR:
            raise ValueError(f"{kind} {M} x {N} x {K}: {name}: relative error {error:.3f}")
    times = time_calls(calls, 0, least=rounds)
    ratios = (ratio(times, rival, OURS) for rival in (THEIRS, DENSE, EXACT))
    return f"| {kind} | {M} | {N} | {K} | {' | '.join(f'{found:.2f}' for found in ratios)} |"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1024, 4608])
    parser.add_argument("--types", nargs="+", default=["Q4_0", "Q4_K", "Q8_0"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    capability = tmm.cpu_capability()
    print(f"{processor_name()}, {capability.isa}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    heads = ("type", "M", "N", "K", "GGUFLinear / ours", "dense bf16 / ours", "exact / ours")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    with torch.no_grad():
        for shape in given.shapes:
            N, K = map(int, shape.split("x"))
            for kind in given.types:
                for M in given.rows:
                    print(line(kind, M, N, K, given.rounds), flush=True)


if __name__ == "__main__":
    main()
