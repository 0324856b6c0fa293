"""The smallest weight format that holds the weights of several experts without loss, if their formats differ."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_marlin_metal.formats import WEIGHT_FORMATS, weight_format
from torch_marlin_metal.layers.experts import ExpertWeights
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.repack import pack_planes, unpack_planes

# Roles of zeros, each more general than the one before.
ROLES = ("none", "zero_point", "bias")
# The formats of integer codes, by the bits of a code and the role of their zeros.
FORMATS = {
    (fmt.code_bits, fmt.zeros_role): fmt
    for fmt in WEIGHT_FORMATS.values()
    if fmt.code_kind == "integer" and fmt.scale_coding == "floating"
}


@dataclass(frozen=True)
class Common:
    """Bits of a code, the role of the zeros, the group size, and the dtype of scales and of zeros that are floats.

    Scales of two levels have the dtype of their codes.
    """

    bits: int
    role: str
    group_size: int
    dtype: torch.dtype


def common_of(weight: PackedWeight) -> Common | None:
    """Returns the format of a weight, or None if no other format holds it."""
    fmt, zeros = weight_format(weight.weight_format), weight.zeros
    if FORMATS.get((fmt.code_bits, fmt.zeros_role)) is not fmt:
        return None
    if fmt.zeros_role == "zero_point" and zeros is not None and zeros.dtype != torch.uint8:
        return None
    return Common(fmt.code_bits, fmt.zeros_role, weight.group_size, weight.scales.dtype)


def wider(one: Common, other: Common, K: int) -> Common | None:
    """Returns the smallest format that holds weights of both formats, or None if there is none.

    The weights stay exact, with one exception. If a bias replaces a zero point, weights change by one fp32 rounding,
    with fp32 scales or with codes of 8 bits and scales of two levels.
    """
    if one == other:
        return one
    small, large = sorted((one.group_size, other.group_size))
    if large % small and large != K:
        return None
    less, more = sorted((one.role, other.role), key=ROLES.index)
    # A product of a zero point and a scale has more bits than fp16 holds, and so has a scale of two levels. The codes
    # of fp16 and bf16 meet in fp32.
    same = one.dtype == other.dtype and one.dtype.is_floating_point and not (more == "bias" and less != "bias")
    return Common(max(one.bits, other.bits), more, small, one.dtype if same else torch.float32)


def widened(weight: PackedWeight, to: Common) -> PackedWeight:
    """Returns the same weight in a wider format."""
    own = common_of(weight)
    if own == to or own is None:
        return weight
    weight = weight.one_level()
    scales, zeros, offset = weight.scales.to(to.dtype), weight.zeros, FORMATS[own.bits, "none"].fixed_offset
    planes: dict[str, Any] = {}
    if to.bits != own.bits:
        codes = unpack_planes(weight.b_packed, weight.b_high, own.bits)
        if to.role == "none":
            codes += FORMATS[to.bits, "none"].fixed_offset - offset
        planes = dict(zip(("b_packed", "b_high"), pack_planes(codes, to.bits), strict=True))
    if to.role == "zero_point" and zeros is None:
        zeros = torch.full_like(scales, offset, dtype=torch.uint8)
    elif to.role == "bias" and own.role != "bias":
        zeros = -scales * (offset if zeros is None else zeros.to(to.dtype))
    elif to.role == "bias" and zeros is not None:
        zeros = zeros.to(to.dtype)
    if to.group_size != weight.group_size:
        times, groups = -(-weight.group_size // to.group_size), -(-weight.K // to.group_size)
        scales = scales.repeat_interleave(times, 0)[:groups].contiguous()
        zeros = None if zeros is None else zeros.repeat_interleave(times, 0)[:groups].contiguous()
    name = FORMATS[to.bits, to.role].name
    return replace(weight, weight_format=name, group_size=to.group_size, scales=scales, zeros=zeros, **planes)


class _Wider(Exception):
    """The weights so far do not hold the next one, but another format holds all."""


def stack_exactly(
    make: Callable[[], Iterable[Sequence[PackedWeight]]], experts: int, dtype: torch.dtype | None
) -> ExpertWeights:
    """Makes a stack of the smallest common format, as `ExpertWeights.from_packed` does for equal formats.

    Experts may differ in width, but the parts of one expert may not.

    Args:
        make: returns the parts of one expert after the other; called again if a format proves too narrow.
        experts: the number of experts.
        dtype: dtype of the biases.

    Raises:
        StackError: no format holds all weights exactly.
    """
    target: Common | None = None

    def ready(parts: Sequence[PackedWeight]) -> Sequence[PackedWeight]:
        nonlocal target
        if len({weight_format(part.weight_format).code_bits for part in parts}) > 1:
            return parts  # gate and up in stacks of their own take less memory than in one of the larger width
        for found in filter(None, map(common_of, parts)):
            new = found if target is None else wider(target, found, parts[0].K)
            if new is not None and new != target:
                first, target = target is None, new
                if not first:
                    raise _Wider
        return [widened(part, target) if target and _fits(part, target) else part for part in parts]

    def converted() -> Iterator[Sequence[PackedWeight]]:
        yield from map(ready, make())  # holds no expert while the next one is read

    while True:
        try:
            return ExpertWeights.from_packed(converted(), experts=experts, dtype=dtype)
        except _Wider:
            continue


def _fits(weight: PackedWeight, target: Common) -> bool:
    found = common_of(weight)
    return found is not None and wider(found, target, weight.K) == target
