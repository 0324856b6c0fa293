"""Pairs, stacks and parts of GGUF matrices that make one transformers layer, and their decoding to floats."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.files.gguf import GgufTensor
from torch_marlin_metal.checkpoints.formats.gguf_small import decode


@dataclass(frozen=True)
class Piece:
    """The one or two matrices of a file, or the part of one, that make one transformers layer.

    Attributes:
        tensor: the matrix, or a stack of matrices.
        second: the matrix that is joined to it, or None.
        way: the way to join their rows, see `gguf_orders.joined`.
        expert: the number of the matrix in a stack.
        part: which part of the rows is the layer, see `gguf_orders.split_rows`; None means all.
    """

    tensor: GgufTensor
    second: GgufTensor | None = None
    way: str = ""
    expert: int | None = None
    part: int | None = None

    @property
    def tensors(self) -> list[GgufTensor]:
        return [self.tensor] if self.second is None else [self.tensor, self.second]


def dequantize(tensor: GgufTensor, expert: int | None) -> Tensor:
    """Decodes any block type with the optional package `gguf`. Floats stay what they are."""
    if tensor.is_plain:
        return tensor.read(expert)
    blocks: Any = tensor.read(expert).numpy()
    try:
        return decode(blocks, tensor.type_name)
    except ImportError as error:
        raise needs_gguf(tensor) from error
    except (NotImplementedError, KeyError) as error:
        where = f"{tensor.file}: tensor {tensor.name!r}"
        raise UnsupportedFormat(f"{where}: the package gguf does not decode {tensor.type_name}") from error


def needs_gguf(tensor: GgufTensor) -> UnsupportedFormat:
    """Returns the error about a type that only the package gguf reads."""
    where = f"{tensor.file}: tensor {tensor.name!r}"
    return UnsupportedFormat(f"{where}: {tensor.type_name} needs the package gguf (pip install gguf)")
