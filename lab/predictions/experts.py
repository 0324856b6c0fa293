"""Prints what the model predicts for the experts of two mixtures: gpt-oss-20b and Qwen3-30B-A3B.

A layer's experts are two calls of `moe_gemm`: gate and up, and down with the weighted sum. For each chip and number of
tokens, a table compares the predicted time with two other times:

- the limit: the time to read the weights of the chosen experts, or the time of the matrix products of all rows,
  whichever is longer. The limit contains no launches.
- one expert after the other: a `gemm` for each product of each chosen expert. From two tokens on, one more kernel
  gathers the expert's rows, and another adds the results to the output. Each of these two takes a launch and the memory
  traffic of its rows. The host's wait for the router's choice is left out.

No kernel is executed. Each token chooses its experts at random, and all experts are equally likely.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from rich.console import Console
from rich.table import Table

from lab import model
from lab.model.kernel import DISPATCH_SECONDS, figure
from torch_marlin_metal.formats import WEIGHT_FORMATS
from torch_marlin_metal.profiling import AppleSiliconGPU

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
NEGLIGIBLE = 1e-6  # Smaller probabilities are ignored.


@dataclass(frozen=True)
class Mixture:
    """The sizes of a layer's experts."""

    name: str
    hidden: int
    inner: int
    experts: int
    top_k: int
    weight_format: str
    group_size: int

    def products(self) -> tuple[tuple[int, int], ...]:
        """Returns N and K of the gate and up product, and of the down product."""
        return (2 * self.inner, self.hidden), (self.hidden, self.inner)


MIXTURES = (
    Mixture("gpt-oss-20b", 2880, 2880, 32, 4, "mxfp4", 32),
    Mixture("Qwen3-30B-A3B", 2048, 768, 128, 8, "uint4b8", 64),
)


@dataclass(frozen=True)
class Prediction:
    """Times in seconds of a layer's experts.

    Attributes:
        kernels: the tilings of the two products.
        seconds: the predicted time.
        launches: the seconds that launches take.
        sorting: the seconds that moe_sort takes, without its launch.
        limit: the longer of memory time and matrix time, added up over both products.
        one_by_one: the predicted time of one expert after the other.
    """

    kernels: tuple[str, str]
    seconds: float
    launches: float
    sorting: float
    limit: float
    one_by_one: float

    @property
    def over_limit(self) -> float:
        """Returns the predicted time divided by the limit."""
        return self.seconds / self.limit


def weight_bytes(mixture: Mixture, N: int, K: int) -> float:
    scale_bytes = 1 if WEIGHT_FORMATS[mixture.weight_format].scale_coding != "floating" else 2
    return N * K * (0.5 + scale_bytes / mixture.group_size)


def peak_flop_per_second(gpu: AppleSiliconGPU) -> float:
    """Returns the peak rate of products with fp16 activations. If the GPU has tensor units, it is their rate."""
    clocks, tensor_clocks = figure(gpu, "matrix_clocks_fp32"), figure(gpu, "tensor_clocks_fp16")
    return gpu.matrix_flop_per_second * (clocks / tensor_clocks if tensor_clocks else 1.0)


def limit(mixture: Mixture, tokens: int, gpu: AppleSiliconGPU) -> float:
    experts = model.expected_routing(tokens, mixture.top_k, mixture.experts, 8).experts
    seconds = 0.0
    for N, K in mixture.products():
        memory = experts * weight_bytes(mixture, N, K) / gpu.reachable_dram_bytes_per_second
        matrix = 2 * tokens * mixture.top_k * N * K / peak_flop_per_second(gpu)
        seconds += max(memory, matrix)
    return seconds


@cache
def one_product(mixture: Mixture, rows: int, N: int, K: int, gpu: str) -> float:
    group_size = WEIGHT_FORMATS[mixture.weight_format].fixed_group_size or mixture.group_size
    problem = model.Problem(rows, N, K, mixture.weight_format, group_size)
    return model.best(problem, AppleSiliconGPU.from_name(gpu))[1]


def rows_of_an_expert(tokens: int, mixture: Mixture) -> Iterator[tuple[int, float]]:
    """Yields each number of rows that an expert can have, and its probability."""
    p = mixture.top_k / mixture.experts
    for rows in range(1, tokens + 1):
        log = math.lgamma(tokens + 1) - math.lgamma(rows + 1) - math.lgamma(tokens - rows + 1)
        probability = math.exp(log + rows * math.log(p) + (tokens - rows) * math.log1p(-p))
        if probability > NEGLIGIBLE:
            yield rows, probability


def moving_rows(mixture: Mixture, rows: int, gpu: AppleSiliconGPU) -> float:
    """Returns the seconds for gathering an expert's rows and for adding its results to the output, in fp16."""
    row_bytes = 2 * mixture.hidden
    # Gathering reads and writes a row. Adding reads a result and a row of the output, and writes the row.
    return 2 * DISPATCH_SECONDS + rows * 5 * row_bytes / gpu.reachable_dram_bytes_per_second


def one_by_one(mixture: Mixture, tokens: int, gpu: AppleSiliconGPU) -> float:
    seconds = 0.0
    for rows, probability in rows_of_an_expert(tokens, mixture):
        products = sum(one_product(mixture, rows, N, K, gpu.name) for N, K in mixture.products())
        moves = moving_rows(mixture, rows, gpu) if tokens > 1 else 0.0
        seconds += probability * (products + moves)
    return mixture.experts * seconds


def predict(mixture: Mixture, tokens: int, gpu: AppleSiliconGPU) -> Prediction:
    """Returns the predicted times of a layer's experts with fp16 activations."""
    kernels, dispatches = [], []
    for (N, K), is_down in zip(mixture.products(), (False, True), strict=True):
        problem = model.ExpertsProblem.of_tokens(
            tokens, mixture.top_k, mixture.experts, N, K, reduce=is_down, rows_by_slot=is_down,
            weight_format=mixture.weight_format, group_size=mixture.group_size,
        )  # fmt: skip
        tiling, _ = model.best(problem, gpu)
        kernels.append(tiling.name)
        dispatches += model.costs(problem, tiling, gpu).dispatches
    return Prediction(
        kernels=(kernels[0], kernels[1]),
        seconds=sum(d.seconds for d in dispatches),
        launches=sum(d.launch_seconds for d in dispatches),
        sorting=sum(d.seconds - d.launch_seconds for d in dispatches if d.kernel == "moe_sort"),
        limit=limit(mixture, tokens, gpu),
        one_by_one=one_by_one(mixture, tokens, gpu),
    )


def short(kernel: str) -> str:
    """Returns the first two letters of the variant and its rows, for example "fu32" for "fused:32x32x64"."""
    variant, tile = kernel.split(":")
    return variant[:2] + tile.split("x")[0]


def table_of(mixture: Mixture, gpus: list[AppleSiliconGPU]) -> Table:
    """Returns a table by tokens and chip: time over limit, the same without launches, speedup, and kernels."""
    title = f"{mixture.name}: time over limit (without launches), times faster than one by one, rows of a block"
    table = Table(title=title, title_justify="left")
    table.add_column("tokens", justify="right")
    for gpu in gpus:
        table.add_column(gpu.name, justify="right")
    for tokens in TOKENS:
        cells = []
        for gpu in gpus:
            found = predict(mixture, tokens, gpu)
            bare = (found.seconds - found.launches) / found.limit
            kernels = " ".join(map(short, found.kernels))
            cells.append(f"{found.over_limit:.2f} ({bare:.2f}) {found.one_by_one / found.seconds:.1f}x {kernels}")
        table.add_row(str(tokens), *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="*", default=AppleSiliconGPU.names(), help="chips (default: all)")
    gpus = [AppleSiliconGPU.from_name(name) for name in parser.parse_args().gpus]
    console = Console(width=max(120, 32 * len(gpus) + 10))
    for mixture in MIXTURES:
        console.print(table_of(mixture, gpus))


if __name__ == "__main__":
    main()
