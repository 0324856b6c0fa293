"""Names of a checkpoint's layers and tensors, and the names that they have in a model."""

import sys
from collections.abc import Callable, Iterable, Mapping

from torch import nn

from torch_marlin_metal.checkpoints.model_names import ModelNames
from torch_marlin_metal.layers.float_experts import is_stack

Rename = Callable[[str], str | None] | Mapping[str, str]


def namer(model: nn.Module, rename: Rename | None) -> Callable[[str], str | None]:
    """Returns the function that maps names in a checkpoint to names in a model.

    Args:
        model: the model. For one of transformers and without `rename`, its `from_pretrained` decides.
        rename: a function, which returns None to leave a tensor out; or a dictionary of prefixes and replacements, of
            which the longest matching prefix is used.
    """
    library = sys.modules.get("transformers")
    if rename is None and library is not None and isinstance(model, library.PreTrainedModel):
        return ModelNames(model, fits=is_stack).find
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    prefixes = sorted(rename.items(), key=lambda item: -len(item[0]))

    def by_prefix(name: str) -> str | None:
        for old, new in prefixes:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    return by_prefix


def shared_prefix(layers: Iterable[str], others: Iterable[str], has_place: Callable[[str], bool]) -> str:
    """Returns the beginning of all names of a checkpoint that hides its layers from the model, or "".

    torch.compile ("_orig_mod."), DistributedDataParallel ("module.") and programs that hold the model in an attribute
    add such a beginning when they save.

    Args:
        layers: the names of the layers.
        others: the names of all other tensors.
        has_place: tells whether the model has a place for the layer with a name.
    """
    named = list(layers)
    if not named or any(map(has_place, named)):
        return ""
    every = [*named, *others]
    parts = named[0].split(".")
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count]) + "."
        if not all(name.startswith(prefix) for name in every):
            return ""
        if any(has_place(name.removeprefix(prefix)) for name in named):
            return prefix
    return ""
