"""Makes `num_parameters`, `dtype` and `device` of transformers models know packed weights, which are no parameters."""

import functools
from typing import Any

import torch
from transformers import PreTrainedModel

from torch_marlin_metal.integrations.counting import packed_dtype, packed_weights
from torch_marlin_metal.layers.embedding import MarlinEmbedding
from torch_marlin_metal.layers.packed_layer import model_device


def install() -> None:
    """Wraps a method and two properties of `PreTrainedModel`; a second call does nothing."""
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
    first_dtype, first_device = PreTrainedModel.dtype.fget, PreTrainedModel.device.fget

    def dtype(self: Any) -> torch.dtype:
        try:
            found: torch.dtype = first_dtype(self)
        except StopIteration:  # no parameter of floats
            if (held := packed_dtype(self)) is None:
                raise
            return held
        return found

    def device(self: Any) -> torch.device:
        try:
            found: torch.device = first_device(self)
        except StopIteration:  # no parameter
            if (held := model_device(self)) is None:
                raise
            return held
        return found

    PreTrainedModel.dtype = property(dtype, doc=PreTrainedModel.dtype.__doc__)
    PreTrainedModel.device = property(device, doc=PreTrainedModel.device.__doc__)
