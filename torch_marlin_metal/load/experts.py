"""The experts of a mixture while a model is loaded, and where their weights cannot be stacked."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torch_marlin_metal.models.empty_model import LinearShape
from torch_marlin_metal.models.experts import ExpertLayers


class SeparateExperts(nn.Module):
    """Replaces a model's experts module while the model is loaded, and afterwards if its weights cannot be stacked.

    With the layers that `separate` makes, it runs one expert after the other and waits for the device to tell which
    ones have tokens. A placeholder has no layers, because modules for thousands of experts take seconds to make.
    """

    def __init__(self, layers: ExpertLayers) -> None:
        super().__init__()
        self._layers = layers

    def separate(self) -> Iterator[tuple[str, nn.Linear, LinearShape]]:
        """Makes an empty layer for each weight, and yields its name in this module, the layer and its shape."""
        for name, shape in self._layers.all_names():
            parent, _, child = name.rpartition(".")
            if parent not in self._modules:
                self.add_module(parent, nn.Module().train(self.training))
            linear = nn.Linear(shape.K, shape.N, shape.bias is not None, device="meta", dtype=shape.dtype)
            self.get_submodule(parent).add_module(child, linear.train(self.training))
            yield name, linear, shape

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns `[T, H]` for `hidden_states [T, H]` and each token's experts and their weights, both `[T, top_k]`."""
        out = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            if not 0 <= expert < self._layers.count:
                continue
            tokens, slots = torch.where(top_k_index == expert)
            y = self._expert(expert, hidden_states[tokens])
            out.index_add_(0, tokens, (y * top_k_weights[tokens, slots, None]).to(out.dtype))
        return out

    def _expert(self, index: int, a: Tensor) -> Tensor:
        gate_up, (down,) = self._layers.names(index)
        both = self._layers.join(0, [self.get_submodule(name)(a) for name in gate_up])
        y: Tensor = self.get_submodule(down)(self._layers.gate(both))
        return y
