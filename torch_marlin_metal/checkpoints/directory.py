"""Opens a checkpoint of any format, and reads the layers of a checkpoint directory."""

import hashlib
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import open_checkpoint
from torch_marlin_metal.checkpoints.eight_bits import E4M3, E5M2
from torch_marlin_metal.checkpoints.errors import CheckpointError, NothingPacked, UnsupportedFormat
from torch_marlin_metal.checkpoints.files.read_ahead import ReadAhead
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat
from torch_marlin_metal.checkpoints.formats.gguf import GgufReader
from torch_marlin_metal.checkpoints.known_formats import find_format
from torch_marlin_metal.checkpoints.layer_tensors import FLOATS, Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.part import Part, part_of
from torch_marlin_metal.checkpoints.reader import CheckpointReader, DenseWeight
from torch_marlin_metal.packed_weight import PackedWeight, PackedWeightError

SIZES = {E4M3: 1, E5M2: 1, "I8": 1, "U8": 2, "F4": 2}  # dtype of a weight `[N, K / n]` -> n, elements per byte
ENDS = 4096  # `fingerprint` hashes this many bytes at each end of a tensor


class DirectoryReader(CheckpointReader):
    """Reads a checkpoint directory in one of the known formats."""

    format: DirectoryFormat

    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self.checkpoint = open_checkpoint(path, options.allow_pickle)
        self.format = find_format(self.checkpoint)
        self._layers = list(self.format.layers(self.checkpoint))
        self._check_complete()
        self._ahead: ReadAhead | None = None

    def _check_complete(self) -> None:
        listed = None if self.format.listed is None else self.format.listed(self.checkpoint.settings)
        if lost := (listed or set()) - {layer.name for layer in self._layers}:
            raise CheckpointError(
                f"{self.checkpoint.path}: {self.format.name}: the files lack the layer {min(lost)!r} of the settings"
            )
        if not self._layers:
            self._refuse_without_layers()
        strays = {role: endings for role, endings in self.format.roles.items() if role not in ("weight", "bias")}
        for name in self.checkpoint.tensors:
            for role, endings in strays.items():
                for ending in endings:
                    if name.endswith(ending) and (listed is None or name.removesuffix(ending) in listed):
                        self._check_anchored(name, role, name.removesuffix(ending))

    def _refuse_without_layers(self) -> None:
        anchors = " or ".join(self.format.anchors or self.format.scaled)
        message = f"{self.checkpoint.path}: {self.format.name}: no tensor's name ends in {anchors}"
        weights = [info for info in self.checkpoint.tensors.values() if info.name.endswith(".weight")]
        codes = [info for info in weights if info.dtype not in (*FLOATS, "F64")]
        if codes:
            raise UnsupportedFormat(f"{message}, and {codes[0].name!r} is {codes[0].dtype}")
        if not any(len(info.shape) == 2 for info in weights):
            raise CheckpointError(f"{message}, and no weight is a matrix of floats")
        raise NothingPacked(f"{message}; all its weights are floats, so its quantization settings have no effect")

    def _check_anchored(self, name: str, role: str, base: str) -> None:
        """Raises an error if a tensor's layer has no codes."""
        anchors = [base + ending for ending in (*self.format.anchors, *self.format.scaled)]
        if self.format.is_float(self.checkpoint, base):
            return
        if not any(anchor in self.checkpoint.tensors for anchor in anchors):
            raise self.checkpoint.error(name, f"{self.format.name}: {role} of a layer without {' or '.join(anchors)}")

    def stored_bytes(self, index: int) -> int:
        layer = self._layers[index]
        whole = sum(self.checkpoint.tensors[name].nbytes for name in layer.roles.values())
        return whole // layer.experts

    def sizes(self, index: int) -> tuple[int, int]:
        layer = self._layers[index]
        shape = layer.shape("weight") if "weight" in layer else ()
        kind = layer.dtype("weight") if len(shape) == 2 else ""
        is_nvfp4 = "weight_scale_2" in layer  # uint8 weights of other formats have another layout
        if kind not in SIZES or (kind == "U8" and not is_nvfp4):
            return super().sizes(index)
        return shape[0], shape[1] * SIZES[kind]

    def kind(self, index: int) -> Hashable:
        """Returns the dtypes and shapes of the layer's tensors in the files."""
        layer = self._layers[index]
        return tuple((role, layer.dtype(role), layer.shape(role)) for role in sorted(layer.roles))

    def names(self) -> list[str]:
        return [layer.name for layer in self._layers]

    def convert(self, index: int) -> PackedWeight:
        if self._ahead is None:
            return self._convert(self._layers[index])
        self.checkpoint.ahead = self._ahead.take(index)
        try:
            return self._convert(self._layers[index])
        finally:
            self.checkpoint.ahead = {}

    def check_headers(self, index: int) -> None:
        """Raises UnsupportedFormat if the headers show that the layer cannot be packed."""
        # The format gets tensors on the meta device. If it needs values, torch raises one of these errors. Then the
        # headers do not show whether the layer can be packed.
        with suppress(RuntimeError, NotImplementedError):
            self.format.read(self._layers[index].headers(), self.checkpoint.settings, self.options)

    def read_ahead(self, order: Iterable[int], limit: int) -> None:
        """Starts threads that read layers in the order in which they will be converted.

        Layers of a stack of experts share tensors and are not read ahead.

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
                if layer.expert is None
            },
            limit,
        )

    def leave_out(self, layers: Iterable[int]) -> None:
        if self._ahead is not None:
            for index in layers:
                self._ahead.take(index)

    def stop_reading_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def read_part(self, index: int, part: Part) -> PackedWeight | None:
        """Reads a part of one layer and validates it. Returns None if the layer can only be read in full."""
        layer = part_of(self._layers[index], self.format.axes, part)
        return None if layer is None else self._convert(layer)

    def _convert(self, layer: Layer) -> PackedWeight:
        weight = self.format.read(layer, self.checkpoint.settings, self.options)
        weight.name = layer.name
        try:
            return weight.validate()
        except PackedWeightError as error:
            role = self.format.fields.get(error.field, error.field)
            raise layer.error(role if role in layer else next(iter(layer.roles)), str(error)) from error

    def bias(self, index: int) -> Tensor | None:
        layer = self._layers[index]
        return layer.bias() if "bias" in layer else None

    @property
    def config(self) -> dict[str, Any]:
        return self.checkpoint.config

    def others(self) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
        used = {name for layer in self._layers for name in layer.roles.values()} | self.format.unused(self.checkpoint)
        for name, info in self.checkpoint.tensors.items():
            if name not in used:
                yield self.format.hf_name(self.checkpoint, name, None), partial(self._plain, name), info.dtype

    def _plain(self, name: str) -> Tensor:
        return self.format.hf_values(self.checkpoint, name, self.checkpoint.read(name))

    def tensor_files(self) -> dict[str, Path]:
        return {name: info.file for name, info in self.checkpoint.tensors.items()}

    def fingerprint(self) -> bytes:
        """Returns a digest of all tensors: their names, dtypes, shapes, and first and last bytes."""
        whole = hashlib.sha256()
        for name, info in sorted(self.checkpoint.tensors.items()):
            whole.update(f"{name} {info.dtype} {info.shape}".encode())
            if info.nbytes and name not in self.checkpoint.loaded:
                with info.file.open("rb", buffering=0) as stream:
                    size = min(ENDS, info.nbytes)
                    for start in (info.offset, info.offset + info.nbytes - size):
                        stream.seek(start)
                        whole.update(stream.read(size))
        return whole.digest()


def open_reader(path: str | os.PathLike[str], options: ReadOptions | None = None, **fields: Any) -> CheckpointReader:
    """Opens a checkpoint and reads only its headers.

    The arguments and errors are those of `read_layers`.

    Examples:
        >>> weight = tmm.quantize_weight(torch.randn(24, 64), "uint4", group_size=32, name="up")
        >>> _ = tmm.convert.export_checkpoint([weight], "opened", "gptq")
        >>> tmm.convert.open_reader("opened").names()
        ['up']
    """
    given, place = ReadOptions.of(options, fields), Path(path)
    if not place.exists():
        raise CheckpointError(f"{place}: does not exist")
    if place.is_dir() or (place.suffix == ".safetensors" and place.is_file()):
        return DirectoryReader(place, given)
    if place.suffix == ".gguf" and place.is_file():
        return GgufReader(place, given)
    raise CheckpointError(f"{place}: expected a directory, a .gguf or a .safetensors file")


def read_layers(
    path: str | os.PathLike[str], options: ReadOptions | None = None, **fields: Any
) -> Iterator[PackedWeight | DenseWeight]:
    """Reads the packed layers of a checkpoint, one at a time.

    Args:
        path: a checkpoint directory or a .gguf file.
        options: how to read; None means the defaults.
        **fields: fields of `ReadOptions`; each overrides the field of `options`.

    Yields:
        `PackedWeight`, in the order of the files. With `on_unsupported="dequantize"`, also `DenseWeight`.

    Raises:
        CheckpointError: the checkpoint is damaged or contradicts itself.
        UnsupportedFormat: the format or a layer is not supported. This is a subclass of `CheckpointError`.
        ValueError: an option has an unknown value.

    Examples:
        >>> weight = tmm.quantize_weight(torch.randn(24, 64), "uint4", group_size=32, name="up")
        >>> _ = tmm.convert.export_checkpoint([weight], "read", "gptq")
        >>> for layer in tmm.convert.read_layers("read"):
        ...     print(layer)
        PackedWeight('up', K=64, N=24, uint4, group_size=32, scales=float16, zeros, device=cpu)
    """
    yield from open_reader(path, options, **fields)
