"""Decoders for the blocks of GGUF files. A block has 32, 64 or 256 weights along K with their codes and scales.

ggml's files ggml-common.h and ggml-quants.c define the block layouts. All types of 4 to 6 bits store the low 4 bits of
the codes in runs of n bytes: the low nibbles contain the first n codes of the run, the high nibbles the next n.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints import block_scales
from torch_marlin_metal.checkpoints.files.gguf import GGML_TYPES
from torch_marlin_metal.checkpoints.files.safetensors import Slice
from torch_marlin_metal.checkpoints.formats.gguf_small import SMALL_TYPES, fields, shifted
from torch_marlin_metal.checkpoints.grouped import BIAS, SIGN, SYMMETRIC, as_words, planes_of_codes, words_of_codes
from torch_marlin_metal.huge_pages import prefer_huge_pages
from torch_marlin_metal.packed_weight import PackedWeight, PackedWeightError

PIECE_BYTES = 1 << 19  # bytes of the blocks that are converted at a time
# Values of the 16 codes of IQ4_NL and IQ4_XS (kvalues_iq4nl in ggml-common.h).
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _codes(blocks: Tensor, run: int) -> Tensor:
    """Repacks bytes `[N, ..., run]` to int32 `[K/8, N]`. In a run, the low nibbles are the first `run` codes."""
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


def _q8_0(blocks: Tensor) -> PackedWeight:
    return _wide(8, blocks[..., 2:] ^ SIGN[8], _float16(blocks[..., :2]), 32)


def _wide(bits: int, codes: Tensor, scales: Tensor, group_size: int, zeros: Tensor | None = None) -> PackedWeight:
    """Makes a weight from codes of 5, 6 or 8 bits `[N, ...]`."""
    words, high = planes_of_codes(codes.flatten(1), bits)
    weight_format = (SYMMETRIC if zeros is None else BIAS)[bits]
    return PackedWeight(words, scales, weight_format, group_size, zeros=zeros, b_high=high)


def _low(data: Tensor, run: int) -> Tensor:
    """Returns the low 4 bits of each code: bytes `[N, B, bytes]` become `[N, B, codes]`."""
    runs = data.reshape(*data.shape[:2], -1, run)
    return torch.cat((runs & 15, runs >> 4), dim=3).flatten(2)


def _fifth(data: Tensor) -> Tensor:
    """Returns the fifth bit of each code, shifted to bit 4: four bytes `[N, B, 4]` become 32 codes `[N, B, 32]`."""
    return (fields(data, *range(8)) & 1) << 4


def _q5_0(blocks: Tensor) -> PackedWeight:
    codes = _low(blocks[..., 6:], 16) | _fifth(blocks[..., 2:6])
    return _wide(5, codes, _float16(blocks[..., :2]), 32)


def _q5_1(blocks: Tensor) -> PackedWeight:
    codes = _low(blocks[..., 8:], 16) | _fifth(blocks[..., 4:8])
    return _wide(5, codes, _float16(blocks[..., :2]), 32, _float16(blocks[..., 2:4]))


def _q6_k(blocks: Tensor) -> PackedWeight:
    halves = [shifted(blocks[..., 128 + start : 160 + start], 0, 2, 4, 6) & 3 for start in (0, 32)]
    codes = _low(blocks[..., :128], 64) | torch.cat(halves, dim=2) << 4
    weight = _wide(6, codes, _per_group(blocks[..., 192:208].view(torch.int8)), 16)
    return replace(weight, super_scales=_float16(blocks[..., 208:]))


def _q5_k(blocks: Tensor) -> PackedWeight:
    codes = _low(blocks[..., 48:], 32) | (shifted(blocks[..., 16:48], *range(8)) & 1) << 4
    return _with_scales_k(_wide(5, codes, *_scales_k(blocks)), blocks)


def _q4_k(blocks: Tensor) -> PackedWeight:
    scales, size, zeros = _scales_k(blocks)
    return _with_scales_k(PackedWeight(_codes(blocks[..., 16:], 32), scales, "uint4_bias", size, zeros=zeros), blocks)


def _scales_k(blocks: Tensor) -> tuple[Tensor, int, Tensor]:
    """Returns the scale codes, the group size and the bias codes of Q4_K or Q5_K."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    sc = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=2)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=2)
    return _per_group(sc), 32, _per_group(minimum)


def _with_scales_k(weight: PackedWeight, blocks: Tensor) -> PackedWeight:
    """Adds the factors d and dmin. As in Q2_K, a scale is d times its code, a bias is -dmin times its code."""
    return replace(weight, super_scales=_float16(blocks[..., :2]), super_zeros=-_float16(blocks[..., 2:4]))


def _q2_k(blocks: Tensor) -> PackedWeight:
    factors = blocks[..., :16]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device="cpu").reshape(4, 1)
    runs = blocks[..., 16:80].reshape(*blocks.shape[:2], 2, 1, 32)
    codes = ((runs >> shifts) & 3).reshape(blocks.shape[0], -1)
    return PackedWeight(
        words_of_codes(codes),
        _per_group(factors & 15),
        "uint4_bias",
        16,
        zeros=_per_group(factors >> 4),
        super_scales=_float16(blocks[..., 80:82]),
        super_zeros=-_float16(blocks[..., 82:84]),
    )


def _per_group(codes: Tensor) -> Tensor:
    """Transposes scale codes `[N, B, groups of a block]` to `[G, N]`."""
    return codes.flatten(1).t().contiguous()


def _iq4_nl(blocks: Tensor) -> PackedWeight:
    lut = torch.tensor(IQ4_VALUES, dtype=torch.float32, device="cpu")
    return PackedWeight(_codes(blocks[..., 2:], 16), _float16(blocks[..., :2]), "lut4", 32, lut=lut)


def _iq4_xs(blocks: Tensor) -> PackedWeight:
    low, high = fields(blocks[..., 4:8], 0, 4) & 15, fields(blocks[..., 2:4], 0, 2, 4, 6) & 3
    scales = _per_group((low | (high << 4)).to(torch.int8) - 32)
    lut = torch.tensor(IQ4_VALUES, dtype=torch.float32, device="cpu")
    super_scales = _float16(blocks[..., :2])
    return PackedWeight(_codes(blocks[..., 8:], 16), scales, "lut4", 32, lut=lut, super_scales=super_scales)


def _mxfp4(blocks: Tensor) -> PackedWeight:
    return block_scales.mx(_codes(blocks[..., 1:], 16), blocks[..., 0].t(), "mxfp4", None, "")


def _nvfp4(blocks: Tensor) -> PackedWeight:
    """Converts NVFP4. Scales are unsigned E4M3 codes, and code 0x7F means 0, as in ggml."""
    scales = blocks[..., :4].flatten(1).t()
    if bool((scales > 0x7F).any()):
        raise PackedWeightError("scales", "expected unsigned E4M3 codes of at most 0x7F")
    return block_scales.nvfp4(_codes(blocks[..., 4:], 8), torch.where(scales == 0x7F, 0, scales), None, None, "")


def in_pieces(decode: Callable[[Tensor], PackedWeight], read: Callable[[Slice], Tensor], rows: int) -> PackedWeight:
    """Converts a matrix a few rows at a time, because the blocks and their intermediate tensors take additional memory.

    Args:
        decode: converts bytes `[n, B, bytes of a block]`.
        read: returns the bytes of a slice of rows.
        rows: the number of rows, N.
    """
    whole: dict[str, Tensor] = {}
    step = max(1, PIECE_BYTES // max(1, read(Slice(0, 0, 1)).numel()))
    for start in range(0, rows, step):
        piece = decode(read(Slice(0, start, min(rows, start + step))))
        if step >= rows:
            return piece
        for name, part in piece.tensors().items():
            if name != "lut":
                held = whole.setdefault(name, prefer_huge_pages(part.new_empty(*part.shape[:-1], rows)))
                held[..., start : start + step] = part
    return replace(piece, **whole)  # type: ignore[arg-type]


_DECODERS: dict[str, Callable[[Tensor], PackedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q2_K": _q2_k,
    **{name: partial(kind.read, type_name=name) for name, kind in SMALL_TYPES.items()},
}
# Type -> (bytes of a block, function that converts blocks).
DECODERS = {name: (nbytes, _DECODERS[name]) for name, _, nbytes in GGML_TYPES.values() if name in _DECODERS}
