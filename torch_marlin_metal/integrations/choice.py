"""Chooses the layers that `from_pretrained` quantizes while it loads, for transformers and diffusers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from transformers.utils import logging

from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.models.coverage import check_coverage, left_matrices
from torch_marlin_metal.models.empty_model import is_candidate, linear_shape, why_not_linear
from torch_marlin_metal.models.report import LayerReport, Report
from torch_marlin_metal.models.taken import taken_weights
from torch_marlin_metal.patterns import check_patterns, selects

logger = logging.get_logger(__name__)


def choose_layers(op: str, model: nn.Module, config: Any, stays: Callable[[str], str]) -> list[str]:
    """Returns the names of the layers to quantize, before any tensor is read.

    Args:
        op: the caller's name, for messages.
        model: the empty model.
        config: a `MarlinConfig`.
        stays: returns why the caller keeps a layer in floats, or "".

    Raises:
        ValueError: a pattern matches nothing, the format does not fit a layer, or no layer would be quantized.
    """
    report, chosen = Report("quantize while loading"), []
    linear = {name: module for name, module in model.named_modules() if is_candidate(module)}
    check_patterns(op, linear, modules_to_not_convert=config.modules_to_not_convert)
    taken = taken_weights(model)
    for name, module in linear.items():
        if selects(config.modules_to_not_convert, name):
            continue
        shape = linear_shape(module)
        weight = module._parameters.get("weight")
        entry = LayerReport(name, type(module).__name__, bytes_before=0 if weight is None else weight.nbytes)
        reason = stays(name)
        if not reason and (reason := taken.get(id(module)) or why_not_linear(module)):
            logger.warning(f"{name} stays in floats: {reason}")
        if reason:
            entry = replace(entry, reason=reason)
        report.layers.append(entry)
        if shape is not None and not reason:
            # The constructor checks the arguments. On the meta device it takes no memory.
            MarlinLinear(
                shape.K, shape.N, weight_format=config.weight_format, group_size=config.group_size, device="meta"
            )
            chosen.append(name)
    report.layers += left_matrices(
        model, lambda name, _: not selects(config.modules_to_not_convert, name), is_candidate
    )
    check_coverage(op, report)
    return chosen
