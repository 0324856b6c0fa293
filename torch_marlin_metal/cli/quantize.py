"""`torch-marlin-metal quantize`: packs a float checkpoint in 4 to 8 bits."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_marlin_metal.cli import arguments
from torch_marlin_metal.cli.convert import write
from torch_marlin_metal.cli.models import opened
from torch_marlin_metal.cli.output import DONE, Json, show
from torch_marlin_metal.convert import FloatReader
from torch_marlin_metal.models.quantize import quantize_model
from torch_marlin_metal.sizes import human_size

Include = Annotated[list[str] | None, typer.Option(help="Pattern of layers to quantize, or re:REGEX; may be repeated.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Pattern of layers to skip, or re:REGEX; may be repeated.")]
TOKENS, PIECES = 512, 128  # tokens of a piece, and pieces, of the text for --calibration


def quantize(
    source: arguments.Checkpoint,
    destination: arguments.Destination,
    weight_format: arguments.Format = "uint4b8",
    group_size: arguments.GroupSize = None,
    method: Annotated[str, typer.Option(help="rtn, or mse: scales with the least squared error.")] = "rtn",
    vocabulary_format: arguments.VocabularyFormat = None,
    memory: Annotated[
        str | None, typer.Option(help="Choose each layer's format, so that the model has so much: 9GB (of 10^9 bytes).")
    ] = None,
    like: Annotated[str | None, typer.Option(help="Choose each layer's format as llama.cpp does: Q4_K_M ...")] = None,
    calibration: Annotated[Path | None, typer.Option(help="With --memory: a text that shows what errors cost.")] = None,
    device: arguments.Device = None,
    include: Include = None,
    exclude: Exclude = None,
    allow_pickle: arguments.AllowPickle = False,
    shard_mb: arguments.ShardSize = 512,
    sync: arguments.Sync = False,
    as_json: Json = False,
) -> int:
    """Quantizes a float checkpoint to 4-8 bits.

    One layer is in memory at a time. With --calibration, the complete model is loaded first. After an interruption, the
    same command resumes.
    """
    choice: dict[str, Any] = {"include": include or None, "exclude": exclude or ()}
    choice["vocabulary_format"] = vocabulary_format
    how = (weight_format, group_size, method)
    fit = None
    if calibration is not None:
        if memory is None:
            raise ValueError("--calibration: expected --memory with it, which says how much the text may spend")
        words = opened.open_tokenizer(source, None)
        ids = opened.read_pieces("--calibration", calibration, words, TOKENS, PIECES).to(arguments.device_of(device))
        model = opened.Opened.of(source, str(ids.device.type), None, None, fuse=False).model
        fit = quantize_model(model, *how, memory=memory, calibration=ids, progress=False, atomic=False, **choice).fit
        choice["chosen"], memory = fit and fit.chosen(), None
    reader = FloatReader(source, *how, memory=memory, like=like, allow_pickle=allow_pickle, **choice)
    fit = fit or reader.fit
    size = write(reader, destination, as_json, max_shard_bytes=shard_mb * 10**6, sync=sync)
    left, kinds = reader.left, Counter(reader.formats())
    value: dict[str, Any] = {"source": str(source), "destination": str(destination), "method": method}
    value |= {"layers": len(reader), "formats": kinds, "bytes": size, "left_in_floats": left}
    what = ", ".join(f"{count} in {name}" for name, count in kinds.items())
    text = f"{destination}: {len(reader)} layers by {method}, {what}: {human_size(size)}"
    if fit is not None:
        text += f"\n{fit.summary()}\n{fit.plot()}"
        curve = [{"bits": one.bits, "bytes": one.total_bytes, "error": one.error} for one in fit.curve()]
        value |= {"error": fit.error, "curve": curve}
    if left:
        rest = sum(left.values())
        largest = ", ".join([*sorted(left, key=lambda name: -left[name])[:4], *(["..."] if len(left) > 4 else [])])
        share = rest / (rest + reader.taken_bytes)
        text += f"\n{human_size(rest)} of matrices stay in floats ({share:.0%}): {largest}"
    show(value, text, as_json)
    return DONE
