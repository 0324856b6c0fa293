"""Describes kernels of other projects to the model: counts, tiles, traffic, and the order of threadgroups.

Sources: MLX at 2026-08-22 (`quantized.h`, `quantized.cpp`) and ggml at 2026-08-21 (`ggml-metal.metal`,
`ggml-metal-ops.cpp`). The counts are for the M1's GPU, from the tool that instructions.py uses (lab/agx).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.model.geometry import ceil_divide as ceil
from lab.model.kernel import DISPATCH_SECONDS, KernelLoad, kernel_cost, reads
from torch_marlin_metal.profiling import AppleSiliconGPU

# Bytes per weight in each format of the other projects, including its share of scales and zero points.
WEIGHT_BYTES = {
    "affine4/32": 0.5 + 4 / 32,
    "affine4/64": 0.5 + 4 / 64,
    "affine4/128": 0.5 + 4 / 128,
    "q4_0": 18 / 32,
    "q6_K": 210 / 256,
    "q8_0": 34 / 32,
    "f16": 2.0,
}


@dataclass(frozen=True)
class Counts:
    """Instructions of one simdgroup, in a step of the hot loop and outside all loops."""

    issue: int
    complex: int
    matrix: int
    half_registers: int
    fixed: int


COUNTS = {
    "qmv_fast": Counts(271, 256, 0, 75, 143),
    "qmv_wide2": Counts(616, 516, 0, 81, 169),
    "qmv_wide3": Counts(728, 548, 0, 91, 228),
    "qmv_wide4": Counts(842, 580, 0, 99, 287),
    "qmv_wide5": Counts(978, 612, 0, 103, 346),
    "qmm_t": Counts(175, 32, 16, 103, 378),
    "mul_mv_q4_0": Counts(271, 268, 0, 107, 212),
    "mul_mv_q8_0": Counts(57, 68, 0, 73, 199),
    "mul_mv_ext2": Counts(250, 112, 0, 95, 288),
    "mul_mv_ext3": Counts(316, 160, 0, 103, 334),
    "mul_mv_ext4": Counts(339, 160, 0, 103, 420),
    "mul_mv_ext5": Counts(360, 160, 0, 111, 506),
    "mul_mm_q4_0": Counts(224, 88, 32, 103, 212),
    "mul_mm_q8_0": Counts(211, 92, 32, 103, 214),
}
# With more rows, ggml uses a matrix kernel.
GGML_MOST_VECTOR_ROWS = 8
# Clocks of a matrix operation with fp32 sums, which MLX and ggml use.
MATRIX_CLOCKS = 18


@dataclass(frozen=True)
class Product:
    """A product of other projects: `[M, K]` times a weight of N columns.

    `cached` says whether the weight is in a cache.
    """

    M: int
    N: int
    K: int
    weight_format: str
    activation_bytes: int = 2
    cached: bool = False

    @property
    def weight_bytes(self) -> float:
        return self.N * self.K * WEIGHT_BYTES[self.weight_format]

    def weight_traffic(self, gpu: AppleSiliconGPU, times: int = 1) -> float:
        """Returns the bytes that are read from memory if the weight is read `times` times.

        If the system-level cache holds the weight, a read counts as fewer bytes.
        """
        if self.cached:
            return float(reads(self.weight_bytes, 1 + times, gpu) - self.weight_bytes)
        return float(reads(self.weight_bytes, times, gpu))


def seconds(load: KernelLoad, gpu: AppleSiliconGPU) -> float:
    return float(kernel_cost(load, gpu).seconds)


def small_dispatch(gpu: AppleSiliconGPU, size: float = 0.0) -> float:
    """Returns the time of a dispatch that moves `size` bytes and computes almost nothing."""
    return DISPATCH_SECONDS + size / gpu.reachable_dram_bytes_per_second


def load_of(
    name: str,
    product: Product,
    *,
    threadgroups: int,
    threads: int,
    steps: float,
    dram: float,
    l2: float,
    threadgroup_bytes: int = 0,
) -> KernelLoad:
    counts = COUNTS[name]
    return KernelLoad(
        threadgroups=threadgroups,
        threads=threads,
        half_registers=counts.half_registers,
        threadgroup_bytes=threadgroup_bytes,
        loads_ahead=False,
        issue=steps * counts.issue + counts.fixed,
        complex=steps * counts.complex,
        matrix_operations=steps * counts.matrix,
        matrix_clocks=MATRIX_CLOCKS,
        dram_waits=steps,
        cache_waits=0,
        weight_bytes=product.weight_bytes,
        dram_bytes=dram,
        l2_bytes=l2,
    )


def row_bytes(product: Product) -> float:
    return product.M * (product.K + product.N) * product.activation_bytes


def mlx_vector(product: Product, gpu: AppleSiliconGPU) -> float:
    """Predicts the time of MLX's `qmv_fast`.

    A threadgroup computes 8 columns of one row. The threadgroups of all rows of a column block start together.
    """
    columns = ceil(product.N, 8)
    activations = product.M * product.K * product.activation_bytes
    return seconds(
        load_of(
            "qmv_fast",
            product,
            threadgroups=product.M * columns,
            threads=64,
            steps=product.K / 512,
            dram=product.weight_traffic(gpu) + row_bytes(product),
            l2=product.M * product.weight_bytes + columns * activations,
        ),
        gpu,
    )


def mlx_wide(product: Product, gpu: AppleSiliconGPU) -> float:
    """Predicts the time of MLX's `qmv_wide`, for M3 and later: a block has 2 to 5 rows, a threadgroup 8 columns."""
    blocks = ceil(product.M, 5)
    columns = ceil(product.N, 8)
    activations = product.M * product.K * product.activation_bytes
    return seconds(
        load_of(
            f"qmv_wide{max(2, ceil(product.M, blocks))}",
            product,
            threadgroups=blocks * columns,
            threads=64,
            steps=product.K / 512,
            dram=product.weight_traffic(gpu) + row_bytes(product),
            l2=blocks * product.weight_bytes + columns * activations,
        ),
        gpu,
    )


def mlx_matrix(product: Product, gpu: AppleSiliconGPU) -> float:
    """Predicts the time of MLX's matrix kernel.

    Tiles are 32 x 32, and threadgroups are ordered along N first. K is split until there are 512 threadgroups.
    """
    row_blocks, column_blocks = ceil(product.M, 32), ceil(product.N, 32)
    splits = min(max(1, 512 // (row_blocks * column_blocks)), product.K // 64)
    while splits > 1 and product.K % (splits * 64):
        splits -= 1
    activations = product.M * product.K * product.activation_bytes
    written = product.M * product.N * product.activation_bytes * (1 if splits == 1 else 2 * splits + 1)
    total = seconds(
        load_of(
            "qmm_t",
            product,
            threadgroups=row_blocks * column_blocks * splits,
            threads=128,
            threadgroup_bytes=2 * 32 * 40 * product.activation_bytes,
            steps=product.K / 32 / splits,
            dram=product.weight_traffic(gpu, row_blocks) + activations + written,
            l2=row_blocks * product.weight_bytes + column_blocks * activations,
        ),
        gpu,
    )
    return total + (small_dispatch(gpu) if splits > 1 else 0.0)


def mlx_takes_matrix(product: Product, gpu: AppleSiliconGPU) -> bool:
    """Returns whether MLX's host code chooses a matrix kernel instead of a scalar kernel."""
    is_ultra = gpu.name.endswith("Ultra")
    limits = (32, 18, 12) if is_ultra else (13, 15, 13) if gpu.family >= 9 else (14, 10, 6)
    size = max(product.N, product.K)
    limit = limits[0] if size <= 2048 else limits[1] if size <= 4096 else limits[2]
    return limit <= product.M


def mlx(product: Product, gpu: AppleSiliconGPU) -> float:
    """Predicts the time of MLX's `quantized_matmul`, with the kernel that MLX's host code chooses."""
    if mlx_takes_matrix(product, gpu):
        return mlx_matrix(product, gpu)
    return mlx_wide(product, gpu) if product.M > 1 and gpu.family >= 9 else mlx_vector(product, gpu)


def ggml_vector(product: Product, gpu: AppleSiliconGPU) -> float:
    """Predicts the time of ggml's kernel for one row of activations.

    A threadgroup computes 8 columns of a row in q4_0, and 2 in q8_0, whose simdgroups divide K among themselves.
    """
    is_q8 = product.weight_format == "q8_0"
    columns = ceil(product.N, 2 if is_q8 else 8)
    activations = product.M * product.K * product.activation_bytes
    return seconds(
        load_of(
            "mul_mv_q8_0" if is_q8 else "mul_mv_q4_0",
            product,
            threadgroups=product.M * columns,
            threads=128 if is_q8 else 64,
            steps=product.K / (1024 if is_q8 else 512),
            dram=product.weight_traffic(gpu, product.M) + row_bytes(product),
            l2=product.M * product.weight_bytes + columns * activations,
        ),
        gpu,
    )


def ggml_few_rows(product: Product, gpu: AppleSiliconGPU) -> float:
    """Predicts the time of ggml's `mul_mv_ext`.

    A block has 2 to 5 rows. The second block starts when the first has ended.
    """
    if product.M == 1:
        return ggml_vector(product, gpu)
    rows = {2: 2, 3: 3, 4: 4, 5: 5, 6: 3, 7: 4, 8: 4}[product.M]
    lanes = 16 if product.M < 3 else 8
    blocks, columns = ceil(product.M, rows), ceil(product.N, 64 // lanes)
    activations = product.M * product.K * product.activation_bytes
    return seconds(
        load_of(
            f"mul_mv_ext{rows}",
            product,
            threadgroups=blocks * columns,
            threads=64,
            steps=product.K / (16 * lanes),
            dram=product.weight_traffic(gpu, blocks) + row_bytes(product),
            l2=blocks * product.weight_bytes + columns * activations,
        ),
        gpu,
    )


def ggml_matrix(product: Product, gpu: AppleSiliconGPU) -> float:
    """Predicts the time of ggml's `mul_mm`.

    Tiles have 32 rows and 64 columns. The row blocks of the same columns start together.
    """
    row_blocks, column_blocks = ceil(product.M, 32), ceil(product.N, 64)
    activations = product.M * product.K * product.activation_bytes
    return seconds(
        load_of(
            "mul_mm_q8_0" if product.weight_format == "q8_0" else "mul_mm_q4_0",
            product,
            threadgroups=row_blocks * column_blocks,
            threads=128,
            threadgroup_bytes=8192,
            steps=product.K / 32,
            dram=product.weight_bytes + row_bytes(product),
            l2=row_blocks * product.weight_bytes + column_blocks * activations,
        ),
        gpu,
    )


@dataclass(frozen=True)
class Model:
    """The sizes of a language model."""

    layers: int
    hidden: int
    key_values: int
    feed_forward: int
    vocabulary: int
    # Dispatches that llama.cpp encodes for one layer. The 7B model has 24: 7 products, and 17 norms, rotations, copies,
    # additions and attention.
    dispatches_per_layer: int = 24

    def weights(self) -> Sequence[tuple[int, int]]:
        """Returns N and K of a layer's products."""
        h, kv, f = self.hidden, self.key_values, self.feed_forward
        return (h, h), (kv, h), (kv, h), (h, h), (f, h), (f, h), (h, f)


MODELS = {
    "LLaMA-2-7B": Model(32, 4096, 4096, 11008, 32000),
    "Llama-2-13B": Model(40, 5120, 5120, 13824, 32000),
    "Qwen2.5-7B": Model(28, 3584, 512, 18944, 152064),
    "Llama-3.2-3B": Model(28, 3072, 1024, 8192, 128256),
}


def whole_model(
    model: Model, M: int, weight_format: str, gpu: AppleSiliconGPU, kernel: Callable[[Product, AppleSiliconGPU], float]
) -> float:
    """Returns the time of M tokens in llama.cpp: all products, and the other dispatches of the layers."""
    products = sum(kernel(Product(M, N, K, weight_format, 4), gpu) for N, K in model.weights())
    size = 2 * 4 * M * model.hidden  # an elementwise kernel reads and writes the hidden state
    others = (model.dispatches_per_layer - len(model.weights())) * small_dispatch(gpu, size)
    attention = 4 * M * M * model.hidden / gpu.matrix_flop_per_second if M > 8 else 0.0
    head_format = "q6_K" if weight_format == "q4_0" else weight_format
    head = model.vocabulary * model.hidden * WEIGHT_BYTES[head_format]
    return model.layers * (products + others + attention) + small_dispatch(gpu, head)
