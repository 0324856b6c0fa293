"""The operators that decode packed weights, and those that convert other layouts to the packed layout.

The source layouts are those of GPTQ, AWQ and compressed-tensors. `repack.py` converts in the other direction, for
exporters and tests.
"""

import torch
from torch import Tensor

from torch_marlin_metal.ops.arguments import weight_arguments
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.repack import ZerosRule

_ops = torch.ops.torch_marlin_metal


def embedding(ids: Tensor, weight: PackedWeight, dtype: torch.dtype = torch.float16) -> Tensor:
    """Looks up vectors in a packed embedding table. Vector i is column i of the weight `[K, N]`.

    Only the vectors of the given ids are decoded. They have the same bits as in `weight.dequantize()`. There are no
    gradients.

    Args:
        ids: int32 or int64, any shape and strides, with values in `[0, N)`.
        weight: `[K, N]`. N is the size of the vocabulary, K the length of a vector.
        dtype: float16, bfloat16 or float32.

    Returns:
        `[..., K]` in `dtype`. On mps, an id outside the table gives a vector of NaN, because the host does not know the
        ids.

    Raises:
        IndexError: an id is outside the table (on the CPU).
        TypeError: `weight` is not a `PackedWeight`.
        ValueError: an argument has the wrong dtype, shape, device or value, or requires grad.

    Examples:
        >>> weight = tmm.quantize_weight(torch.randn(100, 64), "uint4", group_size=32)
        >>> tmm.embedding(torch.tensor([[1, 5]]), weight).shape
        torch.Size([1, 2, 64])
    """
    tensors, named = weight_arguments("embedding", weight)
    result: Tensor = _ops.embedding(ids, *tensors, dtype=dtype, **named)
    return result


def gptq_repack(qweight: Tensor, *, perm: Tensor | None = None, code_bits: int = 4) -> Tensor:
    """Converts GPTQ's `qweight` to the packed layout. Row j of the result is row `perm[j]` of `qweight`.

    Without `perm`, the two layouts are equal and the result is a copy.

    Args:
        qweight: int32 `[K/8, N]`, or `[K/4, N]` for 8-bit codes, contiguous.
        perm: int32 `[K]` from `gptq_perm`, or None.
        code_bits: bits of a code, 4 or 8.

    Returns:
        int32, a new tensor with the shape of `qweight`.

    Raises:
        ValueError: an argument has the wrong dtype or shape.

    Examples:
        >>> qweight = torch.zeros(8, 24, dtype=torch.int32)  # [K/8, N]
        >>> perm = tmm.ops.gptq_perm(torch.arange(64) % 2, group_size=32)
        >>> tmm.ops.gptq_repack(qweight, perm=perm).shape
        torch.Size([8, 24])
    """
    result: Tensor = _ops.gptq_repack(qweight, perm=perm, code_bits=code_bits)
    return result


def gptq_unpack_zeros(qzeros: Tensor, *, checkpoint_version: int, rule: ZerosRule = "word") -> Tensor:
    """Unpacks GPTQ's `qzeros` to one byte per zero point.

    Files of version 1 store z - 1, so a zero point is the stored nibble plus 1. If the nibble is 15, programs disagree
    about the zero point, and `rule` selects one of three results. "word" adds 0x11111111 to the complete word. This is
    exact for files of GPTQModel and AutoRound, which subtract 1 from each nibble of a word, with a borrow from the next
    nibble if z is 0. "masked" computes (nibble + 1) & 15. "unmasked" computes nibble + 1, which may be 16.

    In functions that read layers or checkpoints, the argument `checkpoint_version` is called `gptq_version`, and `rule`
    is called `gptq_zeros_rule`.

    Args:
        qzeros: int32 `[G, N/8]`, contiguous, with the lowest n in the lowest nibble.
        checkpoint_version: 1 (`checkpoint_format: "gptq"`) or 2 (`"gptq_v2"`, zero points stored unchanged).
        rule: "word", "masked" or "unmasked".

    Returns:
        uint8 `[G, N]`.

    Raises:
        ValueError: an argument has the wrong dtype, shape or value.

    Examples:
        >>> qzeros = torch.full((1, 1), 0x77777777, dtype=torch.int32)  # version 1 stores each zero point minus one
        >>> tmm.ops.gptq_unpack_zeros(qzeros, checkpoint_version=1)
        tensor([[8, 8, 8, 8, 8, 8, 8, 8]], dtype=torch.uint8)
    """
    result: Tensor = _ops.gptq_unpack_zeros(qzeros, checkpoint_version=checkpoint_version, rule=rule)
    return result


def awq_repack(qweight: Tensor) -> Tensor:
    """Converts the `qweight` of AWQ's "gemm" version to the packed layout. Undoes AWQ's interleave.

    Args:
        qweight: int32 `[K, N/8]`, contiguous. Nibble i of a word is column `[0, 2, 4, 6, 1, 3, 5, 7][i]` of the eight
            columns in the word.

    Returns:
        int32 `[K/8, N]`.

    Raises:
        ValueError: `qweight` has the wrong dtype or shape, or K is not a multiple of 8.

    Examples:
        >>> qweight = torch.zeros(64, 3, dtype=torch.int32)  # [K, N/8]
        >>> tmm.ops.awq_repack(qweight).shape
        torch.Size([8, 24])
    """
    result: Tensor = _ops.awq_repack(qweight)
    return result


def transpose_words(words: Tensor) -> Tensor:
    """Converts words in the transposed order, `[N, K/8]` or `[N, K/4]`, to the packed layout.

    compressed-tensors and AWQ's "gemv" version store words in this order.

    Args:
        words: int32 `[N, K/8]` of 4-bit codes or `[N, K/4]` of 8-bit codes, contiguous, with the lowest k in the lowest
            bits. Bytes `[N, K]` can be viewed as such words with `codes.view(torch.int32)`.

    Returns:
        int32 `[K/8, N]` or `[K/4, N]`, a new tensor.

    Raises:
        ValueError: `words` has the wrong dtype or shape.

    Examples:
        >>> tmm.ops.transpose_words(torch.zeros(24, 3, dtype=torch.int32)).shape  # [N, K/8]
        torch.Size([3, 24])
    """
    result: Tensor = _ops.transpose_words(words)
    return result


def awq_unpack_zeros(qzeros: Tensor) -> Tensor:
    """Unpacks the `qzeros` of AWQ's "gemm" version to one byte per zero point. Undoes AWQ's interleave.

    Args:
        qzeros: int32 `[G, N/8]`, contiguous.

    Returns:
        uint8 `[G, N]`.

    Raises:
        ValueError: `qzeros` has the wrong dtype or shape.

    Examples:
        >>> tmm.ops.awq_unpack_zeros(torch.zeros(2, 3, dtype=torch.int32)).shape
        torch.Size([2, 24])
    """
    result: Tensor = _ops.awq_unpack_zeros(qzeros)
    return result
