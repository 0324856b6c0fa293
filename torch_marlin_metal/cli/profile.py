"""`torch-marlin-metal profile`: shows the planner's data for a GPU: figures, tiles, choice for each M, roofline."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Group

from torch_marlin_metal.cli import arguments
from torch_marlin_metal.cli.output import DONE, Json, show
from torch_marlin_metal.gpu.measured import measure_gpu
from torch_marlin_metal.gpu.profiling.tiles import Choice
from torch_marlin_metal.printing import table
from torch_marlin_metal.profiling import roofline, selection_guide, tile_table


def profile(
    gpu: arguments.Gpu = None,
    cores: arguments.Cores = None,
    shape: arguments.Shapes = None,
    rows: arguments.Rows = None,
    weight_format: arguments.Format = "uint4b8",
    group_size: arguments.GroupSize = None,
    dtype: arguments.Dtype = "float16",
    plot: Annotated[Path | None, typer.Option(help="Draw the roofline into this file.")] = None,
    measured: Annotated[bool, typer.Option("--measure", help="Also measure this Mac's rates.")] = False,
    as_json: Json = False,
) -> int:
    """Shows the planner's data for a GPU.

    Prints figures with their sources, tiles, the choice for each M, and a roofline. Runs kernels only with --measure:
    small kernels measure the rates of memory, matrix products and instructions, and the time of a dispatch.
    """
    if measured and (gpu is not None or not torch.backends.mps.is_available()):
        raise ValueError(f"profile: --measure: expected a Mac's GPU and no --gpu, got --gpu {gpu}")
    found = arguments.gpu_of("profile", gpu, cores)
    element = arguments.floating(dtype)
    shapes = [arguments.shape_of(text) for text in shape or ["4096,4096", "4096,14336"]]
    products = [(M, N, K) for N, K in shapes for M in rows or [1, 4, 8, 16, 32, 128, 1024]]
    tiles = tile_table(found, element)
    roof = roofline(found, products, weight_format=weight_format, group_size=group_size, dtype=element)
    guides = {
        f"{N},{K}": selection_guide(found, N, K, weight_format=weight_format, group_size=group_size, dtype=element)
        for N, K in shapes
    }
    if plot is not None:
        roof.plot(plot)
    shown = [
        table(f"choice for N,K = {name}", "M", "variant", "tile", rows=map(_row, guide), right=["M"])
        for name, guide in guides.items()
    ]
    value: dict[str, Any] = {
        "gpu": asdict(found),
        "tiles": [asdict(row) for row in tiles.rows],
        "choices": {name: [asdict(choice) for choice in guide] for name, guide in guides.items()},
        "roofline": [asdict(point) for point in roof.points],
    }
    parts: list[Any] = [found, tiles, *shown, roof]
    if measured:
        rates = measure_gpu()
        value["measured"] = rates.as_dict()
        parts.append(rates)
    show(value, Group(*parts), as_json)
    return DONE


def _row(choice: Choice) -> tuple[str, str, str]:
    span = str(choice.first) if choice.first == choice.last else f"{choice.first} to {choice.last}"
    return span, choice.variant, "x".join(map(str, choice.tile))
