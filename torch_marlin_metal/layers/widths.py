"""Selects formats for a model's layers under a memory limit."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.layers.fuse import GROUPS
from torch_marlin_metal.quantize.fit import Fit, Unit, candidates_of, choose, measured
from torch_marlin_metal.quantize.like import formats_like
from torch_marlin_metal.quantize.recipe import Recipe
from torch_marlin_metal.sizes import parse_size

SAMPLE_EXPERTS = 4  # experts per layer of a mixture for which a format's error is measured
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of the expert count in transformers' configs
# The factor of the vocabulary's error in the sum of all layers' errors. Small trained models need 1/4 to 3. The factor
# is larger, so that the vocabulary keeps many bits.
VOCABULARY_WEIGHT = 4
LAYER_BYTES = 12  # bytes of `packed_format`, which a packed layer stores in addition to its weight
STORED_BYTES = LAYER_BYTES + 1  # the same in a file, which also has the layer's `GUARD`, one byte


class Widths:
    """Collects the layers of a model and selects their formats. The recipe must name the layers of the vocabulary."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.candidates = candidates_of(recipe)
        self.units: dict[str, Unit] = {}

    def add(
        self,
        name: str,
        shape: tuple[int, int],
        samples: Iterable[Tensor],
        copies: int = 1,
        shares: str | None = None,
        beside: int = LAYER_BYTES,
    ) -> None:
        """Adds a layer, or all layers of one projection of a mixture's experts.

        Args:
            name: the name of the layer or of the experts module.
            shape: the shape `(N, K)` of the weight.
            samples: see `quantize.fit.measured`.
            copies: the number of matrices of this shape.
            shares: the name of a layer, already added, with the same weight.
            beside: the bytes that the layer has in addition to its weight.
        """
        key = together(name if shares is None else shares)
        if shares is not None:
            self.units[key].names.append(name)
            self.units[key].sizes = [size + beside for size in self.units[key].sizes]
            return
        unit = measured(name, shape, samples, copies, self._recipe, self.candidates)
        unit.sizes = [size + beside for size in unit.sizes]
        known = self.units.setdefault(key, unit)
        if known is not unit:
            is_second = name in known.names  # the second projection of the same experts
            known.join(replace(unit, names=[]) if is_second else unit)

    def choose(self, op: str, fixed: int, limit: int) -> tuple[Recipe, Fit]:
        """Returns the recipe with the selected formats, and the selection.

        Args:
            op: the caller's name for the error message.
            fixed: the bytes of the model that do not depend on formats.
            limit: the largest allowed bytes of the model.

        Raises:
            ValueError: even the smallest formats need more than `limit`.
        """
        fit = choose(op, self.candidates, list(self.units.values()), self._recipe.vocabulary, fixed, limit)
        return replace(self._recipe, chosen=fit.chosen()), fit

    def weigh_vocabulary(self) -> None:
        """Multiplies the errors of the vocabulary by their importance for the model's predictions."""
        words = [unit for unit in self.units.values() if self._recipe.vocabulary.intersection(unit.names)]
        others = sum(len(unit.names) for unit in self.units.values()) - sum(len(unit.names) for unit in words)
        for unit in words:
            unit.errors = [error * VOCABULARY_WEIGHT * max(others, 1) for error in unit.errors]


def check_widths(op: str, memory: str | int | None, like: str | None, text: Tensor | None = None) -> None:
    """Checks that a caller passes at most one of `memory` and `like`, and a text only with `memory`.

    Raises:
        ValueError: the combination or an argument is invalid.
    """
    if memory is not None and like is not None:
        raise ValueError(f"{op}: expected memory or like, got both")
    if text is not None and memory is None:
        raise ValueError(f"{op}: calibration: expected memory with it, which it helps to distribute")
    if text is not None and not (isinstance(text, Tensor) and text.dtype == torch.int64 and text.dim() == 2):
        got = f"{text.dtype} {list(text.shape)}" if isinstance(text, Tensor) else type(text).__name__
        raise ValueError(f"{op}: calibration: expected the ids of tokens, int64 [B, S], got {got}")
    if memory is not None:
        parse_size(f"{op}: memory", memory)
    if like is not None:
        formats_like(op, like, ())


def experts_of(config: Mapping[str, Any]) -> int:
    """Returns the number of experts per layer in a model's transformers settings, or 0."""
    return next((int(config[key]) for key in EXPERTS if config.get(key)), 0)


def together(name: str) -> str:
    """Returns a common key for layers that are computed together (see `fuse_projections`)."""
    owner, _, part = name.rpartition(".")
    return next((f"{owner}.{'+'.join(group)}" for group in GROUPS if part in group), name)
