"""Finds transformers' modules of float experts and the layers in each.

An experts module has the parameters `gate_up_proj` and `down_proj`, each `[E, N, K]` or, if `is_transposed`, `[E, K,
N]`, and optional biases. Its method `_apply_gate` is the activation. The experts of Llama 4 differ: each expert
receives all tokens, with zeros in place of the tokens of other experts, and the activation is `act_fn(gate) * up`.

Checkpoints store experts in two ways. gpt-oss stacks all experts in one tensor, and its layers are named
`experts.gate_up_proj.3`. Others store a Linear for each part of each expert: `experts.3.gate_proj`, or `experts.3.w1`
in Mixtral.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

STACKED = re.compile(r"(.+)\.(gate_up_proj|down_proj)\.(\d+)")
SPLIT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
WEIGHTS = ("gate_up_proj", "down_proj")
# The only parameters that an experts module may have. A module with other parameters computes more than
# `MarlinExperts`, for example a norm after down.
KNOWN_PARAMETERS = {*WEIGHTS, *(f"{name}_bias" for name in WEIGHTS)}


def is_experts(module: nn.Module | None) -> bool:
    """Returns True if a module has stacked float experts with an activation, even if `why_not_experts` refuses them."""
    return is_stack(module) and (hasattr(module, "_apply_gate") or takes_each_token(module))


def takes_each_token(module: nn.Module | None) -> bool:
    """Returns True if the forward of experts has only tokens `[E * T, H]` as argument, without selected experts."""
    arguments = () if module is None else inspect.signature(type(module).forward).parameters
    return len(arguments) == 2 and hasattr(module, "act_fn") and not hasattr(module, "_apply_gate")


def apply_gate(module: Any, gate_up: Tensor) -> Tensor:
    """Applies the activation of an experts module to gate and up `[..., 2 * I]`. Returns `[..., I]`."""
    if hasattr(module, "_apply_gate"):
        return module._apply_gate(gate_up)  # type: ignore[no-any-return]
    gate, up = gate_up.chunk(2, dim=-1)
    return module.act_fn(gate) * up  # type: ignore[no-any-return]


def is_stack(module: nn.Module | None) -> bool:
    """Returns True if a module has stacked float experts, for any computation with them."""
    if module is None:
        return False
    stacks = [module._parameters.get(name) for name in WEIGHTS]
    if any(stack is None or stack.dim() != 3 for stack in stacks):
        return False
    return {name for name, _ in module.named_parameters()} <= KNOWN_PARAMETERS


def stores_transposed(experts: nn.Module) -> bool:
    """Returns True if the stacks of float experts are `[E, K, N]`. Llama 4's experts have no attribute for this."""
    if (stated := getattr(experts, "is_transposed", None)) is not None:
        return bool(stated)
    gate_up, down = (experts._parameters[name] for name in WEIGHTS)
    assert gate_up is not None and down is not None
    return bool(gate_up.shape[1] == down.shape[2] and gate_up.shape[2] == 2 * down.shape[1])


def find_module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


class ExpertFinder:
    """Finds the experts module that contains a layer of a checkpoint.

    Args:
        modules: the modules of a model with float experts, by name. They must not change while the finder is used.
        fits: returns True for the modules to find.
    """

    def __init__(self, modules: Mapping[str, nn.Module], fits: Callable[[nn.Module | None], bool] = is_experts) -> None:
        self._modules, self._fits = modules, fits
        self._known: dict[str, bool] = {}

    def find(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """Returns the name of the experts module and the layer's `ExpertLayers.parts`, or None for other layers.

        Args:
            name: the name of the layer in the model.
        """
        split = SPLIT.fullmatch(name)
        found = split or STACKED.fullmatch(name)
        if found is None:
            return None
        if found[1] not in self._known:
            self._known[found[1]] = self._fits(self._modules.get(found[1]))
        if not self._known[found[1]]:
            return None
        if split is None:
            return found[1], ()
        return found[1], next(names for names in PARTS if split[3] in names)
