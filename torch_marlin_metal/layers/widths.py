"""Chooses the formats of a model's layers by a limit of memory."""

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

SAMPLE_EXPERTS = 4  # of a mixture's layer, on which the error of a format is measured
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names in transformers' configs
# The weight of the vocabulary's error beside the sum of all other layers' errors: 1/4 to 3 in small trained models. The
# larger number keeps it in many bits.
VOCABULARY_WEIGHT = 4
LAYER_BYTES = 12  # of `packed_format`, which a packed layer holds beside the tensors of its weight
STORED_BYTES = LAYER_BYTES + 1  # in a file, which also has the layer's `GUARD`


class Widths:
    """Collects the layers of a model, and chooses their formats.

    Args:
        recipe: the recipe for the model, whose vocabulary is known.
    """

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
        """Adds a layer, or the layers of one kind of a mixture's experts.

        Args:
            name: the name of the layer or of the experts module.
            shape: `(N, K)` of its weight.
            samples: see `quantize.fit.measured`.
            copies: how many matrices of this shape it has.
            shares: the name of an added layer with the same weight.
            beside: the bytes that it has beside the tensors of its weight.
        """
        key = together(name if shares is None else shares)
        if shares is not None:
            self.units[key].names.append(name)
            self.units[key].sizes = [size + beside for size in self.units[key].sizes]
            return
        unit = measured(name, shape, samples, copies, self._recipe, self.candidates)
        unit.sizes = [size + beside for size in unit.sizes]
        if key not in self.units:
            self.units[key] = unit
        elif name in self.units[key].names:  # the other projection of experts
            self.units[key].join(replace(unit, names=[]))
        else:
            self.units[key].join(unit)

    def choose(self, op: str, fixed: int, limit: int) -> tuple[Recipe, Fit]:
        """Returns the recipe with the chosen formats, and the choice.

        Args:
            op: the caller's name, for the error.
            fixed: bytes of the model that no choice changes.
            limit: the bytes that the model may have.

        Raises:
            ValueError: the smallest formats need more.
        """
        fit = choose(op, self.candidates, list(self.units.values()), self._recipe.vocabulary, fixed, limit)
        return replace(self._recipe, chosen=fit.chosen()), fit

    def weigh_vocabulary(self) -> None:
        """Makes errors of the vocabulary's weights count as much as they matter for the model's predictions."""
        is_word = [bool(self._recipe.vocabulary.intersection(unit.names)) for unit in self.units.values()]
        others = sum(len(unit.names) for unit, word in zip(self.units.values(), is_word, strict=True) if not word)
        for unit, word in zip(self.units.values(), is_word, strict=True):
            if word:
                unit.errors = [error * VOCABULARY_WEIGHT * max(others, 1) for error in unit.errors]


def check_widths(op: str, memory: str | int | None, like: str | None, text: Tensor | None = None) -> None:
    """Checks that at most one way to choose formats is given, and the text only with a limit.

    Raises:
        ValueError: it is not so, or an argument is wrong.
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
    """Returns the number of experts of a mixture's layer by transformers' settings of a model, or 0."""
    return next((int(config[key]) for key in EXPERTS if config.get(key)), 0)


def together(name: str) -> str:
    """Returns a key that layers have in common if they are computed together (see `fuse_projections`)."""
    owner, _, part = name.rpartition(".")
    return next((f"{owner}.{'+'.join(group)}" for group in GROUPS if part in group), name)
