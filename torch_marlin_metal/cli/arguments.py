"""Arguments shared by several commands."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from torch_marlin_metal.checkpoints.options import GgufNames
from torch_marlin_metal.formats import resolve_group_size
from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.gpu.device import AppleSiliconGPU, as_gpu
from torch_marlin_metal.gpu.tuning.products import Product
from torch_marlin_metal.repack import ZerosRule

Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint directory or a .gguf file.", show_default=False)]
Destination = Annotated[Path, typer.Argument(help="The directory to make; it must not exist.", show_default=False)]
AllowPickle = Annotated[bool, typer.Option(help="Read PyTorch pickles too, by torch.load(weights_only=True).")]
Names = Annotated[GgufNames, typer.Option(help="Names of a GGUF file's tensors: its own, or transformers'.")]
GptqVersion = Annotated[int | None, typer.Option(help="1 or 2, if a GPTQ checkpoint's settings are wrong about it.")]
GptqZerosRule = Annotated[ZerosRule, typer.Option(help="How GPTQ version 1 zero points of raw value 15 are read.")]
ShardSize = Annotated[int, typer.Option(min=1, help="Size in MB at which a file is closed and the next begun.")]
Sync = Annotated[bool, typer.Option(help="Wait until everything is on the disk.")]
Gpu = Annotated[str | None, typer.Option(help="A chip: M1, M3 Max ... Default: this machine's.")]
Cores = Annotated[
    int | None, typer.Option(help="GPU cores of the chip in --gpu. Default: those of the version with all cores.")
]
Format = Annotated[str, typer.Option("--weight-format", help="uint4b8, nf4 ... (all: docs/formats/formats.md).")]
VocabularyFormat = Annotated[
    str | None,
    typer.Option(help="Format of embedding and output layer, or none for floats. Default: uint8b128."),
]
GroupSize = Annotated[
    int | None,
    typer.Option(help="Weights along k that share a scale; -1 for all. Default: the format's fixed size, else 128."),
]
Dtype = Annotated[str, typer.Option(help="Dtype of the activations: float16, bfloat16 or float32.")]
Shapes = Annotated[list[str] | None, typer.Option("--shape", help="N,K of a weight; may be repeated.")]
Rows = Annotated[list[int] | None, typer.Option(min=1, help="M, rows of the activations; may be repeated.")]
ColdMb = Annotated[int | None, typer.Option(min=1, help="MB of clones of weights, for cold caches. Default: 256.")]
Device = Annotated[str | None, typer.Option(help="mps or cpu. Default: mps if there is one.")]


def device_of(name: str | None) -> str:
    has_mps = torch.backends.mps.is_available()
    chosen = name or ("mps" if has_mps else "cpu")
    if chosen not in ("mps", "cpu") or (chosen == "mps" and not has_mps):
        raise ValueError(f"--device: expected cpu, or mps if torch has it, got {chosen!r}")
    return chosen


def gpu_of(command: str, gpu: str | None, cores: int | None) -> AppleSiliconGPU:
    """Returns the GPU given by --gpu and --cores, or the GPU of this machine."""
    if cores is None:
        return as_gpu(command, gpu)
    if gpu is None:
        raise ValueError(f"{command}: --cores: expected --gpu with it, got {cores} cores of no chip")
    return AppleSiliconGPU.from_name(gpu, cores)


def floating(name: str) -> torch.dtype:
    dtypes = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    if name not in dtypes:
        raise ValueError(f"--dtype: expected one of {', '.join(dtypes)}, got {name!r}")
    return dtypes[name]


def shape_of(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise ValueError(f"--shape: expected N,K, got {text!r}")
    return int(parts[0]), int(parts[1])


def product_of(command: str, shape: str, weight_format: str, group_size: int | None, dtype: str) -> Product:
    N, K = shape_of(shape)
    fmt = find_format(weight_format)
    return Product(N, K, fmt.name, resolve_group_size(command, fmt, group_size, K), dtype)
