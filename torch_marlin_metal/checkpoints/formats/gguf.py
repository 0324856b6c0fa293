"""GGUF layers: blocks of 32, 64 or 256 weights along K, each of which holds its codes and scales.

ggml's files ggml-common.h and ggml-quants.c define the block layouts. In every type, the codes come in runs of n bytes:
the low nibbles hold the first n codes of the run, and the high nibbles the next n.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints import fp4
from torch_marlin_metal.checkpoints.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.checkpoints.files.gguf import GgufTensor, read_gguf
from torch_marlin_metal.checkpoints.format_interface import Format
from torch_marlin_metal.checkpoints.formats.gguf_names import (
    ARCHITECTURES,
    expert_name,
    heads_to_restore,
    hf_name,
    norm_offset,
    partner,
    row_order,
)
from torch_marlin_metal.checkpoints.layer import as_words
from torch_marlin_metal.checkpoints.options import ReadOptions, typed
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.formats import weight_format
from torch_marlin_metal.packed_weight import PackedWeight, PackedWeightError

# Values of the 16 codes of IQ4_NL and IQ4_XS (kvalues_iq4nl in ggml-common.h).
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _codes(blocks: Tensor, run: int) -> Tensor:
    """Repacks bytes `[N, ..., run]` to int32 `[K/8, N]`; the low nibbles hold `run` codes, the high ones the next."""
    runs = blocks.reshape(blocks.shape[0], -1, run)
    even, odd = runs[..., 0::2], runs[..., 1::2]
    low, high = (even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)
    return as_words(torch.cat((low, high), dim=2).reshape(blocks.shape[0], -1))


def _float16(blocks: Tensor) -> Tensor:
    """Converts bytes `[N, B, 2]` to fp16 `[B, N]`."""
    return blocks.contiguous().view(torch.float16).squeeze(-1).t()


def _q4_0(blocks: Tensor) -> PackedWeight:
    return PackedWeight(_codes(blocks[..., 2:], 16), _float16(blocks[..., :2]), "uint4b8", 32)


def _q4_1(blocks: Tensor) -> PackedWeight:
    scales, minimums = _float16(blocks[..., :2]), _float16(blocks[..., 2:4])
    return PackedWeight(_codes(blocks[..., 4:], 16), scales, "uint4_bias", 32, zeros=minimums)


def _q4_k(blocks: Tensor) -> PackedWeight:
    """Converts Q4_K. Its scales d * sc and minimums dmin * m are products of 11 and 6 bits, so only fp32 holds them."""
    d, dmin = _float16(blocks[..., :2]).float(), _float16(blocks[..., 2:4]).float()
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    sc = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=2)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=2)
    scales, minimums = _per_sub_block(d, sc), _per_sub_block(dmin, minimum)
    return PackedWeight(_codes(blocks[..., 16:], 32), scales, "uint4_bias", 32, zeros=-minimums)


def _per_sub_block(d: Tensor, factors: Tensor) -> Tensor:
    """Multiplies the scale of each super-block by the integer factors of its sub-blocks.

    Args:
        d: fp32 `[B, N]`, the scales of B super-blocks in each of N output features.
        factors: integers `[N, B, S]`, one for each of the S sub-blocks of a super-block.

    Returns:
        The products in fp32 `[B * S, N]`: all sub-blocks of an output feature in the order of k.
    """
    return (d.unsqueeze(1) * factors.permute(1, 2, 0).float()).reshape(-1, d.shape[1])


def _iq4_nl(blocks: Tensor) -> PackedWeight:
    lut = torch.tensor(IQ4_VALUES, dtype=torch.float32, device="cpu")
    return PackedWeight(_codes(blocks[..., 2:], 16), _float16(blocks[..., :2]), "lut4", 32, lut=lut)


def _iq4_xs(blocks: Tensor) -> PackedWeight:
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), dim=3).flatten(2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device="cpu")
    high = ((blocks[..., 2:4].unsqueeze(3) >> shifts) & 3).flatten(2)
    scales = _per_sub_block(_float16(blocks[..., :2]).float(), (low | (high << 4)).to(torch.int8) - 32)
    lut = torch.tensor(IQ4_VALUES, dtype=torch.float32, device="cpu")
    return PackedWeight(_codes(blocks[..., 8:], 16), scales, "lut4", 32, lut=lut)


def _mxfp4(blocks: Tensor) -> PackedWeight:
    return fp4.mxfp4(_codes(blocks[..., 1:], 16), blocks[..., 0].t(), None, "")


def _nvfp4(blocks: Tensor) -> PackedWeight:
    """Converts NVFP4. Like ggml, it reads scales as unsigned E4M3, with 0x7F as 0."""
    scales = blocks[..., :4].flatten(1).t()
    if bool((scales > 0x7F).any()):
        raise PackedWeightError("scales", "expected unsigned E4M3 codes of at most 0x7F")
    return fp4.nvfp4(_codes(blocks[..., 4:], 8), torch.where(scales == 0x7F, 0, scales), None, None, "")


DECODERS: dict[str, tuple[int, Callable[[Tensor], PackedWeight]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
    "MXFP4": (17, _mxfp4),
    "NVFP4": (36, _nvfp4),
}


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
            raise UnsupportedFormat(
                f"{path}: no transformers names for the architecture {self.architecture!r}; known: "
                f"{', '.join(ARCHITECTURES)} ({typed('gguf_names', 'gguf')} reads the tensors under their own names)"
            )
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
        base = tensor.name.removesuffix(".weight")
        return [name for name in (f"{base}.bias", f"{base}.scale", f"{base}.weight.scale") if name in self.tensors]

    def names(self) -> list[str]:
        """Returns the layers' names in the order of the file."""
        return [self._name(tensor, expert) for tensor, expert in self._layers]

    def _name(self, tensor: GgufTensor, expert: int | None) -> str:
        if self.hf and expert is not None and (name := expert_name(tensor.name, self.architecture, expert)):
            return name
        return self._full_name(tensor).removesuffix(".weight") + ("" if expert is None else f".{expert}")

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
        joined = {name: _alternate(first[name].T, others[name].T).T.contiguous() for name in ("b_packed", "scales")}
        if weight.zeros is not None:
            joined["zeros"] = _alternate(first["zeros"].T, others["zeros"].T).T.contiguous()
        return replace(weight, **joined, bias=self.bias(index)).validate()  # type: ignore[arg-type]

    def _convert(self, index: int, tensor: GgufTensor, expert: int | None) -> PackedWeight:
        """Reads one matrix of a layer."""
        where = f"{tensor.file}: tensor {tensor.name!r}"
        known = expert is not None and self.hf and expert_name(tensor.name, self.architecture, expert)
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
                weight.b_packed, weight.scales = weight.b_packed[:, order], weight.scales[:, order]
                weight.zeros = None if weight.zeros is None else weight.zeros[:, order]
            weight.scales = weight.scales.contiguous()
            weight.zeros = None if weight.zeros is None else weight.zeros.contiguous()
            return weight.validate()
        except PackedWeightError as error:
            raise CheckpointError(f"{where}: {error}") from error

    def _row_order(self, tensor: GgufTensor) -> Tensor | None:
        """Returns the row order that restores transformers' order of a tensor, or None if it is unchanged."""
        heads = heads_to_restore(tensor.name, self.architecture, self.metadata) if self.hf else None
        if heads is None:
            return None
        rows = tensor.shape[0]
        if type(heads) is not int or heads < 1 or rows % (2 * heads):
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name!r}: {rows} rows do not hold {heads} heads")
        return row_order(rows, heads)

    def _scale(self, tensor: GgufTensor, expert: int | None) -> Tensor | None:
        """Returns NVFP4's scale for the whole tensor, which llama.cpp stores as a separate tensor."""
        base = tensor.name.removesuffix(".weight")
        for name in (f"{base}.scale", f"{base}.weight.scale"):
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
        order = self._row_order(tensor)
        return bias.read(expert) if order is None else bias.read(expert)[order]

    def _floats(self, index: int) -> Callable[[], Tensor]:
        tensor, expert = self._layers[index]

        def dequantize() -> Tensor:
            weight, other = _dequantize(tensor, expert), self._partners.get(tensor.name)
            if other is not None:
                return _alternate(weight, _dequantize(other, expert))
            order = self._row_order(tensor)
            return weight if order is None else weight[order]

        return dequantize

    def others(self) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
        """Yields (name, function that reads it, dtype) for tensors outside the layers, such as embeddings and norms."""
        for tensor in self.tensors.values():
            if tensor.name not in self._used:
                yield self._full_name(tensor), partial(self._plain, tensor), tensor.type_name

    def _plain(self, tensor: GgufTensor) -> Tensor:
        """Reads a tensor outside the layers, with transformers' values and order of rows if `hf` is set."""
        offset = norm_offset(tensor.name, self.architecture) if self.hf else 0.0
        order, values = self._row_order(tensor), tensor.read()
        values = values if order is None else values[order]
        if self.hf and tensor.name.endswith(".ffn_gate_inp_shexp.weight"):
            values = values.reshape(1, -1)  # llama.cpp stores the only row without its dimension
        return values - offset if offset else values


def _alternate(first: Tensor, second: Tensor) -> Tensor:
    """Returns the rows of two tensors in turn, beginning with the first one's."""
    return torch.stack((first, second), dim=1).flatten(0, 1)


def _dequantize(tensor: GgufTensor, expert: int | None) -> Tensor:
    """Decodes any block type with the optional package `gguf`."""
    where = f"{tensor.file}: tensor {tensor.name!r}"
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise UnsupportedFormat(f"{where}: {tensor.type_name} needs the package gguf (pip install gguf)") from error
    blocks: Any = tensor.read(expert).numpy()
    try:
        return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[tensor.type_name])).float()
    except (NotImplementedError, KeyError) as error:
        raise UnsupportedFormat(f"{where}: the package gguf does not decode {tensor.type_name}") from error


FORMAT = Format(
    name="gguf",
    title="GGUF (llama.cpp)",
    variants=(
        ("Q4_0", "uint4b8"),
        ("Q4_1, Q4_K", "uint4_bias"),
        ("IQ4_NL, IQ4_XS", "lut4"),
        ("MXFP4", "mxfp4"),
        ("NVFP4, with its scale tensor", "nvfp4"),
    ),
    refused=(
        (
            "Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q5_K, Q6_K, other IQ types, TQ1_0, TQ2_0",
            "not 4 bit; dequantized on request, and in models by default",
        ),
        ("big-endian files, GGUF version 1", "not written any more"),
        ("gguf_names='hf' for architectures other than " + ", ".join(ARCHITECTURES), "no table of names"),
    ),
    containers=("a `.gguf` file, split or whole",),
)
