"""Reads single files of diffusion models under diffusers' names. The files use their authors' or ComfyUI's names.

For each model class, diffusers has a function that converts the tensors of such a file. Here, the function gets the
placeholders of `row_tensor.py` instead of packed weights. `ConvertedReader` then reads the packed rows of each
converted placeholder.
"""

import os
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.checkpoints.checkpoint import DTYPE_NAMES
from torch_marlin_metal.checkpoints.directory import open_reader
from torch_marlin_metal.checkpoints.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.checkpoints.float_rows import FloatRows
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.joined_weights import joined
from torch_marlin_metal.load.row_tensor import RowError, RowTensor, stand_ins
from torch_marlin_metal.models.linear_layers import ModelMismatchError
from torch_marlin_metal.packed_weight import PackedWeight

COMFY_PREFIX = "model.diffusion_model."


class ConvertedReader(CheckpointReader):
    """Reads the layers of a file under diffusers' names, with the rows that diffusers' models have.

    Args:
        reader: the reader of the file.
        state: the file's tensors by their new names, with placeholders for packed weights.
    """

    def __init__(self, reader: CheckpointReader, state: dict[str, Tensor]) -> None:
        super().__init__(reader.path, reader.options)
        self.format, self._reader = reader.format, reader
        prefix = COMFY_PREFIX if all(name.startswith(COMFY_PREFIX) for name in state) else ""
        self._state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        rows = {name: tensor for name, tensor in self._state.items() if isinstance(tensor, RowTensor)}
        self._layers = [(name.removesuffix(".weight"), rows[name]) for name in rows if name.endswith(".weight")]
        self._decoded = {name: tensor for name, tensor in rows.items() if not name.endswith(".weight")}
        self._biases = {f"{name}.bias" for name, _ in self._layers} & self._state.keys()
        self._latest: tuple[int, PackedWeight] | None = None

    @classmethod
    def of(cls, state: dict[str, Tensor]) -> "ConvertedReader":
        """Wraps the reader that the placeholders in `state` refer to."""
        return cls(next(tensor.table.reader for tensor in state.values() if isinstance(tensor, RowTensor)), state)

    def names(self) -> list[str]:
        return [name for name, _ in self._layers]

    def stored_bytes(self, index: int) -> int:
        """Returns the bytes of a layer's rows in the file."""
        runs = self._runs(index)
        return sum(self._reader.stored_bytes(own) * _count(rows) // self._reader.sizes(own)[0] for own, rows in runs)

    def sizes(self, index: int) -> tuple[int, int]:
        N, K = self._layers[index][1].shape
        return N, K

    def kind(self, index: int) -> Hashable:
        """Returns a key from the layer's size and from the keys of the file's layers that contain the layer's rows."""
        return self.sizes(index), tuple(self._reader.kind(own) for own, _ in self._runs(index))

    def convert(self, index: int) -> PackedWeight:
        try:
            parts = [self._part(own, rows) for own, rows in self._runs(index)]
            weight = parts[0] if len(parts) == 1 else joined(parts)
        except UnsupportedFormat as error:
            known = error.dequantize is not None
            raise UnsupportedFormat(str(error), partial(self._floats, index) if known else None, error.kind) from error
        except CheckpointError:  # the file contradicts itself
            raise
        except ValueError as error:  # the layer's parts have different formats
            raise UnsupportedFormat(f"{self.path}: layer {self.layer_names[index]!r}: {error}",
                                    partial(self._floats, index)) from error  # fmt: skip
        return replace(weight, name=self.layer_names[index], bias=self.bias(index)).validate()

    def _part(self, own: int, rows: slice | Tensor) -> PackedWeight:
        """Reads some rows of a layer in the file. Caches this layer, because its other rows are often read next."""
        if self._latest is None or self._latest[0] != own:
            self._latest = None
            self._latest = own, replace(self._reader.convert(own), bias=None)
        weight = self._latest[1]
        whole = isinstance(rows, slice) and _count(rows) == weight.N
        last = whole or (isinstance(rows, slice) and rows.stop == weight.N)
        if last:
            self._latest = None
        return weight if whole else weight.columns(rows)

    def _floats(self, index: int) -> FloatRows:
        return FloatRows.of(self._values(self._layers[index][1]))

    def _values(self, tensor: RowTensor) -> Tensor:
        parts = []
        for own, rows in tensor.table.runs(tensor.rows):
            try:
                values = self._reader.convert(own).dequantize().t()
            except UnsupportedFormat as error:
                if error.dequantize is None:
                    raise
                values = error.dequantize().values()
            parts.append(values[rows])
        return torch.cat(parts)

    def _runs(self, index: int) -> Iterator[tuple[int, slice | Tensor]]:
        tensor = self._layers[index][1]
        return tensor.table.runs(tensor.rows)

    def bias(self, index: int) -> Tensor | None:
        return self._state.get(f"{self.layer_names[index]}.bias")

    def others(self) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
        for name, tensor in self._state.items():
            if name in self._decoded:
                yield name, partial(self._values, self._decoded[name]), "F32"
            elif not isinstance(tensor, RowTensor) and name not in self._biases:
                yield name, partial(Tensor.detach, tensor), DTYPE_NAMES[tensor.dtype]


def _count(rows: slice | Tensor) -> int:
    return int(rows.stop - rows.start) if isinstance(rows, slice) else len(rows)


def is_diffusers(model: nn.Module) -> bool:
    library: Any = sys.modules.get("diffusers.models.modeling_utils")
    return library is not None and isinstance(model, library.ModelMixin)


def open_converted(
    model: nn.Module, path: str | os.PathLike[str], options: ReadOptions, **fields: Any
) -> CheckpointReader | None:
    """Opens a single file for a diffusers model, with diffusers' names. Returns None for everything else.

    Raises:
        CheckpointError: see `open_reader`.
        ModelMismatchError: diffusers' name conversion fails for the file.
    """
    if not is_diffusers(model) or not Path(path).is_file():
        return None
    reader = open_reader(path, options, **fields | {"gguf_names": "gguf"})
    return ConvertedReader(reader, _converted(model, reader))


def _converted(model: nn.Module, reader: CheckpointReader) -> dict[str, Tensor]:
    import diffusers.loaders.single_file_model as library

    state, kind = stand_ins(reader), library._get_single_file_loadable_mapping_class(type(model))
    if kind is None or not library._should_convert_state_dict_to_diffusers(model.state_dict(), state):
        return state
    convert = library.SINGLE_FILE_LOADABLE_CLASSES[kind]["checkpoint_mapping_fn"]
    settings: Any = model.config
    try:
        made: dict[str, Tensor] = convert(config=dict(settings), checkpoint=state)
    except (KeyError, IndexError, RuntimeError, RowError) as error:
        raise ModelMismatchError(
            f"{reader.path}: expected names and shapes of a {type(model).__name__}: diffusers' {convert.__name__} "
            f"fails with {type(error).__name__}: {error}"
        ) from error
    return made
