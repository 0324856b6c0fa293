"""Reads an unquantized checkpoint and quantizes its Linear layers and experts, one matrix at a time."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import open_checkpoint
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.float_layers import FloatLayer, choose_layers, read_matrix
from torch_marlin_metal.checkpoints.format_interface import Format
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.formats import resolve_group_size
from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.layers.widths import SAMPLE_EXPERTS, STORED_BYTES, Widths, check_widths, experts_of
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.patterns import NameFilter
from torch_marlin_metal.quantize.fit import Fit, sample
from torch_marlin_metal.quantize.like import Described, formats_like
from torch_marlin_metal.quantize.recipe import LayerFormat, Recipe
from torch_marlin_metal.sizes import parse_size

FORMAT = Format(
    name="floats",
    title="Unquantized weights",
    containers=("a directory of safetensors files",),
    variants=(),
    refused=(),
)


class FloatReader(CheckpointReader):
    """Reads and quantizes an unquantized checkpoint: converts each selected layer to a `PackedWeight`.

    Args:
        path: a directory with config.json and safetensors files.
        weight_format: see `quantize_weight`.
        group_size: see `quantize_weight`.
        method: "rtn" or "mse".
        include: which layers to quantize: patterns of layer names as in `quantize_model`, or a function of the name.
            Each selected matrix `<layer>.weight` is quantized. The experts of a mixture are selected together, for
            example with `*.experts`. None selects the experts of mixtures, all `nn.Linear` modules, and the vocabulary.
            To find these modules, transformers builds the model of config.json; no code of the checkpoint runs. If
            transformers does not know the model, `include` is required, and the vocabulary is treated like other
            layers.
        exclude: layers that stay unquantized; same form as `include`.
        vocabulary_format: as in `quantize_model`.
        memory: as in `quantize_model`. The bytes of all tensors in the output count.
        like: as in `quantize_model`.
        chosen: the format and group size of single layers, or of all layers in a module. For example,
            `report.fit.chosen()` after `quantize_model`.
        allow_pickle: as in `ReadOptions`.

    Raises:
        ValueError: the format or method is unknown, the group size does not suit a layer, no layer is selected, or only
            some experts of a mixture are selected.
        CheckpointError: the checkpoint is damaged, is already quantized, or has no layer to quantize.

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
        vocabulary_format: str | None = None,
        memory: str | int | None = None,
        like: str | None = None,
        chosen: Mapping[str, LayerFormat] | None = None,
        allow_pickle: bool = False,
        **options: Any,
    ) -> None:
        recipe = Recipe(weight_format, group_size, method, vocabulary_format, options)
        super().__init__(Path(path), ReadOptions(allow_pickle=allow_pickle))
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: expected a checkpoint directory")
        self.checkpoint = open_checkpoint(self.path, allow_pickle, quantized=False)
        layers, self.left = choose_layers(self.checkpoint, include, exclude, vocabulary_format)
        self._recipe = recipe.with_vocabulary(layer.name for layer in layers if layer.is_vocabulary)
        self.fit: Fit | None = None
        check_widths("FloatReader", memory, like)
        if chosen is not None and (memory, like) != (None, None):
            raise ValueError("FloatReader: chosen: expected neither memory nor like beside it")
        if chosen is not None:
            self._recipe = self._as_chosen(chosen, layers)
        elif like is not None:
            self._recipe = self._liked(like, layers)
        elif memory is not None:
            self._recipe, self.fit = self._fitted(memory, layers)
        for layer in layers:
            name, size = self._recipe.format_of(layer.name)
            resolve_group_size(f"{self.path}: {layer.name}", find_format(name), size, layer.K)
        self._layers = layers
        self.taken_bytes = sum(layer.nbytes for layer in layers)
        names = [layer.name for layer in layers]
        self._settings: dict[str, Any] = {"layers": names, "weight_format": weight_format, "group_size": group_size}
        self._settings |= {"method": method}
        self._settings |= {"vocabulary": sorted(self._recipe.vocabulary), "vocabulary_format": vocabulary_format}
        self._settings |= {"memory": memory, "like": like, "chosen": {k: list(v) for k, v in (chosen or {}).items()}}
        self._settings |= {key: str(value) for key, value in options.items()}
        # A model stores an expert's gate and up matrices as one weight, which has one global scale.
        formats = {layer.name: find_format(self._recipe.format_of(layer.name)[0]) for layer in layers}
        by_name = {layer.name: layer for layer in layers if formats[layer.name].has_global_scale}
        self._partners = [by_name.get(layer.partner) for layer in layers]
        self._amax: dict[str, float] = {}  # largest magnitudes, for layers whose partner was converted already
        self._kept: dict[str, Tensor] = {}  # matrix of the next layer if `_common` has read it; at most one entry

    def formats(self) -> list[str]:
        """Returns the format of each layer, in the order of `names()`."""
        return [self._recipe.format_of(layer.name)[0] for layer in self._layers]

    def _as_chosen(self, chosen: Mapping[str, LayerFormat], layers: list[FloatLayer]) -> Recipe:
        recipe = replace(self._recipe, chosen=dict(chosen))
        for layer in layers:
            if not recipe.is_chosen(layer.name):
                raise ValueError(f"FloatReader: chosen: expected the format of each layer, got none of {layer.name!r}")
        return recipe

    def _liked(self, like: str, layers: list[FloatLayer]) -> Recipe:
        described = [
            Described(layer.name, layer.K, layer.is_output, layer.is_vocabulary and not layer.is_output)
            for layer in layers
        ]
        return replace(self._recipe, chosen=formats_like("FloatReader", like, described, experts_of(self.config)))

    def _fitted(self, memory: str | int, layers: list[FloatLayer]) -> tuple[Recipe, Fit]:
        """Returns a recipe whose result fits in `memory`. Errors are estimated from a sample of rows and experts."""
        widths, counts = (
            Widths(self._recipe),
            Counter((layer.group or layer.name, self._shape(layer)) for layer in layers),
        )
        seen: Counter[Any] = Counter()
        chosen: dict[Any, list[FloatLayer]] = {}
        for layer in layers:
            key = layer.group or layer.name, self._shape(layer)
            if seen[key] % -(-counts[key] // SAMPLE_EXPERTS) == 0:
                chosen.setdefault(key, []).append(layer)
            seen[key] += 1
        for (name, shape), some in chosen.items():
            samples = (sample(read_matrix(self.checkpoint, layer)) for layer in some)
            count = counts[name, shape]
            widths.add(name, shape, samples, count, beside=count * STORED_BYTES)
        widths.weigh_vocabulary()
        taken = {layer.weight for layer in layers}
        fixed = sum(info.nbytes for name, info in self.checkpoint.tensors.items() if name not in taken)
        return widths.choose("FloatReader", fixed, parse_size("FloatReader: memory", memory))

    def _shape(self, layer: FloatLayer) -> tuple[int, int]:
        return math.prod(self.checkpoint.tensors[layer.weight].shape[-2:]) // layer.K, layer.K

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the result. A resumed conversion compares them with the first run's."""
        return self._settings

    def names(self) -> list[str]:
        """Returns the names of the layers to quantize, in the order of the files."""
        return [layer.name for layer in self._layers]

    def convert(self, index: int) -> PackedWeight:
        layer = self._layers[index]
        matrix = self._matrix(layer)
        try:
            weight = self._recipe.quantize(
                layer.name, matrix.T.contiguous() if layer.transposed else matrix, **self._common(index, matrix)
            )
        except ValueError as error:
            place = "" if layer.index is None else f"expert {layer.index}: "
            raise self.checkpoint.error(layer.weight, f"{place}{error}") from error
        weight.bias, weight.source = self.bias(index), "floats"
        return weight.validate()

    def _common(self, index: int, matrix: Tensor) -> dict[str, float]:
        """Returns the argument `amax` of `quantize_weight` for a gate or up layer, else an empty dict.

        Gate and up share a global scale, so `amax` is the largest magnitude of both matrices.
        """
        partner = self._partners[index]
        if partner is None:
            return {}
        if (known := self._amax.pop(self._layers[index].name, None)) is not None:
            return {"amax": known}
        other = self._matrix(partner)
        self._kept.clear()
        extremes = [float(extreme.abs()) for tensor in (matrix, other) for extreme in torch.aminmax(tensor)]
        if not all(map(math.isfinite, extremes)):
            return {}  # `convert` raises an error that names the layer
        self._amax[partner.name], self._kept[partner.name] = max(extremes), other
        return {"amax": max(extremes)}

    def _matrix(self, layer: FloatLayer) -> Tensor:
        """Reads a layer's matrix, unless `_common` has read and kept it."""
        kept = self._kept.pop(layer.name, None)
        return self.checkpoint.read(layer.weight, layer.index) if kept is None else kept

    def bias(self, index: int) -> Tensor | None:
        layer = self._layers[index]
        return self.checkpoint.read(layer.bias, layer.index) if layer.bias else None

    @property
    def config(self) -> dict[str, Any]:
        return self.checkpoint.config

    def others(self) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
        """Yields (name, function that reads the tensor, dtype) for each tensor that remains unquantized."""
        used = {name for layer in self._layers for name in (layer.weight, layer.bias)}
        for name, info in self.checkpoint.tensors.items():
            if name not in used:
                yield name, partial(self.checkpoint.read, name), info.dtype
