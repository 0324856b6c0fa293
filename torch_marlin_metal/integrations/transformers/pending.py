"""Placeholders for packed layers in a transformers model, and the layers that replace them."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from transformers.integrations.accelerate import get_device
from transformers.pytorch_utils import Conv1D

from torch_marlin_metal.checkpoints.reader import DenseWeight
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.models.empty_model import (
    LinearShape,
    ModelMismatchError,
    fit_bias,
    fit_layer,
    fit_table,
    packed_layer,
)
from torch_marlin_metal.models.swap import HOOKS
from torch_marlin_metal.packed_weight import PackedWeight

DEVICES = ("cpu", "mps")


class PendingLinear(nn.Module):
    """Holds the place of a packed layer while transformers loads everything else; it has no parameters.

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
        raise RuntimeError("a model was used before its 4-bit layers were loaded")


Marked = TypeVar("Marked", Tensor, nn.Module)


def initialized(thing: Marked) -> Marked:
    """Marks a tensor or a module that transformers must not initialize."""
    marked: Any = thing
    marked._is_hf_initialized = True
    return thing


def hollow_out(module: nn.Module) -> None:
    """Removes the weight of an embedding, or of a layer tied to an embedding.

    `make_table` or `share_weight` sets it later.

    transformers then does not report the weight as missing. A tensor without values stays in its place, for models that
    access the weights of their submodules.
    """
    weight = module._parameters.pop("weight")
    assert weight is not None
    module.__dict__["weight"] = initialized(torch.empty_like(weight, device="meta"))
    initialized(module)


def inherit(new: nn.Module, old: nn.Module) -> None:
    """Copies the training mode and the hooks, including accelerate's, from a module to its replacement."""
    new.train(old.training)
    for name in HOOKS:
        setattr(new, name, getattr(old, name))
    hook = getattr(old, "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, hook)


def make_layer(
    op: str,
    name: str,
    shape: LinearShape,
    weight: PackedWeight | DenseWeight,
    device: torch.device,
    dense: bool,
) -> nn.Module:
    """Makes the layer for a placeholder: packed, or a float layer if the weight is not packed or `dense` is true."""
    if isinstance(weight, PackedWeight) and not dense:
        return fit_layer(op, name, shape, weight, device=device)
    values = weight.dequantize(shape.dtype).T.contiguous()
    if values.shape != (shape.N, shape.K):
        raise ModelMismatchError(
            f"{op}: layer {name!r}: expected a weight of [{shape.N}, {shape.K}] as in the model, the checkpoint's is "
            f"{list(values.shape)}"
        )
    values = values.T.contiguous() if shape.transposed else values
    return float_layer(op, name, shape, nn.Parameter(values.to(device)), weight.bias)


def float_layer(op: str, name: str, shape: LinearShape, weight: nn.Parameter, given: Tensor | None) -> nn.Module:
    """Makes a Linear, or the transposed layer of GPT-2, with a weight and the bias that was given for it."""
    device, bias = weight.device, fit_bias(op, name, shape.bias, given)
    linear: nn.Module
    if shape.transposed:
        with torch.device("meta"):
            linear = Conv1D(shape.N, shape.K)
        if bias is None:
            bias = torch.zeros(shape.N, dtype=shape.dtype, device=device)
    else:
        linear = nn.Linear(shape.K, shape.N, bias=bias is not None, device="meta")
    linear.weight = weight
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(device, shape.dtype))
    return linear


def make_table(
    op: str,
    name: str,
    embedding: nn.Embedding,
    weight: PackedWeight | DenseWeight,
    device: torch.device,
    dense: bool,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Makes the embedding for a place: packed, or `embedding` itself with decoded values, as `make_layer` does."""
    old, dtype = embedding.weight, dtype or embedding.weight.dtype
    if isinstance(weight, PackedWeight) and not dense:
        table = fit_table(op, name, embedding, weight, device=device, dtype=dtype)
        inherit(table, embedding)
        return table
    values = weight.dequantize(dtype).T.contiguous()
    if values.shape != old.shape:
        raise ModelMismatchError(
            f"{op}: layer {name!r}: expected a table of {list(old.shape)} as in the model, the checkpoint's is "
            f"{list(values.shape)}"
        )
    embedding.__dict__.pop("weight", None)
    embedding.weight = nn.Parameter(values.to(device))
    return embedding


def share_weight(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Gives a hollow module of a model the weight of a layer that has just been made."""
    module = model.get_submodule(name)
    del module.__dict__["weight"]
    if isinstance(layer, MarlinLinear):
        shared = packed_layer(module, replace(layer.to_packed(), bias=None), layer.dtype)
        inherit(shared, module)
        model.set_submodule(name, shared)
    else:
        module.weight = layer.weight


def check_devices(op: str, device_map: dict[str, Any]) -> None:
    """Refuses a device map with the disk or with devices that have no kernels."""
    for module, place in device_map.items():
        kind = place if isinstance(place, str) and place == "disk" else torch.device(place).type
        if kind not in DEVICES:
            raise ValueError(
                f"{op}: device_map: expected {' or '.join(DEVICES)}, got {place!r} for {module or 'the model'!r}"
            )


def device_of(device_map: dict[str, Any] | None, name: str) -> torch.device:
    """Returns the device on which to load a layer.

    If a map contains both mps and cpu, accelerate also runs the modules of the CPU on mps. It copies their parameters
    to mps for each call, but keeps their buffers on mps. A packed weight is a buffer, so it is loaded to mps at once.
    """
    if device_map is None:
        return torch.device("cpu")
    main = [torch.device(place) for place in device_map.values() if torch.device(place).type != "cpu"]
    return main[0] if main else torch.device(get_device(device_map, name, valid_torch_device=True))


def ignored_patterns(names: Iterable[str]) -> set[str]:
    """Returns regular expressions for tensors of packed layers, so that transformers does not report them."""
    return {"^" + re.sub(r"\d+", r"\\d+", re.escape(name)) + "$" for name in names}


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Returns a function that tells whether one of the regular expressions occurs in a name."""
    expressions = [re.compile(pattern) for pattern in patterns]
    return lambda name: any(expression.search(name) for expression in expressions)
