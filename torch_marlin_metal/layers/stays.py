"""Finds the Linear layers that stay in floats by default: heads of classifiers, and float32 parts.

In a head, 4 bits would save almost no memory, because it has few rows, and each row decides about a class. transformers
and its quantizers keep the modules that a class lists in `_keep_in_fp32_modules` in float32, for example T5's `wo`.
"""

import re
from typing import Any

from torch import nn

# A transformers model ends in a trained head with few classes if its class name contains this pattern.
CLASSIFIERS = re.compile(r"For\w*(Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction|XVector)")
IN_HEAD = "it belongs to the head of a classifier"
IN_FLOAT32 = "transformers keeps it in float32"


def staying_layers(model: nn.Module, heads: bool = True) -> dict[int, str]:
    """Returns `{id(layer): reason}` for the Linear layers of a model that stay in floats by default.

    Args:
        model: the model, which may be on the meta device.
        heads: True to include the heads of classifiers.
    """
    found = dict.fromkeys(classifier_heads(model), IN_HEAD) if heads else {}
    for module in model.modules():
        names = getattr(module, "_keep_in_fp32_modules", None)
        if names:
            kept = re.compile("|".join(rf"(?:.*\.)?{name}(?:\..*)?" for name in names))
            layers = [layer for name, layer in module.named_modules() if _is_layer(layer) and kept.fullmatch(name)]
            found |= dict.fromkeys(map(id, layers), IN_FLOAT32)
    return found


def classifier_heads(model: nn.Module) -> set[int]:
    """Returns the ids of the Linear layers in classifier heads, anywhere in a model.

    The head of a transformers class is the layers outside the base model. If there are none, or if the class has no
    base model, the head is the layers with one row per label. If there are none either, the head is the last layer.
    """
    found: set[int] = set()
    for module in model.modules():
        if CLASSIFIERS.match(_class_name(module)):
            found |= {id(layer) for layer in _head_of(module)}
    return found


def _class_name(module: nn.Module) -> str:
    """Returns the class name from "For" on, or "" if the module is not a transformers model."""
    name = type(module).__name__
    return name[name.index("For") :] if "For" in name and hasattr(module, "config") else ""


def _head_of(classifier: Any) -> list[nn.Module]:
    layers = [module for module in classifier.modules() if _is_layer(module)]
    base = getattr(classifier, getattr(classifier, "base_model_prefix", None) or "base_model", None)
    has_base = isinstance(base, nn.Module) and base is not classifier
    inside = {id(module) for module in base.modules()} if has_base else set()  # type: ignore[union-attr]
    if inside and (outside := [layer for layer in layers if id(layer) not in inside]):
        return outside
    labels = getattr(classifier.config, "num_labels", None)
    rows = [layer for layer in layers if getattr(layer, "out_features", None) == labels]
    return rows or ([] if inside else layers[-1:])


def _is_layer(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return is_linear and weight is not None
