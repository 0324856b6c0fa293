"""Reads the layers of GGUF files, with the names and the order of rows of llama.cpp or of transformers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.checkpoints.files.gguf import GgufTensor, read_gguf
from torch_marlin_metal.checkpoints.format_interface import Format
from torch_marlin_metal.checkpoints.formats.gguf_blocks import DECODERS
from torch_marlin_metal.checkpoints.formats.gguf_names import (
    ARCHITECTURES,
    expert_name,
    has_place,
    hf_name,
    is_own_scale,
    partner,
)
from torch_marlin_metal.checkpoints.formats.gguf_orders import column_order, permute_columns, restored, row_order
from torch_marlin_metal.checkpoints.formats.gguf_small import decode
from torch_marlin_metal.checkpoints.options import ReadOptions, typed
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.formats import weight_format
from torch_marlin_metal.packed_weight import COLUMN_TENSORS, PackedWeight, PackedWeightError


def unknown_architecture(path: Path, architecture: str) -> str:
    """Returns the sentence about an architecture that `ARCHITECTURES` lacks."""
    return (
        f"{path}: the architecture {architecture!r} has no table of transformers' names; load the safetensors of the "
        f"model that was converted, or read the tensors under their own names: {typed('gguf_names', 'gguf')}"
    )


class GgufReader(CheckpointReader):
    """Reads a GGUF file. Every quantized matrix is a layer, and so is every expert of a stacked tensor."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        self.format = FORMAT
        self.metadata, self.tensors = read_gguf(path)
        self.architecture = str(self.metadata.get("general.architecture", ""))
        self.hf = options.gguf_names == "hf"
        if self.hf and self.architecture not in ARCHITECTURES:
            raise UnsupportedFormat(unknown_architecture(path, self.architecture))
        if self.hf:
            self.tensors = {
                name: tensor
                for name, tensor in self.tensors.items()
                if has_place(name, self.architecture, self.metadata)
            }
        self._partners = self._find_partners()
        second = {tensor.name for tensor in self._partners.values()}
        self._layers: list[tuple[GgufTensor, int | None]] = []
        for tensor in sorted(self.tensors.values(), key=lambda tensor: (tensor.file.name, tensor.offset)):
            if not tensor.is_plain and tensor.name not in second:
                stacked = len(tensor.shape) == 3
                self._layers += [(tensor, expert) for expert in range(tensor.shape[0])] if stacked else [(tensor, None)]
        if not self._layers:
            raise CheckpointError(f"{path}: no tensor of a quantized type")
        self._matrices = {tensor.name: tensor for tensor, _ in self._layers}
        self._matrices |= {tensor.name: tensor for tensor in self._partners.values()}
        self._used = {*self._matrices}
        self._used |= {name for tensor in self._matrices.values() for name in self._side_tensors(tensor)}

    def _find_partners(self) -> dict[str, GgufTensor]:
        """Returns the tensors that transformers joins with another one in a layer, by the name of the other one."""
        found = {}
        for tensor in self.tensors.values():
            name = partner(tensor.name, self.architecture) if self.hf and not tensor.is_plain else None
            if name is None:
                continue
            other = self.tensors.get(name)
            if other is None or other.is_plain or other.shape != tensor.shape:
                got = "no such tensor" if other is None else f"{other.type_name} {list(other.shape)}"
                raise CheckpointError(
                    f"{tensor.file}: tensor {tensor.name!r}: expected {name!r} quantized with the shape "
                    f"{list(tensor.shape)}, got {got}"
                )
            found[tensor.name] = other
        return found

    def _side_tensors(self, tensor: GgufTensor) -> list[str]:
        names = [f"{tensor.name.removesuffix('.weight')}.bias", *self._scales(tensor)]
        return [name for name in names if name in self.tensors]

    def _scales(self, tensor: GgufTensor) -> list[str]:
        """Returns the names that the scale for a whole tensor may have."""
        base = tensor.name.removesuffix(".weight")
        own = self.hf and tensor.type_name != "NVFP4" and is_own_scale(f"{base}.scale", self.architecture)
        return [f"{base}.weight.scale"] if own else [f"{base}.scale", f"{base}.weight.scale"]

    def names(self) -> list[str]:
        """Returns the layers' names in the order of the file."""
        return [self._name(tensor, expert) for tensor, expert in self._layers]

    def _name(self, tensor: GgufTensor, expert: int | None) -> str:
        if self.hf and expert is not None and (name := self._expert_name(tensor, expert)):
            return name
        return self._full_name(tensor).removesuffix(".weight") + ("" if expert is None else f".{expert}")

    def _expert_name(self, tensor: GgufTensor, expert: int) -> str | None:
        fused = f"{tensor.name.rpartition('.ffn_')[0]}.ffn_gate_up_exps.weight" in self.tensors
        return expert_name(tensor.name, self.architecture, expert, fused=fused)

    def _full_name(self, tensor: GgufTensor) -> str:
        return (hf_name(tensor.name, self.architecture) if self.hf else None) or tensor.name

    def stored_bytes(self, index: int) -> int:
        """Returns the size of a layer in the file."""
        tensor, expert = self._layers[index]
        both = [tensor, *([self._partners[tensor.name]] if tensor.name in self._partners else [])]
        return sum(one.nbytes for one in both) // (1 if expert is None else tensor.shape[0])

    def convert(self, index: int) -> PackedWeight:
        """Reads one layer and validates it."""
        tensor, expert = self._layers[index]
        weight = self._convert(index, tensor, expert)
        other = self._partners.get(tensor.name)
        if other is None:
            return weight
        second = self._convert(index, other, expert)
        fields = ("weight_format", "group_size")
        if any(getattr(weight, name) != getattr(second, name) for name in fields):
            raise UnsupportedFormat(
                f"{tensor.file}: tensors {tensor.name!r} and {other.name!r} are one layer in transformers, but have "
                f"different types ({tensor.type_name} and {other.type_name})",
                self._floats(index),
            )
        if weight_format(weight.weight_format).has_global_scale:
            raise UnsupportedFormat(
                f"{tensor.file}: tensor {tensor.name!r}: NVFP4 whose columns alternate with those of {other.name!r} "
                "is not read",
                self._floats(index),
            )
        first, others = weight.tensors(), second.tensors()
        joined = {
            name: _alternate(first[name].T, others[name].T).T.contiguous()
            for name in COLUMN_TENSORS
            if name in first and name != "bias"
        }
        return replace(weight, **joined, bias=self.bias(index)).validate()  # type: ignore[arg-type]

    def _convert(self, index: int, tensor: GgufTensor, expert: int | None) -> PackedWeight:
        """Reads one matrix of a layer."""
        where = f"{tensor.file}: tensor {tensor.name!r}"
        known = expert is not None and self.hf and self._expert_name(tensor, expert)
        if self.hf and hf_name(tensor.name, self.architecture) is None and not known:
            raise UnsupportedFormat(
                f"{where}: has no name in transformers' {self.architecture} model", self._floats(index)
            )
        if tensor.type_name not in DECODERS:
            raise UnsupportedFormat(
                f"{where}: {tensor.type_name} is not a 4-bit type that is read",
                self._floats(index),
                tensor.type_name,
            )
        if len(tensor.shape) != (2 if expert is None else 3):
            raise UnsupportedFormat(f"{where}: expected a matrix, got shape {list(tensor.shape)}", self._floats(index))
        block_bytes, decode = DECODERS[tensor.type_name]
        rows = tensor.shape[-2]
        try:
            weight = decode(tensor.read(expert).reshape(rows, -1, block_bytes))
            weight.name, weight.source = self._name(tensor, expert), f"gguf {tensor.type_name}"
            weight.global_scale = self._scale(tensor, expert)
            weight.bias = self._bias_of(tensor, expert)
            order = self._row_order(tensor)
            if order is not None:
                weight = replace(weight.columns(order), bias=weight.bias)
            columns = self._column_order(tensor)
            moved = weight if columns is None else permute_columns(weight, columns)
            if moved is None:
                raise UnsupportedFormat(
                    f"{where}: its columns are in another order in transformers, and a value head does not fill whole "
                    f"groups of {weight.group_size}",
                    self._floats(index),
                )
            contiguous: dict[str, Any] = {name: tensor.contiguous() for name, tensor in moved.tensors().items()}
            return replace(moved, **contiguous).validate()
        except PackedWeightError as error:
            raise CheckpointError(f"{where}: {error}") from error
        except ImportError as error:
            raise _needs_gguf(tensor) from error

    def _row_order(self, tensor: GgufTensor) -> Tensor | None:
        """Returns the row order that restores transformers' order of a tensor, or None if it is unchanged."""
        return self._order(row_order, tensor, tensor.shape[0])

    def _column_order(self, tensor: GgufTensor) -> Tensor | None:
        return self._order(column_order, tensor, tensor.shape[-1])

    def _order(self, order_of: Callable[..., Tensor | None], tensor: GgufTensor, count: int) -> Tensor | None:
        if not self.hf:
            return None
        try:
            return order_of(tensor.name, self.architecture, self.metadata, count)
        except CheckpointError as error:
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r}: {error}") from error

    def _scale(self, tensor: GgufTensor, expert: int | None) -> Tensor | None:
        """Returns NVFP4's scale for the whole tensor, which llama.cpp stores as a separate tensor."""
        for name in self._scales(tensor):
            if name in self.tensors:
                scale, experts = self.tensors[name], 1 if expert is None else tensor.shape[0]
                if tensor.type_name != "NVFP4" or scale.type_name != "F32" or scale.shape not in ((1,), (experts,)):
                    raise UnsupportedFormat(
                        f"{scale.file}: tensor {name!r}: {scale.type_name} {list(scale.shape)} beside a weight of "
                        f"{tensor.type_name}; read is one F32 number beside NVFP4",
                        None,
                    )
                values = scale.read()
                return values[:1] if expert is None or values.numel() == 1 else values[expert : expert + 1].clone()
        return None

    def bias(self, index: int) -> Tensor | None:
        """Reads a layer's bias `[N]`, in the order of the rows of its weight; None if the layer has none."""
        tensor, expert = self._layers[index]
        bias, other = self._bias_of(tensor, expert), self._partners.get(tensor.name)
        if other is None:
            return bias
        second = self._bias_of(other, expert)
        if bias is None or second is None:
            if bias is second:
                return None
            raise CheckpointError(f"{tensor.file}: only one of {tensor.name!r} and {other.name!r} has a bias")
        return _alternate(bias, second)

    def _bias_of(self, tensor: GgufTensor, expert: int | None) -> Tensor | None:
        name = f"{tensor.name.removesuffix('.weight')}.bias"
        if name not in self.tensors or not tensor.name.endswith(".weight"):
            return None
        bias, expected = self.tensors[name], tensor.shape[:-1]
        if bias.type_name not in ("F32", "F16", "BF16") or bias.shape != expected:
            raise CheckpointError(
                f"{bias.file}: tensor {name!r}: expected floats {list(expected)}, got {list(bias.shape)}"
            )
        order = self._order(row_order, bias, bias.shape[-1])
        return bias.read(expert) if order is None else bias.read(expert)[order]

    def _floats(self, index: int) -> Callable[[], Tensor]:
        tensor, expert = self._layers[index]

        def dequantize() -> Tensor:
            weight, other = _dequantize(tensor, expert), self._partners.get(tensor.name)
            if other is not None:
                return _alternate(weight, _dequantize(other, expert))
            return self._ordered(tensor, weight)

        return dequantize

    def _ordered(self, tensor: GgufTensor, values: Tensor) -> Tensor:
        """Returns the values of a tensor in transformers' order of rows and columns."""
        rows, columns = self._row_order(tensor), self._column_order(tensor)
        values = values if rows is None else values[rows]
        return values if columns is None else values[:, columns]

    def others(self) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
        """Yields (name, function that reads it, dtype) for tensors outside the layers, such as embeddings and norms."""
        for tensor in self.tensors.values():
            if tensor.name not in self._used:
                yield self._full_name(tensor), partial(self._plain, tensor), tensor.type_name
            elif tensor.type_name == "F32" and self.hf and is_own_scale(tensor.name, self.architecture):
                # llama.cpp's converter has multiplied the scales of NVFP4 by these numbers.
                yield self._full_name(tensor), partial(torch.ones, tensor.shape), tensor.type_name

    def _plain(self, tensor: GgufTensor) -> Tensor:
        """Reads a tensor outside the layers, with transformers' values and order of rows if `hf` is set."""
        values = self._ordered(tensor, tensor.read())
        return restored(tensor.name, self.architecture, values) if self.hf else values


def _alternate(first: Tensor, second: Tensor) -> Tensor:
    """Returns the rows of two tensors in turn, beginning with the first one's."""
    return torch.stack((first, second), dim=1).flatten(0, 1)


def _dequantize(tensor: GgufTensor, expert: int | None) -> Tensor:
    """Decodes any block type with the optional package `gguf`."""
    blocks: Any = tensor.read(expert).numpy()
    try:
        return decode(blocks, tensor.type_name)
    except ImportError as error:
        raise _needs_gguf(tensor) from error
    except (NotImplementedError, KeyError) as error:
        where = f"{tensor.file}: tensor {tensor.name!r}"
        raise UnsupportedFormat(f"{where}: the package gguf does not decode {tensor.type_name}") from error


def _needs_gguf(tensor: GgufTensor) -> UnsupportedFormat:
    where = f"{tensor.file}: tensor {tensor.name!r}"
    return UnsupportedFormat(f"{where}: {tensor.type_name} needs the package gguf (pip install gguf)")


FORMAT = Format(
    name="gguf",
    title="GGUF (llama.cpp)",
    variants=(
        ("Q4_0, Q3_K, TQ1_0, TQ2_0", "uint4b8"),
        ("Q4_1, Q4_K, Q2_K", "uint4_bias"),
        ("IQ4_NL, IQ4_XS, IQ3_XXS, IQ3_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ1_S, IQ1_M", "lut4"),
        ("MXFP4", "mxfp4"),
        ("NVFP4, with its scale tensor", "nvfp4"),
    ),
    refused=(
        (
            "Q5_0, Q5_1, Q8_0, Q5_K, Q6_K",
            "more than 16 values in a group; dequantized on request, and in models by default",
        ),
        ("big-endian files, GGUF version 1", "not written any more"),
        ("gguf_names='hf' for architectures without a table of names", "see the page on GGUF files"),
    ),
    containers=("a `.gguf` file, split or whole",),
)
