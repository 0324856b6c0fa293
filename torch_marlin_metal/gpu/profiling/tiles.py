"""Tables of tiles: memory, registers and occupancy of each tile shape, and the planner's choice for each M."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from torch_marlin_metal.extension import native
from torch_marlin_metal.gpu.device import AppleSiliconGPU, as_gpu
from torch_marlin_metal.gpu.occupancy import SIMD_WIDTH, Occupancy, occupancy_of
from torch_marlin_metal.gpu.planning import element_name, plan
from torch_marlin_metal.printing import RichText, table

THREADGROUP_LIMIT = 32 * 1024  # Metal's limit, in bytes of threadgroup memory


@dataclass(frozen=True)
class TileRow:
    """The memory and the registers of one variant with one tile shape.

    Attributes:
        variant: the name for `gemm(variant=...)`.
        tile: M, N and K of one step of a threadgroup (of a simdgroup for `gemv` and `fused`).
        simdgroups: simdgroups per threadgroup. For `gemv` and `fused`, this is the number for a product with the tile's
            rows and N = K = 4096.
        threadgroup_bytes: bytes of threadgroup memory.
        half_registers: 16-bit registers per thread, counted for the M1 (for `tensor`, assumed).
        occupancy: the threadgroups that are resident on a core.
        flop_per_byte: floating-point operations in a step per byte that the step loads from device memory.
    """

    variant: str
    tile: tuple[int, int, int]
    simdgroups: int
    threadgroup_bytes: int
    half_registers: int
    occupancy: Occupancy
    flop_per_byte: float

    @property
    def share(self) -> float:
        """Returns the tile's threadgroup memory as a fraction of Metal's limit."""
        return self.threadgroup_bytes / THREADGROUP_LIMIT

    def waves(self, M: int, N: int, cores: int) -> float:
        """Returns the number of output tiles divided by the threadgroups resident on the GPU, without split K."""
        tiles = -(-M // self.tile[0]) * -(-N // self.tile[1])
        return tiles / (cores * self.occupancy.threadgroups)


@dataclass(frozen=True)
class TileTable(RichText):
    """Every variant and tile shape for one GPU and one activation dtype. Prints as a table.

    Attributes:
        gpu: the GPU for which the occupancy is computed.
        dtype: dtype of the activations.
        rows: an entry for each variant and tile shape.
    """

    gpu: AppleSiliconGPU
    dtype: torch.dtype
    rows: tuple[TileRow, ...]

    HEADINGS = (
        "variant", "tile", "simdgroups", "bytes", "of 32 KB", "threadgroups/core", "threads/core", "half-registers",
        "flop/byte",
    )  # fmt: skip

    def __rich__(self) -> Table:
        dtype = str(self.dtype).removeprefix("torch.")
        title = f"{dtype} activations on {self.gpu.name}; balance {self.gpu.balance:.1f} flop per byte"
        return table(title, *self.HEADINGS, rows=map(_cells, self.rows), right=self.HEADINGS[2:])


def _cells(row: TileRow) -> tuple[str, ...]:
    held = row.occupancy
    return (
        row.variant,
        "x".join(map(str, row.tile)),
        str(row.simdgroups),
        str(row.threadgroup_bytes),
        f"{row.share:.0%}",
        str(held.threadgroups),
        str(held.simdgroups * SIMD_WIDTH),
        str(row.half_registers),
        f"{row.flop_per_byte:.1f}",
    )


def tile_table(gpu: AppleSiliconGPU | str | None = None, dtype: torch.dtype = torch.float16) -> TileTable:
    """Returns the memory, registers and occupancy of every variant and tile shape.

    Tiles are omitted if their threadgroup memory exceeds Metal's 32 KB with this dtype.

    Args:
        gpu: a GPU, its name, or None for this machine's GPU.
        dtype: dtype of the activations.

    Raises:
        ValueError: the GPU is unknown, or the dtype is not float16, bfloat16 or float32.

    Examples:
        >>> tmm.profiling.tile_table("M1").rows[0].variant
        'gemv'
    """
    found, element = as_gpu("tile_table", gpu), element_name("tile_table", dtype)
    tiles = {row[0]: row[2] for M in (8, 128) for row in _plans(found, element, "auto", M) if any(row[2])}
    order = list(native.gemm_variants())
    rows = [
        _row(found, dtype, *_plans(found, element, name, tiles[name][0])[0])
        for name in sorted(tiles, key=lambda name: order.index(name.partition(":")[0]))
    ]
    return TileTable(found, dtype, tuple(rows))


def _plans(gpu: AppleSiliconGPU, dtype: str, variant: str, M: int) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = native.gemm_plans(
        chip=gpu.name, cores=gpu.cores, half_subnormals=True, M=M, N=4096, K=4096, weight_format="uint4b8",
        group_size=128, activations=dtype, scales="float16", zeros="float16", has_perm=False, has_global_scale=False,
        has_bias=False, variant=variant, tuned=False, own_system=False,
    )[0]  # fmt: skip
    return rows


def _row(
    gpu: AppleSiliconGPU,
    dtype: torch.dtype,
    name: str,
    variant: str,
    tile: tuple[int, int, int],
    seconds: float,
    dispatches: list[dict[str, Any]],
) -> TileRow:
    launch = dispatches[0]
    memory, registers = launch["threadgroup_bytes"], launch["half_registers"]
    simdgroups = launch["threads"][0] // SIMD_WIDTH
    held = occupancy_of(launch["threads"][0], registers, memory, gpu)
    M, N, _ = tile
    loaded = 0.5 * N + M * dtype.itemsize  # bytes of packed codes and of activations for one k
    return TileRow(variant, tile, simdgroups, memory, registers, held, 2 * M * N / loaded)


def occupancy(
    kernel: str, device: AppleSiliconGPU | str | None = None, dtype: torch.dtype = torch.float16
) -> dict[tuple[int, int, int], Occupancy]:
    """Returns the occupancy of a kernel by tile shape: the threadgroups that are resident on a core.

    Args:
        kernel: a variant: "gemv", "fused", "double_buffered", "single_stage", "striped" or, on a GPU with tensor units,
            "tensor".
        device: a GPU, its name, or None for this machine's GPU.
        dtype: dtype of the activations.

    Raises:
        ValueError: an argument is unknown.

    Examples:
        >>> tmm.profiling.occupancy("double_buffered", "M1")[64, 64, 32].threadgroups
        2
    """
    table = tile_table(device, dtype)
    found = {row.tile: row.occupancy for row in table.rows if row.variant == kernel}
    if not found:
        known = ", ".join(dict.fromkeys(row.variant for row in table.rows))
        raise ValueError(f"occupancy: kernel: expected one of {known}, got {kernel!r}")
    return found


@dataclass(frozen=True)
class Choice:
    """The planner's choice for a range of M. Each M of the range was planned.

    Attributes:
        first: smallest M of the range.
        last: largest M of the range.
        variant: the chosen variant.
        tile: the chosen tile.
    """

    first: int
    last: int
    variant: str
    tile: tuple[int, int, int]


def selection_guide(
    gpu: AppleSiliconGPU | str | None,
    N: int,
    K: int,
    rows: Iterable[int] = (*range(1, 129), 192, 256, 512, 1024, 2048, 4096),
    *,
    weight_format: str = "uint4b8",
    group_size: int | None = None,
    dtype: torch.dtype = torch.float16,
) -> list[Choice]:
    """Returns the planner's choice of variant and tile for ranges of M.

    A range ends where the choice changes, and where `rows` skips a number.

    Args:
        gpu: a GPU, its name, or None for this machine's GPU.
        N: columns of the weight.
        K: rows of the weight.
        rows: values of M to plan, ascending.
        weight_format: format of the weight.
        group_size: group size of the weight, as in `quantize_weight`.
        dtype: dtype of the activations.

    Raises:
        ValueError: an argument is unknown or out of range.

    Examples:
        >>> tmm.profiling.selection_guide("M1", 4096, 4096, rows=(1, 512))[-1].variant
        'fused'
    """
    found = as_gpu("selection_guide", gpu)
    guide: list[Choice] = []
    for M in rows:
        best = plan(M, N, K, weight_format=weight_format, group_size=group_size, dtype=dtype, gpu=found).chosen
        key = (M, best.variant, best.tile)
        continues = bool(guide) and (guide[-1].last + 1, guide[-1].variant, guide[-1].tile) == key
        first = guide.pop().first if continues else M
        guide.append(Choice(first, M, best.variant, best.tile))
    return guide
