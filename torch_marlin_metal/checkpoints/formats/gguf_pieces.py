"""Describes the matrices of a GGUF file that become one transformers layer, and decodes matrices to floats."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.files.gguf import GgufTensor
from torch_marlin_metal.checkpoints.formats.gguf_small import decode


@dataclass(frozen=True)
class Piece:
    """One or two matrices of a file, or a part of one matrix, that become one transformers layer.

    Attributes:
        tensor: the matrix, or a stack of matrices.
        second: the matrix that is joined to the first, or None.
        way: how to join the rows of the two matrices, see `gguf_orders.joined`.
        expert: the index of the matrix in the stack.
        part: if the layer is a part of the matrix's rows, the part's number, see `gguf_orders.split_rows`. Else None.
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
    """Decodes any block type with the optional package `gguf`. Tensors of floats keep their dtype."""
    if tensor.is_plain:
        return tensor.read(expert)
    blocks: Any = tensor.read(expert).numpy()
    try:
        return decode(blocks, tensor.type_name)
    except ImportError as error:
        raise needs_gguf(tensor) from error
    except (NotImplementedError, KeyError) as error:
        raise UnsupportedFormat(f"{tensor.where}: the package gguf does not decode {tensor.type_name}") from error


def needs_gguf(tensor: GgufTensor) -> UnsupportedFormat:
    """Makes the error for a type that only the package gguf can decode."""
    return UnsupportedFormat(f"{tensor.where}: {tensor.type_name} needs the package gguf (pip install gguf)")
