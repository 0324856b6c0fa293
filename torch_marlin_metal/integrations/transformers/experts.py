"""Loads and saves the experts of a mixture with packed weights.

While a model is loaded, `SeparateExperts` stands in for an experts module. It has a layer for each of the checkpoint's
layers. `stack` then replaces it by one stack of weights. Experts that cannot be stacked stay separate.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.integrations.transformers.pending import PendingLinear, inherit
from torch_marlin_metal.layers.experts import StackError
from torch_marlin_metal.layers.float_experts import find_experts
from torch_marlin_metal.layers.fuse import unfused
from torch_marlin_metal.models.empty_model import LinearShape
from torch_marlin_metal.models.experts import ExpertLayers, NamedExperts
from torch_marlin_metal.packed_weight import PackedWeight


class SeparateExperts(nn.Module):
    """Replaces transformers' experts module with a layer for each part of each expert.

    It runs one expert after the other, and waits for the device to tell which experts have tokens. Models keep it only
    for experts whose layers cannot be stacked, for instance because some stay in floats.
    """

    def __init__(self, layers: ExpertLayers) -> None:
        super().__init__()
        self._layers = layers
        for name, shape in layers.all_names():
            parent, _, child = name.rpartition(".")
            if parent not in self._modules:
                self.add_module(parent, nn.Module())
            self.get_submodule(parent).add_module(child, PendingLinear(shape))

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
        shapes = dict(self._layers.all_names())
        stack = self._layers.pack(lambda name: read(name, shapes[name])).train(self.training)
        inherit(stack, self)
        return stack


def stack_experts(
    model: nn.Module, read: Callable[[str, LinearShape], PackedWeight]
) -> tuple[set[str], dict[str, str]]:
    """Replaces each `SeparateExperts` of a model by one stack of weights.

    Weights are copied into the stack as they are read, so that at any time the weights of only one expert exist twice.

    Args:
        model: changed in place.
        read: returns the weight of a layer, or raises `StackError` if it stays in floats.

    Returns:
        The names of the layers that are in a stack now, and the modules that stay separate with the reason.
    """
    done: set[str] = set()
    left: dict[str, str] = {}
    for prefix, module in list(model.named_modules()):
        if not isinstance(module, SeparateExperts):
            continue
        names = {f"{prefix}.{name}" for name, _ in module._layers.all_names()}
        try:
            stack = module.stacked(lambda name, shape, prefix=prefix: read(f"{prefix}.{name}", shape))  # type: ignore[misc]
        except StackError as error:
            left[prefix] = error.reason
            continue
        model.set_submodule(prefix, stack)
        done |= names
    return done, left


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


def make_room(model: Any, name: str) -> bool:
    """Puts `SeparateExperts` into the model if `name` is the layer of an expert. Returns whether it is."""
    found = find_experts(model, name)
    if found is None:
        return False
    prefix, parts = found
    experts = model.get_submodule(prefix)
    model.set_submodule(prefix, SeparateExperts(ExpertLayers.of(experts, parts)).train(experts.training))
    return True
