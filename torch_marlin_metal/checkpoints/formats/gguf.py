"""Reads the layers of GGUF files under the names and in the row order of llama.cpp or of transformers."""

import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.errors import CheckpointError, UnknownArchitecture, UnsupportedFormat
from torch_marlin_metal.checkpoints.files.gguf import GgufTensor, read_gguf
from torch_marlin_metal.checkpoints.files.safetensors import Slice
from torch_marlin_metal.checkpoints.float_rows import FloatRows
from torch_marlin_metal.checkpoints.format_interface import Format
from torch_marlin_metal.checkpoints.formats.gguf_blocks import DECODERS, in_pieces
from torch_marlin_metal.checkpoints.formats.gguf_names import (
    ARCHITECTURES,
    expert_name,
    has_place,
    hf_name,
    is_own_scale,
    partner,
    split_names,
)
from torch_marlin_metal.checkpoints.formats.gguf_orders import (
    column_order,
    joined,
    permute_columns,
    restored,
    row_order,
    split_rows,
)
from torch_marlin_metal.checkpoints.formats.gguf_pieces import Piece, dequantize, needs_gguf
from torch_marlin_metal.checkpoints.options import ReadOptions, typed
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.formats import weight_format
from torch_marlin_metal.joined_weights import same_kind
from torch_marlin_metal.packed_weight import COLUMN_TENSORS, PackedWeight, PackedWeightError


def unknown_architecture(path: Path, architecture: str) -> str:
    """Returns the error message for an architecture that is not in `ARCHITECTURES`."""
    return (
        f"{path}: the architecture {architecture!r} has no table of transformers' names; load the safetensors of the "
        f"model that was converted, or read the tensors under their own names: {typed('gguf_names', 'gguf')}"
    )


class GgufReader(CheckpointReader):
    """Reads a GGUF file. Each quantized matrix is a layer, and so is each expert of a stacked tensor."""

    tensors: dict[str, GgufTensor]

    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self.format = FORMAT
        self.metadata, self.tensors = read_gguf(path)
        self.architecture = str(self.metadata.get("general.architecture", ""))
        self.hf = options.gguf_names == "hf"
        if self.hf and self.architecture not in ARCHITECTURES:
            raise UnknownArchitecture(unknown_architecture(path, self.architecture))
        if self.hf:
            self.tensors = {
                name: tensor
                for name, tensor in self.tensors.items()
                if has_place(name, self.architecture, self.metadata)
            }
        self._partners = self._find_partners()
        pieces = list(self._pieces())
        self._layers = [piece for piece in pieces if not all(tensor.is_plain for tensor in piece.tensors)]
        if not self._layers:
            raise CheckpointError(f"{path}: no tensor of a quantized type")
        self._floats_of_layers = [piece for piece in pieces if all(tensor.is_plain for tensor in piece.tensors)]
        matrices = {tensor.name: tensor for piece in pieces for tensor in piece.tensors}
        self._used = {*matrices}
        self._used |= {name for tensor in matrices.values() for name in self._side_tensors(tensor)}

    def _find_partners(self) -> dict[str, tuple[GgufTensor, str]]:
        """Finds the pairs that are one layer in transformers: first tensor -> (second tensor, way of joining)."""
        found = {}
        for tensor in self.tensors.values():
            join = partner(tensor.name, self.architecture) if self.hf else None
            if join is None:
                continue
            name, way = join
            other = self.tensors.get(name)
            fits = other is not None and other.shape[:-2] == tensor.shape[:-2] and len(other.shape) == len(tensor.shape)
            if other is None or not fits or (way == "interleaved" and other.shape != tensor.shape):
                got = "no such tensor" if other is None else f"{other.type_name} {list(other.shape)}"
                raise CheckpointError(
                    f"{tensor.where}: expected {name!r} with a shape that fits {list(tensor.shape)}, got {got}"
                )
            found[tensor.name] = other, way
        return found

    def _pieces(self) -> Iterator[Piece]:
        """Yields the quantized matrices, and those float matrices that transformers joins, splits or unstacks."""
        seconds = {other.name for other, _ in self._partners.values()}
        for tensor in sorted(self.tensors.values(), key=lambda tensor: (tensor.file.name, tensor.offset)):
            second, way = self._partners.get(tensor.name, (None, ""))
            if tensor.name in seconds:
                continue
            parts = split_names(tensor.name, self.architecture) if self.hf else []
            stacked = len(tensor.shape) == 3 and way != "latent"
            if tensor.is_plain and not (self.hf and (second or parts or stacked)):
                continue
            if stacked:
                yield from (Piece(tensor, second, way, expert) for expert in range(tensor.shape[0]))
            elif parts:
                yield from (Piece(tensor, None, "", None, part) for part in range(len(parts)))
            else:
                yield Piece(tensor, second, way)

    def _side_tensors(self, tensor: GgufTensor) -> list[str]:
        names = [f"{tensor.name.removesuffix('.weight')}.bias", *self._scales(tensor)]
        return [name for name in names if name in self.tensors]

    def _scales(self, tensor: GgufTensor) -> list[str]:
        """Returns the possible names of the global scale of a tensor."""
        base = tensor.name.removesuffix(".weight")
        own = self.hf and tensor.type_name != "NVFP4" and is_own_scale(f"{base}.scale", self.architecture)
        return [f"{base}.weight.scale"] if own else [f"{base}.scale", f"{base}.weight.scale"]

    def names(self) -> list[str]:
        return [self._name(piece) for piece in self._layers]

    def _name(self, piece: Piece) -> str:
        tensor, expert = piece.tensor, piece.expert
        if piece.part is not None:
            return split_names(tensor.name, self.architecture)[piece.part]
        if self.hf and expert is not None and (name := self._expert_name(tensor, expert)):
            return name
        return self._full_name(tensor).removesuffix(".weight") + ("" if expert is None else f".{expert}")

    def _expert_name(self, tensor: GgufTensor, expert: int) -> str | None:
        fused = f"{tensor.name.rpartition('.ffn_')[0]}.ffn_gate_up_exps.weight" in self.tensors
        return expert_name(tensor.name, self.architecture, expert, fused=fused)

    def _full_name(self, tensor: GgufTensor) -> str:
        if not self.hf:
            return tensor.name
        name = hf_name(tensor.name, self.architecture)
        for inner, (other, instead) in ARCHITECTURES[self.architecture].without.items():
            base, _, ending = tensor.name.rpartition(".")
            if base.endswith(inner) and f"{base.removesuffix(inner)}{other}.{ending}" not in self.tensors:
                number = base.removesuffix(inner).rpartition(".")[2]
                name = f"{ARCHITECTURES[self.architecture].blocks}.{number}{instead}.{ending}"
        return name or tensor.name

    def stored_bytes(self, index: int) -> int:
        piece = self._layers[index]
        size = sum(tensor.nbytes for tensor in piece.tensors)
        if piece.part is not None:
            rows = self._rows(piece)
            return int(size * (rows.stop - rows.start) // piece.tensor.shape[0])
        return size // (1 if piece.expert is None else piece.tensor.shape[0])

    def sizes(self, index: int) -> tuple[int, int]:
        N, K = self._layers[index].tensor.shape[-2:]
        return N, K

    def weight_name(self, index: int) -> str:
        """Returns the name of the layer's weight: the layer's name, plus `.weight` if the tensor's name has it."""
        name = self.layer_names[index]
        return f"{name}.weight" if f"{name}.weight" in self.tensors else name

    def kind(self, index: int) -> Hashable:
        """Returns the types, the shapes, and the name without digits, because the column order depends on the name."""
        piece = self._layers[index]
        sides = [name for tensor in piece.tensors for name in self._side_tensors(tensor)]
        whole = piece.expert is None, piece.part, re.sub(r"\d", "", piece.tensor.name)
        return *whole, len(sides), tuple((tensor.type_name, tensor.shape) for tensor in piece.tensors)

    def convert(self, index: int) -> PackedWeight:
        piece = self._layers[index]
        if piece.way == "latent":
            raise UnsupportedFormat(
                f"{piece.tensor.where}: its columns are rows in transformers' layer",
                self._floats(index),
                f"{piece.tensor.type_name} of attn_k_b",
            )
        weight = self._convert(index, piece, piece.tensor)
        other = piece.second
        if other is None:
            return weight
        second = self._convert(index, piece, other)
        if not same_kind(weight, second):
            raise UnsupportedFormat(
                f"{piece.tensor.file}: tensors {piece.tensor.name!r} and {other.name!r} are one layer in transformers, "
                f"but have different types ({piece.tensor.type_name} and {other.type_name})",
                self._floats(index),
            )
        if weight_format(weight.weight_format).has_global_scale:
            raise UnsupportedFormat(
                f"{piece.tensor.where}: NVFP4 that is one layer with {other.name!r} is not read",
                self._floats(index),
            )
        first, others = weight.tensors(), second.tensors()
        names = [name for name in COLUMN_TENSORS if name in first and name != "bias"]
        both = {name: self._joined(piece, first[name].T, others[name].T).T.contiguous() for name in names}
        return replace(weight, **both, bias=self.bias(index)).validate()  # type: ignore[arg-type]

    def _joined(self, piece: Piece, first: Tensor, second: Tensor) -> Tensor:
        try:
            return joined(piece.way, first, second, self.architecture, self.metadata)
        except CheckpointError as error:
            raise CheckpointError(f"{piece.tensor.where}: {error}") from error

    def _rows(self, piece: Piece) -> slice:
        if piece.part is None:
            return slice(None)
        try:
            return split_rows(piece.part, piece.tensor.shape[0], self.architecture, self.metadata)
        except CheckpointError as error:
            raise CheckpointError(f"{piece.tensor.where}: {error}") from error

    def _convert(self, index: int, piece: Piece, tensor: GgufTensor) -> PackedWeight:
        where, expert = tensor.where, piece.expert
        known = not self.hf or piece.second or piece.part is not None or hf_name(tensor.name, self.architecture)
        if not known and (expert is None or not self._expert_name(tensor, expert)):
            raise UnsupportedFormat(
                f"{where}: has no name in transformers' {self.architecture} model", self._floats(index)
            )
        if tensor.type_name not in DECODERS:
            raise UnsupportedFormat(
                f"{where}: {tensor.type_name} is not a type that is read",
                self._floats(index),
                tensor.type_name,
            )
        if len(tensor.shape) != (2 if expert is None else 3):
            raise UnsupportedFormat(f"{where}: expected a matrix, got shape {list(tensor.shape)}", self._floats(index))
        block_bytes, decode = DECODERS[tensor.type_name]
        rows = tensor.shape[-2]
        try:
            first, last, _ = self._rows(piece).indices(rows)

            def read(part: Slice) -> Tensor:
                some = Slice(0, first + part.start, first + part.stop)
                return tensor.read(expert, some).reshape(part.stop - part.start, -1, block_bytes)

            weight = in_pieces(decode, read, last - first)
            weight.name, weight.source = self._name(piece), f"gguf {tensor.type_name}"
            weight.global_scale = self._scale(tensor, expert)
            weight.bias = self._bias_of(piece, tensor)
            order = self._order(row_order, tensor, tensor.shape[0])
            if order is not None:
                weight = replace(weight.columns(order), bias=weight.bias)
            columns = self._order(column_order, tensor, tensor.shape[-1])
            moved = weight if columns is None else permute_columns(weight, columns)
            if moved is None:
                raise UnsupportedFormat(
                    f"{where}: its columns are in another order in transformers, and a value head does not fill whole "
                    f"groups of {weight.group_size}",
                    self._floats(index),
                    f"{tensor.type_name} of ssm_out",
                )
            contiguous: dict[str, Any] = {name: tensor.contiguous() for name, tensor in moved.tensors().items()}
            return replace(moved, **contiguous).validate()
        except PackedWeightError as error:
            raise CheckpointError(f"{where}: {error}") from error
        except ImportError as error:
            raise needs_gguf(tensor) from error

    def _order(self, order_of: Callable[..., Tensor | None], tensor: GgufTensor, count: int) -> Tensor | None:
        """Returns the order that restores transformers' rows or columns, or None if no row or column moved."""
        if not self.hf:
            return None
        try:
            return order_of(tensor.name, self.architecture, self.metadata, count)
        except CheckpointError as error:
            raise CheckpointError(f"{tensor.where}: {error}") from error

    def _scale(self, tensor: GgufTensor, expert: int | None) -> Tensor | None:
        """Returns the global scale of an NVFP4 tensor, which llama.cpp stores as a separate tensor."""
        for name in self._scales(tensor):
            if name in self.tensors:
                scale, experts = self.tensors[name], 1 if expert is None else tensor.shape[0]
                if tensor.type_name != "NVFP4" or scale.type_name != "F32" or scale.shape not in ((1,), (experts,)):
                    raise UnsupportedFormat(
                        f"{scale.where}: expected one F32 number beside a weight of NVFP4, got "
                        f"{scale.type_name} {list(scale.shape)} beside {tensor.type_name}"
                    )
                values = scale.read()
                return values[:1] if expert is None or values.numel() == 1 else values[expert : expert + 1].clone()
        return None

    def bias(self, index: int) -> Tensor | None:
        """Reads a layer's bias `[N]` in the row order of its weight. Returns None if the layer has no bias."""
        return self._bias(self._layers[index])

    def _bias(self, piece: Piece) -> Tensor | None:
        bias, other = self._bias_of(piece, piece.tensor), piece.second
        if other is None:
            return bias
        second = self._bias_of(piece, other)
        if bias is None or second is None:
            if bias is second:
                return None
            raise CheckpointError(f"{other.file}: only one of {piece.tensor.name!r} and {other.name!r} has a bias")
        return self._joined(piece, bias, second)

    def _bias_of(self, piece: Piece, tensor: GgufTensor) -> Tensor | None:
        name = f"{tensor.name.removesuffix('.weight')}.bias"
        if name not in self.tensors or not tensor.name.endswith(".weight"):
            return None
        bias, expected = self.tensors[name], tensor.shape[:-1]
        if bias.type_name not in ("F32", "F16", "BF16") or bias.shape != expected:
            raise CheckpointError(f"{bias.where}: expected floats {list(expected)}, got {list(bias.shape)}")
        order = self._order(row_order, bias, bias.shape[-1])
        values = bias.read(piece.expert)[self._rows(piece)]
        return values if order is None else values[order]

    def _floats(self, index: int) -> Callable[[], FloatRows]:
        return lambda: FloatRows.of(self._values(self._layers[index]))

    def _values(self, piece: Piece) -> Tensor:
        """Reads the weight of a layer as floats `[N, K]`."""
        first = self._decoded(piece.tensor, piece.expert)
        if piece.second is not None:
            return self._joined(piece, first, self._decoded(piece.second, piece.expert))
        return self._ordered(piece.tensor, first)[self._rows(piece)]

    def _decoded(self, tensor: GgufTensor, expert: int | None) -> Tensor:
        values, scale = dequantize(tensor, expert), self._scale(tensor, expert)
        return values if scale is None else values * scale

    def _ordered(self, tensor: GgufTensor, values: Tensor) -> Tensor:
        rows = self._order(row_order, tensor, tensor.shape[0])
        columns = self._order(column_order, tensor, tensor.shape[-1])
        values = values if rows is None else values[rows]
        return values if columns is None else values[:, columns]

    def others(self) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
        """Yields (name, function that reads the tensor, dtype) for tensors outside the layers, for example norms."""
        for tensor in self.tensors.values():
            if tensor.name not in self._used:
                yield self._full_name(tensor), partial(self._plain, tensor), tensor.type_name
            elif tensor.type_name == "F32" and self.hf and is_own_scale(tensor.name, self.architecture):
                # llama.cpp's converter already multiplied the NVFP4 scales by this tensor, so transformers gets ones.
                yield self._full_name(tensor), partial(torch.ones, tensor.shape), tensor.type_name
        for piece in self._floats_of_layers:
            kind = piece.tensor.type_name
            yield f"{self._name(piece)}.weight", partial(self._values, piece), kind
            if (bias := self._bias(piece)) is not None:
                yield f"{self._name(piece)}.bias", partial(Tensor.clone, bias), kind
        yield from self._numbers()

    def _numbers(self) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
        """Yields the parameters of blocks that the file stores as metadata, one number for each block."""
        known = ARCHITECTURES[self.architecture] if self.hf else None
        for key, name in known.numbers.items() if known is not None else ():
            values = self.metadata.get(key)
            count = self.metadata.get(f"{self.architecture}.block_count")
            if not isinstance(values, memoryview) or len(values) != count:
                raise CheckpointError(f"{self.path}: {key}: expected a number for each of {count} blocks")
            for block, value in enumerate(values):
                read = partial(torch.tensor, [value] if "alpha" in key else value, device="cpu")
                yield f"{known.blocks}.{block}{name}", read, "F32"  # type: ignore[union-attr]

    def _plain(self, tensor: GgufTensor) -> Tensor:
        values = self._ordered(tensor, tensor.read())
        return restored(tensor.name, self.architecture, values) if self.hf else values


FORMAT = Format(
    name="gguf",
    title="GGUF (llama.cpp)",
    variants=(
        ("Q4_0, Q3_K, TQ1_0, TQ2_0", "uint4b8"),
        ("Q4_1, Q4_K, Q2_K", "uint4_bias"),
        ("Q5_0", "uint5b16"),
        ("Q5_1, Q5_K", "uint5_bias"),
        ("Q6_K", "uint6b32"),
        ("Q8_0", "uint8b128"),
        ("IQ4_NL, IQ4_XS, IQ3_XXS, IQ3_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ1_S, IQ1_M", "lut4"),
        ("MXFP4", "mxfp4"),
        ("NVFP4, with its scale tensor", "nvfp4"),
    ),
    refused=(
        ("Q8_1, Q8_K, Q1_0", "no file has the first two, and Q1_0 is decoded by no package"),
        ("big-endian files, GGUF version 1", "not written any more"),
        ("gguf_names='hf' for architectures without a table of names", "see the page on GGUF files"),
    ),
    containers=("a `.gguf` file, split or whole",),
)
