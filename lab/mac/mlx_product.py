"""Times this package's product and MLX's `quantized_matmul` on this Mac.

    python -m lab.mac.mlx_product --shape 4096,4096 --rows 1 8 --group-size 64

Both take turns, on chains of dependent products whose weights are in no cache. Prints the medians of the times on the
GPU's clock, and the median of the ratios of all rounds.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.cli.arguments import product_of
from torch_marlin_metal.gpu.tuning.chains import Chain, Measured, gemm_chain, interleave, median_ratio, rotating
from torch_marlin_metal.gpu.tuning.peers import NoPeer
from torch_marlin_metal.packed_weight import PackedWeight

GROUP_SIZES = (32, 64, 128)


def lazy_clock(chain: Chain, calls: int) -> Measured:
    """Measures calls of a lazy library (MLX), which computes nothing until the chain is evaluated.

    MLX gives no access to its command buffers. The function therefore runs a chain, and then a chain of twice the
    length. The difference of the two times is the time of the additional calls, without the cost of starting and
    waiting. The host's time is measured separately, as in `gpu_clock`.
    """

    def evaluated(count: int) -> tuple[float, float]:
        chain.finish(chain.first)
        begin = time.perf_counter()
        state = chain.run(count, chain.first)
        noted = time.perf_counter()
        chain.finish(state)
        return time.perf_counter() - noted, noted - begin

    short, _ = evaluated(calls)
    long, noting = evaluated(2 * calls)
    # If other work slows the shorter chain, the difference can be zero or negative.
    return Measured(max(long - short, 1e-3 * long) / calls, noting / (2 * calls))


def mlx_chain(weight: PackedWeight, a: Tensor, cold_bytes: int) -> Chain:
    """Makes a chain of MLX's products with random weights of the same shape and group size.

    Raises:
        NoPeer: MLX does not support the group size, or MLX is not installed.
    """
    if weight.group_size not in GROUP_SIZES:
        raise NoPeer(f"group_size {weight.group_size} is none of {GROUP_SIZES}")
    if importlib.util.find_spec("mlx") is None:
        raise NoPeer("MLX is not installed")
    try:
        mx: Any = importlib.import_module("mlx.core")
    except ImportError as error:
        raise NoPeer(f"MLX does not load: {error}") from error
    dtype = getattr(mx, str(a.dtype).removeprefix("torch."))
    dense = mx.random.normal((weight.N, weight.K)).astype(dtype)
    words, scales, biases = mx.quantize(dense, group_size=weight.group_size, bits=4)
    copies = [[mx.array(part) for part in (words, scales, biases)] for _ in range(-(-cold_bytes // words.nbytes))]
    first = mx.random.normal(tuple(a.shape)).astype(dtype)
    mx.eval(first, copies)

    def step(state: Any, index: int) -> Any:
        product = mx.quantized_matmul(
            state, *copies[index % len(copies)], transpose=True, group_size=weight.group_size, bits=4
        )
        return state + product[:, :1] * 0

    return Chain(first, step, mx.eval, lazy_clock)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="N,K; may be repeated")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--weight-format", default="uint4_bias")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold-mb", type=int, default=256)
    options = parser.parse_args()
    if not torch.backends.mps.is_available():
        print("mlx_product.py: expected a Mac whose GPU torch can use through MPS", file=sys.stderr)
        return 2
    print("| N x K | M | ours us | MLX us | MLX / ours |\n|---|---|---|---|---|")
    for shape in options.shape or ["4096,4096", "14336,4096", "4096,14336"]:
        product = product_of("mlx_product", shape, options.weight_format, options.group_size, "float16")
        weight = product.make_weight("mps")
        for M in options.rows:
            a = torch.randn(M, product.K, dtype=torch.float16, device="mps")
            cold = options.cold_mb * 10**6
            try:
                chains = {"ours": gemm_chain(a, rotating(weight, cold)), "MLX": mlx_chain(weight, a, cold)}
            except NoPeer as error:
                print(f"mlx_product.py: {error}", file=sys.stderr)
                return 2
            times = interleave(chains, options.rounds)
            medians = " | ".join(f"{1e6 * statistics.median(values):.1f}" for values in times.values())
            print(f"| {product.N} x {product.K} | {M} | {medians} | {median_ratio(times['MLX'], times['ours']):.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
