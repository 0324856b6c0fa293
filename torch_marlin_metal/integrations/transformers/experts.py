"""Runs the experts of a mixture with packed weights; transformers keeps them as stacked parameters.

Checkpoints store experts in two ways. gpt-oss stacks all experts in one tensor, and its reader names the layers
`experts.gate_up_proj.3`. Others have one Linear for each part of each expert: `experts.3.gate_proj`, or
`experts.3.w1` in Mixtral. While a model is loaded, `SeparateExperts` holds a layer for each of these names. When all of
them are there, `stack` copies their weights into one `MarlinExperts`.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.integrations.transformers.pending import PendingLinear, inherit
from torch_marlin_metal.layers.experts import ExpertWeights, MarlinExperts, difference
from torch_marlin_metal.layers.fuse import unfused
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.models.empty_model import LinearShape
from torch_marlin_metal.packed_weight import PackedWeight

STACKED = re.compile(r"(.+)\.(gate_up_proj|down_proj)\.(\d+)")
SPLIT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
# An experts module with other parameters computes something that these modules do not, such as a norm after down.
KNOWN_PARAMETERS = {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}


class SeparateExperts(nn.Module):
    """Replaces transformers' experts module with a layer for each part of each expert.

    It runs one expert after the other and waits for the device to tell which ones have tokens. Experts whose layers
    cannot be stacked, for instance because some stay in floats, run this way.

    Args:
        experts: the module to replace. It loses its stacked parameters; its activation function is still used.
        parts: names of the gate, up and down layers, or () if gate and up are one layer.
    """

    def __init__(self, experts: Any, parts: tuple[str, ...]) -> None:
        super().__init__()
        self.count, self.parts = int(experts.num_experts), parts
        gate_up, down = shapes_of(experts, "gate_up_proj"), shapes_of(experts, "down_proj")
        if parts:
            for index in range(self.count):
                half = LinearShape(gate_up.N // 2, gate_up.K, gate_up.dtype, gate_up.device, None)
                layers = [PendingLinear(shape) for shape in (half, half, down)]
                self.add_module(str(index), nn.ModuleDict(dict(zip(parts, layers, strict=True))))
        else:
            self.gate_up_proj = nn.ModuleList([PendingLinear(gate_up) for _ in range(self.count)])
            self.down_proj = nn.ModuleList([PendingLinear(down) for _ in range(self.count)])
        experts._parameters.clear()
        self._replaced = (experts,)  # in a tuple, so that transformers does not find and initialize it

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns `[T, H]` for `hidden_states [T, H]` and each token's experts and their weights, both `[T, top_k]`."""
        out = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            if not 0 <= expert < self.count:
                continue
            tokens, slots = torch.where(top_k_index == expert)
            y = self._expert(expert, hidden_states[tokens])
            out.index_add_(0, tokens, (y * top_k_weights[tokens, slots, None]).to(out.dtype))
        return out

    def layers(self, index: int) -> tuple[list[nn.Module], nn.Module]:
        """Returns an expert's layers of gate and up, together or separate, and its down layer."""
        if not self.parts:
            return [self.gate_up_proj[index]], self.down_proj[index]
        gate, up, down = (self.get_submodule(f"{index}.{part}") for part in self.parts)
        return [gate, up], down

    def names(self, index: int) -> tuple[list[str], str]:
        """Returns the names of these layers in this module."""
        if not self.parts:
            return [f"gate_up_proj.{index}"], f"down_proj.{index}"
        gate, up, down = self.parts
        return [f"{index}.{gate}", f"{index}.{up}"], f"{index}.{down}"

    def gate(self, gate_up: Tensor) -> Tensor:
        """Returns `[..., I]`, the model's activation of gate and up `[..., 2 * I]`."""
        (rules,) = self._replaced
        gated: Tensor = rules._apply_gate(gate_up)
        return gated

    def _expert(self, index: int, a: Tensor) -> Tensor:
        gate_up, down = self.layers(index)
        y: Tensor = down(self.gate(torch.cat([layer(a) for layer in gate_up], dim=-1)))
        return y


class StackedExperts(MarlinExperts):
    """`MarlinExperts` made from `SeparateExperts`, whose names its layers keep in checkpoints."""

    def __init__(self, separate: SeparateExperts, gate_up: ExpertWeights, down: ExpertWeights) -> None:
        super().__init__(gate_up, down, separate.gate)
        self._separate = (separate,)  # in a tuple, so that it is no submodule

    def unstacked(self) -> Iterator[tuple[str, PackedWeight]]:
        """Yields the name in this module and the weight of each expert's layers."""
        (separate,) = self._separate
        for index in range(self.num_experts):
            gate_up, down = separate.names(index)
            for part, name in enumerate(gate_up):
                yield name, self.gate_up.to_packed(index, part)
            yield down, self.down.to_packed(index)

    def separate(self) -> SeparateExperts:
        """Returns a module with a `MarlinLinear` for each of these layers."""
        (separate,) = self._separate
        for name, weight in self.unstacked():
            separate.set_submodule(name, MarlinLinear.from_packed(weight, dtype=self.gate_up.dtype))
        return separate.train(self.training)


def stack(model: nn.Module) -> dict[str, str]:
    """Replaces each `SeparateExperts` of a model by one stack of weights.

    The weights of an expert are freed when they are in the stack.

    Returns:
        The modules that stay separate, with the reason.
    """
    left = {}
    # A list of all modules would keep the experts that are in a stack already.
    separate = [(name, module) for name, module in model.named_modules() if isinstance(module, SeparateExperts)]
    for name, module in separate:
        if reason := _why_separate(module):
            left[name] = reason
            continue
        dtype = _packed(module.layers(0)[1]).dtype
        stacks = []
        for number, parts in enumerate(_weights(module, 0)):
            perm = any(_weights(module, index)[number][0].perm is not None for index in range(module.count))
            stacks.append(ExpertWeights.room_for(parts, module.count, perm, dtype))
        del parts  # or the first expert would not be freed
        for index in range(module.count):
            for target, weights in zip(stacks, _weights(module, index), strict=True):
                target.fill(index, weights)
            gate_up, last = module.names(index)
            for layer in (*gate_up, last):
                module.set_submodule(layer, nn.Identity())
        stacked = StackedExperts(module, *stacks).train(module.training)
        inherit(stacked, module)
        model.set_submodule(name, stacked)
    return left


def unstack(model: nn.Module) -> None:
    """Replaces each stack of experts of a model by separate layers."""
    for name, module in list(model.named_modules()):
        if isinstance(module, StackedExperts):
            model.set_submodule(name, module.separate())


def packed_layers(model: nn.Module) -> Iterator[tuple[str, PackedWeight]]:
    """Yields the name and weight of every packed layer of a model, as checkpoints have them."""
    yield from unfused(model)
    yield from expert_layers(model)


def expert_layers(model: nn.Module) -> Iterator[tuple[str, PackedWeight]]:
    """Yields the name and weight of every layer of a model's stacked experts, as checkpoints have them."""
    for name, module in model.named_modules():
        if isinstance(module, StackedExperts):
            for inner, weight in module.unstacked():
                yield f"{name}.{inner}" if name else inner, weight


def _weights(module: SeparateExperts, index: int) -> tuple[list[PackedWeight], list[PackedWeight]]:
    gate_up, down = module.layers(index)
    return [_packed(layer).to_packed() for layer in gate_up], [_packed(down).to_packed()]


def _packed(layer: nn.Module) -> MarlinLinear:
    assert isinstance(layer, MarlinLinear)  # as _why_separate found
    return layer


def _why_separate(module: SeparateExperts) -> str:
    for index in range(module.count):
        gate_up, down = module.layers(index)
        if not all(isinstance(layer, MarlinLinear) for layer in (*gate_up, down)):
            return f"expert {index} has layers in floats"
        for mine, other in zip(_weights(module, 0), _weights(module, index), strict=True):
            if reason := difference(mine, other):
                return reason
    return ""


def shapes_of(experts: Any, name: str) -> LinearShape:
    """Returns the shape of one expert's layer of a stacked parameter `[E, N, K]`, or `[E, K, N]` if transposed."""
    weight, bias = experts._parameters[name], experts._parameters.get(f"{name}_bias")
    _, N, K = weight.mT.shape if getattr(experts, "is_transposed", False) else weight.shape
    return LinearShape(N, K, weight.dtype, weight.device, None if bias is None else bias[0])


def make_room(model: Any, name: str) -> bool:
    """Puts `SeparateExperts` into the model if `name` is the layer of an expert. Returns whether it is."""
    stacked, split = STACKED.fullmatch(name), SPLIT.fullmatch(name)
    found = stacked or split
    try:
        experts = model.get_submodule(found[1]) if found is not None else None
    except AttributeError:
        return False
    held = {} if experts is None else experts._parameters
    if experts is None or not {"gate_up_proj", "down_proj"} <= held.keys() or not hasattr(experts, "_apply_gate"):
        return False
    assert found is not None
    parts = next((names for names in PARTS if split is not None and split[3] in names), ())
    interleaved = parts and not getattr(experts, "is_concatenated", True)
    others = {inner for inner, _ in experts.named_parameters()} - KNOWN_PARAMETERS
    if others or interleaved or not all(held[part].dim() == 3 for part in ("gate_up_proj", "down_proj")):
        return False
    model.set_submodule(found[1], SeparateExperts(experts, parts).train(experts.training))
    return True
