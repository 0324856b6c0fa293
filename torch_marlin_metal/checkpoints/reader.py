"""What readers of all formats have in common: they read the layers of a checkpoint, one at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.float_rows import FloatRows
from torch_marlin_metal.checkpoints.format_interface import Format
from torch_marlin_metal.checkpoints.options import ReadOptions, typed
from torch_marlin_metal.checkpoints.part import Part
from torch_marlin_metal.packed_weight import PackedWeight

SAMPLE = 1 << 20  # bytes at the start of a file that tell it from other files


@dataclass
class DenseWeight:
    """A layer that the operators cannot represent, decoded to floats at the caller's request.

    Attributes:
        name: the layer's name in the model, without ".weight".
        values: the weight, which is decoded when it is needed.
        bias: `[N]` or None.
        reason: why the layer is not a `PackedWeight`.
        kind: what layers with the same reason have in common, such as "Q6_K".

    Examples:
        >>> weight = tmm.quantize_weight(torch.randn(24, 64), "uint4", group_size=32, name="up")
        >>> _ = tmm.convert.export_checkpoint([weight], "dense", "gptq")
        >>> [isinstance(layer, tmm.convert.DenseWeight) for layer in tmm.convert.read_layers("dense")]
        [False]
    """

    name: str
    values: FloatRows
    bias: Tensor | None
    reason: str
    kind: str = ""

    @property
    def weight(self) -> Tensor:
        """Returns the weight in fp32 `[N, K]`, as `torch.nn.Linear` holds it."""
        return self.values.values()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weight as `[K, N]`, like `PackedWeight.dequantize`."""
        return self.values.values(dtype).t()


@dataclass(frozen=True)
class Refusal:
    """Why a layer cannot be packed: the sentence, and `DenseWeight.kind`."""

    reason: str
    kind: str


class CheckpointReader(ABC):
    """An opened checkpoint: iterate over its layers, then over its other tensors.

    It reads tensor data only when a layer is requested, by its index.

    Attributes:
        path: the directory or file.
        options: how the checkpoint is read.
        format: the description of the format that was found.
        metadata: the metadata of a single file, or empty.
        tensors: the tensors of a single file by name, or nothing.
        calculates: whether reading does arithmetic, so that more threads make it faster, and does not only move words.

    Examples:
        >>> weight = tmm.quantize_weight(torch.randn(24, 64), "uint4", group_size=32, name="up")
        >>> _ = tmm.convert.export_checkpoint([weight], "reader", "gptq")
        >>> reader = tmm.convert.open_reader("reader")
        >>> [layer.weight_format for layer in reader]
        ['uint4']
    """

    calculates = False
    format: Format
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path = path
        self.options = options
        self.metadata, self.tensors = {}, {}
        self._tried: dict[int, PackedWeight] = {}

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of the packed layers in the order of the files."""

    @abstractmethod
    def convert(self, index: int) -> PackedWeight:
        """Reads one layer and validates it."""

    def check_headers(self, index: int) -> None:  # noqa: B027  a format that is never read in parts does nothing
        """Raises UnsupportedFormat if the headers say that a layer cannot be packed."""

    @abstractmethod
    def bias(self, index: int) -> Tensor | None:
        """Reads the bias of a layer that could not be converted."""

    @abstractmethod
    def others(self) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
        """Yields (name, function that reads it, dtype's name in the file) for each tensor outside the layers."""

    @property
    def config(self) -> dict[str, Any]:
        """Returns the model's own configuration, or {} if the checkpoint has none."""
        return {}

    def tensor_files(self) -> dict[str, Path]:
        """Returns the file of every tensor of a directory, or {} for a single file."""
        return {}

    def stored_bytes(self, index: int) -> int:
        """Returns the size of a layer in the files."""
        return 0

    def sizes(self, index: int) -> tuple[int, int]:
        """Returns N and K of a layer, from the headers if the format allows it."""
        weight = self.convert(index)
        return weight.N, weight.K

    def weight_name(self, index: int) -> str:
        """Returns the name of the weight of a layer that is one matrix of the file."""
        return f"{self.layer_names[index]}.weight"

    def kind(self, index: int) -> Hashable:
        """Returns a key from the headers; layers with equal keys become tensors of equal shapes and dtypes."""
        return index

    def fingerprint(self) -> bytes:
        """Returns bytes that differ for most other checkpoints. Reads little of the files."""
        with self.path.open("rb") as stream:
            return stream.read(SAMPLE) + str(self.path.stat().st_size).encode()

    def read_ahead(self, order: Iterable[int], limit: int) -> None:  # noqa: B027  a format that cannot does nothing
        """Starts to read layers in threads, in the order in which they will be converted, if the format allows it.

        Args:
            order: indexes of layers.
            limit: see `ReadAhead`.
        """

    def leave_out(self, layers: Iterable[int]) -> None:  # noqa: B027  a format that cannot does nothing
        """Frees layers that were read ahead and will not be converted, and reads no more of them."""

    def stop_reading_ahead(self) -> None:  # noqa: B027  a format that cannot does nothing
        """Frees tensors that were read and not converted. Without `read_ahead`, does nothing."""

    def settings(self) -> dict[str, Any]:
        """Returns the settings that affect how layers are read, in JSON types; a resumed conversion compares them."""
        return asdict(self.options)

    @cached_property
    def layer_names(self) -> list[str]:
        """Returns the names of the layers, in the order of iteration."""
        return self.names()

    def __len__(self) -> int:
        return len(self.layer_names)

    def __iter__(self) -> Iterator[PackedWeight | DenseWeight]:
        for index in range(len(self)):
            converted = self.read(index)
            if converted is not None:
                yield converted

    def refusals(self, indexes: Iterable[int], *, whole: bool = True) -> dict[int, Refusal]:
        """Finds the layers that cannot be packed but decoded.

        Args:
            indexes: the layers.
            whole: read one layer of each kind, and keep it for `read`. With False, only headers are read.

        Raises:
            UnsupportedFormat: a layer can neither be packed nor decoded.
        """
        kinds: dict[Hashable, Refusal | None] = {}
        found: dict[int, Refusal] = {}
        for index in indexes:
            kind = self.kind(index)
            if kind not in kinds:
                kinds[kind] = self._try(index, whole)
            if (refusal := kinds[kind]) is not None:
                found[index] = refusal
        return found

    def _try(self, index: int, whole: bool) -> Refusal | None:
        try:
            if whole:
                self._tried[index] = self.convert(index)
            else:
                self.check_headers(index)
        except UnsupportedFormat as error:
            if error.dequantize is None:
                raise
            return Refusal(str(error), error.kind or str(error))
        return None

    def read(self, index: int) -> PackedWeight | DenseWeight | None:
        """Reads the layer at an index; returns None if it is left out (`on_unsupported="skip"`)."""
        if (tried := self._tried.pop(index, None)) is not None:
            return tried
        try:
            return self.convert(index)
        except UnsupportedFormat as error:
            if self.options.on_unsupported == "skip":
                return None
            if error.dequantize is None:
                raise
            if self.options.on_unsupported != "dequantize":
                way = f"{typed('on_unsupported', 'dequantize')} decodes it to floats"
                raise UnsupportedFormat(f"{error}; {way}", error.dequantize, error.kind) from error
            return DenseWeight(self.layer_names[index], error.dequantize(), self.bias(index), str(error), error.kind)

    def read_part(self, index: int, part: Part) -> PackedWeight | None:
        """Reads one process's part of the layer at an index, or returns None if it can only be read whole."""
        return None

    def other_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) for everything outside the packed layers: embeddings, norms, dense layers."""
        for name, read, _ in self.others():
            yield name, read()
