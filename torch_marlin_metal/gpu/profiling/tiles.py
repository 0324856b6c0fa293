"""Shows tile budgets: memory and registers of each tile, threadgroups per core, and the planner's choice for each M."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from rich.table import Table

from torch_marlin_metal.extension import native
from torch_marlin_metal.gpu.device import AppleSiliconGPU, as_gpu
from torch_marlin_metal.gpu.occupancy import Occupancy
from torch_marlin_metal.gpu.planning import element_name, plan
from torch_marlin_metal.printing import RichText


@dataclass(frozen=True)
class TileRow:
    """How much memory and how many registers one variant uses with one tile shape.

    Attributes:
        variant: the name for `gemm(variant=...)`.
        tile: M, N and K of a threadgroup's step (for `gemv` and `fused`, of a simdgroup's step).
        simdgroups: simdgroups per threadgroup.
        activation_bytes: bytes of activations in threadgroup memory, in all stages.
        code_bytes: bytes of decoded weights in threadgroup memory, in all stages.
        staging_bytes: bytes of scales, zero points, tables and sums in threadgroup memory.
        threadgroup_bytes: all bytes of threadgroup memory.
        refused: why no plan can have this tile; "" if one can.
        occupancy: how many threadgroups a core holds; None if the tile is refused or its registers were not counted.
        accumulators: fp32 accumulators per lane.
        half_registers: 16-bit registers per thread, counted for the M1 (assumed for `tensor`); 0 if the tile is
            refused.
        matrix_operations: 8x8x8 products per simdgroup and step.
        flop_per_byte: floating-point operations of a step for each byte that it loads from device memory.
    """

    variant: str
    tile: tuple[int, int, int]
    simdgroups: int
    activation_bytes: int
    code_bytes: int
    staging_bytes: int
    threadgroup_bytes: int
    refused: str
    occupancy: Occupancy | None
    accumulators: int
    half_registers: int
    matrix_operations: int
    flop_per_byte: float

    @property
    def share(self) -> float:
        """Returns the tile's threadgroup memory as a fraction of Metal's limit."""
        return self.threadgroup_bytes / int(native.threadgroup_limit())

    def waves(self, M: int, N: int, cores: int) -> float:
        """Returns the number of output tiles divided by the threadgroups that a GPU holds at once, without split K.

        Raises:
            ValueError: the tile is refused.
        """
        if self.occupancy is None:
            raise ValueError(f"TileRow.waves: {self.variant} {self.tile} cannot run: {self.refused}")
        tiles = -(-M // self.tile[0]) * -(-N // self.tile[1])
        return tiles / (cores * self.occupancy.threadgroups)


@dataclass(frozen=True)
class TileTable(RichText):
    """Every variant and tile shape for one GPU and one dtype of activations; prints as a table.

    Attributes:
        gpu: the GPU.
        dtype: dtype of the activations.
        rows: tiles that exist, then tiles that are refused.
    """

    gpu: AppleSiliconGPU
    dtype: torch.dtype
    rows: tuple[TileRow, ...]

    HEADINGS = (
        "variant", "tile", "simdgroups", "A bytes", "B bytes", "staging", "total", "of 32 KB", "threadgroups/core",
        "threads/core", "accumulators", "half-registers", "MMA/step", "flop/byte",
    )  # fmt: skip

    def cells(self) -> list[tuple[str, ...]]:
        """Returns the table's rows as text; the last cells of a refused tile are empty."""
        return [_cells(row) for row in self.rows]

    def __rich__(self) -> Table:
        dtype = str(self.dtype).removeprefix("torch.")
        table = Table(
            title=f"{dtype} activations on {self.gpu.name}; balance {self.gpu.balance:.1f} flop per byte",
            title_justify="left",
            caption_justify="left",
        )
        for heading in self.HEADINGS:
            table.add_column(heading, justify="left" if heading in ("variant", "tile") else "right", overflow="fold")
        for cells in self.cells():
            table.add_row(*cells)
        table.caption = "\n".join(f"refused: {row.refused}" for row in self.rows if row.refused)
        return table


def _cells(row: TileRow) -> tuple[str, ...]:
    memory = (row.activation_bytes, row.code_bytes, row.staging_bytes, row.threadgroup_bytes)
    held = row.occupancy
    return (
        row.variant,
        "x".join(map(str, row.tile)),
        str(row.simdgroups),
        *map(str, memory),
        f"{row.share:.0%}",
        str(held.threadgroups) if held else "refused",
        str(held.simdgroups * native.simd_width()) if held else "",
        str(row.accumulators),
        str(row.half_registers) if held else "",
        str(row.matrix_operations),
        f"{row.flop_per_byte:.1f}",
    )


def tile_table(gpu: AppleSiliconGPU | str | None = None, dtype: torch.dtype = torch.float16) -> TileTable:
    """Returns the memory and registers of every variant and tile shape, and how many threadgroups fit on a core.

    The table also lists common tile shapes that are refused because they exceed Metal's 32 KB of threadgroup memory.

    Args:
        gpu: a GPU, its name, or None for this machine's GPU.
        dtype: dtype of the activations.

    Raises:
        ValueError: the GPU is unknown, or the dtype is not float16, bfloat16 or float32.
    """
    found = as_gpu("tile_table", gpu)
    budgets = native.tile_budgets(element_name("tile_table", dtype))
    rows = [_row(entry, found) for entry in budgets if entry["variant"] != "tensor" or found.has_tensor_units]
    return TileTable(found, dtype, tuple(rows))


def _row(entry: dict[str, object], gpu: AppleSiliconGPU) -> TileRow:
    fields = dict(entry)
    held = None
    if not fields["refused"]:
        threads = int(native.simd_width()) * int(fields["simdgroups"])  # type: ignore[call-overload]
        found = native.occupancy(threads, fields["half_registers"], fields["threadgroup_bytes"], gpu.name)
        held = Occupancy(**found)
    return TileRow(occupancy=held, **fields)  # type: ignore[arg-type]


def occupancy(
    kernel: str, device: AppleSiliconGPU | str | None = None, dtype: torch.dtype = torch.float16
) -> dict[tuple[int, int, int], Occupancy]:
    """Returns how many threadgroups of a kernel a core holds at once, by tile shape.

    Args:
        kernel: a variant: "gemv", "fused", "double_buffered", "single_stage", "striped" or, on a GPU with tensor units,
            "tensor".
        device: a GPU, its name, or None for this machine's GPU.
        dtype: dtype of the activations.

    Raises:
        ValueError: an argument is unknown.
    """
    table = tile_table(device, dtype)
    found = {row.tile: row.occupancy for row in table.rows if row.variant == kernel and row.occupancy is not None}
    if not found:
        known = ", ".join(dict.fromkeys(row.variant for row in table.rows))
        raise ValueError(f"occupancy: kernel: expected one of {known}, got {kernel!r}")
    return found


@dataclass(frozen=True)
class Choice:
    """The planner's choice for a range of M. Every M of the range was planned.

    Attributes:
        first: smallest M of the range.
        last: largest M of the range.
        variant: the chosen variant.
        tile: the tile of the choice.
        seconds: predicted time for `last`.
        bound: the resource that limits the product at `last`.
    """

    first: int
    last: int
    variant: str
    tile: tuple[int, int, int]
    seconds: float
    bound: str


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
    """Returns the variant and tile that the planner chooses, for ranges of M.

    A range ends when the choice changes. It also ends when `rows` leaves out a value, because the choice for that value
    is not known.

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
    """
    found = as_gpu("selection_guide", gpu)
    guide: list[Choice] = []
    for M in rows:
        best = plan(M, N, K, weight_format=weight_format, group_size=group_size, dtype=dtype, gpu=found).chosen
        key = (M, best.variant, best.tile)
        continues = bool(guide) and (guide[-1].last + 1, guide[-1].variant, guide[-1].tile) == key
        first = guide.pop().first if continues else M
        guide.append(Choice(first, M, best.variant, best.tile, best.seconds, best.bound))
    return guide
