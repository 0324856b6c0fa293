"""Finds the smallest weight format that represents the weights of several experts with different formats exactly."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_marlin_metal.formats import WEIGHT_FORMATS, weight_format
from torch_marlin_metal.layers.experts import ExpertWeights
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.repack import pack_planes, unpack_planes

# Roles of zeros, from special to general.
ROLES = ("none", "zero_point", "bias")
# The integer formats: (code bits, role of the zeros) -> format.
FORMATS = {
    (fmt.code_bits, fmt.zeros_role): fmt
    for fmt in WEIGHT_FORMATS.values()
    if fmt.code_kind == "integer" and fmt.scale_coding == "floating"
}


@dataclass(frozen=True)
class Common:
    """What weights in common tensors must share: code bits, role of the zeros, group size, and dtype of the scales.

    Floating-point zeros have the dtype of the scales. For two-level scales, `dtype` is that of the scale codes.
    """

    bits: int
    role: str
    group_size: int
    dtype: torch.dtype


def common_of(weight: PackedWeight) -> Common | None:
    """Returns the parameters of a weight's format, or None if no other format can represent the weight."""
    fmt, zeros = weight_format(weight.weight_format), weight.zeros
    if FORMATS.get((fmt.code_bits, fmt.zeros_role)) is not fmt:
        return None
    if fmt.zeros_role == "zero_point" and zeros is not None and zeros.dtype != torch.uint8:
        return None
    return Common(fmt.code_bits, fmt.zeros_role, weight.group_size, weight.scales.dtype)


def wider(one: Common, other: Common, K: int) -> Common | None:
    """Returns the smallest format that represents weights of both formats, or None if there is none.

    The weights remain exact, except where a bias replaces a zero point. There, weights with fp32 scales, and those with
    8-bit codes and two-level scales, change by one fp32 rounding.
    """
    if one == other:
        return one
    small, large = sorted((one.group_size, other.group_size))
    if large % small and large != K:
        return None
    less, more = sorted((one.role, other.role), key=ROLES.index)
    # fp16 cannot represent the product of a zero point and a scale, nor a two-level scale. fp32 represents both fp16
    # and bf16 values.
    same = one.dtype == other.dtype and one.dtype.is_floating_point and not (more == "bias" and less != "bias")
    return Common(max(one.bits, other.bits), more, small, one.dtype if same else torch.float32)


def widened(weight: PackedWeight, to: Common) -> PackedWeight:
    """Converts a weight to a wider format without changing its values."""
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
    """The format so far cannot represent the next weight, but a wider format can represent all."""


def stack_exactly(
    make: Callable[[], Iterable[Sequence[PackedWeight]]], experts: int, dtype: torch.dtype | None
) -> ExpertWeights:
    """Makes a stack in the smallest common format, like `ExpertWeights.from_packed` for equal formats.

    Experts may differ in code width. The parts of one expert must have the same width.

    Args:
        make: returns an iterator over the parts of each expert. It is called again if a format is too narrow.
        experts: the number of experts.
        dtype: dtype of the biases.

    Raises:
        StackError: no format represents all weights exactly.
    """
    target: Common | None = None

    def ready(parts: Sequence[PackedWeight]) -> Sequence[PackedWeight]:
        nonlocal target
        if len({weight_format(part.weight_format).code_bits for part in parts}) > 1:
            return parts  # the caller makes two stacks, which take less memory than one stack of the larger width
        for found in filter(None, map(common_of, parts)):
            new = found if target is None else wider(target, found, parts[0].K)
            if new is not None and new != target:
                first, target = target is None, new
                if not first:
                    raise _Wider
        return [widened(part, target) if target and _fits(part, target) else part for part in parts]

    while True:
        try:  # `map` frees an expert before it reads the next one
            return ExpertWeights.from_packed(map(ready, make()), experts=experts, dtype=dtype)
        except _Wider:
            continue


def _fits(weight: PackedWeight, target: Common) -> bool:
    found = common_of(weight)
    return found is not None and wider(found, target, weight.K) == target
