"""Placeholders for packed layers in a model that is being loaded."""

from typing import NoReturn

import torch
from torch import Tensor, nn

from torch_marlin_metal.load.model_tensors import initialized
from torch_marlin_metal.models.linear_layers import LinearShape


class PendingLinear(nn.Module):
    """Holds the place of a packed layer while a host library loads everything else; it has no parameters.

    If a checkpoint lacks tensors, the model initializes them, and some models also initialize tensors of their children
    (`module.q.weight.normal_`). For such models, the placeholder has attributes that are meta tensors, which have no
    values to initialize.
    """

    def __init__(self, shape: LinearShape) -> None:
        super().__init__()
        self.shape = shape
        self.in_features, self.out_features = shape.K, shape.N

    @property
    def weight(self) -> Tensor:
        """Returns a tensor of the weight's shape without values."""
        size = (self.shape.K, self.shape.N) if self.shape.transposed else (self.shape.N, self.shape.K)
        return initialized(torch.empty(size, dtype=self.shape.dtype, device="meta"))

    @property
    def bias(self) -> Tensor | None:
        """Returns a tensor of the bias' shape without values, or None."""
        return None if self.shape.bias is None else initialized(torch.empty_like(self.shape.bias, device="meta"))

    def forward(self, a: Tensor) -> NoReturn:
        """Raises an error, because the model is not loaded yet."""
        raise RuntimeError("a model was used before its packed layers were loaded")


class PendingExperts(nn.Module):
    """Holds the place of the packed experts of a mixture; it has no parameters.

    Some models initialize tensors of their children, as `PendingLinear` says. So this class has a tensor without values
    for each parameter of the replaced module.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        for name, tensor in experts._parameters.items():
            self.__dict__[name] = None if tensor is None else initialized(torch.empty_like(tensor, device="meta"))

    def forward(self, *args: Tensor) -> NoReturn:
        """Raises an error, because the model is not loaded yet."""
        raise RuntimeError("a model was used before its packed experts were loaded")
