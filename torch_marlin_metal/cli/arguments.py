"""Arguments that several commands take."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class OnUnsupported(str, Enum):
    """What happens to a layer that the operators cannot represent without loss."""

    error = "error"
    dequantize = "dequantize"
    skip = "skip"


class GgufNames(str, Enum):
    """Names for the tensors of a GGUF file."""

    gguf = "gguf"
    hf = "hf"


class ZerosRule(str, Enum):
    """How GPTQ version 1 zero points are read where writers differ."""

    word = "word"
    masked = "masked"
    unmasked = "unmasked"


Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint directory or a .gguf file.", show_default=False)]
Destination = Annotated[Path, typer.Argument(help="The directory to make; it must not exist.", show_default=False)]
AllowPickle = Annotated[bool, typer.Option(help="Read PyTorch pickles too, by torch.load(weights_only=True).")]
Names = Annotated[GgufNames, typer.Option(help="Names of a GGUF file's tensors: its own, or transformers'.")]
GptqVersion = Annotated[int | None, typer.Option(help="1 or 2, where a GPTQ checkpoint's settings are wrong about it.")]
GptqZerosRule = Annotated[ZerosRule, typer.Option(help="How GPTQ version 1 zero points of raw value 15 are read.")]
ShardSize = Annotated[int, typer.Option(min=1, help="Size in MB at which a file is closed and the next begun.")]
Sync = Annotated[bool, typer.Option(help="Wait until all is on the disk before the destination gets its name.")]
