"""Finds and initializes the tensors of a loaded model that no file contains."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.load.model_tensors import Changes, ModelTensors, initialized
from torch_marlin_metal.models.linear_layers import ModelMismatchError, listing


def initialize(
    op: str, model: nn.Module, tensors: ModelTensors, names: Iterable[str], device: torch.device, changes: Changes
) -> None:
    """Lets the model's classes compute tensors that are on the meta device, for example rotary frequencies.

    transformers models do this in `_init_weights`, which transformers also calls for its own empty models. The method
    gets a copy of the module. In this copy, only the tensors to compute have values, so nothing else changes.

    Args:
        op: the caller's name for the error message.
        model: the model that `tensors` describes.
        tensors: as they were before the computation.
        names: the tensors to compute, by their names in the model.
        device: where the computed tensors are made.
        changes: gets an entry for each computed tensor, so that the caller can undo it.

    Raises:
        ModelMismatchError: a class does not compute one of the tensors.
    """
    if device.type == "meta":  # tensors have no values to compute
        return
    by_module: dict[int, tuple[nn.Module, list[str]]] = {}
    for name in names:
        module, _ = tensors.owner(name)
        by_module.setdefault(id(module), (module, []))[1].append(name)
    owners = _owners(model)
    empty: list[str] = []
    for module, wanted in by_module.values():
        stand_in: Any = copy.copy(module)
        stand_in._parameters, stand_in._buffers = _hollow(module._parameters), _hollow(module._buffers)
        for name in wanted:
            _, key = tensors.owner(name)
            old = tensors.get(name)
            held: Any = stand_in._parameters if isinstance(old, nn.Parameter) else stand_in._buffers
            value = _unset(old, device)
            held[key] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
        owner = owners.get(id(module))
        if owner is not None:
            with torch.no_grad():
                owner._init_weights(stand_in)
        for name in wanted:
            _, key = tensors.owner(name)
            value = getattr(stand_in, key)
            if _is_unset(value):
                empty.append(name)
            changes.set_tensors(tensors, [name], value.detach())
    if empty:
        raise _error(op, model, empty)


def watch(model: Any, op: str) -> None:
    """Makes a transformers model raise an error if its classes do not set a tensor during loading.

    transformers allocates the tensors that are in no file, and then calls `_initialize_missing_keys` once. The wrapped
    method first gives these tensors a value that no model computes. A tensor that has this value afterwards was not
    set.
    """
    original: Callable[[bool], None] = model._initialize_missing_keys

    def checked(is_quantized: bool) -> None:
        del model.__dict__["_initialize_missing_keys"]
        before = {}
        for name, tensor in _every_tensor(model):
            plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta  # no part of a distributed tensor
            if plain and not getattr(tensor, "_is_hf_initialized", False):
                with torch.no_grad():
                    tensor.copy_(_unset(tensor, tensor.device))
                before[name] = tensor, tensor._version
        original(is_quantized)
        now = dict(_every_tensor(model))
        empty = [
            name
            for name, (tensor, version) in before.items()
            if now.get(name) is tensor and tensor._version == version and _is_unset(tensor)
        ]
        if empty:
            raise _error(op, model, empty)

    model.__dict__["_initialize_missing_keys"] = checked


def _hollow(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {
        key: None if held is None else initialized(torch.empty_like(held, device="meta"))
        for key, held in tensors.items()
    }


def _every_tensor(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _owners(model: nn.Module) -> dict[int, Any]:
    """Returns the innermost transformers model around each module. Its `_init_weights` can initialize the module."""
    found: dict[int, Any] = {}

    def visit(module: nn.Module, owner: Any) -> None:
        owner = module if hasattr(type(module), "_init_weights") else owner
        found[id(module)] = owner
        for child in module.children():
            visit(child, owner)

    visit(model, None)
    return found


def _unset(like: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor filled with a value that no model computes. If the value remains, the tensor was not set."""
    value = torch.finfo(like.dtype).max if like.is_floating_point() else 1 if like.dtype == torch.bool else 113
    return torch.full_like(like, value, device=device, requires_grad=False)


def _is_unset(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and torch.equal(tensor, _unset(tensor, tensor.device))


def _error(op: str, model: nn.Module, names: list[str]) -> ModelMismatchError:
    return ModelMismatchError(
        f"{op}: {type(model).__name__}: the tensors {listing(names)} are in no checkpoint, and the model's class does "
        "not compute them when the model is made without values (on the meta device): make the model on the CPU and "
        "load the checkpoint with load_quantized"
    )
