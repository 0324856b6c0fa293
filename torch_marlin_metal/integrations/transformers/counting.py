"""Makes `num_parameters` of transformers models count packed weights, which are buffers and not parameters."""

import functools
from typing import Any

from transformers import PreTrainedModel

from torch_marlin_metal.integrations.counting import packed_weights
from torch_marlin_metal.layers.embedding import MarlinEmbedding


def install() -> None:
    """Wraps `PreTrainedModel.num_parameters`; a second call does nothing."""
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
