"""Finds the embeddings and output layers of a model. They are quantized to a separate format."""

import contextlib
from typing import Any

from torch import nn

from torch_marlin_metal.quantize.recipe import IN_FLOATS


def vocabulary_of(model: nn.Module, vocabulary_format: str | None) -> tuple[set[int], set[int]]:
    """Returns the ids of the embeddings to pack, and the ids of the output layers.

    In a transformers model, these are the modules that `get_input_embeddings` and `get_output_embeddings` return. The
    model's remaining `nn.Embedding` modules (positions, queries and so on) are not packed, because models often read
    their `weight` directly. In a model that is not from transformers, all `nn.Embedding` modules are packed if a format
    is given.

    Args:
        model: the model, which may be on the meta device.
        vocabulary_format: a format, None for the default of transformers models, or "none" to pack no embeddings.
    """
    modules: list[Any] = list(model.modules())
    if not any(hasattr(module, "get_input_embeddings") for module in modules):
        every = {id(module) for module in modules if isinstance(module, nn.Embedding)}
        return (set() if vocabulary_format in (None, IN_FLOATS) else every), set()
    found: dict[str, list[Any]] = {"get_input_embeddings": [], "get_output_embeddings": []}
    for module in modules:
        for name, named in found.items():
            with contextlib.suppress(NotImplementedError, AttributeError):
                named.append(getattr(module, name)())
    tables, heads = found.values()
    is_packed = vocabulary_format != IN_FLOATS
    return (
        {id(table) for table in tables if is_packed and isinstance(table, nn.Embedding)},
        {id(head) for head in heads if head is not None},
    )
