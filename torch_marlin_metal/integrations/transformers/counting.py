"""Makes `num_parameters`, `dtype` and `device` of transformers models include packed weights, which are buffers."""

import functools
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from torch_marlin_metal.integrations.counting import packed_dtype, packed_weights
from torch_marlin_metal.layers.embedding import MarlinEmbedding
from torch_marlin_metal.layers.packed_layer import model_device


def install() -> None:
    """Wraps a method and two properties of `PreTrainedModel`. A second call does nothing."""
    original = PreTrainedModel.num_parameters
    if getattr(original, "counts_packed_weights", False):
        return

    @functools.wraps(original)
    def num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        count: int = original(self, only_trainable, exclude_embeddings)
        if only_trainable:
            return count
        tables = [module for module in self.modules() if isinstance(module, MarlinEmbedding)]
        return count + packed_weights(self.modules()) - (packed_weights(tables) if exclude_embeddings else 0)

    num_parameters.counts_packed_weights = True  # type: ignore[attr-defined]
    PreTrainedModel.num_parameters = num_parameters
    PreTrainedModel.dtype = _or_packed(PreTrainedModel.dtype, packed_dtype)
    PreTrainedModel.device = _or_packed(PreTrainedModel.device, model_device)


def _or_packed(original: property, of_packed: Callable[[Any], Any]) -> property:
    """Returns a property that uses the packed layers if the model has no parameter."""
    first: Any = original.fget

    def value(self: Any) -> Any:
        try:
            return first(self)
        except StopIteration:
            if (held := of_packed(self)) is None:
                raise
            return held

    return property(value, doc=original.__doc__)
