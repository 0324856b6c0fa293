"""`torch-marlin-metal quantize`: converts a float checkpoint to 4 bit."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_marlin_metal.cli import arguments, calibrated
from torch_marlin_metal.cli.output import DONE, Json, show
from torch_marlin_metal.cli.writing import directory_bytes, write
from torch_marlin_metal.convert import CheckpointReader, FloatReader, open_reader
from torch_marlin_metal.sizes import human_size

Include = Annotated[list[str] | None, typer.Option(help="Pattern of layers to quantize, or re:REGEX; may be repeated.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Pattern of layers to skip, or re:REGEX; may be repeated.")]


def quantize(
    source: arguments.Checkpoint,
    destination: arguments.Destination,
    weight_format: arguments.Format = "uint4b8",
    group_size: arguments.GroupSize = None,
    method: Annotated[
        str,
        typer.Option(help="rtn or mse; or gptq, awq (GPTQModel) or autoround, which need that package and a text."),
    ] = "rtn",
    calibration: Annotated[
        Path | None,
        typer.Option(help="A text file to run through the model: for calibrated methods, or for --memory."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Pieces of the calibration text.")] = 128,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a piece of the calibration text.")] = 512,
    vocabulary_format: arguments.VocabularyFormat = None,
    memory: Annotated[
        str | None, typer.Option(help="Choose each layer's format, so that the model has so many bytes: 9GB, 8.5GiB.")
    ] = None,
    like: Annotated[str | None, typer.Option(help="Choose each layer's format as llama.cpp does: Q4_K_M ...")] = None,
    device: Annotated[str, typer.Option(help="Where the text is run.")] = "cpu",
    include: Include = None,
    exclude: Exclude = None,
    allow_pickle: arguments.AllowPickle = False,
    shard_mb: arguments.ShardSize = 512,
    sync: arguments.Sync = False,
    as_json: Json = False,
) -> int:
    """Quantizes a float checkpoint to 4 bit, one layer at a time. After an interruption, the same command resumes.

    What runs a text is different: it loads the whole model, and it starts again after an interruption.
    """
    options = {"max_shard_bytes": shard_mb * 10**6, "sync": sync}
    reader: CheckpointReader
    left: dict[str, int] = {}
    value: dict[str, Any] = {"source": str(source), "destination": str(destination), "method": method}
    floats = ""
    if method in calibrated.METHODS:
        if include or exclude:
            raise ValueError(
                f"--include and --exclude are for rtn and mse; {method} takes the layers that its package takes"
            )
        if (memory, like, vocabulary_format) != (None, None, None):
            raise ValueError(
                f"--memory, --like and --vocabulary-format are for rtn and mse; {method} has one format for all layers"
            )
        if destination.exists():
            raise FileExistsError(f"{destination}: exists already")
        pieces = calibrated.Text(calibration, samples, length)
        with calibrated.quantized(source, destination, method, weight_format, group_size, pieces, device) as made:
            reader = open_reader(made)
            write(reader, destination, as_json, **options)
    else:
        fit = None
        choice: dict[str, Any] = {"include": include or None, "exclude": exclude or ()}
        choice["vocabulary_format"] = vocabulary_format
        if calibration is not None:
            if memory is None:
                raise ValueError(
                    f"--calibration is for --memory and for {', '.join(calibrated.METHODS)}; without them, {method} "
                    "looks at the weights alone"
                )
            pieces = calibrated.Text(calibration, samples, length)
            fit = calibrated.fitted(source, pieces, device, weight_format, group_size, method, memory, **choice).fit
        reader = FloatReader(
            source,
            weight_format,
            group_size,
            method,
            memory=memory if fit is None else None,
            like=like,
            chosen=None if fit is None else fit.chosen(),
            allow_pickle=allow_pickle,
            **choice,
        )
        write(reader, destination, as_json, **options)
        left = reader.left
        if (fit := fit or reader.fit) is not None:
            floats = f"\n{fit.summary()}\n{fit.plot()}"
            curve = [{"bits": one.bits, "bytes": one.total_bytes, "error": one.error} for one in fit.curve()]
            value |= {"error": fit.error, "curve": curve}
        rest, whole = sum(left.values()), sum(left.values()) + reader.taken_bytes
        if left:
            largest = ", ".join(sorted(left, key=lambda name: -left[name])[:4])
            floats += f"\n{human_size(rest)} of matrices stay in floats ({rest / whole:.0%}): {largest}"
            floats += ", ..." if len(left) > 4 else ""
    size = directory_bytes(destination)
    kinds = Counter(reader.formats()) if isinstance(reader, FloatReader) else Counter([weight_format] * len(reader))
    what = ", ".join(f"{count} in {name}" for name, count in kinds.items())
    text = f"{destination}: {len(reader)} layers by {method}, {what}: {human_size(size)}"
    value |= {"layers": len(reader), "formats": kinds, "bytes": size, "left_in_floats": left}
    show(value, text + floats, as_json)
    return DONE
