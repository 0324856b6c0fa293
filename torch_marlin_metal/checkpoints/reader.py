"""Reads the layers of a checkpoint of any format, one at a time."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint, open_checkpoint
from torch_marlin_metal.checkpoints.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.checkpoints.files.read_ahead import ReadAhead
from torch_marlin_metal.checkpoints.format_interface import Format
from torch_marlin_metal.checkpoints.formats.gguf import GgufSource
from torch_marlin_metal.checkpoints.known_formats import find_format
from torch_marlin_metal.checkpoints.layer import Layer, fp8_weight
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.part import Part, part_of
from torch_marlin_metal.packed_weight import PackedWeight, PackedWeightError


@dataclass
class DenseWeight:
    """A layer that the operators cannot represent, decoded to floats at the caller's request.

    Attributes:
        name: the layer's name in the model, without ".weight".
        weight: fp32 `[N, K]`, as `torch.nn.Linear` holds it.
        bias: `[N]` or None.
        reason: why the layer is not a `PackedWeight`.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    reason: str

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weight as `[K, N]`, like `PackedWeight.dequantize`."""
        return self.weight.t().to(dtype)


class Source(Protocol):
    """An opened checkpoint. It reads tensor data only when a layer is requested, by its index."""

    @property
    def format(self) -> Format:
        """Returns the description of the format."""
        ...

    def names(self) -> list[str]:
        """Returns the names of the 4-bit layers in the order of the files."""
        ...

    def convert(self, index: int) -> PackedWeight:
        """Reads one layer and validates it."""
        ...

    def bias(self, index: int) -> Tensor | None:
        """Reads the bias of a layer that could not be converted."""
        ...

    def others(self) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
        """Yields (name, function that reads it, dtype's name in the file) for each tensor outside the layers."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """Returns the model's own configuration, or {}."""
        ...


class DirectorySource:
    """A checkpoint directory in one of the known formats."""

    def __init__(self, checkpoint: Checkpoint, options: ReadOptions) -> None:
        self.checkpoint = checkpoint
        self.options = options
        self.format = find_format(checkpoint)
        self._layers = list(self.format.layers(checkpoint))
        self._check_complete()
        self._ahead: ReadAhead | None = None

    def _check_complete(self) -> None:
        self._refused = {layer.name for layer in self._layers if layer.refused}
        if not self._layers:
            anchors = " or ".join(self.format.anchors)
            raise CheckpointError(f"{self.checkpoint.path}: {self.format.name}: no tensor's name ends in {anchors}")
        listed = None if self.format.listed is None else self.format.listed(self.checkpoint.settings)
        if lost := (listed or set()) - {layer.name for layer in self._layers}:
            raise CheckpointError(
                f"{self.checkpoint.path}: {self.format.name}: the files lack the layer {min(lost)!r} of the settings"
            )
        strays = {role: endings for role, endings in self.format.roles.items() if role not in ("weight", "bias")}
        for name in self.checkpoint.tensors:
            for role, endings in strays.items():
                for ending in endings:
                    if name.endswith(ending) and (listed is None or name.removesuffix(ending) in listed):
                        self._check_anchored(name, role, name.removesuffix(ending))

    def _check_anchored(self, name: str, role: str, base: str) -> None:
        """Refuses a tensor whose layer has no codes, unless `convert` refuses the layer with a better reason."""
        anchors = [base + ending for ending in self.format.anchors]
        if base not in self._refused and not any(anchor in self.checkpoint.tensors for anchor in anchors):
            raise self.checkpoint.error(name, f"{self.format.name}: {role} of a layer without {' or '.join(anchors)}")

    def names(self) -> list[str]:
        """Returns the names of the layers in the order of the files."""
        return [layer.name for layer in self._layers]

    def convert(self, index: int) -> PackedWeight:
        """Reads one layer and validates it."""
        if self._ahead is None:
            return self._convert(self._layers[index])
        self.checkpoint.ahead = self._ahead.take(index)
        try:
            return self._convert(self._layers[index])
        finally:
            self.checkpoint.ahead = {}

    def read_ahead(self, order: Iterable[int], limit: int) -> None:
        """Starts to read layers in threads, in the order in which they will be converted.

        Does not read layers of a stack of experts, which share tensors.

        Args:
            order: indexes of layers.
            limit: see `ReadAhead`.
        """
        if self.checkpoint.loaded or not hasattr(os, "preadv"):
            return
        layers = {index: self._layers[index] for index in order}
        self._ahead = ReadAhead(
            {
                index: [self.checkpoint.tensors[name] for name in layer.roles.values()]
                for index, layer in layers.items()
                if layer.expert is None and not layer.refused
            },
            limit,
        )

    def leave_out(self, layers: Iterable[int]) -> None:
        """Frees layers that were read ahead and will not be converted, and reads no more of them."""
        if self._ahead is not None:
            for index in layers:
                self._ahead.take(index)

    def stop_reading_ahead(self) -> None:
        """Frees what was read and not converted. Without `read_ahead`, does nothing."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def convert_part(self, index: int, part: Part) -> PackedWeight | None:
        """Reads a part of one layer and validates it, or returns None if the layer can only be read whole."""
        layer = part_of(self._layers[index], self.format.axes, part)
        return None if layer is None else self._convert(layer)

    def _convert(self, layer: Layer) -> PackedWeight:
        if layer.refused:
            raise layer.unsupported(layer.refused, partial(fp8_weight, layer))
        weight = self.format.read(layer, self.checkpoint.settings, self.options)
        weight.name = layer.name
        try:
            return weight.validate()
        except PackedWeightError as error:
            role = self.format.fields.get(error.field, next(iter(layer.roles)))
            raise layer.error(role if role in layer else next(iter(layer.roles)), str(error)) from error

    def bias(self, index: int) -> Tensor | None:
        """Reads the bias of a layer."""
        layer = self._layers[index]
        return layer.read("bias") if "bias" in layer else None

    @property
    def config(self) -> dict[str, Any]:
        """Returns the model's own configuration, or {}."""
        return self.checkpoint.config

    def others(self) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
        """Yields (name, function that reads it, dtype) for each tensor outside the layers."""
        used = {name for layer in self._layers for name in layer.roles.values()}
        for name, info in self.checkpoint.tensors.items():
            if name not in used:
                yield name, partial(self.checkpoint.read, name), info.dtype


class CheckpointReader:
    """An opened checkpoint: iterate over its layers, then over its other tensors.

    Attributes:
        path: the directory or file.
        source: the opened container.
        options: how the checkpoint is read.
        calculates: whether reading does arithmetic, so that more threads make it faster, and does not only move words.
    """

    calculates = False

    def __init__(self, path: str | os.PathLike[str], options: ReadOptions) -> None:
        self.path = Path(path)
        self.options = options
        if not self.path.exists():
            raise CheckpointError(f"{self.path}: does not exist")
        self.source: Source
        if self.path.is_dir():
            self.source = DirectorySource(open_checkpoint(self.path, options.allow_pickle), options)
        elif self.path.suffix == ".gguf" and self.path.is_file():
            self.source = GgufSource(self.path, options)
        else:
            raise CheckpointError(f"{self.path}: expected a directory or a .gguf file")

    @property
    def format(self) -> Format:
        """Returns the description of the format that was found."""
        return self.source.format

    def mixture(self) -> str:
        """Returns a sentence about the matrices of a GGUF file that are not 4 bit, or "" if there are none."""
        return self.source.mixture() if isinstance(self.source, GgufSource) else ""

    def settings(self) -> dict[str, Any]:
        """Returns the settings that affect how layers are read, in JSON types; a resumed conversion compares them."""
        return asdict(self.options)

    @cached_property
    def layer_names(self) -> list[str]:
        """Returns the names of the layers, in the order of iteration."""
        return self.source.names()

    def __len__(self) -> int:
        return len(self.layer_names)

    def __iter__(self) -> Iterator[PackedWeight | DenseWeight]:
        for index in range(len(self)):
            converted = self.read(index)
            if converted is not None:
                yield converted

    def read(self, index: int) -> PackedWeight | DenseWeight | None:
        """Reads the layer at an index; returns None if it is left out (`on_unsupported="skip"`)."""
        try:
            return self.source.convert(index)
        except UnsupportedFormat as error:
            if self.options.on_unsupported == "skip":
                return None
            if self.options.on_unsupported == "error" or error.dequantize is None:
                raise
            return DenseWeight(self.layer_names[index], error.dequantize(), self.source.bias(index), str(error))

    def read_part(self, index: int, part: Part) -> PackedWeight | None:
        """Reads one process's part of the layer at an index, or returns None if it can only be read whole."""
        return self.source.convert_part(index, part) if isinstance(self.source, DirectorySource) else None

    def other_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) for everything outside the 4-bit layers: embeddings, norms, dense layers."""
        for name, read, _ in self.source.others():
            yield name, read()


def open_reader(path: str | os.PathLike[str], options: ReadOptions | None = None, **fields: Any) -> CheckpointReader:
    """Opens a checkpoint and reads only its headers. Takes the arguments of `read_layers`, and raises its errors."""
    return CheckpointReader(path, ReadOptions.of(options, fields))


def read_layers(
    path: str | os.PathLike[str], options: ReadOptions | None = None, **fields: Any
) -> Iterator[PackedWeight | DenseWeight]:
    """Reads the 4-bit layers of a checkpoint, one at a time.

    Args:
        path: a checkpoint directory or a .gguf file.
        options: how to read; None means the defaults.
        **fields: fields of `ReadOptions`, which override those of `options`.

    Yields:
        `PackedWeight`, in the order of the files; with `on_unsupported="dequantize"` also `DenseWeight`.

    Raises:
        CheckpointError: the checkpoint is damaged or contradicts itself.
        UnsupportedFormat: the format or a layer is not supported. This is a subclass of `CheckpointError`.
        ValueError: an option has an unknown value.
    """
    yield from open_reader(path, options, **fields)
