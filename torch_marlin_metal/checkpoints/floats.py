"""Reads an unquantized checkpoint and quantizes its Linear layers and its experts, one matrix at a time."""

import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import open_checkpoint
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.float_layers import FloatLayer, choose_layers
from torch_marlin_metal.checkpoints.format_interface import Format
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.formats import resolve_group_size
from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.patterns import NameFilter
from torch_marlin_metal.quantize.weight import METHODS, quantize_weight

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
        include: patterns of layer names as in `quantize_model`, or a function of the name. Every matrix
            `<layer>.weight` that it selects is quantized. The experts of a mixture can be selected together
            (`*.experts`). None selects the experts of mixtures and all `nn.Linear` modules except the output embedding.
            In that case, transformers builds the model that config.json names, to learn which modules these are; no
            code of the checkpoint runs.
        exclude: layers to leave unquantized, chosen like `include`.
        allow_pickle: as in `ReadOptions`.

    Raises:
        ValueError: the format or method is unknown, a layer cannot have the group size, no layer is chosen, or only
            some layers of a mixture's experts are chosen.
        CheckpointError: the checkpoint is damaged, is quantized already, or has no layer to quantize.

    Examples:
        >>> import pathlib
        >>> from safetensors.torch import save_file
        >>> pathlib.Path("floats").mkdir()
        >>> save_file({"up.weight": torch.randn(24, 64)}, "floats/model.safetensors")
        >>> _ = pathlib.Path("floats/config.json").write_text("{}")
        >>> reader = tmm.convert.FloatReader("floats", "uint4", group_size=32, include="up")
        >>> tmm.convert.write_checkpoint(reader, "packed").name
        'packed'
    """

    calculates = True
    format = FORMAT

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
        super().__init__(Path(path), ReadOptions(allow_pickle=allow_pickle))
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: expected a checkpoint directory")
        self.checkpoint = open_checkpoint(self.path, allow_pickle, quantized=False)
        layers, self.left = choose_layers(self.checkpoint, include, exclude)
        for layer in layers:
            resolve_group_size(f"{self.path}: {layer.name}", fmt, group_size, layer.K)
        self._layers = layers
        self._quantize: Callable[..., PackedWeight] = partial(
            quantize_weight, weight_format=weight_format, group_size=group_size, method=method, **options
        )
        self.taken_bytes = sum(layer.nbytes for layer in layers)
        names = [layer.name for layer in layers]
        self._settings = {"layers": names, "weight_format": weight_format, "group_size": group_size, "method": method}
        self._settings |= {key: str(value) for key, value in options.items()}
        # A model holds an expert's gate and up as one weight, with one global scale.
        by_name = {layer.name: layer for layer in layers} if fmt.has_global_scale else {}
        self._partners = [by_name.get(layer.partner) for layer in layers]
        self._amax: dict[str, float] = {}  # of layers whose partner has been converted
        self._kept: dict[str, Tensor] = {}  # the matrix of at most one of them

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the result; a resumed conversion compares them."""
        return self._settings

    def names(self) -> list[str]:
        """Returns the names of the layers to quantize, in the order of the files."""
        return [layer.name for layer in self._layers]

    def convert(self, index: int) -> PackedWeight:
        """Reads one matrix and quantizes it."""
        layer = self._layers[index]
        matrix = self._matrix(layer)
        try:
            weight = self._quantize(
                matrix.T.contiguous() if layer.transposed else matrix, **self._common(index, matrix)
            )
        except ValueError as error:
            place = "" if layer.index is None else f"expert {layer.index}: "
            raise self.checkpoint.error(layer.weight, f"{place}{error}") from error
        weight.name, weight.bias, weight.source = layer.name, self.bias(index), "floats"
        return weight.validate()

    def _common(self, index: int, matrix: Tensor) -> dict[str, float]:
        """Returns the argument for the global scale that a gate and an up projection share, or none."""
        partner = self._partners[index]
        if partner is None:
            return {}
        if (known := self._amax.pop(self._layers[index].name, None)) is not None:
            return {"amax": known}
        other = self._matrix(partner)
        self._kept.clear()
        extremes = [float(extreme.abs()) for tensor in (matrix, other) for extreme in torch.aminmax(tensor)]
        if not all(map(math.isfinite, extremes)):
            return {}  # the conversion of the tensor that is not finite raises the error, which names it
        self._amax[partner.name], self._kept[partner.name] = max(extremes), other
        return {"amax": max(extremes)}

    def _matrix(self, layer: FloatLayer) -> Tensor:
        """Reads the matrix of a layer, unless it was read for its partner and kept."""
        kept = self._kept.pop(layer.name, None)
        return self.checkpoint.read(layer.weight, layer.index) if kept is None else kept

    def bias(self, index: int) -> Tensor | None:
        layer = self._layers[index]
        return self.checkpoint.read(layer.bias, layer.index) if layer.bias else None

    @property
    def config(self) -> dict[str, Any]:
        """Returns the model's own configuration."""
        return self.checkpoint.config

    def others(self) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
        """Yields (name, function that reads it, dtype) for each tensor that stays in floats."""
        used = {name for layer in self._layers for name in (layer.weight, layer.bias)}
        for name, info in self.checkpoint.tensors.items():
            if name not in used:
                yield name, partial(self.checkpoint.read, name), info.dtype
