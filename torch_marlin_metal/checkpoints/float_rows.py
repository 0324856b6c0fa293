"""Decodes a weight a few rows at a time. Besides the result, only these rows are in memory in fp32."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_marlin_metal.packed_weight import PackedWeight

PIECE = 1 << 18  # number of weights decoded at a time


@dataclass(frozen=True)
class FloatRows:
    """A weight that can be decoded to floats.

    Attributes:
        N: the number of rows of the weight, in the orientation of `torch.nn.Linear`.
        K: the number of values in a row.
        rows: returns the given slice of rows, fp32 `[rows, K]`.
    """

    N: int
    K: int
    rows: Callable[[slice], Tensor]

    @classmethod
    def of(cls, weight: "Tensor | PackedWeight") -> "FloatRows":
        """Makes `FloatRows` of a packed weight or of a tensor `[N, ...]`, usually a matrix `[N, K]`."""
        if isinstance(weight, PackedWeight):
            return cls(weight.N, weight.K, lambda which: weight.columns(which).dequantize().T)
        return cls(len(weight), math.prod(weight.shape[1:]), weight.__getitem__)

    def to(self, device: torch.device | str) -> "FloatRows":
        """Returns a copy that moves rows to a device after decoding."""
        return FloatRows(self.N, self.K, lambda which: self.rows(which).to(device))

    def write(self, out: Tensor) -> None:
        """Decodes the weight into a matrix `[N, K]` of any dtype, strides and device."""
        if out.is_meta:
            return
        step = max(1, PIECE // max(self.K, 1))
        for first in range(0, self.N, step):
            which = slice(first, min(first + step, self.N))
            out[which] = self.rows(which).to(out.dtype)

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decodes the complete weight."""
        row = self.rows(slice(0, 1))
        out = torch.empty(self.N, *row.shape[1:], dtype=dtype, device=row.device)
        self.write(out)
        return out
