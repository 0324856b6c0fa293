"""Selects formats for the layers of a PyTorch model: under a memory limit, or according to llama.cpp's recipes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.layers.float_experts import WEIGHTS, is_experts, stores_transposed
from torch_marlin_metal.layers.packed_layer import model_device
from torch_marlin_metal.layers.widths import SAMPLE_EXPERTS, Widths, experts_of
from torch_marlin_metal.models.experts import shape_of
from torch_marlin_metal.models.linear_layers import is_transposed, matrix_of
from torch_marlin_metal.models.report import module_bytes
from torch_marlin_metal.quantize.fit import Fit, Unit, sample
from torch_marlin_metal.quantize.like import Described, formats_like
from torch_marlin_metal.quantize.recipe import LayerFormat, Recipe
from torch_marlin_metal.sizes import parse_size

CHUNK = 4  # number of sequences computed at once
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
    """Selects a format for each layer so that the model fits in a memory limit.

    Returns the recipe with these formats, and the `Fit` that describes the selection.

    Args:
        op: the caller's name for error messages.
        model: the model, which may be on the meta device.
        modules: the layers to quantize, by name.
        recipe: the recipe before the selection, with the names of the vocabulary's layers.
        memory: see `quantize_model`.
        samples: returns rows of a weight. Its arguments are the module's name, the module and the weight's name.
        ties: layers with a shared weight: name -> name of the module that owns the weight.
        calibration: see `quantize_model`.

    Raises:
        ValueError: even the smallest formats need more memory.
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
    fixed, limit = module_bytes(model) - sum(taken.values()), parse_size(f"{op}: memory", memory)
    unweighted = {key: unit.errors for key, unit in widths.units.items()}
    widths.weigh_vocabulary()
    by_weights = widths.choose(op, fixed, limit)
    if calibration is None:
        return by_weights
    text = _Text(model, modules, calibration)
    for key, unit in widths.units.items():
        unit.errors = _estimates(text, unweighted[key], unit, recipe, widths.candidates)
    found = widths.choose(op, fixed, limit)
    tried = [found, (by_weights[0], replace(found[1], choice=by_weights[1].choice))]
    own = [recipe.size_of(unit.names[0]) for unit in found[1].units]
    uniform = replace(found[1], choice=[widths.candidates.index(one) for one in own])
    if uniform.total_bytes <= limit:
        tried.append((recipe, uniform))
    return min(tried, key=lambda one: text.divergence(one[0], [name for unit in found[1].units for name in unit.names]))


def liked(
    op: str, model: nn.Module, modules: Mapping[str, nn.Module], recipe: Recipe, like: str, outputs: set[str]
) -> Recipe:
    """Returns the recipe with the formats of one of llama.cpp's recipes.

    Args:
        op: see `fitted`.
        model: see `fitted`.
        modules: see `fitted`.
        recipe: see `fitted`.
        like: the name of llama.cpp's recipe.
        outputs: the names of the layers that compute the logits, and of embeddings that share their weight.
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
    """Yields samples of a module's rows. For an experts module, they are from several experts."""
    if not is_experts(module):
        yield sample(matrix_of(module).detach())
        return
    stack = module._parameters[kind]
    assert stack is not None
    for index in range(0, len(stack), -(-len(stack) // SAMPLE_EXPERTS)):
        matrix = stack.detach()[index]
        yield sample(matrix.T if stores_transposed(module) else matrix)


class _Text:
    """A text, with the float model's predictions for it."""

    def __init__(self, model: Any, modules: Mapping[str, nn.Module], ids: Tensor) -> None:
        self._model, self._modules, self._ids = model, modules, torch.split(ids, CHUNK)
        self._exact = list(self._predictions())

    def _predictions(self) -> Iterator[Tensor]:
        """Yields log probabilities of the next tokens, fp32 `[B, S, V]`."""
        device = model_device(self._model) or torch.device("cpu")
        training = [module for module in self._model.modules() if module.training]
        self._model.eval()
        try:
            with torch.no_grad():
                for ids in self._ids:
                    yield self._model(input_ids=ids.to(device), use_cache=False).logits.float().log_softmax(-1)
        finally:
            for module in training:
                module.training = True

    def divergence(self, recipe: Recipe, names: Iterable[str]) -> float:
        """Returns the mean KL divergence of the predictions after some layers are rounded to their formats in a recipe.

        The model is restored afterwards. Meanwhile, a copy of these layers' weights is in memory.
        """
        weights: dict[int, tuple[str, nn.Module, Tensor]] = {}
        for name in names:
            for kind in _kinds(self._modules[name]):
                weight = getattr(self._modules[name], kind)
                weights.setdefault(id(weight), (name, self._modules[name], weight))
        kept = [weight.detach().clone() for _, _, weight in weights.values()]
        try:
            with torch.no_grad():
                for name, module, weight in weights.values():
                    _round(name, module, weight, recipe)
            pairs = zip(self._exact, self._predictions(), strict=True)
            total = sum(float((exact.exp() * (exact - found)).sum()) for exact, found in pairs)
        finally:
            with torch.no_grad():
                for (_, _, weight), values in zip(weights.values(), kept, strict=True):
                    weight.copy_(values)
        return max(total / sum(len(ids.flatten()) for ids in self._ids), 0.0)


def _estimates(
    text: _Text, errors: list[float], unit: Unit, recipe: Recipe, candidates: tuple[LayerFormat, ...]
) -> list[float]:
    """Returns, for each candidate format, the divergence if only the layers of `unit` have this format.

    Only the smallest candidate is measured. The divergence is quadratic in the weight errors, so the results for the
    other candidates are scaled by the ratio of squared errors.
    """
    index = min(range(len(unit.sizes)), key=lambda place: unit.sizes[place])
    divergence, least = text.divergence(recipe.in_format(*candidates[index]), unit.names), errors[index]
    return [divergence * error / least if least else 0.0 for error in errors]


def _round(name: str, module: nn.Module, weight: Tensor, recipe: Recipe) -> None:
    transposed = stores_transposed(module) if is_experts(module) else is_transposed(module)
    for matrix in weight if weight.dim() == 3 else [weight]:
        rows = matrix.T if transposed else matrix
        rows.copy_(recipe.quantize(name, rows.detach().contiguous()).dequantize().T)
