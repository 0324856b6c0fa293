"""`torch-marlin-metal quantize`: converts a float checkpoint to 4 bit."""

from collections import Counter
from typing import Annotated, Any

import typer

from torch_marlin_metal.cli import arguments
from torch_marlin_metal.cli.convert import write
from torch_marlin_metal.cli.output import DONE, Json, show
from torch_marlin_metal.convert import FloatReader
from torch_marlin_metal.sizes import human_size

Include = Annotated[list[str] | None, typer.Option(help="Pattern of layers to quantize, or re:REGEX; may be repeated.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Pattern of layers to skip, or re:REGEX; may be repeated.")]


def quantize(
    source: arguments.Checkpoint,
    destination: arguments.Destination,
    weight_format: arguments.Format = "uint4b8",
    group_size: arguments.GroupSize = None,
    method: Annotated[str, typer.Option(help="rtn, or mse: scales with the least squared error.")] = "rtn",
    vocabulary_format: arguments.VocabularyFormat = None,
    memory: Annotated[
        str | None, typer.Option(help="Choose each layer's format, so that the model has so many bytes: 9GB, 8.5GiB.")
    ] = None,
    like: Annotated[str | None, typer.Option(help="Choose each layer's format as llama.cpp does: Q4_K_M ...")] = None,
    include: Include = None,
    exclude: Exclude = None,
    allow_pickle: arguments.AllowPickle = False,
    shard_mb: arguments.ShardSize = 512,
    sync: arguments.Sync = False,
    as_json: Json = False,
) -> int:
    """Quantizes a float checkpoint to 4 bit, one layer at a time. After an interruption, the same command resumes."""
    reader = FloatReader(
        source,
        weight_format,
        group_size,
        method,
        include=include or None,
        exclude=exclude or (),
        vocabulary_format=vocabulary_format,
        memory=memory,
        like=like,
        allow_pickle=allow_pickle,
    )
    size = write(reader, destination, as_json, max_shard_bytes=shard_mb * 10**6, sync=sync)
    left, kinds = reader.left, Counter(reader.formats())
    value: dict[str, Any] = {"source": str(source), "destination": str(destination), "method": method}
    value |= {"layers": len(reader), "formats": kinds, "bytes": size, "left_in_floats": left}
    what = ", ".join(f"{count} in {name}" for name, count in kinds.items())
    text = f"{destination}: {len(reader)} layers by {method}, {what}: {human_size(size)}"
    if reader.fit is not None:
        text += f"\n{reader.fit.summary()}\n{reader.fit.plot()}"
        curve = [{"bits": one.bits, "bytes": one.total_bytes, "error": one.error} for one in reader.fit.curve()]
        value |= {"error": reader.fit.error, "curve": curve}
    if left:
        rest = sum(left.values())
        largest = ", ".join([*sorted(left, key=lambda name: -left[name])[:4], *(["..."] if len(left) > 4 else [])])
        share = rest / (rest + reader.taken_bytes)
        text += f"\n{human_size(rest)} of matrices stay in floats ({share:.0%}): {largest}"
    show(value, text, as_json)
    return DONE
