"""Reads an unquantized checkpoint and quantizes its Linear weights, one at a time."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint, open_checkpoint
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.format_interface import Format
from torch_marlin_metal.checkpoints.layer import FLOATS
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.formats import resolve_group_size
from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.patterns import NameFilter, check_patterns, selects
from torch_marlin_metal.quantize.weight import METHODS, quantize_weight

SMALLEST = 8  # a matrix has at least this many rows and columns

FORMAT = Format(
    name="floats",
    title="Unquantized weights",
    containers=("a directory of safetensors files",),
    variants=(),
    refused=(),
)


class FloatReader(CheckpointReader):
    """Reads an unquantized checkpoint like `open_reader` and quantizes it: yields every layer as a `PackedWeight`.

    Args:
        path: a directory with config.json and safetensors files.
        weight_format: see `quantize_weight`.
        group_size: see `quantize_weight`.
        method: "rtn" or "mse".
        include: patterns of layer names as in `quantize_model`, or a function of the name. Quantizes every matrix
            `<layer>.weight` that it selects. None selects the `nn.Linear` modules of the model that config.json names,
            except its output embedding. transformers supplies those names; no code of the checkpoint runs.
        exclude: layers to leave unquantized, chosen like `include`.
        allow_pickle: as in `ReadOptions`.

    Raises:
        ValueError: the format or method is unknown, a layer cannot have the group size, or no layer is chosen.
        CheckpointError: the checkpoint is damaged, is quantized already, or has no layer to quantize.
    """

    calculates = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        weight_format: str = "uint4b8",
        group_size: int | None = None,
        method: str = "rtn",
        *,
        include: NameFilter | None = None,
        exclude: NameFilter = (),
        allow_pickle: bool = False,
        **options: Any,
    ) -> None:
        fmt = find_format(weight_format)
        if method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
        self.path = Path(path)
        self.options = ReadOptions(allow_pickle=allow_pickle)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: expected a checkpoint directory")
        checkpoint = open_checkpoint(self.path, allow_pickle, quantized=False)
        wanted = matrices(checkpoint)
        if include is None:
            linear, looked_up = linear_names(checkpoint)
            names = [name for name in wanted if name in linear]
        else:
            names, looked_up = [name for name in wanted if selects(include, name)], set()
        check_patterns(str(self.path), wanted, include=include, exclude=exclude)
        if not names and include is None:
            raise CheckpointError(f"{self.path}: none of its {len(wanted)} matrices is to be quantized")
        names = [name for name in names if not selects(exclude, name)]
        if not names:
            raise ValueError(f"{self.path}: include, exclude: they leave none of its {len(wanted)} matrices")
        for name in names:
            resolve_group_size(f"{self.path}: {name}", fmt, group_size, checkpoint.tensors[f"{name}.weight"].shape[1])
        self._quantize = partial(
            quantize_weight, weight_format=weight_format, group_size=group_size, method=method, **options
        )
        self.left = {
            name: size
            for name, size in _matrix_bytes(checkpoint).items()
            if name not in {*names, *looked_up} and not selects(exclude, name)
            if include is None or selects(include, name)
        }
        self.taken_bytes = sum(checkpoint.tensors[f"{name}.weight"].nbytes for name in names)
        self._settings = {"layers": names, "weight_format": weight_format, "group_size": group_size, "method": method}
        self._settings |= {key: str(value) for key, value in options.items()}
        self.source = _FloatSource(checkpoint, names, self._quantize)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the result; a resumed conversion compares them."""
        return self._settings


class _FloatSource:
    """The source of the layers of a float checkpoint, see `reader.Source`."""

    format = FORMAT

    def __init__(self, checkpoint: Checkpoint, names: list[str], quantize: Callable[[Tensor], PackedWeight]) -> None:
        self.checkpoint = checkpoint
        self._names = names
        self._quantize = quantize

    def names(self) -> list[str]:
        return self._names

    def convert(self, index: int) -> PackedWeight:
        name = self._names[index]
        try:
            weight = self._quantize(self.checkpoint.read(f"{name}.weight"))
        except ValueError as error:
            raise self.checkpoint.error(f"{name}.weight", str(error)) from error
        weight.name, weight.bias, weight.source = name, self.bias(index), "floats"
        return weight.validate()

    def bias(self, index: int) -> Tensor | None:
        name = f"{self._names[index]}.bias"
        return self.checkpoint.read(name) if name in self.checkpoint.tensors else None

    @property
    def config(self) -> dict[str, Any]:
        return self.checkpoint.config

    def others(self) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
        used = {f"{name}.{role}" for name in self._names for role in ("weight", "bias")}
        for name, info in self.checkpoint.tensors.items():
            if name not in used:
                yield name, partial(self.checkpoint.read, name), info.dtype


def matrices(checkpoint: Checkpoint) -> list[str]:
    """Returns the layers whose `weight` is a float matrix that the operators can hold, in the order of the files."""
    places = sorted(checkpoint.tensors.values(), key=lambda info: (info.file.name, info.offset))
    return [
        info.name.removesuffix(".weight")
        for info in places
        if info.name.endswith(".weight") and len(info.shape) == 2 and info.dtype in FLOATS
        if info.shape[0] and info.shape[1] and info.shape[1] % 8 == 0
    ]


def _matrix_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    """Returns the bytes of every matrix of floats, and of every stack of them, without ".weight" in its name."""
    return {
        name.removesuffix(".weight"): info.nbytes
        for name, info in checkpoint.tensors.items()
        if info.dtype in FLOATS and len(info.shape) in (2, 3) and min(info.shape[-2:]) >= SMALLEST
        if len(info.shape) == 2 or info.shape[0] > 1
    }


def linear_names(checkpoint: Checkpoint) -> tuple[set[str], set[str]]:
    """Returns the names of the `nn.Linear` modules of config.json's model, except its output embedding.

    The second set holds the modules that look their weights up (embeddings) or convolve with them.

    Raises:
        CheckpointError: transformers is not installed, or does not know the model.
    """
    advice = "name the layers to quantize (include)"
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(f"{checkpoint.path}: without transformers its layers are not known: {advice}") from error
    stated = checkpoint.config.get("architectures")
    architecture = stated[0] if isinstance(stated, list) and stated else ""
    model_class = getattr(transformers, str(architecture), None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise CheckpointError(f"{checkpoint.path}: transformers knows no model {stated!r}: {advice}")
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:  # wrong settings can raise any exception in the model's own code
        raise CheckpointError(f"{checkpoint.path}: {architecture} cannot be made of it ({error}): {advice}") from error
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    linear = {name for name, module in modules.items() if type(module) is nn.Linear and module is not head}
    lookups = (nn.Embedding, nn.modules.conv._ConvNd)
    return linear, {name for name, module in modules.items() if isinstance(module, lookups)}
