"""Wraps peft's functions that count, freeze or search parameters. They would miss packed weights, which are buffers."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft.utils import other
from torch import nn

from torch_marlin_metal.integrations.counting import packed_weights
from torch_marlin_metal.layers.embedding import MarlinEmbedding
from torch_marlin_metal.layers.packed_layer import PackedLayer

PREPARE = "prepare_model_for_kbit_training"


def get_nb_trainable_parameters(original: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    """Makes peft's parameter count include packed weights."""

    def count(self: nn.Module) -> tuple[int, int]:
        trainable, total = original(self)
        return trainable, total + packed_weights(self.modules())

    return count


def setup_prompt_encoder(original: Callable[..., None]) -> Callable[..., None]:
    """Lets prompt tuning find a packed vocabulary table. peft searches for the first parameter of the table's size."""

    def setup(self: nn.Module, adapter_name: str) -> None:
        with _shown_tables(self):
            original(self, adapter_name)

    return setup


@contextlib.contextmanager
def _shown_tables(model: nn.Module) -> Iterator[None]:
    """Inside the block, packed embeddings have a parameter with the shape of their weight but without values."""
    tables = [module for module in model.modules() if isinstance(module, MarlinEmbedding)]
    for table in tables:
        hollow = torch.empty((), dtype=table.dtype, device=table.b_packed.device).expand(table.weight.shape)
        table._parameters["weight"] = nn.Parameter(hollow, requires_grad=False)
    try:
        yield
    finally:
        for table in tables:
            del table._parameters["weight"]


def _prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `prepare_model_for_kbit_training` handle packed models like HQQ models, whose weights are no parameters.

    peft then freezes the model, keeps the dtypes of its other parameters, and enables gradient checkpointing.
    """

    @functools.wraps(original)
    def prepare_model_for_kbit_training(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(module, PackedLayer) for module in model.modules()):
            return original(model, *args, **kwargs)
        model.hqq_quantized = True
        try:
            return original(model, *args, **kwargs)
        finally:
            del model.hqq_quantized

    prepare_model_for_kbit_training.without_marlin = original  # type: ignore[attr-defined]
    return prepare_model_for_kbit_training


def install() -> None:
    """Wraps `prepare_model_for_kbit_training`, also in modules that have already imported it."""
    original = getattr(other, PREPARE)
    if not hasattr(original, "without_marlin"):
        _replace(original, _prepare(original))


def restore() -> None:
    """Undoes `install`."""
    wrapper = getattr(other, PREPARE)
    _replace(wrapper, getattr(wrapper, "without_marlin", wrapper))


def _replace(old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(PREPARE) is old:
            setattr(module, PREPARE, new)
