"""Runs the experts of a mixture as separate packed layers; transformers keeps them as stacked parameters.

Checkpoints store experts in two ways. gpt-oss stacks all experts in one tensor, and its reader names the layers
`experts.gate_up_proj.3`. Others have one Linear for each part of each expert: `experts.3.gate_proj`, or
`experts.3.w1` in Mixtral.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.integrations.transformers.pending import PendingLinear
from torch_marlin_metal.models.empty_model import LinearShape

STACKED = re.compile(r"(.+)\.(gate_up_proj|down_proj)\.(\d+)")
SPLIT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


class MarlinExperts(nn.Module):
    """Replaces transformers' experts module and runs the tokens of each expert through its packed layers.

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
            if expert >= self.count:
                continue
            tokens, slots = torch.where(top_k_index == expert)
            y = self._expert(expert, hidden_states[tokens])
            out.index_add_(0, tokens, (y * top_k_weights[tokens, slots, None]).to(out.dtype))
        return out

    def _expert(self, index: int, a: Tensor) -> Tensor:
        (rules,) = self._replaced
        if not self.parts:
            gated: Tensor = self.down_proj[index](rules._apply_gate(self.gate_up_proj[index](a)))
            return gated
        gate, up, down = (self.get_submodule(f"{index}.{part}") for part in self.parts)
        split: Tensor = down(rules._apply_gate(torch.cat((gate(a), up(a)), dim=-1)))
        return split


def shapes_of(experts: Any, name: str) -> LinearShape:
    """Returns the shape of one expert's layer of a stacked parameter `[E, N, K]`, or `[E, K, N]` if transposed."""
    weight, bias = experts._parameters[name], experts._parameters.get(f"{name}_bias")
    _, N, K = weight.mT.shape if experts.is_transposed else weight.shape
    return LinearShape(N, K, weight.dtype, weight.device, None if bias is None else bias[0])


def make_room(model: Any, name: str) -> bool:
    """Puts `MarlinExperts` into the model if `name` is the layer of an expert. Returns whether it is."""
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
    if interleaved or not all(held[part].dim() == 3 for part in ("gate_up_proj", "down_proj")):
        return False
    model.set_submodule(found[1], MarlinExperts(experts, parts).train(experts.training))
    return True
