"""`torch-marlin-metal quantize`: floats in, a 4-bit checkpoint out."""

from typing import Annotated

import typer

from torch_marlin_metal.cli import arguments
from torch_marlin_metal.cli.output import DONE, Json, human_bytes, show
from torch_marlin_metal.cli.writing import directory_bytes, write
from torch_marlin_metal.convert import FloatReader


def quantize(
    source: arguments.Checkpoint,
    destination: arguments.Destination,
    weight_format: Annotated[
        str, typer.Option("--weight-format", help="uint4b8, uint4, nvfp4, mxfp4, nf4 ...")
    ] = "uint4b8",
    group_size: Annotated[int | None, typer.Option(help="Weights along k that share a scale; -1 is all.")] = None,
    method: Annotated[str, typer.Option(help="rtn or mse.")] = "rtn",
    include: Annotated[list[str] | None, typer.Option(help="Pattern of layers to quantize; may be repeated.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Pattern of layers to leave; may be repeated.")] = None,
    allow_pickle: arguments.AllowPickle = False,
    shard_mb: arguments.ShardSize = 512,
    sync: arguments.Sync = False,
    as_json: Json = False,
) -> int:
    """Quantizes a checkpoint of floats to 4 bit, one layer at a time; the same call goes on after an interruption."""
    reader = FloatReader(
        source,
        weight_format,
        group_size,
        method,
        include=include or None,
        exclude=exclude or (),
        allow_pickle=allow_pickle,
    )
    write(reader, destination, as_json, max_shard_bytes=shard_mb * 10**6, sync=sync)
    size = directory_bytes(destination)
    value = {"source": str(source), "destination": str(destination), "weight_format": weight_format, "method": method}
    text = f"{destination}: {len(reader)} layers in {weight_format} by {method}, {human_bytes(size)}"
    show(value | {"layers": len(reader), "bytes": size}, text, as_json)
    return DONE
