"""A plan for splitting the packed layers of a model, during loading or later."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.layers.experts import MarlinExperts
from torch_marlin_metal.layers.packed_layer import PackedLayer
from torch_marlin_metal.models.linear_layers import LinearShape, listing
from torch_marlin_metal.parallel.agreement import check_checkpoint
from torch_marlin_metal.parallel.styles import LinearStyle, PackedStyle


class SplitPlan:
    """Maps the layers of a model to the styles that split them over processes.

    With `load_quantized(model, path, split=SplitPlan(...))`, a process reads only its part of each layer, so its memory
    never exceeds its share of the model plus one layer. `apply` splits a model that is already loaded.

    Args:
        mesh: the processes, as a mesh with one dimension.
        plan: module name -> style. Names may have wildcards as in `parallelize_module`: a "*" matches one part of a
            name between dots.

    Raises:
        ValueError: the mesh has more than one dimension, or the plan is empty.
    """

    def __init__(self, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
        if mesh.ndim != 1:
            raise ValueError(f"SplitPlan: mesh: expected one dimension, got {mesh.ndim}; take one: mesh['tp']")
        if not plan:
            raise ValueError("SplitPlan: plan: expected at least one name, got none")
        self.mesh, self.plan = mesh, dict(plan)

    def style_of(self, name: str) -> ParallelStyle | None:
        """Returns the style for the first pattern that matches a name."""
        return next((style for pattern, style in self.plan.items() if _matches(pattern, name)), None)

    def apply(self, model: nn.Module) -> nn.Module:
        """Splits a loaded model in place, like `parallelize_module`. If a process fails, its model does not change.

        The old tensors are freed at the end, so a process needs memory for the complete model and for its share.

        Raises:
            ValueError: a pattern matches no module, or the size of a layer is not divisible by the number of processes.
            TypeError: a style does not support the layer that the plan assigns to it.
            RuntimeError: the processes have different weights or versions of this package.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        self._check_names("SplitPlan.apply", modules)
        chosen = {id(modules[n]): (n, modules[n], style) for n in modules if n and (style := self.style_of(n))}
        for name, module, style in chosen.values():
            packed = isinstance(module, (PackedLayer, MarlinExperts))
            if packed != isinstance(style, PackedStyle):
                raise TypeError(
                    f"SplitPlan.apply: layer {name!r}: {type(style).__name__} is no style for a {type(module).__name__}"
                )
        with _restored_on_error([module for _, module, _ in chosen.values()]):
            for name, module, style in chosen.values():
                try:
                    parallelize_module(module, self.mesh, style)
                except (ValueError, TypeError, RuntimeError) as error:
                    raise type(error)(f"layer {name!r}: {error}") from error
        return model

    def begin(
        self,
        op: str,
        model: nn.Module,
        layers: Mapping[str, LinearShape],
        whole: Collection[str],
        reader: CheckpointReader,
    ) -> None:
        """Raises an error for a plan that `load` cannot execute, and for processes with another package or checkpoint.

        Raises:
            ValueError: a pattern matches no module.
            TypeError: a style is not one of this package's styles for Linear layers, or a layer in the plan is not
                packed or has a tied bias.
            RuntimeError: a process has another version of this package or another checkpoint.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        self._check_names(op, modules)
        for name, module in modules.items():
            style = self.style_of(name) if name else None
            if style is None:
                continue
            if not isinstance(style, LinearStyle):
                raise TypeError(
                    f"{op}: split: layer {name!r}: expected MarlinColwiseParallel or MarlinRowwiseParallel, got "
                    f"{type(style).__name__}; SplitPlan.apply takes other styles after loading"
                )
            if name not in layers:
                raise TypeError(
                    f"{op}: split: layer {name!r}: expected a packed Linear layer, got a "
                    f"{type(module).__name__} that is not packed or has a tied bias"
                )
        check_checkpoint(op, reader, self.mesh.get_group())

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
        """Makes this process's part of a layer, like `LinearStyle.load`. Returns None if the layer has no style."""
        style = next((found for name in names if (found := self.style_of(name))), None)
        if not isinstance(style, LinearStyle):
            return None
        group = self.mesh.get_group()
        return style.load(op, names[0], shape, reader, index, group, device=device, dtype=dtype)

    def _check_names(self, op: str, names: Iterable[str]) -> None:
        known = list(names)
        if lost := [pattern for pattern in self.plan if not any(_matches(pattern, name) for name in known)]:
            raise ValueError(f"{op}: plan: expected names of modules, got {listing(lost)}, which the model lacks")


def _matches(pattern: str, name: str) -> bool:
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


@contextmanager
def _restored_on_error(modules: Iterable[nn.Module]) -> Iterator[None]:
    """If the block raises an error, restores the modules without their children."""
    before: list[tuple[Any, type, dict[str, Any]]] = []
    for module in modules:
        held = {key: value.copy() if isinstance(value, dict) else value for key, value in vars(module).items()}
        before.append((module, type(module), held))
    try:
        yield
    except BaseException:
        for module, kind, held in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(held)
        raise
