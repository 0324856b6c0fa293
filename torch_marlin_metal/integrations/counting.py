"""The number of weights in packed layers, which are buffers and therefore no parameters of PyTorch."""

from collections.abc import Iterable

from torch import nn

from torch_marlin_metal.layers.packed_layer import PackedLayer

CODES_PER_WORD = 8


def packed_weights(modules: Iterable[nn.Module]) -> int:
    """Returns the number of 4-bit weights in these modules. Layers that share their words count once."""
    words = {id(module.b_packed): module.b_packed for module in modules if isinstance(module, PackedLayer)}
    return sum(CODES_PER_WORD * tensor.numel() for tensor in words.values())
