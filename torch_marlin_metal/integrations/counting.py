"""The number of weights in packed layers, which are buffers and therefore no parameters of PyTorch."""

from collections.abc import Iterable

from torch import nn

from torch_marlin_metal.formats import weight_format
from torch_marlin_metal.layers.packed_layer import PackedLayer


def packed_weights(modules: Iterable[nn.Module]) -> int:
    """Returns the number of packed weights in these modules. Layers that share their words count once."""
    layers = {id(module.b_packed): module for module in modules if isinstance(module, PackedLayer)}
    return sum(weight_format(layer.weight_format).codes_per_word * layer.b_packed.numel() for layer in layers.values())
