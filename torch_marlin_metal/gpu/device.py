"""The figures of Apple's GPUs with their sources, from the planner's table `csrc/planner/chips.h`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from rich.table import Table

from torch_marlin_metal.extension import native
from torch_marlin_metal.printing import RichText, table


@dataclass(frozen=True)
class Figure:
    """A number and its source."""

    value: float
    source: str


@dataclass(frozen=True)
class AppleSiliconGPU(RichText):
    """A GPU: a chip of the planner's table with a number of cores.

    Attributes:
        name: the name of the chip, for example "M1 Max".
        cores: number of GPU cores.
        family: the Apple GPU family in Metal's feature tables, for example 7 for the M1.
        has_bfloat: True if the hardware has bfloat arithmetic.
        figures: all other figures by name. `csrc/planner/chips.h` defines each figure. Rates of tensor units are
            omitted for a GPU without tensor units.

    Examples:
        >>> tmm.profiling.AppleSiliconGPU.from_name("M4 Max").cores
        40
    """

    name: str
    cores: int
    family: int
    has_bfloat: bool
    figures: dict[str, Figure]

    @staticmethod
    def names() -> tuple[str, ...]:
        """Returns the names of all chips in the table, oldest first."""
        return tuple(row[0] for row in native.chips())

    @classmethod
    def from_name(cls, name: str, cores: int | None = None) -> AppleSiliconGPU:
        """Returns the GPU of a chip in the table.

        Args:
            name: the name of the chip, for example "M1" or "M3 Max". The prefix "Apple " is allowed.
            cores: the number of GPU cores, for a chip version with fewer cores (an M1 with 7, an M3 Max with 30).

        Raises:
            ValueError: the table lacks the chip, or the chip has no version with this number of cores.
        """
        chips = {row[0]: row for row in native.chips()}
        chip = chips.get(name.removeprefix("Apple "))
        if chip is None:
            raise ValueError(f"AppleSiliconGPU.from_name: name: expected one of {', '.join(chips)}, got {name!r}")
        full_name, family, most, fewest, figures = chip
        cores = most if cores is None else cores
        if not fewest <= cores <= most:
            raise ValueError(
                f"AppleSiliconGPU.from_name: cores: expected {fewest} to {most} for {full_name}, got {cores}"
            )
        _, has_bfloat, of_family = next(row for row in native.gpu_families() if row[0] == family)
        named = {key: Figure(*value) for key, value in {**figures, **of_family}.items()}
        return cls(full_name, cores, family, has_bfloat, named)

    @classmethod
    def current(cls) -> AppleSiliconGPU:
        """Returns the GPU of this Mac, which PyTorch reports.

        Raises:
            RuntimeError: torch has no MPS device here.
            ValueError: the table lacks the GPU. The message states the GPU's name.
        """
        if not torch.backends.mps.is_available():
            raise RuntimeError(
                "AppleSiliconGPU.current: this machine has no GPU that torch can use through MPS: "
                "name one by AppleSiliconGPU.from_name(...)"
            )
        name = torch.backends.mps.get_name()
        if name.removeprefix("Apple ") not in cls.names():
            raise ValueError(
                f"AppleSiliconGPU.current: expected one of {', '.join(cls.names())}, this GPU calls itself {name!r}"
            )
        return cls.from_name(name, torch.backends.mps.get_core_count())

    @classmethod
    def planned(cls) -> AppleSiliconGPU:
        """Returns the GPU for which this process plans its mps operators.

        If `TORCH_MARLIN_METAL_GPU` is set, returns the chip with this name. Otherwise, returns this machine's GPU if
        the table has it. If not, returns the chip with the nearest number of cores, and the oldest chip on a tie.

        Raises:
            RuntimeError: torch has no MPS device here.
            ValueError: `TORCH_MARLIN_METAL_GPU` is not the name of a chip.
        """
        if not torch.backends.mps.is_available():
            raise RuntimeError("AppleSiliconGPU.planned: this machine has no GPU that torch can use through MPS")
        name, cores = native.gpu_device(torch.backends.mps.get_name(), torch.backends.mps.get_core_count())
        return replace(cls.from_name(name), cores=cores)

    @property
    def clock_hz(self) -> float:
        """Returns the GPU clock in Hz."""
        return self.figures["clock_ghz"].value * 1e9

    @property
    def dram_bytes_per_second(self) -> float:
        """Returns the peak memory bandwidth of the chip version with this number of cores, in bytes per second."""
        whole = self.from_name(self.name)
        return 1e9 * self.figures["dram_gbs_fewest_cores" if self.cores < whole.cores else "dram_gbs"].value

    @property
    def reachable_dram_bytes_per_second(self) -> float:
        """Returns the memory bandwidth that reading kernels reach, in bytes per second."""
        return self.dram_bytes_per_second * self.figures["dram_fraction"].value

    def flop_per_second(self, dtype: torch.dtype = torch.float32) -> float:
        """Returns the peak rate of multiply-adds in flop/s. A multiply-add is two operations.

        Raises:
            ValueError: the dtype is not float16, bfloat16 or float32.
        """
        names = {torch.float16: "fp16", torch.bfloat16: "fp32", torch.float32: "fp32"}
        if dtype not in names:
            raise ValueError(f"flop_per_second: dtype: expected float16, bfloat16 or float32, got {dtype}")
        return self.figures[f"{names[dtype]}_flop_per_clock"].value * self.cores * self.clock_hz

    @property
    def has_tensor_units(self) -> bool:
        """Returns True if the GPU has tensor units, like the M5. `variant="tensor"` uses them."""
        return "tensor_clocks_fp16" in self.figures

    @property
    def matrix_flop_per_second(self) -> float:
        """Returns the peak rate of 8x8x8 matrix products with fp32 fragments, in flop/s."""
        clocks = self.figures["matrix_clocks_fp32"].value
        return 2 * 8**3 / clocks * self.figures["schedulers"].value * self.cores * self.clock_hz

    @property
    def balance(self) -> float:
        """Returns the peak rate of matrix products divided by the reachable memory bandwidth, in flop per byte."""
        return self.matrix_flop_per_second / self.reachable_dram_bytes_per_second

    def __rich__(self) -> Table:
        rows = [(key, f"{figure.value:g}", figure.source) for key, figure in self.figures.items()]
        derived = "derived from the rows above"
        rows += [
            ("fp32 TFLOP/s", f"{self.flop_per_second() / 1e12:.2f}", derived),
            ("fp16 TFLOP/s", f"{self.flop_per_second(torch.float16) / 1e12:.2f}", derived),
            ("matrix TFLOP/s", f"{self.matrix_flop_per_second / 1e12:.2f}", derived),
            ("matrix flop per byte", f"{self.balance:.1f}", derived),
        ]
        title = f"{self.name}, {self.cores} GPU cores, Apple{self.family}"
        return table(title, "figure", "value", "source", rows=rows, right=["value"])


def as_gpu(function: str, gpu: AppleSiliconGPU | str | None) -> AppleSiliconGPU:
    """Converts an argument to a GPU. The argument is a GPU, a name, or None for `AppleSiliconGPU.planned()`.

    Raises:
        ValueError: the name is unknown, or the argument is None and this machine has no GPU.
    """
    if isinstance(gpu, AppleSiliconGPU):
        return gpu
    if gpu is not None:
        return AppleSiliconGPU.from_name(gpu)
    if not torch.backends.mps.is_available():
        known = ", ".join(AppleSiliconGPU.names())
        raise ValueError(f"{function}: gpu: expected one of {known} (this machine has no GPU of its own), got None")
    return AppleSiliconGPU.planned()
