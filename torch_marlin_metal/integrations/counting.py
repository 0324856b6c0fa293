"""The number and dtype of a model's weights, for libraries that look only at parameters. Packed weights are buffers."""

from collections.abc import Iterable

import torch
from torch import nn

from torch_marlin_metal.formats import weight_format
from torch_marlin_metal.layers.packed_layer import PackedLayer


def packed_weights(modules: Iterable[nn.Module]) -> int:
    """Returns the number of packed weights in the modules. Layers that share the same words count once."""
    layers = {id(module.b_packed): module for module in modules if isinstance(module, PackedLayer)}
    return sum(weight_format(layer.weight_format).codes_per_word * layer.b_packed.numel() for layer in layers.values())


def packed_dtype(model: nn.Module) -> torch.dtype | None:
    """Returns the dtype of the float layer that the first packed layer replaced, or None without packed layers."""
    return next((module.dtype for module in model.modules() if isinstance(module, PackedLayer)), None)
