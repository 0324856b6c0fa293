"""The roofline of a GPU: the rates that memory bandwidth and matrix unit allow for given products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from torch_marlin_metal.formats import weight_format as format_of
from torch_marlin_metal.gpu.device import AppleSiliconGPU, as_gpu
from torch_marlin_metal.gpu.planning import GemmPlan, plan
from torch_marlin_metal.printing import RichText, table


@dataclass(frozen=True)
class RooflinePoint:
    """A product in a roofline.

    Attributes:
        M: rows of the activations.
        N: columns of the weight.
        K: rows of the weight.
        variant: the variant that the planner chooses.
        intensity: floating-point operations per byte, if each byte is moved once.
        attainable: the highest rate in flop/s that memory bandwidth and matrix unit allow at this intensity.
    """

    M: int
    N: int
    K: int
    variant: str
    intensity: float
    attainable: float


@dataclass(frozen=True)
class Roofline(RichText):
    """A GPU's roofline and the products below it.

    Attributes:
        gpu: the GPU that computes the products.
        weight_format: weight format of the products.
        points: a point for each product, in the order of `shapes`.
    """

    gpu: AppleSiliconGPU
    weight_format: str
    points: tuple[RooflinePoint, ...]

    def __rich__(self) -> Table:
        roofs = (
            f"{self.gpu.matrix_flop_per_second / 1e12:.2f} TFLOP/s of matrix products, "
            f"{self.bandwidth / 1e9:.0f} GB/s, balance {self.gpu.balance:.1f} flop per byte"
        )
        title = f"{self.weight_format} on {self.gpu.name} ({self.gpu.cores} cores): {roofs}"
        rows = [
            (
                *map(str, (point.M, point.N, point.K, point.variant)),
                *(f"{point.intensity:.1f}", f"{point.attainable / 1e12:.3f}"),
            )
            for point in self.points
        ]
        right = ("M", "N", "K", "flop/byte", "roof TFLOP/s")
        return table(title, *right[:3], "variant", *right[3:], rows=rows, right=right)

    def plot(self, path: str | Path) -> None:
        """Draws the roofline into a file. The ending of the file's name selects the image format.

        Raises:
            ImportError: matplotlib is not installed (`pip install matplotlib`).
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("Roofline.plot: needs matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        highest = max([2 * self.gpu.balance, *(point.intensity for point in self.points)])
        lowest = min([self.gpu.balance / 2, *(point.intensity for point in self.points)])
        roof = [lowest / 2, self.gpu.balance, highest * 2]
        axes.plot(roof, [min(self.gpu.matrix_flop_per_second, x * self.bandwidth) / 1e12 for x in roof], color="black")
        for variant in sorted({point.variant for point in self.points}):
            points = [point for point in self.points if point.variant == variant]
            axes.scatter(
                [point.intensity for point in points], [point.attainable / 1e12 for point in points], label=variant
            )
        for point in self.points:
            axes.annotate(
                f"{point.M}x{point.N}x{point.K}",
                (point.intensity, point.attainable / 1e12),
                textcoords="offset points",
                xytext=(4, -10),
                fontsize=7,
            )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="flop per byte of memory traffic",
            ylabel="TFLOP/s",
            title=f"{self.weight_format} on {self.gpu.name} ({self.gpu.cores} cores)",
        )
        axes.legend()
        figure.savefig(path)

    @property
    def bandwidth(self) -> float:
        """Returns the memory bandwidth that reading kernels reach, in bytes per second."""
        return self.gpu.reachable_dram_bytes_per_second


def roofline(
    gpu: AppleSiliconGPU | str | None,
    shapes: Iterable[tuple[int, int, int]],
    *,
    weight_format: str = "uint4b8",
    group_size: int | None = None,
    dtype: torch.dtype = torch.float16,
) -> Roofline:
    """Computes a GPU's roofline and the position of products below it.

    Args:
        gpu: a GPU, its name, or None for this machine's GPU.
        shapes: (M, N, K) of each product.
        weight_format: weight format of all products.
        group_size: group size of all products, as in `quantize_weight`.
        dtype: dtype of the activations.

    Raises:
        ValueError: an argument is unknown or out of range.

    Examples:
        >>> len(tmm.profiling.roofline("M1", [(1, 4096, 4096)]).points)
        1
    """
    found = as_gpu("roofline", gpu)
    points = []
    for M, N, K in shapes:
        planned = plan(M, N, K, weight_format=weight_format, group_size=group_size, dtype=dtype, gpu=found)
        flop = 2.0 * M * N * K
        moved = _weight_bytes(planned) + (M * K + M * N) * dtype.itemsize
        intensity = flop / moved
        roof = min(found.matrix_flop_per_second, intensity * found.reachable_dram_bytes_per_second)
        points.append(RooflinePoint(M, N, K, planned.chosen.variant, intensity, roof))
    return Roofline(found, weight_format, tuple(points))


def _weight_bytes(planned: GemmPlan) -> float:
    row = format_of(planned.weight_format)
    of_group = 1 if row.has_coded_scales else planned.dtype.itemsize
    zeros = {"none": 0, "zero_point": 1, "bias": planned.dtype.itemsize}[row.zeros_role]
    groups = -(-planned.K // planned.group_size)
    return planned.N * (row.code_bits / 8 * planned.K + groups * (of_group + zeros))
