"""Finds the heads of classifiers, which stay in floats unless the caller asks for them.

A head has few rows, so that 4 bit saves nothing, and every row decides about a class.
"""

import re
from typing import Any

from torch import nn

# Parts of the class names of transformers' models that end in a trained head over few classes.
CLASSIFIERS = re.compile(r"For\w*(Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction|XVector)")
IN_HEAD = "it belongs to the head of a classifier"


def classifier_heads(model: nn.Module) -> set[int]:
    """Returns the ids of the Linear layers that belong to the head of a classifier, anywhere in a model.

    In a class of transformers, these are the layers outside of the base model. If there is none, or no base model, they
    are the layers with a row for each label, and without such a layer the last one.
    """
    found: set[int] = set()
    for module in model.modules():
        if CLASSIFIERS.match(_class_name(module)):
            found |= {id(layer) for layer in _head_of(module)}
    return found


def _class_name(module: nn.Module) -> str:
    """Returns the class name from "For" on, or "" if the module is no model of transformers' kind."""
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
