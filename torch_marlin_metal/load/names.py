"""Maps the names of a checkpoint to the names of a model."""

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
        rename: a function that returns None to leave a tensor out, or a dictionary of prefixes and replacements; the
            longest matching prefix wins.
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
    """Returns the prefix without which the names of a checkpoint are those of the model, or "".

    torch.compile ("_orig_mod."), DistributedDataParallel ("module.") and programs that hold the model in an attribute
    add such a prefix when they save. A model for text and images adds one to the names of its model for text.

    Args:
        layers: the names of the layers.
        others: the names of all other tensors.
        has_place: tells whether the model has a place for the layer with a name.
        in_part: whether the model may be a part of the model in the checkpoint, so that other names begin differently.
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
    """Returns the shortest prefix of a name whose removal leaves the name of a layer, or ""."""
    parts = name.split(".")
    beginnings = (".".join(parts[:count]) + "." for count in range(1, len(parts)))
    return next((one for one in beginnings if has_place(name.removeprefix(one))), "")
