"""Experts of mixtures in floats, as transformers stacks them: which modules they are, and which layers are theirs.

An experts module has the parameters `gate_up_proj` and `down_proj`, `[E, N, K]` or, if `is_transposed`, `[E, K, N]`,
and perhaps a bias for each. Its method `_apply_gate` is the activation. Checkpoints store experts in two ways. gpt-oss
stacks all experts in one tensor, and its layers are named `experts.gate_up_proj.3`. Others have one Linear for each
part of each expert: `experts.3.gate_proj`, or `experts.3.w1` in Mixtral.
"""

import re

from torch import nn

STACKED = re.compile(r"(.+)\.(gate_up_proj|down_proj)\.(\d+)")
SPLIT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
WEIGHTS = ("gate_up_proj", "down_proj")
# These are the only parameters that an experts module may have. A module with other parameters computes something that
# `MarlinExperts` does not compute, such as a norm after down.
KNOWN_PARAMETERS = {*WEIGHTS, *(f"{name}_bias" for name in WEIGHTS)}


def is_experts(module: nn.Module | None) -> bool:
    """Returns whether a module has stacked experts in floats, and computes what `MarlinExperts` does."""
    held = {} if module is None else module._parameters
    stacks = [held.get(name) for name in WEIGHTS]
    if module is None or any(stack is None or stack.dim() != 3 for stack in stacks):
        return False
    return hasattr(module, "_apply_gate") and {name for name, _ in module.named_parameters()} <= KNOWN_PARAMETERS


def find_module(model: nn.Module, name: str) -> nn.Module | None:
    """Returns the module of this name, or None if the model has none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def find_experts(model: nn.Module, name: str) -> tuple[str, tuple[str, ...]] | None:
    """Returns the experts module to which a layer of a checkpoint belongs, or None if it belongs to none.

    Args:
        model: a model with experts in floats.
        name: the layer's name, as in the model.

    Returns:
        The module's name, and `ExpertLayers.parts`.
    """
    stacked, split = STACKED.fullmatch(name), SPLIT.fullmatch(name)
    found = stacked or split
    experts = find_module(model, found[1]) if found is not None else None
    if found is None or not is_experts(experts):
        return None
    if split is None:
        return found[1], ()
    if not getattr(experts, "is_concatenated", True):  # its columns alternate between gate and up
        return None
    return found[1], next(names for names in PARTS if split[3] in names)
