"""Compares packed weights, and joins them along their columns."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torch_marlin_metal.packed_weight import COLUMN_TENSORS, PackedWeight


def with_same_scales(parts: Sequence[PackedWeight]) -> Sequence[PackedWeight]:
    """Returns the weights unchanged if all have scales of blocks, and otherwise with a scale for each column."""
    return parts if all(part.has_block_scales for part in parts) else [part.expanded_scales() for part in parts]


def same_kind(one: PackedWeight, other: PackedWeight) -> bool:
    """Returns True if two weights differ only in N and in the values of codes and scales."""
    kinds = [
        (weight.weight_format, weight.K, weight.group_size, {name: held.dtype for name, held in tensors.items()})
        for weight in (one, other)
        if (tensors := replace(weight, bias=None).tensors())
    ]
    tables = ((getattr(one, name), getattr(other, name)) for name in ("lut", "perm"))
    return kinds[0] == kinds[1] and all(mine is None or torch.equal(mine, theirs) for mine, theirs in tables)


def same_values(one: PackedWeight, other: PackedWeight) -> bool:
    """Returns True if two weights are equal, apart from their biases. Weights on the meta device count as equal."""
    if one.b_packed is other.b_packed or one.b_packed.is_meta or other.b_packed.is_meta:
        return True
    if (one.weight_format, one.group_size) != (other.weight_format, other.group_size):
        return False
    mine, theirs = (replace(weight, bias=None).tensors() for weight in (one, other))
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name].to(one.b_packed.device)) for name in mine
    )


def joined(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Concatenates weights along N, without their biases.

    Raises:
        ValueError: the weights have different formats, sizes K or dtypes.
    """
    parts = with_same_scales(parts)
    first = parts[0]
    if other := next((part for part in parts if not same_kind(first, part)), None):
        kinds = " and ".join(f"{part.source} {part!r}" for part in (first, other))
        raise ValueError(f"expected weights of one kind, got {kinds}")
    columns: dict[str, Any] = {"bias": None}
    for name in COLUMN_TENSORS:
        held = [getattr(part, name) for part in parts]
        if name == "bias" or held[0] is None:
            continue
        if name == "global_scale":
            held = [scale.expand(part.N) for scale, part in zip(held, parts, strict=True)]
        columns[name] = torch.cat([tensor.detach() for tensor in held], dim=-1)
    return replace(first, **columns)
