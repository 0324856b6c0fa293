"""What a caller of the loader supplies: `load_quantized`, or an integration with another library.

Errors name arguments of `load_quantized`. Other callers run the loader in a block of `spelled`, which renames them.
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
    """Says which layers a process loads in part, and loads them."""

    def begin(
        self,
        op: str,
        model: nn.Module,
        layers: Mapping[str, LinearShape],
        whole: Collection[str],
        reader: CheckpointReader,
    ) -> None:
        """Refuses a plan or a checkpoint before anything is read.

        Args:
            op: the caller's name, for errors.
            model: the model to load into.
            layers: the Linear layers of the model that packed layers of the checkpoint replace, experts' included.
            whole: modules that cannot be split: packed embeddings and layers tied to them, layers with a tied bias, and
                layers that become floats.
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


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The choices of a caller of the loader.

    Attributes:
        op: the caller's name, for errors.
        find: maps the name of a layer or tensor in the checkpoint to its name in the model; None leaves it out.
        ties: modules that share the weight of another module: name -> name of that module.
        bias_ties: biases that are not yet the same tensor in the model, but will be: name -> name of the other.
        exclude: layers that become floats.
        exclude_argument: the caller's name of that argument.
        ignore: layers and tensors of the checkpoint that the model may lack, by their names in the model.
        keep: tensors of the model that the checkpoint may lack.
        hosted: whether the host library loads the tensors outside the packed layers. It then also reports parts of the
            checkpoint that the model's class lacks, such as another class's head, and these are left out.
        unused: tells which tensors the model's class leaves out, for a host library.
        reinitializes: whether the model's class initializes a layer that has another shape in the checkpoint. None
            means False: the caller has no such argument.
        parts: whether the process loads only its parts of layers. Then no whole layer is read to find the layers that
            become floats: the warning before the load has those known from the headers, and a warning after the load
            the others.
        device_of: the device of a loaded module; None means the replaced module's, or the CPU for the meta device.
        dtype: dtype of floating tensors that are not packed; None means the replaced tensors' dtype.
        progress: whether to show a progress bar.
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
