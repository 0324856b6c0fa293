"""Makes a `PackedWeight` from codes, scales and zero points, and refuses values that no weight format represents.

Codes of 1 to 3 bits are widened to 4 bits, and codes of 7 bits to 8 bits.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.float_rows import FloatRows
from torch_marlin_metal.checkpoints.layer_tensors import Layer
from torch_marlin_metal.checkpoints.words import transposed
from torch_marlin_metal.formats import GROUP_SIZES, WEIGHT_FORMATS
from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.repack import high_bit_places
from torch_marlin_metal.repack import unpack_planes as unpack_both

INTEGERS = [fmt for fmt in WEIGHT_FORMATS.values() if fmt.code_kind == "integer"]
# Code bits -> name of the integer format: with zero points, without zero points, with biases.
ZERO_POINT, SYMMETRIC, BIAS = (
    {fmt.code_bits: fmt.name for fmt in INTEGERS if fmt.zeros_role == role} for role in ("zero_point", "none", "bias")
)
SIGN = {bits: 1 << bits - 1 for bits in SYMMETRIC}  # code bits -> the zero point of signed codes
# Code bits -> widths of the planes in GPTQModel's format "gptq_p", lowest bits first.
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
PIECE = 1 << 20  # number of codes unpacked at a time
Planes = tuple[Tensor, Tensor | None]  # `b_packed` and `b_high` of a weight


def packed(
    layer: Layer,
    words: Tensor,
    weight_format: str,
    group_size: int,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    source: str,
    K: int = 0,
    high: Tensor | None = None,
    perm: Tensor | None = None,
) -> PackedWeight:
    """Makes a layer's weight. Splits groups so that the operators support their size.

    Args:
        layer: the layer, used for its bias and in error messages.
        words: int32 `[words, N]`, codes of the format along K, the lowest k in the lowest bits.
        weight_format: a format with floating-point scales.
        group_size: the producer's group size; K or more means one group.
        scales: `[G, N]`.
        zeros: zero points or biases `[G, N]`, if the format has them.
        source: see `PackedWeight.source`.
        K: the rows of the weight, needed if the words contain padding.
        high: see `PackedWeight.b_high`.
        perm: see `PackedWeight.perm`. The words are in the permuted order.

    Raises:
        UnsupportedFormat: K is not a multiple of 8, or no supported group size divides the producer's group size.
    """
    fmt = find_format(weight_format)
    K = K or len(words) * fmt.codes_per_word

    def rows(which: slice) -> Tensor:
        own, upper = (None if one is None else one[:, which] for one in (zeros, high))
        values = decoded(words[:, which], weight_format, K, group_size, scales[:, which], own, upper)
        return values if perm is None else torch.empty_like(values).index_copy_(1, perm.long(), values)

    dequantize = partial(FloatRows, words.shape[1], K, rows)

    if K % 8:
        raise layer.unsupported(f"K={K} is not a multiple of 8", dequantize)
    fitted = fit_groups(K, group_size, scales, *([] if zeros is None else [zeros]))
    if fitted is None:
        raise layer.unsupported(f"no group size of the operators divides its groups of {group_size}", dequantize)
    return PackedWeight(
        b_packed=words,
        b_high=high,
        scales=fitted[1][0].contiguous(),
        weight_format=weight_format,
        group_size=fitted[0],
        zeros=None if zeros is None else fitted[1][1].contiguous(),
        perm=perm,
        bias=layer.bias(words.shape[1]),
        source=source,
    )


def decoded(
    words: Tensor,
    weight_format: str,
    K: int,
    group_size: int,
    scales: Tensor,
    zeros: Tensor | None = None,
    high: Tensor | None = None,
) -> Tensor:
    """Decodes a weight to fp32 `[N, K]`, for any K and group size. The arguments are those of `packed`."""
    fmt = find_format(weight_format)
    codes = codes_of_words(words, fmt.code_bits, high)[:, :K]
    if fmt.code_kind != "integer":
        codes = codes.view(torch.float8_e4m3fn)
    values = codes.float() - fmt.fixed_offset
    if zeros is not None and fmt.zeros_role == "zero_point":
        values -= spread(zeros.float(), K, group_size).t()
    values *= spread(scales.float(), K, group_size).t()
    if zeros is not None and fmt.zeros_role == "bias":
        values += spread(zeros.float(), K, group_size).t()
    return values


def fit_groups(K: int, group_size: int, *grouped: Tensor) -> tuple[int, list[Tensor]] | None:
    """Splits groups into parts of a size that the operators support, without loss.

    The parts of a group have equal sizes and repeat the group's values.

    Args:
        K: rows of the weight.
        group_size: the producer's group size; K or more means one group.
        grouped: the tensors to convert, each with one row per group, `[ceil(K / group_size), N]`.

    Returns:
        The new group size and the tensors with one row per new group, or None if no supported size divides the old one.
    """
    if group_size >= K:
        return K, list(grouped)
    size = next((size for size in sorted(GROUP_SIZES, reverse=True) if group_size % size == 0), None)
    if size is None:
        return None
    if size == group_size:
        return size, list(grouped)
    groups = -(-K // size)
    return size, [tensor.repeat_interleave(group_size // size, 0)[:groups] for tensor in grouped]


def spread(grouped: Tensor, K: int, group_size: int) -> Tensor:
    """Expands values `[G, N]` per group to `[K, N]`: repeats each row `group_size` times and truncates to K rows."""
    return grouped.repeat_interleave(group_size, 0)[:K]


def width_of(bits: int) -> int:
    """Returns the narrowest code width of the operators for codes of 1 to 8 bits."""
    return min(width for width in SIGN if width >= bits)


def centre(bits: int) -> int:
    """Returns the number to add to codes so that their middle becomes the middle of the operators' wider codes."""
    return SIGN[width_of(bits)] - (1 << bits - 1)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks `count` codes of any width along the first dimension of int32 words. A code may straddle two words."""
    first = torch.arange(count, device="cpu") * bits
    low, shift = first // 32, (first % 32).unsqueeze(1)
    wide = words.long() & 0xFFFFFFFF
    next_word = wide[(low + 1).clamp(max=words.shape[0] - 1)]
    return ((wide[low] >> shift) | (next_word << (32 - shift))) & ((1 << bits) - 1)


def unpack_planes(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks codes in planes. For each 32 codes, the words of the lowest bits come first, then those of the next bits.

    Args:
        words: int32 `[count * bits / 32, N]`.
        bits: 2 to 8, the bits of a code.
        count: a multiple of 32.
    """
    blocks, first = words.reshape(-1, bits, words.shape[1]), 0
    codes = torch.zeros((), dtype=torch.int64, device="cpu")
    for width in PLANES[bits]:
        plane = blocks[:, first : first + width].reshape(-1, words.shape[1])
        codes = codes | (unpack(plane, width, count) << first)
        first += width
    return codes


def repacked(
    words: Tensor,
    bits: int,
    K: int,
    *,
    offset: int = 0,
    codes_of: Callable[[Tensor, int, int], Tensor] = unpack,
    perm: Tensor | None = None,
) -> Planes:
    """Repacks codes of any width into `b_packed` and, for 5 and 6 bits, `b_high`.

    Processes a few columns at a time, because codes take more memory than words.

    Args:
        words: packed codes, int32 `[W, N]`.
        bits: 1 to 8, the bits of a code.
        K: number of codes in a column.
        offset: a number that is added to each code.
        codes_of: the function that unpacks codes, `unpack` or `unpack_planes`.
        perm: the order of the rows in the result; see `PackedWeight.perm`.
    """
    rows = slice(None) if perm is None else perm.long()
    N, step = words.shape[1], max(1, PIECE // K)
    whole: list[Tensor] = []
    for start in range(0, N, step):
        codes = (codes_of(words[:, start : start + step], bits, K)[rows] + offset).t().to(torch.uint8)
        pieces = [piece for piece in planes_of_codes(codes, width_of(bits)) if piece is not None]
        whole = whole or [piece.new_empty(len(piece), N) for piece in pieces]
        for held, piece in zip(whole, pieces, strict=True):
            held[:, start : start + step] = piece
    return whole[0], whole[1] if len(whole) > 1 else None


def as_words(stored: Tensor) -> Tensor:
    """Converts rows of bytes or words `[N, ...]`, lowest k in the lowest bits, to int32 words `[words, N]`."""
    return transposed(stored.contiguous().view(torch.int32))


def planes_of_codes(codes: Tensor, width: int) -> Planes:
    """Packs uint8 codes `[N, K]` of 4, 5, 6 or 8 bits into `b_packed` and, for 5 and 6 bits, `b_high`.

    Returns the same planes as `repack.pack_planes`. It is faster because it moves the upper bits of four codes at once.
    """
    if width in (4, 8):
        return words_of_codes(codes, width), None
    codes, places = codes.contiguous(), high_bit_places(width)
    upper = torch.nn.functional.pad(codes >> 4, (0, -codes.shape[1] % len(places)))
    fours = upper.view(torch.int32).reshape(len(codes), -1, len(places) // 4)
    fields = fours.clone()
    for j in (1, 2, 3):
        fields |= fours >> 8 * j - places[j]
    fields &= 255
    high = fields[..., 0].clone()
    for four in range(1, len(places) // 4):
        high |= fields[..., four] << places[4 * four]
    return words_of_codes(codes & 15), transposed(high)


def words_of_codes(codes: Tensor, width: int = 4) -> Tensor:
    """Packs uint8 codes `[N, K]` of 4 or 8 bits into int32 `[words, N]`. Zeros fill the last word."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (32 // width)))
    return as_words(codes if width == 8 else codes[:, 0::2] | (codes[:, 1::2] << 4))


def codes_of_words(words: Tensor, width: int, high: Tensor | None = None) -> Tensor:
    """Unpacks uint8 codes `[N, K]` from int32 words `[words, N]` and, for codes of 5 or 6 bits, from `high`."""
    if high is not None:
        return unpack_both(words, high, width).t()
    rows = words.t() if words.t().is_contiguous() else transposed(words.contiguous())
    stored = rows.view(torch.uint8)
    return stored if width == 8 else torch.stack((stored & 15, stored >> 4), dim=2).flatten(1)


def unsigned(points: Tensor, width: int) -> Tensor:
    """Converts zero points of signed codes to those of unsigned codes: uint8 if all are valid codes, else fp32."""
    shifted = points.float() + SIGN[width]
    are_codes = bool(((shifted == shifted.round()) & (shifted >= 0) & (shifted < 1 << width)).all())
    return shifted.to(torch.uint8) if are_codes else shifted


def swap_nibbles(stored: Tensor) -> Tensor:
    """Swaps the two codes of each byte, for producers that store the even k in the high nibble."""
    return (stored << 4) | (stored >> 4)


def constant(tensor: Tensor, value: int) -> bool:
    """Returns True if every element equals `value`."""
    return bool((tensor == value).all())
