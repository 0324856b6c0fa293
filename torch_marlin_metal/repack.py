"""Packs and unpacks codes, inverts the repacking operators, and computes GPTQ's act-order permutation.

Exporters and tests use these functions, which are pure PyTorch and run on any device. Model loading uses the operators
in ops/weights.py.
"""

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

CODES_PER_WORD = 8
# GPTQ's version 1 stores each zero point minus 1. The rule selects the zero point for a stored nibble of 15; see
# `ops.weights.gptq_unpack_zeros`.
ZerosRule = Literal["word", "masked", "unmasked"]
# AWQ's interleave: nibble i (lowest first) of a word is column AWQ_ORDER[i] of eight (AutoAWQ, packing_utils.py).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SEQUENTIAL_ORDER = tuple(range(CODES_PER_WORD))
# For GPTQ's version 1, GPTQModel and AutoRound subtract this number from a word of eight zero points.
ONE_IN_EACH_NIBBLE = 0x11111111


def pack_codes(codes: Tensor, code_bits: int = 4) -> Tensor:
    """Packs codes into the operators' words.

    Args:
        codes: uint8 `[K, N]`, K a multiple of 8. If `code_bits` is 4, each code is 0..15.
        code_bits: bits of a code, 4 or 8.

    Returns:
        int32 `[K/8, N]`, or `[K/4, N]` if `code_bits` is 8. Word (r, n) contains consecutive k of column n, the lowest
        k in the lowest bits.

    Raises:
        ValueError: `codes` is not uint8 or has the wrong rank, K is not a multiple of 8, or a code is too large.
    """
    _check_codes("pack_codes", "codes", codes, packed_dim=0, largest=255 if code_bits == 8 else 15)
    if code_bits == 8:
        return (
            codes.reshape(-1, 4, codes.shape[1]).movedim(1, -1).flatten().view(torch.int32).reshape(-1, codes.shape[1])
        )
    return _pack(codes.reshape(-1, CODES_PER_WORD, codes.shape[1]).movedim(1, -1), SEQUENTIAL_ORDER)


def unpack_codes(b_packed: Tensor, code_bits: int = 4) -> Tensor:
    """Unpacks the operators' words. This is the inverse of `pack_codes`.

    Args:
        b_packed: int32 `[K/8, N]`, or `[K/4, N]` if `code_bits` is 8.
        code_bits: bits of a code, 4 or 8.

    Returns:
        uint8 `[K, N]`.

    Raises:
        ValueError: `b_packed` is not int32 or not two-dimensional.
    """
    _check_words("unpack_codes", "b_packed", b_packed)
    if code_bits == 8:
        return b_packed.contiguous().unsqueeze(-1).view(torch.uint8).movedim(-1, 1).flatten(0, 1)
    return unpack_nibbles(b_packed, SEQUENTIAL_ORDER).movedim(-1, 1).flatten(0, 1)


def pack_planes(codes: Tensor, code_bits: int) -> tuple[Tensor, Tensor | None]:
    """Packs codes of any width into `b_packed` and `b_high` of a `PackedWeight`.

    Args:
        codes: uint8 `[K, N]`, K a multiple of 8, each code below 2^code_bits.
        code_bits: bits of a code: 4, 5, 6 or 8.

    Returns:
        `b_packed` and `b_high`. For codes of 4 or 8 bits, `b_packed` is the result of `pack_codes`, and `b_high` is
        None. For codes of 5 or 6 bits, `b_packed` contains the lower four bits, and `b_high` the upper bits, int32
        `[ceil(K/32), N]` or `[ceil(K/16), N]`. The field for k is at bit `high_bit_places(code_bits)[k]` of its word,
        counting k from the word's first k. Fields for k beyond K are 0.

    Raises:
        ValueError: see `pack_codes`.
    """
    if code_bits in (4, 8):
        return pack_codes(codes, code_bits), None
    _check_codes("pack_planes", "codes", codes, packed_dim=0, largest=(1 << code_bits) - 1)
    places = high_bit_places(code_bits)
    K, N = codes.shape
    count = -(-K // len(places))
    b_high = torch.zeros(count, N, dtype=torch.int32, device=codes.device)
    for k, place in enumerate(places):
        upper = codes[k :: len(places)] >> 4
        b_high[: len(upper)] |= upper.to(torch.int32) << place
    return pack_codes(codes & 15), b_high


def unpack_planes(b_packed: Tensor, b_high: Tensor | None, code_bits: int) -> Tensor:
    """Unpacks `b_packed` and `b_high` to codes, uint8 `[K, N]`. This is the inverse of `pack_planes`.

    Raises:
        ValueError: a tensor is not int32 or not two-dimensional, or the shape of `b_high` does not match.
    """
    if code_bits in (4, 8):
        return unpack_codes(b_packed, code_bits)
    codes = unpack_codes(b_packed)
    places = high_bit_places(code_bits)
    expected = [-(-len(codes) // len(places)), codes.shape[1]]
    if b_high is None or list(b_high.shape) != expected:
        got = None if b_high is None else list(b_high.shape)
        raise ValueError(f"unpack_planes: b_high: expected shape {expected}, got {got}")
    _check_words("unpack_planes", "b_high", b_high)
    for k, place in enumerate(places):
        rows = codes[k :: len(places)]
        rows |= (((b_high[: len(rows)] >> place) & ((1 << code_bits - 4) - 1)) << 4).to(torch.uint8)
    return codes


def high_bit_places(code_bits: int) -> tuple[int, ...]:
    """Returns the first bit of the field for each k in a word of `b_high` (`high_bit` in kernels/shared/types.h).

    A field has `code_bits - 4` bits. The fields of codes k and k + 4 in a group of eight are 16 bits apart, so that
    kernels can decode both at once.
    """
    bits = code_bits - 4
    blocks = (0, 8) if bits == 2 else (0, 2, 8, 10)
    return tuple(block + 16 * half + j % 2 * 4 + j // 2 * bits for block in blocks for half in (0, 1) for j in range(4))


def pack_gptq(b_packed: Tensor, *, perm: Tensor | None = None, code_bits: int = 4) -> Tensor:
    """Makes the `qweight` of a GPTQ checkpoint. This is the inverse of `gptq_repack`.

    Args:
        b_packed: int32 `[K/8, N]`, or `[K/4, N]` if `code_bits` is 8.
        perm: int32 `[K]` (see `gptq_perm`). Row j of `b_packed` is row `perm[j]` of the checkpoint.
        code_bits: bits of a code, 4 or 8.

    Returns:
        int32 with the shape of `b_packed`, always a new tensor.

    Raises:
        ValueError: an argument has the wrong dtype or shape, or `perm` is not a permutation of 0..K-1.
    """
    _check_words("pack_gptq", "b_packed", b_packed)
    if perm is None:
        return b_packed.clone(memory_format=torch.contiguous_format)
    codes = unpack_codes(b_packed, code_bits)
    return pack_codes(codes.index_select(0, _inverse_permutation("pack_gptq", perm, len(codes))), code_bits)


def pack_gptq_zeros(zeros: Tensor, checkpoint_version: int, *, rule: ZerosRule = "word") -> Tensor:
    """Makes the `qzeros` of a GPTQ checkpoint. This is the inverse of `gptq_unpack_zeros`.

    Args:
        zeros: uint8 `[G, N]`, N a multiple of 8, each 0..15, or 1..16 for version 1 with the rule "unmasked".
        checkpoint_version: 2 stores each zero point, 1 stores each zero point minus one.
        rule: the representation of zero points 0 and 16 in version 1. For 0, "word" borrows from the next nibble
            (GPTQModel, AutoRound), "masked" stores 15, and "unmasked" raises an error. Only "unmasked" supports 16,
            stored as 15.

    Returns:
        int32 `[G, N/8]`, the lowest column in the lowest nibble.

    Raises:
        ValueError: `zeros` is not uint8 or has the wrong rank, N is not a multiple of 8, a zero point is out of range,
            or the version or the rule is unknown.
    """
    if checkpoint_version not in (1, 2):
        raise ValueError(f"pack_gptq_zeros: checkpoint_version: expected 1 or 2, got {checkpoint_version}")
    if rule not in get_args(ZerosRule):
        raise ValueError(f"pack_gptq_zeros: rule: expected 'word', 'masked' or 'unmasked', got {rule!r}")
    if checkpoint_version == 1 and rule == "unmasked":
        if zeros.numel() and int(zeros.min()) == 0:
            raise ValueError("pack_gptq_zeros: zeros: expected 1..16 with version 1 and rule 'unmasked', got 0")
        zeros = zeros - 1
    elif checkpoint_version == 1 and rule == "masked":
        _check_codes("pack_gptq_zeros", "zeros", zeros, packed_dim=1)
        zeros = (zeros + 15) & 15
    _check_codes("pack_gptq_zeros", "zeros", zeros, packed_dim=1)
    words = _pack(zeros.reshape(len(zeros), -1, CODES_PER_WORD), SEQUENTIAL_ORDER)
    return words - ONE_IN_EACH_NIBBLE if checkpoint_version == 1 and rule == "word" else words


def pack_awq(b_packed: Tensor) -> Tensor:
    """Makes the `qweight` of an AWQ (gemm) checkpoint. This is the inverse of `awq_repack`.

    Args:
        b_packed: int32 `[K/8, N]`, N a multiple of 8.

    Returns:
        int32 `[K, N/8]` with AWQ's interleave.

    Raises:
        ValueError: `b_packed` is not int32 or has the wrong rank, or N is not a multiple of 8.
    """
    return _pack_awq("pack_awq", "b_packed", unpack_codes(b_packed))


def pack_awq_zeros(zeros: Tensor) -> Tensor:
    """Makes the `qzeros` of an AWQ (gemm) checkpoint. This is the inverse of `awq_unpack_zeros`.

    Args:
        zeros: uint8 `[G, N]`, each 0..15, N a multiple of 8.

    Returns:
        int32 `[G, N/8]` with AWQ's interleave.

    Raises:
        ValueError: `zeros` is not uint8 or has the wrong rank, N is not a multiple of 8, or a zero point is above 15.
    """
    return _pack_awq("pack_awq_zeros", "zeros", zeros)


def gptq_perm(g_idx: Tensor, group_size: int) -> Tensor | None:
    """Converts GPTQ's act-order `g_idx` to the operators' `perm`.

    A stable sort orders the rows by group: row j of the packed weight is row `perm[j]` of the checkpoint, and each
    group becomes contiguous.

    Args:
        g_idx: int32 or int64 `[K]`, the group of each row in the checkpoint.
        group_size: rows per group. -1, or K or more, means one group. Only the last group may be shorter.

    Returns:
        int32 `[K]` on the device of `g_idx`, or None if the rows are in order. They are in order if `g_idx[k]` is k //
        group_size. Some programs without act-order write zeros, so an all-zero `g_idx` is also treated as in order. The
        function warns about zeros if there is more than one group.

    Raises:
        ValueError: `g_idx` is not int32 or int64 or has the wrong rank, a group is out of range, or a group has the
            wrong size.

    Examples:
        >>> tmm.ops.gptq_perm(torch.tensor([0, 1, 0, 1]), group_size=2)
        tensor([0, 2, 1, 3], dtype=torch.int32)
    """
    if g_idx.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"gptq_perm: g_idx: expected int32 or int64, got {g_idx.dtype}")
    if g_idx.dim() != 1 or g_idx.numel() == 0:
        raise ValueError(f"gptq_perm: g_idx: expected shape [K], got {list(g_idx.shape)}")
    K = g_idx.numel()
    if group_size != -1 and group_size < 1:
        raise ValueError(f"gptq_perm: group_size: expected -1 or a positive number, got {group_size}")
    group_size = K if group_size == -1 else min(group_size, K)
    G = -(-K // group_size)
    # Each branch below would wait for a value from the device, so all K numbers are copied to the CPU at once.
    groups = g_idx.detach().cpu().long()
    low, high = int(groups.min()), int(groups.max())
    if low < 0 or high >= G:
        raise ValueError(
            f"gptq_perm: g_idx: expected groups 0..{G - 1} (K {K}, group_size {group_size}), got {low}..{high}"
        )
    if torch.equal(groups, torch.arange(K, device="cpu") // group_size):
        return None
    if high == 0:
        warnings.warn(
            f"gptq_perm: g_idx is all zero for K {K} and group_size {group_size}; read as no act-order", stacklevel=2
        )
        return None
    expected = torch.full((G,), group_size, device="cpu")
    expected[-1] = K - group_size * (G - 1)
    counts = torch.bincount(groups, minlength=G)
    if not torch.equal(counts, expected):
        first = int((counts != expected).nonzero()[0])
        raise ValueError(
            f"gptq_perm: g_idx: expected {int(expected[first])} rows in group {first} of {G}, got {int(counts[first])}"
        )
    return torch.argsort(groups, stable=True).to(torch.int32).to(g_idx.device)


def _pack_awq(op: str, argument: str, codes: Tensor) -> Tensor:
    _check_codes(op, argument, codes, packed_dim=1)
    return _pack(codes.reshape(len(codes), -1, CODES_PER_WORD), AWQ_ORDER)


def _pack(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Packs codes [..., 8] into int32 [...]. Nibble i is code order[i]."""
    words = torch.zeros(codes.shape[:-1], dtype=torch.int32, device=codes.device)
    for nibble, code in enumerate(order):
        words |= codes[..., code].to(torch.int32) << (4 * nibble)
    return words


def unpack_nibbles(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """Unpacks int32 [...] into uint8 [..., 8]. Code order[i] is nibble i."""
    codes = torch.empty(*words.shape, CODES_PER_WORD, dtype=torch.uint8, device=words.device)
    for nibble, code in enumerate(order):
        codes[..., code] = (words >> (4 * nibble)) & 15
    return codes


def _inverse_permutation(op: str, perm: Tensor, K: int) -> Tensor:
    if perm.dtype != torch.int32:
        raise ValueError(f"{op}: perm: expected int32, got {perm.dtype}")
    if list(perm.shape) != [K]:
        raise ValueError(f"{op}: perm: expected shape [{K}], got {list(perm.shape)}")
    order, inverse = torch.sort(perm.long())
    if not torch.equal(order, torch.arange(K, device=perm.device)):
        raise ValueError(f"{op}: perm: expected a permutation of 0..{K - 1}")
    return inverse


def _check_codes(op: str, argument: str, codes: Tensor, *, packed_dim: int, largest: int = 15) -> None:
    if codes.dtype != torch.uint8:
        raise ValueError(f"{op}: {argument}: expected uint8, got {codes.dtype}")
    if codes.dim() != 2:
        raise ValueError(f"{op}: {argument}: expected two dimensions, got shape {list(codes.shape)}")
    if codes.shape[packed_dim] % CODES_PER_WORD:
        raise ValueError(
            f"{op}: {argument}: expected {'KN'[packed_dim]} to be a multiple of 8, got shape {list(codes.shape)}"
        )
    if largest < 255 and codes.numel() and int(codes.max()) > largest:
        raise ValueError(f"{op}: {argument}: expected codes 0..{largest}, got {int(codes.max())}")


def _check_words(op: str, argument: str, words: Tensor) -> None:
    if words.dtype != torch.int32:
        raise ValueError(f"{op}: {argument}: expected int32, got {words.dtype}")
    if words.dim() != 2:
        raise ValueError(f"{op}: {argument}: expected two dimensions, got shape {list(words.shape)}")
