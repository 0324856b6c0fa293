"""GGUF block types of at most 3 bits. The weights of a group have at most 16 distinct values.

The package gguf decodes the blocks to floats, because only that package contains the grids, the sign tables and the
packing of the codes. This module then divides each decoded value by its group's scale. The quotient is exactly a whole
number or a table entry: a scale has at most 17 significant bits, so its products with whole numbers and table entries
fit into fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.grouped import words_of_codes
from torch_marlin_metal.packed_weight import PackedWeight


def decode(blocks: Any, type_name: str) -> Tensor:
    """Decodes bytes `[..., bytes of a row]` of any type to fp32 with the optional package gguf.

    Raises:
        ImportError: the package is not installed.
        NotImplementedError, KeyError: the package does not know the type.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[type_name])).float()


@dataclass(frozen=True)
class SmallType:
    """A type whose weights are scales times table values, or scales times whole numbers from -8 to 7.

    Attributes:
        group_size: number of weights that share a scale.
        d: reads the fp16 scale of each block, `[N, B]`, from bytes `[N, B, bytes of a block]`.
        codes: reads the whole numbers that multiply d, `[N, B, groups of a block]`. None if a block is one group.
        factor: a power of two that multiplies each scale. The packed weight has this factor in its table.
        signed: True if gguf's table has only magnitudes, and a value may be a magnitude or its negative.
        has_table: True if the values come from a table.
    """

    group_size: int
    d: Callable[[Tensor], Tensor]
    codes: Callable[[Tensor], Tensor] | None = None
    factor: float = 1.0
    has_table: bool = True
    signed: bool = True

    def table(self, type_name: str) -> Tensor:
        """Returns the values of the type in ascending order. For whole numbers, these are the values of "uint4b8"."""
        if not self.has_table:
            return torch.arange(-8.0, 8.0, device="cpu")
        import gguf.quants

        kind = getattr(gguf.quants, type_name)
        signs = [(float(value), sign) for value in kind.grid_map for sign in (-1, 1)]
        values = {sign * value if self.signed else value + sign * gguf.quants.IQ1_S.delta for value, sign in signs}
        return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")

    def read(self, blocks: Tensor, type_name: str) -> PackedWeight:
        """Converts bytes `[N, B, bytes of a block]`.

        Raises:
            ImportError: the package gguf is not installed.
        """
        table = self.table(type_name)
        d = self.d(blocks)
        dtype = torch.uint8 if self.has_table else torch.int8
        scales = d.unsqueeze(2) if self.codes is None else self.codes(blocks).to(dtype)
        lut = torch.nn.functional.pad(table * self.factor, (0, 16 - len(table)))
        return PackedWeight(
            words_of_codes(self._words(blocks, d, scales, type_name, table)),
            scales.flatten(1).t().contiguous(),
            "lut4" if self.has_table else "uint4b8",
            self.group_size,
            super_scales=None if self.codes is None else d.t().contiguous(),
            lut=lut if self.has_table else None,
        )

    def _words(self, blocks: Tensor, d: Tensor, scales: Tensor, type_name: str, table: Tensor) -> Tensor:
        """Returns the codes `[N, K]` of some rows in uint8."""
        rows = blocks.shape[0]
        exact = scales.float() if self.codes is None else d.unsqueeze(2).float() * scales.float() * self.factor
        exact = exact.reshape(rows, -1)
        values = decode(blocks.reshape(rows, -1).numpy(), type_name).reshape(rows, -1, self.group_size)
        zero = exact == 0  # every code decodes to 0 here, so choose a code with the sign of the zero
        negative = values[zero].signbit() != exact[zero].signbit().unsqueeze(1)
        values /= exact.unsqueeze(2)
        values[zero] = torch.where(negative, table[0], table[-1])
        steps = 1 if self.signed else 8
        places = torch.zeros(256, dtype=torch.uint8, device="cpu")
        places[((table - table[0]) * steps).long()] = torch.arange(len(table), dtype=torch.uint8, device="cpu")
        codes = values.sub_(table[0]).mul_(steps).to(torch.uint8)
        return torch.from_numpy(places.numpy()[codes.numpy()]).reshape(rows, -1)


def _half(start: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that reads the fp16 number at byte `start` of each block, `[N, B]`."""
    return lambda blocks: blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def shifted(data: Tensor, *shifts: int) -> Tensor:
    """Shifts `[N, B, n]` right by each of `shifts` and concatenates the results: `[N, B, n * len(shifts)]`."""
    return torch.cat([data >> shift for shift in shifts], dim=2)


def fields(data: Tensor, *shifts: int) -> Tensor:
    """Returns the elements of `shifted` in another order: those from the same element of `data` are adjacent."""
    return (data.unsqueeze(3) >> torch.tensor(shifts, dtype=data.dtype, device="cpu")).flatten(2)


def _words(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.contiguous().view(dtype).int()


def _odd(code: Tensor) -> Tensor:
    """Returns 2 * code + 1, because most types have scales of (0.5 + code)."""
    return 2 * code + 1


def _q3_k(blocks: Tensor) -> Tensor:
    """Returns the 16 scales of a block: 6-bit codes minus 32. 8 bytes have the low 4 bits, 4 bytes the high 2 bits."""
    low, high = shifted(blocks[..., 96:104], 0, 4) & 15, shifted(blocks[..., 104:108], 0, 2, 4, 6) & 3
    return (low | high << 4).int() - 32


def _top_bits(start: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that reads scales from the top 4 bits of 32-bit words. If `start` is 2, it takes odd words."""

    def codes(blocks: Tensor) -> Tensor:
        words = _words(blocks[..., start:], torch.int32)
        words = words[..., 1::2] if start == 2 else words
        return _odd((words >> 28) & 15)

    return codes


def _nibbles(start: int) -> Callable[[Tensor], Tensor]:
    return lambda blocks: _odd(fields(blocks[..., start:], 0, 4) & 15)


def _iq1_s(blocks: Tensor) -> Tensor:
    return _odd((_words(blocks[..., 34:50], torch.int16) >> 12) & 7)


def _iq1_m(blocks: Tensor) -> Tensor:
    return _odd(fields(_words(blocks[..., 48:56], torch.int16), 0, 3, 6, 9) & 7)


def _iq1_m_d(blocks: Tensor) -> Tensor:
    """Returns d of IQ1_M. The top 4 bits of each of four words are 4 bits of d."""
    words = _words(blocks[..., 48:56], torch.int16) & 0xFFFF
    parts = [(words[..., word] >> 12) << 4 * word for word in range(4)]
    return (parts[0] | parts[1] | parts[2] | parts[3]).to(torch.uint16).view(torch.float16)


SMALL_TYPES = {
    "Q3_K": SmallType(16, _half(108), _q3_k, has_table=False),
    "TQ1_0": SmallType(256, _half(52), has_table=False),
    "TQ2_0": SmallType(256, _half(64), has_table=False),
    "IQ1_S": SmallType(32, _half(0), _iq1_s, signed=False),
    "IQ1_M": SmallType(16, _iq1_m_d, _iq1_m, signed=False),
    "IQ2_XXS": SmallType(32, _half(0), _top_bits(2), 0.125),
    "IQ2_XS": SmallType(16, _half(0), _nibbles(66), 0.125),
    "IQ2_S": SmallType(16, _half(0), _nibbles(74), 0.125),
    "IQ3_XXS": SmallType(32, _half(0), _top_bits(66), 0.25),
    "IQ3_S": SmallType(32, _half(0), _nibbles(106)),
}
