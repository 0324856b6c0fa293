"""Act-order: reads `g_idx` `[K]`, the group of each row, and computes the permutation that sorts rows by group."""

import warnings
from functools import lru_cache

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.layer_tensors import Layer
from torch_marlin_metal.repack import gptq_perm


@lru_cache(maxsize=8)
def _in_order(K: int, group_size: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(K, dtype=dtype, device="cpu") // group_size


def read_permutation(layer: Layer, role: str, K: int, G: int, group_size: int) -> Tensor | None:
    """Reads a layer's `g_idx` and returns the permutation of the rows, int32 `[K]`, or None if they are in order.

    Row j of the packed weight is row perm[j] of the file. Returns None also if the tensor is absent or was never filled
    in. Some files without act-order store the tensor with the same value in every row: -1 in old compressed-tensors
    files, 0 in some GPTQ files. exllama and text-generation-inference treat such a tensor as not filled in too.

    Raises:
        CheckpointError: the tensor has a wrong shape or dtype, a group is out of range, or a group does not have
            `group_size` rows. Only the last group may have fewer.
    """
    if role not in layer:
        return None
    layer.expect(role, ("I32", "I64"), K)
    stored = layer.read(role)
    if torch.equal(stored, _in_order(K, group_size, stored.dtype)):
        return None
    g_idx = stored.long()
    low, high = (int(bound) for bound in g_idx.aminmax())
    if low == high == -1:
        return None
    if low < 0 or high >= G:
        raise layer.error(role, f"expected groups in 0..{G - 1}, got a range of {low} to {high}")
    if high == 0 and G > 1:
        warnings.warn(
            f"{layer.file}: layer {layer.name!r}: {role} is all zero with {G} groups: read as no act-order",
            stacklevel=2,
        )
        return None
    try:
        return gptq_perm(g_idx, group_size)
    except ValueError as error:
        raise layer.error(role, str(error)) from error
