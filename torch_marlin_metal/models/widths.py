"""Chooses the formats of the layers of a model of PyTorch: by a limit of memory, or as llama.cpp's recipes do."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.layers.float_experts import WEIGHTS, is_experts
from torch_marlin_metal.layers.widths import SAMPLE_EXPERTS, Widths, experts_of
from torch_marlin_metal.models.empty_model import is_transposed, matrix_of
from torch_marlin_metal.models.experts import shape_of
from torch_marlin_metal.models.report import module_bytes
from torch_marlin_metal.quantize.fit import Fit, sample
from torch_marlin_metal.quantize.like import Described, formats_like
from torch_marlin_metal.quantize.recipe import Recipe
from torch_marlin_metal.sizes import parse_size

CHUNK = 4  # sequences that are computed at once
Samples = Callable[[str, nn.Module, str], Iterable[Tensor]]


def fitted(
    op: str,
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    recipe: Recipe,
    memory: str | int,
    samples: Samples,
    ties: Mapping[str, str],
    calibration: Tensor | None = None,
) -> tuple[Recipe, Fit]:
    """Returns the recipe whose formats fit into a limit of memory, and the choice.

    Args:
        op: the caller's name, for errors.
        model: the model, which may be on the meta device.
        modules: the layers to quantize, by name.
        recipe: the recipe without choices, whose vocabulary is known.
        memory: see `quantize_model`.
        samples: returns rows of a module's weight, given its name, the module and the weight's name.
        ties: layers that share the weight of another of the modules: name -> name of that module.
        calibration: see `quantize_model`.

    Raises:
        ValueError: the smallest formats need more.
    """
    widths, taken = Widths(recipe), dict[int, int]()
    for name, module in modules.items():
        for kind in _kinds(module):
            weight = module._parameters[kind]
            assert weight is not None
            if ties.get(name) in modules:
                widths.add(name, (0, 0), (), shares=ties[name])
            elif is_experts(module):
                shape = shape_of(module, kind)
                widths.add(name, (shape.N, shape.K), samples(name, module, kind), len(weight))
            else:
                N, K = reversed(weight.shape) if is_transposed(module) else weight.shape
                widths.add(name, (N, K), samples(name, module, kind))
            taken[id(weight)] = weight.nbytes
    if calibration is not None:
        _calibrate(model, modules, recipe, widths, calibration)
    return widths.choose(op, module_bytes(model) - sum(taken.values()), parse_size(f"{op}: memory", memory))


def liked(
    op: str, model: nn.Module, modules: Mapping[str, nn.Module], recipe: Recipe, like: str, outputs: set[str]
) -> Recipe:
    """Returns the recipe with the formats of a recipe of llama.cpp; arguments are those of `fitted`.

    Args:
        op: see `fitted`.
        model: see `fitted`.
        modules: see `fitted`.
        recipe: see `fitted`.
        like: the recipe's name.
        outputs: the names of the layers that give the logits, and of the embeddings that share their weight.
    """
    layers = []
    for name, module in modules.items():
        if is_experts(module):
            layers += [Described(f"{name}.{kind}", shape_of(module, kind).K) for kind in WEIGHTS]
            continue
        K = matrix_of(module).shape[1]
        is_output = name in outputs
        layers.append(Described(name, K, is_output, name in recipe.vocabulary and not is_output))
    config = getattr(model, "config", None)
    experts = 0 if config is None else experts_of(vars(config))
    return replace(recipe, chosen=formats_like(op, like, layers, experts))


def _kinds(module: nn.Module) -> tuple[str, ...]:
    return WEIGHTS if is_experts(module) else ("weight",)


def rows_of(name: str, module: nn.Module, kind: str) -> Iterator[Tensor]:
    """Yields rows of the weight of a module with values: of the matrix, or of several experts."""
    if not is_experts(module):
        yield sample(matrix_of(module).detach())
        return
    stack = module._parameters[kind]
    assert stack is not None
    for index in range(0, len(stack), -(-len(stack) // SAMPLE_EXPERTS)):
        matrix = stack.detach()[index]
        yield sample(matrix.T if getattr(module, "is_transposed", False) else matrix)


def _calibrate(model: Any, modules: Mapping[str, nn.Module], recipe: Recipe, widths: Widths, text: Tensor) -> None:
    """Replaces the errors of weights by estimates of the KL divergence of the model's predictions.

    The divergence is measured with one unit at a time in its smallest format. It is of second order in the error of
    the weights, and is scaled by it for the other formats.
    """
    device = next(model.parameters()).device
    with torch.no_grad():
        exact = [_logs(model, ids.to(device)) for ids in torch.split(text, CHUNK)]
        for unit in widths.units.values():
            index = min(range(len(unit.sizes)), key=lambda place: unit.sizes[place])
            rounding = recipe.in_format(*widths.candidates[index])
            weights: dict[int, tuple[nn.Module, Tensor]] = {
                id(getattr(module, kind)): (module, getattr(module, kind))
                for module in map(modules.__getitem__, unit.names)
                for kind in _kinds(module)
            }
            kept = [weight.detach().clone() for _, weight in weights.values()]
            try:
                for module, weight in weights.values():
                    _round(module, weight, rounding)
                total = sum(
                    float((known.exp() * (known - _logs(model, ids.to(device)))).sum())
                    for known, ids in zip(exact, torch.split(text, CHUNK), strict=True)
                )
            finally:
                for (_, weight), values in zip(weights.values(), kept, strict=True):
                    weight.copy_(values)
            divergence = max(total / text.numel(), 0.0)
            least = unit.errors[index]
            unit.errors = [divergence * error / least if least else 0.0 for error in unit.errors]


def _round(module: nn.Module, weight: Tensor, rounding: Recipe) -> None:
    """Replaces a weight by what a format keeps of it."""
    transposed = is_transposed(module) or bool(getattr(module, "is_transposed", False))
    for matrix in weight if weight.dim() == 3 else [weight]:
        rows = matrix.T if transposed else matrix
        rows.copy_(rounding.quantize("", rows.detach().contiguous()).dequantize().T)


def _logs(model: Any, ids: Tensor) -> Tensor:
    """Returns the logarithms of the probabilities of the next tokens, fp32 `[B, S, V]`."""
    found: Tensor = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    return found
