"""Predicts the times of other projects' kernels for up to 64 rows, with the model of lab/model/kernel.py.

`counts.csv` stores what the tool of lab/agx counted in the projects' sources (-O1, the M1's GPU). A row has the clocks
of a scheduler per weight and lane, the part of them that matrix products take (17 clocks each), and the registers of a
thread. 0 clocks mean that the tool cannot compile the kernel; its predicted time is then the time of its bytes. If a
project's rule for choosing a tiling is not known, the fastest tiling is used. Kernels for tensor units cannot be
counted either. Their predicted time is the least possible: the time of their bytes, or of their products at the
published rate of the units.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lab.model.experts import expected_routing
from lab.model.geometry import ceil_divide
from lab.model.kernel import DISPATCH_SECONDS, KernelLoad, figure, kernel_cost, occupancy
from lab.published.published_kernels import Product, mlx_takes_matrix
from torch_marlin_metal.profiling import AppleSiliconGPU

TABLE = Path(__file__).with_name("counts.csv")
# Bytes per weight, including its share of scales. MLX's affine formats are missing: their bytes depend on the group.
BYTES = {"q4_0": 18 / 32, "q8_0": 34 / 32, "q4_K": 144 / 256, "q5_K": 176 / 256, "q6_K": 210 / 256, "mxfp4": 17 / 32}
MLX_BYTES = {"mxfp4": 17 / 32, "nvfp4": 9 / 16, "mxfp8": 33 / 32}
# (columns, simdgroups) of a threadgroup of mul_mv.
LLAMA_VECTOR = {"q4_0": (8, 2), "q8_0": (2, 4), "q4_K": (4, 2), "q5_K": (2, 2), "q6_K": (4, 2), "mxfp4": (4, 2)}
# mul_mv_mma: numbers of column blocks (8 columns each), and of simdgroups that divide K. llama.cpp's rule that chooses
# between them is not known.
FEW_BLOCKS, FEW_SIMDGROUPS = (1, 2, 4), (1, 2, 4, 8, 16)
# Clocks per weight that mul_mv_mma takes to prepare the activations with one column block. All blocks share them.
FEW_SHARED_CLOCKS = 3.6
FEW_COUNTED_BLOCKS = 4
FEW_LOADS_AHEAD = ("q4_0", "q8_0", "q5_K")
FEW_MOST_ROWS = 16
FIXED_ISSUE = 300
VECTOR_STEP = 64
MLX_COLUMNS, MLX_WIDE_ROWS = 8, 5
# From these numbers of rows on, the projects use kernels for the tensor units of an M5, which the tool cannot count.
TENSOR_ROWS = {"llama.cpp": 17, "MLX": 13}
TENSOR_FAMILY = 10


@dataclass(frozen=True)
class Kernel:
    """A row of counts.csv. The module's docstring explains the numbers."""

    project: str
    version: str
    kernel: str
    format: str
    rows: int
    clocks: float
    matrix: float
    half_registers: int


@dataclass(frozen=True)
class Time:
    """A predicted time in seconds, and what takes longest: a bound of `DispatchCost`, or "tensor"."""

    seconds: float
    bound: str


@dataclass(frozen=True)
class Rival:
    """A format of a project, for example MLX's "affine4" with a group size."""

    project: str
    format: str
    group_size: int = 32

    @property
    def bytes_per_weight(self) -> float:
        """Returns the bytes per weight, including its share of scales and biases."""
        if self.format.startswith("affine"):
            return int(self.format[-1]) / 8 + 4 / self.group_size
        return (BYTES if self.project == "llama.cpp" else MLX_BYTES)[self.format]


@dataclass(frozen=True)
class Work:
    """The work of a product: `blocks` blocks of `rows` rows, each multiplied by one of `weights` weights `[K, N]`."""

    rows: int
    blocks: float
    weights: float
    N: int
    K: int
    activation_bytes: int

    def time(
        self, kernel: Kernel, rival: Rival, gpu: AppleSiliconGPU, *, columns: int, simdgroups: int, step: float,
        clocks: float | None = None, loads_ahead: bool = False, splits: int = 1,
    ) -> Time:  # fmt: skip
        """Returns the predicted time of a kernel.

        Args:
            kernel: the counted kernel.
            rival: the format of the weights.
            gpu: the GPU.
            columns: columns of the product that a threadgroup computes.
            simdgroups: simdgroups of a threadgroup.
            step: weights that a lane multiplies between two waits for memory.
            clocks: clocks per weight; None means those of the kernel.
            loads_ahead: whether the kernel loads before it computes.
            splits: number of threadgroups that divide K.
        """
        own = columns * self.K / splits / simdgroups / 32
        matrix = kernel.matrix * own / 17
        of_weight = self.N * self.K * rival.bytes_per_weight
        moved = self.blocks * self.rows * (self.K + self.N) * self.activation_bytes
        issue = ((kernel.clocks if clocks is None else clocks) - kernel.matrix) * own
        load = KernelLoad(
            threadgroups=max(1, round(self.blocks * ceil_divide(self.N, columns))) * splits,
            threads=32 * simdgroups,
            half_registers=kernel.half_registers,
            loads_ahead=loads_ahead or kernel.clocks == 0,
            issue=max(0.0, issue) + FIXED_ISSUE,
            matrix_operations=matrix,
            matrix_clocks=figure(gpu, "matrix_clocks_fp32"),
            dram_waits=own / step,
            weight_bytes=self.weights * of_weight,
            dram_bytes=self.weights * of_weight + moved,
            l2_bytes=self.blocks * (of_weight + self.rows * self.K * self.activation_bytes * self.N / columns),
        )
        adds_up = DISPATCH_SECONDS if splits > 1 else 0.0
        cost = kernel_cost(load, gpu).scalar(gpu, occupancy(load, gpu))
        return Time(cost.seconds + adds_up, cost.bound)


@cache
def table() -> tuple[Kernel, ...]:
    """Returns counts.csv."""
    with TABLE.open(newline="") as file:
        return tuple(
            Kernel(row["project"], row["version"], row["kernel"], row["format"], int(row["rows"]),
                   float(row["clocks"]), float(row["matrix"]), int(row["half_registers"]))
            for row in csv.DictReader(file)
        )  # fmt: skip


def find(rival: Rival, kernel: str, rows: int) -> Kernel | None:
    """Returns the counted kernel with the smallest row block of at least `rows` rows."""
    own = [
        row for row in table()
        if (row.project, row.format, row.kernel) == (rival.project, rival.format, kernel) and row.rows >= rows
    ]  # fmt: skip
    return min(own, key=lambda row: row.rows, default=None)


def _work(rows: int, tokens: int, top_k: int, experts: int, N: int, K: int, size: int) -> Work:
    """Returns the work in blocks of `rows` rows. 0 experts mean one weight for all tokens."""
    if experts == 0:
        return Work(min(rows, tokens), ceil_divide(tokens, rows), 1, N, K, size)
    routing = expected_routing(tokens, top_k, experts, rows)
    return Work(rows, routing.blocks, routing.experts, N, K, size)


def llama_times(
    rival: Rival, tokens: int, N: int, K: int, gpu: AppleSiliconGPU, experts: int, top_k: int
) -> Iterator[Time]:
    """Yields the times of llama.cpp's kernels that support this number of tokens."""
    vector = find(rival, "vector", 1)
    if vector is not None and (tokens == 1 or experts):
        columns, simdgroups = LLAMA_VECTOR[rival.format]
        work = _work(1, tokens, top_k, experts, N, K, 4)
        yield work.time(vector, rival, gpu, columns=columns, simdgroups=simdgroups, step=VECTOR_STEP)
    pairs = find(rival, "columns", tokens)
    if pairs is not None and tokens == pairs.rows and not experts:
        work = _work(pairs.rows, tokens, top_k, experts, N, K, 4)
        yield work.time(pairs, rival, gpu, columns=8, simdgroups=2, step=VECTOR_STEP)
    few = find(rival, "few", 8 if experts else min(tokens, FEW_MOST_ROWS))
    if few is not None and tokens > 1 and (experts or tokens <= FEW_MOST_ROWS):
        work = _work(few.rows, tokens, top_k, experts, N, K, 4)
        for blocks in (FEW_COUNTED_BLOCKS,) if experts else FEW_BLOCKS:
            shared = FEW_SHARED_CLOCKS * few.rows / 8 * (1 / blocks - 1 / FEW_COUNTED_BLOCKS)
            for simdgroups in FEW_SIMDGROUPS:
                yield work.time(
                    few, rival, gpu, columns=8 * blocks, simdgroups=simdgroups, step=8 * blocks,
                    clocks=few.clocks + shared, loads_ahead=rival.format in FEW_LOADS_AHEAD,
                )  # fmt: skip
    matrix = find(rival, "matrix", 1)
    if matrix is not None and (tokens > FEW_MOST_ROWS or experts):
        work = _work(matrix.rows, tokens, top_k, experts, N, K, 4)
        yield work.time(matrix, rival, gpu, columns=64, simdgroups=4, step=16)


def mlx_times(
    rival: Rival, tokens: int, N: int, K: int, gpu: AppleSiliconGPU, experts: int, top_k: int
) -> Iterator[Time]:
    """Yields the times of MLX's kernels that support this number of tokens."""
    vector, matrix = find(rival, "vector", 1), find(rival, "matrix", 1)
    assert vector is not None and matrix is not None
    by_rows = not experts and not mlx_takes_matrix(Product(tokens, N, K, "affine4/64"), gpu)
    if by_rows and tokens > 1 and gpu.family >= 9:
        blocks = ceil_divide(tokens, MLX_WIDE_ROWS)
        wide = find(rival, "wide", max(2, ceil_divide(tokens, blocks)))
        assert wide is not None
        work = Work(ceil_divide(tokens, blocks), blocks, 1, N, K, 2)
        yield work.time(wide, rival, gpu, columns=MLX_COLUMNS, simdgroups=2, step=32)
    elif by_rows or experts:
        work = _work(1, tokens, top_k, experts, N, K, 2)
        yield work.time(vector, rival, gpu, columns=MLX_COLUMNS, simdgroups=2, step=VECTOR_STEP)
    if not by_rows:
        work = _work(matrix.rows, tokens, top_k, experts, N, K, 2)
        tiles = ceil_divide(tokens, 32) * ceil_divide(N, 32)
        for splits in (1,) if experts else (1, min(max(1, 512 // tiles), K // 64)):
            yield work.time(matrix, rival, gpu, columns=32, simdgroups=4, step=8, splits=splits)


def tensor_time(
    rival: Rival, tokens: int, N: int, K: int, gpu: AppleSiliconGPU, experts: int = 0, top_k: int = 1
) -> Time:
    """Returns the least time of a product on tensor units."""
    work = _work(1, tokens, top_k, experts, N, K, 2)
    moved = work.weights * N * K * rival.bytes_per_weight + work.blocks * (K + N) * work.activation_bytes
    products = work.blocks * N * K / 512 * figure(gpu, "tensor_clocks_fp16")
    bytes_time = moved / gpu.reachable_dram_bytes_per_second
    product_time = products / (figure(gpu, "schedulers") * gpu.cores * gpu.clock_hz)
    longest = max(bytes_time, product_time)
    return Time(DISPATCH_SECONDS + longest, "tensor" if product_time == longest else "dram")


def fastest(rival: Rival, tokens: int, N: int, K: int, gpu: AppleSiliconGPU, experts: int = 0, top_k: int = 1) -> Time:
    """Returns the time of a project's fastest kernel. 0 experts mean a dense product."""
    if on_tensor_units(rival, tokens, gpu):
        return tensor_time(rival, tokens, N, K, gpu, experts, top_k)
    times = llama_times if rival.project == "llama.cpp" else mlx_times
    return min(times(rival, tokens, N, K, gpu, experts, top_k), key=lambda time: time.seconds)


def on_tensor_units(rival: Rival, tokens: int, gpu: AppleSiliconGPU) -> bool:
    """Returns whether the project uses tensor units for this number of tokens."""
    return gpu.family >= TENSOR_FAMILY and tokens >= TENSOR_ROWS[rival.project]
