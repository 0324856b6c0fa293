"""Lists the packed layers that `save_pretrained` writes. Layers that transformers ties are omitted."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torch_marlin_metal.integrations.transformers.names import tied_modules
from torch_marlin_metal.layers.fuse import unfused
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.models.experts import NamedExperts
from torch_marlin_metal.models.swap import inherit
from torch_marlin_metal.packed_weight import PackedWeight


def stored_layers(model: Any, *, copy: bool = True) -> Iterator[tuple[str, PackedWeight]]:
    """Yields (name, weight) for the packed layers that `save_pretrained` writes.

    A layer is omitted if transformers ties it to another layer after loading. Layers that share a weight for another
    reason are yielded as copies, because safetensors refuses tensors that share memory. `copy` is the argument of
    `ExpertWeights.to_packed`.
    """
    # Only the ids of living tensors identify a weight. The weight of a fused projection is a new tensor, which may get
    # the id of a freed one.
    held = {id(module.b_packed) for module in model.modules() if isinstance(module, MarlinLinear)}
    first: dict[int, str] = {}
    ties: dict[str, str] | None = None
    for name, weight in unfused(model):
        if id(weight.b_packed) not in held:
            yield name, weight
            continue
        other = first.setdefault(id(weight.b_packed), name)
        if other == name:
            yield name, weight
            continue
        if ties is None:
            ties = tied_modules(empty_model(model).all_tied_weights_keys)
        roots = {ties.get(one, one) for one in (name, other)}
        if len(roots) > 1:
            copies: dict[str, Any] = {key: tensor.clone() for key, tensor in weight.tensors().items() if key != "bias"}
            yield name, replace(weight, **copies)
    yield from expert_layers(model, copy=copy)


def packed_layers(model: nn.Module, *, copy: bool = True) -> Iterator[tuple[str, PackedWeight]]:
    """Yields (name, weight) for each packed layer of a model, with the names that checkpoints use.

    Args:
        model: a model whose projections and experts may be fused or stacked.
        copy: see `ExpertWeights.to_packed`.
    """
    yield from unfused(model)
    yield from expert_layers(model, copy=copy)


def expert_layers(model: nn.Module, *, copy: bool = True) -> Iterator[tuple[str, PackedWeight]]:
    """Yields (name, weight) for each layer in a model's stacked experts, like `packed_layers`."""
    for name, module in model.named_modules():
        if isinstance(module, NamedExperts):
            for inner, weight in module.named_layers(copy=copy):
                yield f"{name}.{inner}" if name else inner, weight


def decode_stacks(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces each stack of packed experts in a model by transformers' module with floats."""
    for name, module in list(model.named_modules()):
        if isinstance(module, NamedExperts):
            experts = module.to_floats(dtype)
            inherit(experts, module)
            model.set_submodule(name, experts)


def empty_model(model: Any) -> Any:
    """Makes the model on the meta device, as transformers does before it reads a checkpoint."""
    with torch.device("meta"):
        return type(model)._from_config(model.config)
