"""`torch-marlin-metal tune`: measures the planner's candidates on this GPU and stores the fastest."""

from pathlib import Path
from typing import Annotated

import typer

from torch_marlin_metal import tuning
from torch_marlin_metal.cli.arguments import ColdMb, Dtype, Format, GroupSize, Rows, Shapes, floating, product_of
from torch_marlin_metal.cli.output import DONE, Json, show
from torch_marlin_metal.gpu.tuning.tuner import ROWS
from torch_marlin_metal.printing import table


def tune(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="A checkpoint directory or a .gguf file: its products are tuned.")
    ] = None,
    shape: Shapes = None,
    rows: Rows = None,
    weight_format: Format = "uint4b8",
    group_size: GroupSize = None,
    dtype: Dtype = "float16",
    output: Annotated[Path | None, typer.Option(help="The file. Default: the one that later processes read.")] = None,
    cold_mb: ColdMb = None,
    as_json: Json = False,
) -> int:
    """Finds the fastest kernels on this GPU.

    Times the planner's candidates for the products of a checkpoint or for given shapes. If a candidate is faster than
    the planner's own choice, it is written to a file. Later processes use the file if they have the same GPU, torch
    version and package version. The variable `TORCH_MARLIN_METAL_TUNED` names another file.
    """
    floating(dtype)
    products = [] if checkpoint is None else tuning.products_of(checkpoint, dtype)
    products += [product_of("tune", text, weight_format, group_size, dtype) for text in shape or []]
    if not products:
        raise ValueError("tune: expected a checkpoint with layers of ours, or --shape N,K")
    chosen_rows = sorted(set(rows)) if rows else ROWS
    found = tuning.tune(products, rows=chosen_rows, cold_bytes=(cold_mb or 256) * 10**6, progress=not as_json)
    path = tuning.save(found, output)
    rows_shown, changed = [], 0
    for entry in found.ranges:
        same = entry.variant == entry.model_variant
        changed += not same
        faster = ("the same", "") if same else (entry.model_variant, f"{entry.speedup:.2f}")
        cells = (str(entry.product), str(entry.last_rows), entry.variant, f"{entry.seconds * 1e6:.1f}", *faster)
        rows_shown.append(cells)
    shown = table(
        f"{found.machine.gpu}, {found.machine.cores} cores, torch {found.machine.torch}",
        *("product", "M", "fastest", "us", "model's choice", "times faster"),
        rows=rows_shown,
        right=("M", "us", "times faster"),
        caption=f"{changed} of {len(found.ranges)} choices differ from the planner's; written to {path}",
    )
    ranges = [{**vars(entry), "product": vars(entry.product)} for entry in found.ranges]
    value = {"machine": vars(found.machine), "path": str(path), "changed": changed, "ranges": ranges}
    show(value, shown, as_json)
    return DONE
