"""The interface of the object with which `load_quantized` splits a model between processes."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.models.empty_model import LinearShape


class Split(Protocol):
    """Says which layers a process loads in part, and loads them."""

    def begin(self, op: str, model: nn.Module, layers: Iterable[str], reader: CheckpointReader) -> None:
        """Refuses a plan or a checkpoint before anything is loaded.

        Args:
            op: the caller's name, for errors.
            model: the model to load into.
            layers: the names of the model's Linear layers that packed layers of the checkpoint replace.
            reader: the checkpoint.
        """
        ...

    def load(
        self,
        op: str,
        names: Sequence[str],
        shape: LinearShape,
        reader: CheckpointReader,
        index: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module | None:
        """Makes this process's part of a layer with these names, or returns None if the layer stays whole."""
        ...
