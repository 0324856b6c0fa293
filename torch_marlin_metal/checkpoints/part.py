"""Finds the bytes of one process's part of a layer in a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from torch_marlin_metal.checkpoints.files.safetensors import Slice
from torch_marlin_metal.checkpoints.layer_tensors import Layer
from torch_marlin_metal.packed_weight import SUPER_BLOCK


@dataclass(frozen=True)
class Part:
    """Part `rank` of a layer `[K, N]` that is cut into `count` equal parts along its columns (N) or its rows (K)."""

    by: Literal["columns", "rows"]
    count: int
    rank: int


def part_of(layer: Layer, axes: Mapping[str, tuple[str, ...]], part: Part) -> Layer | None:
    """Returns a layer that reads only one part of the given layer.

    Args:
        layer: the complete layer.
        axes: see `DirectoryFormat.axes`.
        part: the part to read.

    Returns:
        The part as a layer, or None if the part cannot be read separately. This is the case if a border of the part is
        inside a word, a group or a block of scales. Weights with act-order or a single group have no parts along K.
    """
    roles = [role for role in layer.roles if role in axes]
    if any(len(axes[role]) != len(layer.shape(role)) for role in roles):
        return None
    sizes = _sizes(layer, axes, roles)
    if sizes is None:
        return None
    K, N, G, per_word = sizes
    if part.by == "columns":
        border, labels = N // part.count, {"N": 1, "N/8": per_word}
        if N % part.count or ("N/8" in {axis for role in roles for axis in axes[role]} and border % per_word):
            return None
        return replace(layer, parts=_slices(layer, axes, roles, labels, border * part.rank, border))
    group_size, border = K // G, K // part.count
    if G == 1 or K % G or K % part.count or border % group_size or border % 8:
        return None
    if border % SUPER_BLOCK and any("S" in axes[role] for role in roles):
        return None
    high = [
        K // size for role in roles for axis, size in zip(axes[role], layer.shape(role), strict=True) if axis == "H"
    ]
    per_high_word = 32 if high and high[0] > 16 else 16
    if high and border % per_high_word:
        return None
    dropped = set()
    for role in roles:
        if axes[role] == ("order",):
            if not torch.equal(layer.read(role).long(), torch.arange(K, device="cpu") // group_size):
                return None
            dropped.add(role)
    if part.rank > 0:
        dropped.add("bias")  # only the first part has the bias, because the parts are summed
    kept = {role: name for role, name in layer.roles.items() if role not in dropped}
    labels = {"K": 1, "K/8": per_word, "G": group_size, "S": SUPER_BLOCK, "H": per_high_word}
    return replace(layer, roles=kept, parts=_slices(layer, axes, list(kept), labels, border * part.rank, border))


def _sizes(layer: Layer, axes: Mapping[str, tuple[str, ...]], roles: list[str]) -> tuple[int, int, int, int] | None:
    """Returns K, N, G and the codes per word, or None if the shapes contradict each other or do not determine them."""
    for per_word in (8, 4):  # codes per word for 4 and 8 bits
        found: dict[str, set[int]] = {"K": set(), "N": set(), "G": set()}
        for role in roles:
            for axis, size in zip(axes[role], layer.shape(role), strict=True):
                if axis not in ("S", "H") and not (role == "global_scale" and size == 1):
                    found["K" if axis == "order" else axis[0]].add(size * (per_word if axis.endswith("/8") else 1))
        if all(len(values) == 1 for values in found.values()):
            (K,), (N,), (G,) = found["K"], found["N"], found["G"]
            if any(
                size != -(-K // SUPER_BLOCK)
                for role in roles
                for axis, size in zip(axes[role], layer.shape(role), strict=True)
                if axis == "S"
            ):
                continue  # of a weight with two-level scales, only the blocks show how many codes a word has
            return (K, N, G, per_word) if min(K, N, G) > 0 else None
    return None


def _slices(
    layer: Layer,
    axes: Mapping[str, tuple[str, ...]],
    roles: list[str],
    labels: Mapping[str, int],
    first: int,
    count: int,
) -> dict[str, Slice]:
    """Returns the slice of each tensor that contains `count` columns or rows from `first` on.

    `labels` maps each axis that is cut to the number of columns or rows per entry along the axis.
    """
    slices = {}
    for role in roles:
        for axis, label in enumerate(axes.get(role, ())):
            if (per_entry := labels.get(label)) and layer.shape(role)[axis] > 1:
                slices[role] = Slice(axis, first // per_entry, (first + count) // per_entry)
    return slices
