"""Finds modules in a model by name, and replaces all of them or none."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from tqdm.auto import tqdm

from torch_marlin_metal.models.report import LayerReport, Report, module_bytes
from torch_marlin_metal.patterns import Filter, check_patterns, selects

# The attributes that store a module's hooks. The new module shares these dictionaries, so that existing handles can
# still remove hooks. The last attribute is a flag, without which no backward hook is called.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


@dataclass
class Target:
    """A module with all its names in the model."""

    names: list[str]
    module: nn.Module

    @property
    def name(self) -> str:
        return self.names[0]


def find_targets(
    op: str,
    model: nn.Module,
    wanted: Callable[[nn.Module], bool],
    include: Filter | None,
    exclude: Filter | None,
) -> list[Target]:
    """Returns the modules for which `wanted` is True and that the filters select.

    A module that the model contains several times is one target with all its names.

    Raises:
        ValueError: `wanted` is True for the model itself, or a pattern matches no name.
    """
    if wanted(model):
        raise ValueError(
            f"{op}: model: expected a model with layers inside, got the layer {type(model).__name__} itself"
        )
    targets: dict[int, Target] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if wanted(module):
            targets.setdefault(id(module), Target([], module)).names.append(name)
    found = list(targets.values())
    check_patterns(op, [name for target in found for name in target.names], include=include, exclude=exclude)
    return [
        target for target in found if (include is None or _selected(include, target)) and not _selected(exclude, target)
    ]


def swap(
    model: nn.Module,
    targets: list[Target],
    convert: Callable[[Target], tuple[nn.Module, LayerReport] | LayerReport],
    title: str,
    *,
    atomic: bool,
    progress: bool,
) -> Report:
    """Replaces each target by the module that `convert` returns. Keeps the target if `convert` returns only a report.

    Args:
        model: changed in place.
        targets: the modules to replace. The function empties the list, so that it does not keep old modules in memory.
        convert: makes the new module without changing the old module.
        title: title of the report and the progress bar.
        atomic: True to replace all modules after the last conversion, so that an exception leaves the model unchanged.
            False to replace each module immediately and free the old module before the next conversion.
        progress: True to show a progress bar.
    """
    report = Report(title, bytes_before=module_bytes(model))
    staged: list[tuple[Target, nn.Module]] = []
    total = len(targets)
    targets.reverse()
    with tqdm(total=total, desc=title, unit="layer", disable=not progress) as bar:
        while targets:
            target = targets.pop()
            with torch.inference_mode(False):  # tensors made in inference mode cannot be used in training later
                result = convert(target)
            if isinstance(result, LayerReport):
                report.layers.append(result)
            else:
                new, entry = result
                inherit(new, target.module)
                report.layers.append(entry)
                if atomic:
                    staged.append((target, new))
                else:
                    _install(model, target.names, new)
            bar.update()
    _install_all(model, staged)
    report.bytes_after = module_bytes(model)
    return report


def _install_all(model: nn.Module, staged: list[tuple[Target, nn.Module]]) -> None:
    done: list[Target] = []
    try:
        for target, new in staged:
            done.append(target)
            _install(model, target.names, new)
    except BaseException:
        for target in done:
            _install(model, target.names, target.module)
        raise


def _install(model: nn.Module, names: list[str], module: nn.Module) -> None:
    for name in names:
        model.set_submodule(name, module)


def inherit(new: nn.Module, old: nn.Module) -> None:
    """Copies the training mode and the hooks, including those of accelerate, from a module to its replacement."""
    if new is old:
        return
    new.train(old.training)
    for name in HOOKS:
        setattr(new, name, getattr(old, name))
    hook = getattr(old, "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, hook)


def _selected(choice: Filter | None, target: Target) -> bool:
    return any(selects(choice, name, target.module) for name in target.names)
