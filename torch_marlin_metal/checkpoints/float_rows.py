"""Decodes weights a few rows at a time, so that only these rows exist in fp32 beside the result."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_marlin_metal.packed_weight import PackedWeight

PIECE = 1 << 18  # weights that are decoded at a time


@dataclass(frozen=True)
class FloatRows:
    """A weight that can be decoded.

    Attributes:
        N: the rows of the weight, as `torch.nn.Linear` holds it.
        K: the numbers in a row.
        rows: returns some rows of the weight, fp32 `[rows, K]`.
    """

    N: int
    K: int
    rows: Callable[[slice], Tensor]

    @classmethod
    def of(cls, weight: "Tensor | PackedWeight") -> "FloatRows":
        """Returns the rows of a packed weight or of a tensor, usually a matrix `[N, K]`; rows may have any shape."""
        if isinstance(weight, PackedWeight):
            return cls(weight.N, weight.K, lambda which: weight.columns(which).dequantize().T)
        return cls(len(weight), math.prod(weight.shape[1:]), weight.__getitem__)

    def to(self, device: torch.device | str) -> "FloatRows":
        """Returns rows that are moved to a device after they are decoded."""
        return FloatRows(self.N, self.K, lambda which: self.rows(which).to(device))

    def write(self, out: Tensor) -> None:
        """Decodes into a matrix `[N, K]` of any dtype, strides and device."""
        if out.is_meta:
            return
        step = max(1, PIECE // max(self.K, 1))
        for first in range(0, self.N, step):
            which = slice(first, min(first + step, self.N))
            out[which] = self.rows(which).to(out.dtype)

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the whole weight."""
        row = self.rows(slice(0, 1))
        out = torch.empty(self.N, *row.shape[1:], dtype=dtype, device=row.device)
        self.write(out)
        return out
