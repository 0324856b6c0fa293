"""Finds the names of layers in the original checkpoint, because transformers may rename layers for the model."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    rename_source_key,
)

from torch_marlin_metal.layers.packed_layer import GUARD


def tied_modules(keys: Mapping[str, str]) -> dict[str, str]:
    """Returns transformers' tied modules: name of a module -> name of the module that owns the weight."""
    return {
        name.removesuffix(".weight"): source.removesuffix(".weight")
        for name, source in keys.items()
        if name.endswith(".weight") and source.endswith(".weight")
    }


def loaded_names(names: Iterable[str], conversions: Iterable[Any]) -> set[str]:
    """Returns the names under which transformers searches a model for a checkpoint's tensors.

    If a conversion splits a tensor, the tensor has several names. transformers adds or removes a base model's prefix
    only for tensors that the model has. A model has no tensors for packed layers, so the prefix of these names does not
    change.
    """
    conversions = list(conversions)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    found = set()
    for name in names:
        key, pattern = rename_source_key(name, renamings, converters)
        targets = next((entry.target_patterns for entry in converters if pattern in entry.source_patterns), [""])
        found |= {key.replace(targets[0], target) if target else key for target in targets}
    return found


def siblings(name: str, conversions: Iterable[Any]) -> Iterator[str]:
    """Yields the model tensors made from the same checkpoint tensor as `name`, for example k and v of a stored qkv."""
    for entry in conversions:
        if isinstance(entry, WeightConverter) and entry.target_patterns[0] in name:
            for pattern in entry.target_patterns[1:]:
                yield name.replace(entry.target_patterns[0], pattern)


def rearranges(model: Any, layers: Iterable[str]) -> bool:
    """Returns True if transformers would join, split or permute weights of these layers when it saves the model.

    transformers does this if checkpoint and model have different tensors, for example one tensor for q, k and v, or a
    bias under another name. Packed words cannot be rearranged in this way, so such a model is saved under the model's
    names.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    back = [entry.reverse_transform() for entry in conversions[::-1] if isinstance(entry, WeightConverter)]
    renamings = [entry.reverse_transform() for entry in conversions[::-1] if isinstance(entry, WeightRenaming)]
    for name in layers if conversions else ():
        if any(apply_converters(f"{name}.{key}", back)[1] is not None for key in ("b_packed", GUARD)):
            return True
        stored = {apply_renamings(f"{name}.{key}", renamings).removesuffix(key) for key in ("b_packed", "bias", GUARD)}
        if len(stored) > 1:
            return True
    return False
