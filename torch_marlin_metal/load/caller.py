"""The options that a caller of the loader supplies. Callers are `load_quantized` and integrations with other libraries.

Error messages name arguments of `load_quantized`. Other callers run the loader inside `spelled`, which replaces these
names.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.models.linear_layers import LinearShape
from torch_marlin_metal.patterns import Filter, NameFilter


class Split(Protocol):
    """Decides which layers a process loads in part, and loads them."""

    def begin(
        self,
        op: str,
        model: nn.Module,
        layers: Mapping[str, LinearShape],
        whole: Collection[str],
        reader: CheckpointReader,
    ) -> None:
        """Raises an error for an unsupported plan or checkpoint, before any tensor is read.

        Args:
            op: the caller's name for error messages.
            model: the model to load into.
            layers: the Linear layers of the model that packed layers of the checkpoint replace, including those of
                experts.
            whole: modules that cannot be split: packed embeddings and layers tied to them, layers with a tied bias, and
                layers that are decoded to floats.
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
        """Makes this process's part of the layer with these names. Returns None if the layer is not split."""
        ...


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The options of a caller of the loader.

    Attributes:
        op: the caller's name for error messages.
        find: maps the checkpoint's name of a layer or tensor to the model's name, or to None if it is not loaded.
        ties: modules that share another module's weight: name -> name of the other module.
        bias_ties: biases that will become the same tensor after loading: name -> name of the other bias.
        exclude: layers that are decoded to floats.
        exclude_argument: the name of the caller's argument for `exclude`.
        ignore: layers and tensors of the checkpoint that the model may lack, by their names in the model.
        keep: tensors of the model that the checkpoint may lack.
        hosted: True if a host library loads the tensors outside the packed layers. The host library then also reports
            parts of the checkpoint that the model's class lacks, for example another class's head. These parts are not
            loaded.
        unused: if a host library loads tensors: returns True for the name of a tensor that the model's class ignores.
        reinitializes: True if the model's class initializes a layer whose shape differs in the checkpoint. None means
            False, for callers without such an argument.
        parts: True if the process loads only its parts of layers. It then reads only headers to find the layers that
            will be decoded to floats. A warning before loading lists these layers. If values show further layers, a
            warning after loading lists them.
        device_of: the device of a loaded module. None means the replaced module's device, or the CPU for the meta
            device.
        dtype: dtype of floating-point tensors that are not packed. None means the dtype of the replaced tensors.
        progress: True to show a progress bar.
    """

    op: str
    find: Callable[[str], str | None]
    ties: Mapping[str, str] = field(default_factory=dict)
    bias_ties: Mapping[str, str] = field(default_factory=dict)
    exclude: Filter | None = ()
    exclude_argument: str = "exclude"
    ignore: NameFilter | None = ()
    keep: NameFilter | None = ()
    hosted: bool = False
    unused: Callable[[str], bool] = lambda name: False
    reinitializes: bool | None = None
    parts: bool = False
    device_of: Callable[[str], torch.device | None] = lambda name: None
    dtype: torch.dtype | None = None
    progress: bool = True
