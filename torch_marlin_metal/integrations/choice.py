"""Selects the layers that `from_pretrained` quantizes during loading, for transformers and diffusers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from torch_marlin_metal.layers.embedding import why_not_embedding
from torch_marlin_metal.layers.float_experts import WEIGHTS, is_experts
from torch_marlin_metal.layers.vocabulary import vocabulary_of
from torch_marlin_metal.models.coverage import check_coverage, left_matrices
from torch_marlin_metal.models.experts import shape_of, why_never_experts
from torch_marlin_metal.models.linear_layers import is_candidate, linear_shape, why_not_linear
from torch_marlin_metal.models.reasons import taken_weights
from torch_marlin_metal.models.report import LayerReport, Report
from torch_marlin_metal.models.widths import Samples, fitted, liked
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.patterns import check_patterns, selects
from torch_marlin_metal.quantize.recipe import IN_FLOATS, Recipe

logger = logging.get_logger(__name__)
NO_TIES: Mapping[str, str] = {}


class ChoosesLayers:
    """The base class of the quantizers for transformers and diffusers."""

    op: str

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)  # type: ignore[call-arg]
        self._chosen: set[str] = set()
        self._recipe: Recipe | None = None
        self._made: dict[str, tuple[PackedWeight, torch.dtype]] = {}

    def update_device_map(self, device_map: Any) -> Any:
        """Replaces "auto" and its variants by mps if this machine has it, else by the CPU."""
        if isinstance(device_map, str):
            return {"": torch.device("mps" if torch.backends.mps.is_available() else "cpu")}
        return device_map

    def _packed_weight(self, name: str, matrix: Tensor) -> PackedWeight:
        assert self._recipe is not None
        try:
            return self._recipe.quantize(name, matrix)
        except ValueError as error:
            raise ValueError(f"{self.op}: layer {name!r}: {error}") from error

    @property
    def is_compileable(self) -> bool:
        """Returns True: `generate` and `torch.compile` may compile a model with packed layers."""
        return True


def choose_layers(
    op: str,
    model: nn.Module,
    config: Any,
    stays: Callable[[str], str],
    ties: Mapping[str, str] = NO_TIES,
    samples: Samples | None = None,
) -> tuple[list[str], Recipe]:
    """Returns the layers, embeddings and experts modules to quantize, by name, and a recipe. No tensor is loaded yet.

    Args:
        op: the caller's name for messages.
        model: the model without values.
        config: a `MarlinConfig`.
        stays: returns the reason why the caller keeps a layer in floats, or "" if there is none.
        ties: modules that are tied after loading: name -> name of the module that owns the weight.
        samples: reads rows of the weights, for `config.memory`.

    Raises:
        ValueError: a pattern matches nothing, the format does not support a layer, or no layer would be quantized.
    """
    recipe = config.recipe()
    tables, heads = vocabulary_of(model, config.vocabulary_format)

    def is_wanted(module: nn.Module) -> bool:
        return is_candidate(module) or id(module) in tables or is_experts(module)

    modules = dict(model.named_modules())
    wanted = {name: module for name, module in modules.items() if is_wanted(module)}
    # An embedding that is tied to a vocabulary table is part of the vocabulary too.
    for name, source in ties.items():
        for one, other in ((name, source), (source, name)):
            if id(modules.get(one)) in tables and isinstance(modules.get(other), nn.Embedding):
                wanted[other] = modules[other]
                tables.add(id(modules[other]))
    check_patterns(op, wanted, modules_to_not_convert=config.modules_to_not_convert)
    excluded = {name for name in wanted if selects(config.modules_to_not_convert, name)}
    recipe = recipe.with_vocabulary(name for name, module in wanted.items() if id(module) in tables | heads)
    unfit = taken_weights(model)
    why: dict[str, str] = {}
    for name, module in wanted.items():
        if name in excluded:
            continue
        is_table = id(module) in tables
        if not recipe.packs_vocabulary and id(module) in heads:
            reason = "the output layer, unless vocabulary_format names a format"
        else:
            reason = "" if is_table or _with_table(name, ties, modules, tables) else stays(name)
        why_not = why_not_embedding if is_table else why_never_experts if is_experts(module) else why_not_linear
        if not reason and (reason := unfit.get(id(module)) or why_not(module)):
            logger.warning(f"{name} stays in floats: {reason}")
        why[name] = reason
    _keep_with_others(why, ties, modules)
    taken = {name: modules[name] for name, reason in why.items() if not reason}
    if config.memory is not None and samples is not None:
        recipe, fit = fitted(op, model, taken, recipe, config.memory, samples, ties)
        logger.info(f"{op}: {fit.summary()}")
    elif config.like is not None:
        outputs = {name for name, module in modules.items() if id(module) in heads}
        outputs |= {source for name, source in ties.items() if name in outputs}
        recipe = liked(op, model, taken, recipe, config.like, outputs)
    report = Report("quantize while loading", [_checked(recipe, name, wanted[name], why[name]) for name in why])
    report.layers += left_matrices(
        model,
        lambda name, _: not selects(config.modules_to_not_convert, name),
        is_wanted,
        config.vocabulary_format not in (None, IN_FLOATS),
    )
    check_coverage(op, report)
    return list(taken), recipe


def _with_table(name: str, ties: Mapping[str, str], modules: Mapping[str, nn.Module], tables: set[int]) -> bool:
    """Returns True if a layer shares its weight with an embedding that will be quantized."""
    return any(name in pair and any(id(modules.get(other)) in tables for other in pair) for pair in ties.items())


def _keep_with_others(why: dict[str, str], ties: Mapping[str, str], modules: Mapping[str, nn.Module]) -> None:
    """Keeps modules in floats that share their weight with a module in floats. Adds the reason to `why`."""
    groups: dict[str, set[str]] = {}
    for name, source in ties.items():
        groups.setdefault(source, {source}).add(name)
    for group in groups.values():
        staying = sorted(name for name in group if name in modules and why.get(name, "it is not chosen"))
        for name in group if staying else ():
            if why.get(name) == "":
                other = modules[staying[0]]
                advice = "" if staying[0] in why or why_not_embedding(other) else "; vocabulary_format packs both"
                why[name] = f"its weight is also that of {staying[0]} ({type(other).__name__}), which stays{advice}"
                logger.warning(f"{name} stays in floats: {why[name]}")


def _checked(recipe: Recipe, name: str, module: nn.Module, reason: str) -> LayerReport:
    """Returns the report of a layer. Raises a ValueError if the format does not support the shape of a chosen layer."""
    held = [module._parameters.get(kind) for kind in (WEIGHTS if is_experts(module) else ("weight",))]
    weights = [weight for weight in held if weight is not None]
    entry = LayerReport(name, type(module).__name__, bytes_before=sum(weight.nbytes for weight in weights))
    if reason:
        return replace(entry, reason=reason)
    if is_experts(module):
        shapes = [shape_of(module, kind) for kind in WEIGHTS]
        sizes = [(shape.N, shape.K) for shape in shapes]
    else:
        shape = linear_shape(module)
        sizes = [(shape.N, shape.K) if shape is not None else tuple(weights[0].shape)]  # type: ignore[list-item]
    for N, K in sizes:
        recipe.quantize(name, torch.empty(N, K, device="meta"))  # checks the arguments
    return entry
