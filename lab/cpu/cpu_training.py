"""Compares the packed products of a training step with dense bf16 products, on each instruction set of the CPU kernels.

The products are the forward product (`gemm`), the gradient of the activations (`gemm_transposed`), and both through
autograd. The weight is frozen, as with LoRA. The rival is PyTorch's bf16 linear and its gradient. Each instruction set
runs in a separate process, which limits PyTorch's oneDNN to the same set: "avx512" thus shows a machine without AMX. In
each round every product runs once, on weights that are in no cache.

Each process first prints which code runs. For `gemm` this is the kernel set that the package reports. For the dense
product and for `gemm_transposed`, it is the implementation that oneDNN reports, because `gemm_transposed` decodes the
weight with this package's kernels but multiplies with PyTorch's.

    python -m lab.cpu.cpu_training [--minutes 3] [--sets amx avx512] [--threads 16]
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

import torch_marlin_metal as tmm
from lab.cpu.cpu_gemm import Call, Layer, cold_bytes, ratio, row, table, time_calls
from torch_marlin_metal.cli.bench import processor_name

ROWS = (128, 512, 2048)
SHAPES = ("2048x8192", "8192x2048")
FORMATS = {"uint4b8": 128, "nf4": 64}
DENSE = "dense bf16"
PRODUCTS = ("forward", "transposed", "both")
ONEDNN_LIMITS = {"avx512": "AVX512_CORE_BF16", "avx2": "AVX2"}  # ONEDNN_MAX_CPU_ISA of a kernel set


class Packed(Layer):
    """Copies of one packed weight and its products."""

    def forward(self, x: Tensor, index: int) -> Tensor:
        return tmm.gemm(x, self.weights[index % len(self.weights)])

    def transposed(self, gradient: Tensor, index: int) -> Tensor:
        return tmm.gemm_transposed(gradient, self.weights[index % len(self.weights)])


class Dense:
    """Copies of one bf16 weight and its products."""

    def __init__(self, K: int, N: int) -> None:
        weight = torch.randn(N, K).to(torch.bfloat16)
        self.weights = [weight.clone() for _ in range(max(2, cold_bytes() // weight.nbytes))]

    def forward(self, x: Tensor, index: int) -> Tensor:
        return linear(x, self.weights[index % len(self.weights)])

    def transposed(self, gradient: Tensor, index: int) -> Tensor:
        return gradient @ self.weights[index % len(self.weights)]


def both(layer: Packed | Dense, x: Tensor, gradient: Tensor, index: int) -> Tensor:
    """Returns the gradient of x after a forward product, by autograd."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(layer.forward(x, index), x, gradient)[0]


def onednn_kernels(call: Call) -> str:
    """Returns the implementations that oneDNN reports for a call, for example brg_matmul:avx10_1_512_amx."""
    sys.stdout.flush()
    terminal = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                call(0)
        finally:
            os.dup2(terminal, 1)
            os.close(terminal)
        file.seek(0)
        lines = [line.split(",") for line in file if ",exec," in line]
    found = {fields[fields.index("exec") + 3] for fields in lines if "matmul" in fields or "inner_product" in fields}
    return " ".join(sorted(found)) or "no product in oneDNN"


def measure(options: argparse.Namespace, kernel_set: str, minutes: float) -> None:
    """Prints the tables of the kernel set that the environment selects."""
    deadline = time.monotonic() + 60 * minutes
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    capability = tmm.cpu_capability()
    assert capability.isa == kernel_set, f"expected kernels for {kernel_set}, got {capability.isa}"
    names = (*FORMATS, DENSE)
    lines_left = len(options.shapes) * len(options.rows)
    for shape in options.shapes:
        K, N = (int(size) for size in shape.split("x"))
        layers: dict[str, Packed | Dense] = {name: Packed(K, N, name, group) for name, group in FORMATS.items()}
        layers[DENSE] = Dense(K, N)
        x, gradient = torch.randn(64, K).to(torch.bfloat16), torch.randn(64, N).to(torch.bfloat16)
        kernels = {
            "gemm": f"{capability.isa} of this package",
            "dense forward": onednn_kernels(partial(layers[DENSE].forward, x)),
            "dense transposed": onednn_kernels(partial(layers[DENSE].transposed, gradient)),
            "product in gemm_transposed": onednn_kernels(partial(layers["nf4"].transposed, gradient)),
        }
        print(f"\n{kernel_set}: {'; '.join(f'{product}: {kernel}' for product, kernel in kernels.items())}")
        table(
            f"K x N = {shape}, bf16 activations, {kernel_set}. Ratios above 1: packed is faster than {DENSE}.",
            ["rows", "product", *(f"us {name}" for name in names), *FORMATS, "rounds"],
        )
        for M in options.rows:
            budget = (deadline - time.monotonic()) / lines_left
            lines_left -= 1
            if budget < 0:
                print(f"left out for want of time: {M} rows", flush=True)
                continue
            x, gradient = torch.randn(M, K).to(torch.bfloat16), torch.randn(M, N).to(torch.bfloat16)
            calls: dict[str, Call] = {}
            for name, layer in layers.items():
                calls[f"forward {name}"] = partial(layer.forward, x)
                calls[f"transposed {name}"] = partial(layer.transposed, gradient)
                calls[f"both {name}"] = partial(both, layer, x, gradient)
            times = time_calls(calls, budget, least=3)
            for product in PRODUCTS:
                middle = {name: 1e6 * statistics.median(times[f"{product} {name}"]) for name in names}
                ratios = {name: ratio(times, f"{product} {DENSE}", f"{product} {name}") for name in FORMATS}
                rounds = len(times[f"{product} {DENSE}"])
                row(M, product, *(f"{us:.0f}" for us in middle.values()), *ratios.values(), rounds)


def main() -> None:
    available = tmm.cpu_capability().available
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sets", nargs="+", choices=available, help="default: amx and avx512, else the best one")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="KxN")
    parser.add_argument("--minutes", type=float, default=3.0, help="for everything; lines beyond it are left out")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    sets = options.sets or [name for name in ("amx", "avx512") if name in available] or [available[-1]]
    print(f"{processor_name()}, {options.threads} threads, torch {torch.__version__}")
    print(f"kernel sets of this machine: {', '.join(available)}", flush=True)
    context = multiprocessing.get_context("spawn")
    for number, kernel_set in enumerate(sets):
        os.environ["TORCH_MARLIN_METAL_CPU_ISA"] = kernel_set
        os.environ["ONEDNN_MAX_CPU_ISA"] = ONEDNN_LIMITS.get(kernel_set, "DEFAULT")
        minutes = (deadline - time.monotonic()) / 60 / (len(sets) - number)
        process = context.Process(target=measure, args=(options, kernel_set, minutes))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"lab/cpu/cpu_training.py: the measurement of {kernel_set} failed")


if __name__ == "__main__":
    main()
