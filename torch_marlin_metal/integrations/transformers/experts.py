"""Loads and saves the experts of a mixture with packed weights.

While a model is loaded, `SeparateExperts` stands in for an experts module. One stack of weights then replaces it.
Experts that cannot be stacked stay separate.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from torch_marlin_metal.integrations.transformers.pending import PendingLinear, inherit
from torch_marlin_metal.layers.fuse import unfused
from torch_marlin_metal.models.empty_model import LinearShape
from torch_marlin_metal.models.experts import ExpertLayers, NamedExperts
from torch_marlin_metal.packed_weight import PackedWeight


class SeparateExperts(nn.Module):
    """Replaces transformers' experts module while the model is loaded, and afterwards if its weights cannot be stacked.

    With the layers that `separate` makes, it runs one expert after the other and waits for the device to tell which
    ones have tokens. A placeholder has no layers, because modules for thousands of experts take seconds to make.

    Attributes:
        shapes: the shape of the layer with each name.
        why_unknown: as in `ExpertLayers`.
    """

    def __init__(self, layers: ExpertLayers) -> None:
        super().__init__()
        self._layers = layers
        self.shapes, self.why_unknown = dict(layers.all_names()), layers.why_unknown

    def separate(self) -> Iterator[tuple[str, PendingLinear]]:
        """Makes a placeholder for each layer, and yields its name in this module and the placeholder."""
        for name, shape in self.shapes.items():
            parent, _, child = name.rpartition(".")
            if parent not in self._modules:
                self.add_module(parent, nn.Module().train(self.training))
            pending = PendingLinear(shape).train(self.training)
            self.get_submodule(parent).add_module(child, pending)
            yield name, pending

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
        both = torch.cat([self.get_submodule(name)(a) for name in gate_up], dim=-1)
        y: Tensor = self.get_submodule(down)(self._layers.gate(both))
        return y

    def stacked(self, read: Callable[[str, LinearShape], PackedWeight]) -> NamedExperts:
        """Makes the stack of all experts. `read` returns the weight of a layer, given its name and its shape.

        Raises:
            StackError: the weights cannot be stacked.
        """
        stack = self._layers.pack(lambda name: read(name, self.shapes[name])).train(self.training)
        inherit(stack, self)
        return stack


def decode_stacks(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces each stack of experts of a model by transformers' module with floats."""
    for name, module in list(model.named_modules()):
        if isinstance(module, NamedExperts):
            experts = module.to_floats(dtype)
            inherit(experts, module)
            model.set_submodule(name, experts)


def packed_layers(model: nn.Module, *, copy: bool = True) -> Iterator[tuple[str, PackedWeight]]:
    """Yields the name and weight of every packed layer of a model, as checkpoints have them.

    Args:
        model: the model.
        copy: see `ExpertWeights.to_packed`.
    """
    yield from unfused(model)
    yield from expert_layers(model, copy=copy)


def expert_layers(model: nn.Module, *, copy: bool = True) -> Iterator[tuple[str, PackedWeight]]:
    """Yields the name and weight of every layer of a model's stacked experts, as `packed_layers` does."""
    for name, module in model.named_modules():
        if isinstance(module, NamedExperts):
            for inner, weight in module.named_layers(copy=copy):
                yield f"{name}.{inner}" if name else inner, weight


def make_room(model: nn.Module, prefix: str, parts: tuple[str, ...]) -> SeparateExperts:
    """Puts `SeparateExperts` into the model in the place of an experts module; `parts` as in `ExpertLayers`."""
    experts = model.get_submodule(prefix)
    room = SeparateExperts(ExpertLayers.of(experts, parts)).train(experts.training)
    model.set_submodule(prefix, room)
    return room
