"""Maps the names in a checkpoint to the names in a model."""

import sys
from collections.abc import Callable, Iterable, Mapping

from torch import nn

from torch_marlin_metal.checkpoints.model_names import ModelNames
from torch_marlin_metal.layers.float_experts import is_stack

Rename = Callable[[str], str | None] | Mapping[str, str]


def namer(model: nn.Module, rename: Rename | None) -> Callable[[str], str | None]:
    """Returns a function from names in a checkpoint to names in a model.

    Args:
        model: the model. For a transformers model without `rename`, the rules of `from_pretrained` apply.
        rename: a function that returns None for tensors that are not loaded, or a dictionary from prefixes to
            replacements. The longest matching prefix is replaced.
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


def shared_prefix(
    layers: Iterable[str], others: Iterable[str], has_place: Callable[[str], bool], in_part: bool = False
) -> str:
    """Returns the prefix that must be removed from the checkpoint's names to get the model's names, or "".

    torch.compile ("_orig_mod."), DistributedDataParallel ("module.") and programs that store the model in an attribute
    add a prefix to all names when they save. A model for text and images adds a prefix to the names of its text model.

    Args:
        layers: the names of the packed layers.
        others: the names of all other tensors.
        has_place: returns True if the model has a layer with the given name.
        in_part: True if the checkpoint may belong to a larger model that contains this model. Names of the other parts
            then need not have the prefix.
    """
    named = list(layers)
    if any(map(has_place, named)):
        return ""
    found = {prefix for name in named if (prefix := _hiding(name, has_place))}
    every = (*named, *others)
    if whole := [prefix for prefix in found if all(name.startswith(prefix) for name in every)]:
        return min(whole, key=len)
    fitting = [
        prefix for prefix in found if all(has_place(name[len(prefix) :]) for name in named if name.startswith(prefix))
    ]
    return fitting[0] if in_part and len(fitting) == 1 else ""


def _hiding(name: str, has_place: Callable[[str], bool]) -> str:
    """Returns the shortest prefix of a name whose removal leaves the name of a layer in the model, or ""."""
    parts = name.split(".")
    beginnings = (".".join(parts[:count]) + "." for count in range(1, len(parts)))
    return next((one for one in beginnings if has_place(name.removeprefix(one))), "")
