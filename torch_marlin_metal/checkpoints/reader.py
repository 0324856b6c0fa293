"""The base class of all checkpoint readers. A reader returns the layers of a checkpoint one at a time."""

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

SAMPLE = 1 << 20  # `fingerprint` includes this many bytes from the start of a file


@dataclass
class DenseWeight:
    """A layer that the operators cannot represent. It is decoded to floats on the caller's request.

    Attributes:
        name: the layer's name in the model, without ".weight".
        values: decodes the weight on request.
        bias: the bias `[N]`, or None.
        reason: the reason why the layer is not a `PackedWeight`.
        kind: what all layers with this reason have in common, for example the type "Q6_K".

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
        """Returns the weight in fp32 `[N, K]`, the orientation of `torch.nn.Linear`."""
        return self.values.values()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weight as `[K, N]`, the orientation of `PackedWeight.dequantize`."""
        return self.values.values(dtype).t()


@dataclass(frozen=True)
class Refusal:
    """The reason why a layer cannot be packed, and its `DenseWeight.kind`."""

    reason: str
    kind: str


class CheckpointReader(ABC):
    """An opened checkpoint. Iterating over the reader yields the layers; `other_tensors` yields the rest.

    Tensor data is read only when a layer is requested by its index.

    Attributes:
        path: the directory or file.
        options: the options for reading the checkpoint.
        format: the description of the checkpoint's format.
        metadata: the metadata of a single file, else empty.
        tensors: the tensors of a single file by name, else empty.
        calculates: True if reading does arithmetic, which more threads speed up. False if it only moves words.

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

    def check_headers(self, index: int) -> None:  # noqa: B027 does nothing for formats that are never read in parts
        """Raises UnsupportedFormat if the headers show that the layer cannot be packed."""

    @abstractmethod
    def bias(self, index: int) -> Tensor | None:
        """Reads the bias of a layer that could not be converted."""

    @abstractmethod
    def others(self) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
        """Yields (name, function that reads the tensor, dtype's name in the file) for tensors outside the layers."""

    @property
    def config(self) -> dict[str, Any]:
        """Returns the model's own configuration, or {} if the checkpoint has none."""
        return {}

    def tensor_files(self) -> dict[str, Path]:
        """Returns the file of each tensor in a directory, or {} for a single file."""
        return {}

    def stored_bytes(self, index: int) -> int:
        """Returns the bytes of a layer in the files."""
        return 0

    def sizes(self, index: int) -> tuple[int, int]:
        """Returns N and K of a layer, without reading data if the headers suffice."""
        weight = self.convert(index)
        return weight.N, weight.K

    def weight_name(self, index: int) -> str:
        """Returns the name of a layer's weight, for a layer that is one matrix of the file."""
        return f"{self.layer_names[index]}.weight"

    def kind(self, index: int) -> Hashable:
        """Returns a key computed from the headers. Layers with equal keys become tensors of equal shapes and dtypes."""
        return index

    def fingerprint(self) -> bytes:
        """Returns bytes that differ between most checkpoints. Reads only a small part of the files."""
        with self.path.open("rb") as stream:
            return stream.read(SAMPLE) + str(self.path.stat().st_size).encode()

    def read_ahead(self, order: Iterable[int], limit: int) -> None:  # noqa: B027 optional for a format
        """Starts threads that read layers in the order in which they will be converted, if the format supports this.

        Args:
            order: indexes of layers.
            limit: see `ReadAhead`.
        """

    def leave_out(self, layers: Iterable[int]) -> None:  # noqa: B027 optional for a format
        """Frees layers that were read ahead but will not be converted, and stops reading such layers."""

    def stop_reading_ahead(self) -> None:  # noqa: B027 optional for a format
        """Frees tensors that were read ahead but not converted. Does nothing if `read_ahead` was not called."""

    def settings(self) -> dict[str, Any]:
        """Returns the settings that affect reading, as JSON types. A resumed conversion compares them."""
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
        """Finds the layers that cannot be packed but can be decoded.

        Args:
            indexes: the layers to check.
            whole: True to read one layer of each kind and store it for `read`. False to read only headers.

        Raises:
            UnsupportedFormat: a layer can be neither packed nor decoded.
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
        """Reads the layer at an index. Returns None if the layer is omitted (`on_unsupported="skip"`)."""
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
        """Reads one process's part of the layer at an index. Returns None if the layer can only be read in full."""
        return None

    def other_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) for each tensor outside the packed layers: embeddings, norms, dense layers."""
        for name, read, _ in self.others():
            yield name, read()
