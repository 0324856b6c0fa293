"""Converts a packed layer to a floating-point module."""

import torch
from torch import Tensor, nn

from torch_marlin_metal.layers.embedding import MarlinEmbedding
from torch_marlin_metal.models.linear_layers import is_transposed
from torch_marlin_metal.models.swap import inherit
from torch_marlin_metal.packed_weight import PackedWeight


def float_module(
    held: nn.Module, own: nn.Module | None, packed: PackedWeight, dtype: torch.dtype, weight: nn.Parameter | None = None
) -> nn.Module:
    """Makes the floating-point module that replaces a packed layer.

    Args:
        held: the packed layer, whose training mode and hooks the new module gets.
        own: the original module of the model's class, on the meta device. None means an nn.Linear or nn.Embedding.
        packed: the weight of the layer.
        dtype: dtype of the floats.
        weight: the decoded values, if another layer that shares the weight was decoded before.
    """
    new: nn.Module
    if own is not None and own._parameters.get("weight") is not None:
        new = own
        if isinstance(held, MarlinEmbedding) and "embed_scale" in new._buffers:
            new._buffers["embed_scale"] = torch.tensor(held.scale, device=packed.b_packed.device)
    elif isinstance(held, MarlinEmbedding):
        new = nn.Embedding(packed.N, packed.K, held.padding_idx, device="meta")
    else:
        new = nn.Linear(packed.K, packed.N, bias=packed.bias is not None, device="meta")
    if weight is None:
        rows = packed.dequantize(dtype)
        weight = nn.Parameter(rows.contiguous() if is_transposed(new) else rows.T.contiguous())
    new._parameters["weight"] = weight
    bias: Tensor | None = packed.bias
    if bias is None and new._parameters.get("bias") is not None:
        bias = torch.zeros(packed.N, device=weight.device)
    if bias is not None:
        new._parameters["bias"] = nn.Parameter(bias.detach().to(weight.device, dtype))
    inherit(new, held)
    return new
