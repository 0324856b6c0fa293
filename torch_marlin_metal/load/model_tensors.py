"""The tensors of a model by name, and changes to a model that can be undone."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class ModelTensors:
    """The current parameters and buffers of a model by name. A tensor with several names is a single entry."""

    def __init__(self, model: nn.Module) -> None:
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._names: dict[int, list[str]] = {}
        self._held: dict[str, Tensor] = {}
        self.persistent: set[str] = set()
        for prefix, module in model.named_modules(remove_duplicate=False):
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is not None:
                        name = f"{prefix}.{key}" if prefix else key
                        self._owners[name], self._held[name] = (module, key), tensor
                        self._names.setdefault(id(tensor), []).append(name)
                        if key not in module._non_persistent_buffers_set:
                            self.persistent.add(name)

    def __contains__(self, name: str) -> bool:
        return name in self._owners

    def __iter__(self) -> Any:
        return iter(self._owners)

    def get(self, name: str) -> Tensor:
        """Returns the tensor that had this name when the object was created."""
        return self._held[name]

    def owner(self, name: str) -> tuple[nn.Module, str]:
        """Returns the module that owns a tensor, and the tensor's key in the module."""
        return self._owners[name]

    def names_of(self, name: str) -> list[str]:
        """Returns all names of the tensor with the given name. A tied tensor has several names."""
        return self._names[id(self._held[name])]


class Changes:
    """Records changes to a model. `undo` reverts them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._undo: list[Callable[[], None]] = []
        self._remembered: set[int] = set()

    def replace(self, names: Iterable[str], module: nn.Module) -> None:
        """Sets a module under all these names of the model."""
        for name in names:
            self._undo.append(partial(self._model.set_submodule, name, self._model.get_submodule(name)))
            self._model.set_submodule(name, module)

    def remember(self, module: nn.Module) -> None:
        """Saves references to a module's own tensors, before they are changed."""
        if id(module) in self._remembered:
            return
        self._remembered.add(id(module))
        parameters, buffers, kept = dict(module._parameters), dict(module._buffers), dict(module.__dict__)

        def restore() -> None:
            for key in parameters:
                module.__dict__.pop(key, None)
            module.__dict__.update({key: kept[key] for key in parameters if key in kept})
            for held, before in ((module._parameters, parameters), (module._buffers, buffers)):
                held.clear()
                held.update(before)  # type: ignore[arg-type]

        self._undo.append(restore)

    def hollow_out(self, module: nn.Module, key: str) -> None:
        """Removes a parameter of a module until it is loaded, so that a host library does not report or create it.

        For models that access the weights of their submodules, a tensor without values replaces the parameter. The
        tensor is marked, so that transformers does not initialize it. The module is not marked, because its class must
        initialize its other tensors.
        """
        self.remember(module)
        held = module._parameters[key]
        assert held is not None
        module._parameters[key] = None
        module.__dict__[key] = initialized(torch.empty_like(held, device="meta"))

    def set_parameter(self, module: nn.Module, key: str, values: Tensor, like: Tensor) -> nn.Parameter:
        """Replaces a parameter of a module and preserves its `requires_grad`."""
        self.remember(module)
        module.__dict__.pop(key, None)
        if not isinstance(values, nn.Parameter):
            values = nn.Parameter(values, requires_grad=like.requires_grad and values.is_floating_point())
        module._parameters[key] = values
        return values

    def set_tensors(self, tensors: ModelTensors, names: Iterable[str], values: Tensor) -> None:
        """Sets one tensor under all these names. A parameter is replaced by a parameter."""
        for name in names:
            (module, key), old = tensors.owner(name), tensors.get(name)
            if isinstance(old, nn.Parameter):
                values = self.set_parameter(module, key, values, old)
            else:
                self.remember(module)
                module._buffers[key] = values

    def undo(self) -> None:
        """Reverts all changes, the last change first."""
        while self._undo:
            self._undo.pop()()


def initialized(tensor: Tensor) -> Tensor:
    """Marks a tensor that transformers must not initialize."""
    marked: Any = tensor
    marked._is_hf_initialized = True
    return tensor
