"""Converts the packed words of checkpoints to the operators' layout.

The operators of the compiled extension rearrange the bits. Without the extension, PyTorch's functions do the same more
slowly. Both results are equal bit for bit, so checkpoints can be inspected and converted on every machine. The readers
check shapes and dtypes before they call these functions.
"""

import torch
from torch import Tensor

from torch_marlin_metal import extension
from torch_marlin_metal.repack import (
    AWQ_ORDER,
    ONE_IN_EACH_NIBBLE,
    SEQUENTIAL_ORDER,
    ZerosRule,
    pack_codes,
    unpack_codes,
    unpack_nibbles,
)


def permuted(words: Tensor, perm: Tensor, code_bits: int = 4) -> Tensor:
    """Permutes the rows of packed words like `gptq_repack`: row j of the result is row `perm[j]`."""
    if extension.refusal is not None:
        return pack_codes(unpack_codes(words, code_bits)[perm.long()], code_bits)
    result: Tensor = torch.ops.torch_marlin_metal.gptq_repack(words, perm=perm, code_bits=code_bits)
    return result


def gptq_zeros(qzeros: Tensor, checkpoint_version: int, rule: ZerosRule = "word") -> Tensor:
    """Unpacks int32 `[G, N/8]` to uint8 `[G, N]` like `gptq_unpack_zeros`."""
    if extension.refusal is None:
        result: Tensor = torch.ops.torch_marlin_metal.gptq_unpack_zeros(
            qzeros, checkpoint_version=checkpoint_version, rule=rule
        )
        return result
    if checkpoint_version == 2:
        return unpack_nibbles(qzeros, SEQUENTIAL_ORDER).flatten(1)
    if rule == "word":
        return unpack_nibbles(qzeros + ONE_IN_EACH_NIBBLE, SEQUENTIAL_ORDER).flatten(1)
    zeros = unpack_nibbles(qzeros, SEQUENTIAL_ORDER).flatten(1) + 1
    return zeros & 15 if rule == "masked" else zeros


def awq_words(qweight: Tensor) -> Tensor:
    """Converts int32 `[K, N/8]` with AWQ's interleave to int32 `[K/8, N]` like `awq_repack`."""
    if extension.refusal is not None:
        return pack_codes(unpack_nibbles(qweight, AWQ_ORDER).flatten(1))
    result: Tensor = torch.ops.torch_marlin_metal.awq_repack(qweight)
    return result


def awq_zeros(qzeros: Tensor) -> Tensor:
    """Unpacks int32 `[G, N/8]` with AWQ's interleave to uint8 `[G, N]` like `awq_unpack_zeros`."""
    if extension.refusal is not None:
        return unpack_nibbles(qzeros, AWQ_ORDER).flatten(1)
    result: Tensor = torch.ops.torch_marlin_metal.awq_unpack_zeros(qzeros)
    return result


def transposed(words: Tensor) -> Tensor:
    """Transposes words like `transpose_words`: int32 `[N, K/8]` to `[K/8, N]`, and `[N, K/4]` to `[K/4, N]`."""
    if extension.refusal is not None:
        return words.t().contiguous()
    result: Tensor = torch.ops.torch_marlin_metal.transpose_words(words)
    return result
