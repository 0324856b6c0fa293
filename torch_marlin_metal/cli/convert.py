"""`torch-marlin-metal convert`: writes a checkpoint in this package's format or another program's."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_marlin_metal.checkpoints.options import OnUnsupported
from torch_marlin_metal.checkpoints.settings import find_settings
from torch_marlin_metal.checkpoints.writer import TARGETS
from torch_marlin_metal.cli import arguments
from torch_marlin_metal.cli.output import DONE, Json, progress_bar, show
from torch_marlin_metal.convert import CheckpointReader, open_reader, write_checkpoint
from torch_marlin_metal.printing import printable
from torch_marlin_metal.sizes import human_size

Target = Enum("Target", {name: name for name in TARGETS}, type=str)  # type: ignore[misc]
NATIVE = Target("native")


def convert(
    source: arguments.Checkpoint,
    destination: arguments.Destination,
    to: Annotated[Target, typer.Option("--format", help="What to write.")] = NATIVE,
    on_unsupported: Annotated[
        OnUnsupported, typer.Option(help="What to do with a layer that cannot be packed without loss.")
    ] = "error",
    allow_pickle: arguments.AllowPickle = False,
    gguf_names: arguments.Names = "gguf",
    gptq_version: arguments.GptqVersion = None,
    gptq_zeros_rule: arguments.GptqZerosRule = "word",
    write_gptq_version: Annotated[
        int | None, typer.Option(min=1, max=2, help="For --format gptq: version 2 can store a zero point of 0.")
    ] = None,
    shard_mb: arguments.ShardSize = 512,
    sync: arguments.Sync = False,
    as_json: Json = False,
) -> int:
    """Converts a checkpoint without loss. After an interruption, the same command resumes.

    Files are written into DESTINATION.partial, which is renamed when it is complete.
    """
    if write_gptq_version is not None and to.value != "gptq":
        raise ValueError(f"--write-gptq-version is for --format gptq, got --format {to.value}")
    reader = open_reader(
        source,
        on_unsupported=on_unsupported,
        allow_pickle=allow_pickle,
        gptq_version=gptq_version,
        gptq_zeros_rule=gptq_zeros_rule,
        gguf_names=gguf_names,
    )
    options = {} if write_gptq_version is None else {"version": write_gptq_version}
    size = write(reader, destination, as_json, target=to.value, max_shard_bytes=shard_mb * 10**6, sync=sync, **options)
    is_packed = find_settings(destination) is not None
    value = {"source": str(source), "destination": str(destination), "format": to.value}
    result = to.value if is_packed else "floats: no layer is 4 bit, so the directory has no quantization settings"
    text = f"{destination}: {len(reader)} layers, from {reader.format.name} to {result}, {human_size(size)}"
    show(value | {"layers": len(reader), "is_packed": is_packed, "bytes": size}, text, as_json)
    return DONE


def write(reader: CheckpointReader, destination: Path, as_json: bool, **options: Any) -> int:
    """Calls `write_checkpoint` with a progress bar. Returns the bytes of the written files."""
    with progress_bar(0, "tensor", as_json) as bar:

        def advance(name: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_postfix_str(printable(name), refresh=False)
            bar.update(done - bar.n)

        write_checkpoint(reader, destination, progress=advance, **options)
    return sum(file.stat().st_size for file in destination.iterdir())
