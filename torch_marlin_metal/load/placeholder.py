"""Placeholders for packed layers in a model during loading."""

from typing import NoReturn

import torch
from torch import Tensor, nn

from torch_marlin_metal.load.model_tensors import initialized
from torch_marlin_metal.models.linear_layers import LinearShape


class PendingLinear(nn.Module):
    """A placeholder without parameters for a packed layer, used while a host library loads the other tensors.

    Models initialize tensors that a checkpoint lacks. Some models then also initialize tensors of their children
    (`module.q.weight.normal_`). For such models, `weight` and `bias` of the placeholder are meta tensors, which have no
    values to initialize.
    """

    def __init__(self, shape: LinearShape) -> None:
        super().__init__()
        self.shape = shape
        self.in_features, self.out_features = shape.K, shape.N

    @property
    def weight(self) -> Tensor:
        """Returns a tensor with the shape of the weight but without values."""
        size = (self.shape.K, self.shape.N) if self.shape.transposed else (self.shape.N, self.shape.K)
        return initialized(torch.empty(size, dtype=self.shape.dtype, device="meta"))

    @property
    def bias(self) -> Tensor | None:
        """Returns a tensor with the shape of the bias but without values, or None."""
        return None if self.shape.bias is None else initialized(torch.empty_like(self.shape.bias, device="meta"))

    def forward(self, a: Tensor) -> NoReturn:
        """Raises an error, because the model is not loaded yet."""
        raise RuntimeError("a model was used before its packed layers were loaded")


class PendingExperts(nn.Module):
    """A placeholder without parameters for the packed experts of a mixture.

    Some models initialize tensors of their children (see `PendingLinear`). For them, the placeholder has a meta tensor
    for each parameter of the replaced module.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        for name, tensor in experts._parameters.items():
            self.__dict__[name] = None if tensor is None else initialized(torch.empty_like(tensor, device="meta"))

    def forward(self, *args: Tensor) -> NoReturn:
        """Raises an error, because the model is not loaded yet."""
        raise RuntimeError("a model was used before its packed experts were loaded")
