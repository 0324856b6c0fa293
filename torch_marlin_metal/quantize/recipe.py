"""The formats to which the layers of a model are quantized: one for most, one for the vocabulary, and exceptions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.formats import (
    DEFAULT_GROUP_SIZE,
    TWO_LEVELS,
    default_group_size,
    resolve_group_size,
    weight_format,
)
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.quantize.weight import METHODS, empty_weight, quantize_weight

# The format of embeddings and output layers. It halves their bytes but has 8 bits, because every logit is a product
# with the output layer.
VOCABULARY_FORMAT = "uint8b128"
LayerFormat = tuple[str, int | None]  # (weight format, group size as in `quantize_weight`)
IN_FLOATS = "none"


@dataclass(frozen=True)
class Recipe:
    """The format, group size and method for each layer of a model.

    Attributes:
        weight_format: the format of all layers that are not in `vocabulary` or `chosen`.
        group_size: the group size of these layers, as in `quantize_weight`.
        method: "rtn" or "mse".
        vocabulary_format: the format of the layers in `vocabulary`, or "none" to keep them in floats. None means
            `VOCABULARY_FORMAT` for the vocabulary that a transformers model names.
        options: `scale_dtype`, `lut` and `mx_rounding` of `quantize_weight`.
        vocabulary: the names of the embeddings and output layers.
        chosen: the format and group size of single layers, or of all layers in a module.

    Raises:
        ValueError: a format or the method is unknown.
    """

    weight_format: str
    group_size: int | None = None
    method: str = "rtn"
    vocabulary_format: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: frozenset[str] = frozenset()
    chosen: Mapping[str, LayerFormat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weight_format(self.weight_format)
        if self.method not in METHODS:
            raise ValueError(f"method: expected {' or '.join(map(repr, METHODS))}, got {self.method!r}")
        if self.vocabulary_format not in (None, IN_FLOATS):
            try:
                weight_format(str(self.vocabulary_format))
            except ValueError as error:
                raise ValueError(f"vocabulary_format: {error}, which is also not {IN_FLOATS!r}") from error

    @property
    def packs_vocabulary(self) -> bool:
        """Returns True if embeddings and output layers are quantized."""
        return self.vocabulary_format != IN_FLOATS

    def format_of(self, name: str) -> LayerFormat:
        """Returns the format and group size of a layer."""
        if (own := self._choice(name)) is not None:
            return own
        if name not in self.vocabulary:
            return self.weight_format, self.group_size
        chosen = self.vocabulary_format or VOCABULARY_FORMAT
        fixed = default_group_size(chosen) or default_group_size(self.weight_format)
        return chosen, None if fixed else self.group_size

    def is_chosen(self, name: str) -> bool:
        """Returns True if `chosen` contains a layer or a module around it."""
        return self._choice(name) is not None

    def _choice(self, name: str) -> LayerFormat | None:
        while name and name not in self.chosen:
            name = name.rpartition(".")[0]
        return self.chosen.get(name)

    def size_of(self, name: str) -> LayerFormat:
        """Returns the format and group size of a layer, with the default group size if none was given."""
        chosen, size = self.format_of(name)
        return chosen, size or default_group_size(chosen) or DEFAULT_GROUP_SIZE

    def quantize(self, name: str, weight: Tensor, **more: Any) -> PackedWeight:
        """Quantizes the weight `[N, K]` of a layer.

        For a weight on the meta device, the result's tensors have no values.

        Args:
            name: the layer's name.
            weight: see `quantize_weight`.
            **more: further arguments of `quantize_weight`.

        Raises:
            ValueError: see `quantize_weight`.
        """
        chosen, size = self.format_of(name)
        fmt = weight_format(chosen)
        options = dict(self.options)
        if weight_format(self.weight_format).has_lut and not fmt.has_lut:
            options.pop("lut", None)
        if weight.is_meta:
            size = default_group_size(chosen) if size is None else size
            size = resolve_group_size("quantize_weight", fmt, size, weight.shape[1])
            two_levels = options.get("two_levels") or chosen in TWO_LEVELS
            return empty_weight(weight, fmt, size, options.get("scale_dtype", torch.float16), name, two_levels)
        return quantize_weight(weight, chosen, size, self.method, name=name, **options, **more)

    def with_vocabulary(self, names: Iterable[str]) -> "Recipe":
        """Returns a recipe for a model whose embeddings and output layers have these names."""
        return replace(self, vocabulary=frozenset(names))

    def in_format(self, name: str, group_size: int | None) -> "Recipe":
        """Returns a recipe that quantizes all layers to one format."""
        options = {key: value for key, value in self.options.items() if key != "lut" or weight_format(name).has_lut}
        return Recipe(name, group_size, self.method, options=options)
