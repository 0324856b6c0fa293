"""Splits packed weights along N or K into parts, and joins the parts bit for bit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.formats import weight_format
from torch_marlin_metal.joined_weights import with_same_scales
from torch_marlin_metal.packed_weight import COLUMN_TENSORS, SUPER_BLOCK, PackedWeight
from torch_marlin_metal.repack import pack_planes, unpack_planes

_BY_GROUP = ("scales", "zeros")  # fields whose first dimension is the number of groups
_BY_BLOCK = ("super_scales", "super_zeros")  # fields whose first dimension is the number of blocks of SUPER_BLOCK k


def split_columns(
    weight: PackedWeight, count: int, *, parts: Sequence[int] | None = None, only: int | None = None
) -> list[PackedWeight]:
    """Splits a weight `[K, N]` into `count` weights `[K, N/count]`, for layers that share their input.

    Bias, scales, zero points and a global scale per column are split with the columns. The other tensors are shared.

    Args:
        weight: the complete weight.
        count: the number of resulting weights, 1 or more.
        parts: the number of columns of each projection, for a weight of several adjacent projections such as q, k and
            v. Each result then has its share of every projection. The default is one projection of N columns.
        only: the index of the only weight to make. The result is then a list with this weight.

    Raises:
        ValueError: `parts` do not sum to N, or one of them is not divisible by `count`.
    """
    sizes = [weight.N] if parts is None else list(parts)
    if sum(sizes) != weight.N or min(sizes, default=0) < 1:
        raise ValueError(f"split_columns: parts: expected positive sizes that sum to N = {weight.N}, got {sizes}")
    if count < 1 or any(size % count for size in sizes):
        raise ValueError(
            f"split_columns: count: expected a divisor of {' and '.join(map(str, sizes))} columns, got {count}"
        )
    projections = torch.split(torch.arange(weight.N, device="cpu"), sizes)
    own = (torch.cat([columns.chunk(count)[rank] for columns in projections]) for rank in _chosen(count, only))
    return [reorder_columns(weight, columns) for columns in own]


def reorder_columns(weight: PackedWeight, order: Tensor) -> PackedWeight:
    """Returns a weight whose column n is column `order[n]` of the given weight.

    Use this function for the layer before a layer with an act-order `perm`. If `down` reads the outputs of `up`,
    `reorder_columns(up, down.perm)` puts these outputs in the order of the packed rows of `down`.

    Args:
        weight: the weight `[K, N]`.
        order: column numbers of `weight`, in any integer dtype.

    Raises:
        ValueError: a number is not in 0..N-1.
    """
    index = order.long().to(weight.b_packed.device)
    if index.dim() != 1 or index.numel() == 0 or int(index.min()) < 0 or int(index.max()) >= weight.N:
        raise ValueError(
            f"reorder_columns: order: expected column numbers 0..{weight.N - 1} in one dimension, "
            f"got shape {list(order.shape)}"
            + (f" with values {int(index.min())} to {int(index.max())}" if index.numel() else "")
        )
    return weight.columns(index)


def split_rows(
    weight: PackedWeight, count: int, *, gathered: bool = False, only: int | None = None
) -> list[PackedWeight]:
    """Splits a weight `[K, N]` into `count` weights `[K/count, N]`, whose products sum to the complete product.

    Part r multiplies the features r * K/count to (r + 1) * K/count - 1 of the activations. Only the first part has the
    bias, so the sum includes the bias once.

    If a border between parts is inside a block of 256 rows with two-level scales, the parts have one-level fp32 scales.

    Args:
        weight: the complete weight.
        count: the number of resulting weights, 1 or more. Each border must be a border of a group. If one group
            contains all of K, every border is allowed, and the parts share the scales.
        gathered: True for a weight with an act-order `perm` that moves features between parts. The parts then have no
            `perm`, and part r multiplies the features `weight.perm[r * K/count : (r + 1) * K/count]`. The preceding
            layer must output its features in this order; `reorder_columns` changes that layer.
        only: the index of the only weight to make. The result is then a list with this weight.

    Raises:
        ValueError: K cannot be split into `count` parts at borders of groups, or `perm` moves features between parts
            and `gathered` is False.
    """
    K, group_size = weight.K, weight.group_size
    rows = K // max(count, 1)
    one_group = group_size >= K and weight_format(weight.weight_format).fixed_group_size is None
    step = 8 if one_group else group_size
    if count < 1 or K % count or (count > 1 and rows % step):
        raise ValueError(
            f"split_rows: count: expected a divisor of K = {K} that gives a multiple of {step} rows to each part "
            f"(group_size={group_size}), got {count}"
        )
    perms = _perms(weight, rows, gathered)
    if count > 1 and rows % SUPER_BLOCK:
        weight = weight.one_level()
    if one_group:  # the parts' groups are too small for scales of blocks
        weight = weight.expanded_scales()
    result = []
    for part in _chosen(count, only):
        first = part * rows
        groups = slice(0, 1) if one_group else slice(first // group_size, -(-(first + rows) // group_size))
        cut: dict[str, Any] = {n: t[groups].clone() for n, t in weight.tensors().items() if n in _BY_GROUP}
        blocks = slice(first // SUPER_BLOCK, -(-(first + rows) // SUPER_BLOCK))
        cut |= {n: t[blocks].clone() for n, t in weight.tensors().items() if n in _BY_BLOCK}
        cut |= _planes(weight, first, rows)
        result.append(
            replace(
                weight,
                **cut,
                group_size=rows if one_group else group_size,
                perm=perms[part],
                bias=weight.bias if part == 0 else None,
            )
        )
    return result


def _planes(weight: PackedWeight, first: int, rows: int) -> dict[str, Tensor]:
    """Copies the planes of some rows. A word of `b_high` may cross a border between parts."""
    fmt = weight_format(weight.weight_format)
    low = weight.b_packed[first // fmt.codes_per_word : (first + rows) // fmt.codes_per_word].clone()
    if weight.b_high is None:
        return {"b_packed": low}
    begin, step = first // fmt.k_per_high_word, fmt.k_per_high_word
    high = weight.b_high[begin : -(-(first + rows) // step)].clone()
    if first % step or (rows % step and first + rows < weight.K):
        around = weight.b_packed[begin * step // 8 : (begin + len(high)) * step // 8]
        codes = unpack_planes(around, high, fmt.code_bits)[first - begin * step :][:rows]
        return _packed_planes(codes, fmt.code_bits)
    return {"b_packed": low, "b_high": high}


def _packed_planes(codes: Tensor, code_bits: int) -> dict[str, Tensor]:
    low, high = pack_planes(codes, code_bits)
    return {"b_packed": low} if high is None else {"b_packed": low, "b_high": high}


def _joined_planes(weights: Sequence[PackedWeight]) -> dict[str, Tensor]:
    fmt = weight_format(weights[0].weight_format)
    high = [w.b_high for w in weights if w.b_high is not None]
    if high and len(high) > 1 and weights[0].K % fmt.k_per_high_word:
        codes = [unpack_planes(w.b_packed, w.b_high, fmt.code_bits) for w in weights]
        return _packed_planes(torch.cat(codes), fmt.code_bits)
    low = {"b_packed": torch.cat([w.b_packed for w in weights])}
    return low | {"b_high": torch.cat(high)} if high else low


def _chosen(count: int, only: int | None) -> Sequence[int]:
    return range(count) if only is None else [only]


def _perms(weight: PackedWeight, rows: int, gathered: bool) -> list[Tensor | None]:
    count = weight.K // rows
    if weight.perm is None or gathered:
        return [None] * count
    local = weight.perm.view(count, rows) - torch.arange(count, device=weight.perm.device)[:, None] * rows
    if int(local.min()) < 0 or int(local.max()) >= rows:
        raise ValueError(
            "split_rows: perm: expected an order that keeps each feature in its part, got one that moves features "
            "between parts; pass gathered=True and give part r the features perm[r * rows : (r + 1) * rows], for "
            "example by reorder_columns(previous, weight.perm) for the layer before"
        )
    return [part.to(torch.int32).contiguous() for part in local]


def join_columns(weights: Sequence[PackedWeight], *, parts: Sequence[int] | None = None) -> PackedWeight:
    """Joins the results of `split_columns` to the complete weight, bit for bit.

    Args:
        weights: the weights, in order.
        parts: the argument `parts` of `split_columns`.

    Raises:
        ValueError: the weights differ in a field that they must share, or `parts` do not match the weights.
    """
    weights = with_same_scales(weights)
    first = _agreeing("join_columns", weights, ("K", "weight_format", "group_size", "lut", "perm"))
    held = {name: [w.tensors().get(name) for w in weights] for name in COLUMN_TENSORS}
    scales = held["global_scale"]
    one = first.global_scale
    if one is not None and one.numel() == 1 and all(_same(one, s) for s in scales):
        del held["global_scale"]
    elif one is not None:
        held["global_scale"] = [s if s is None else s.expand(w.N) for s, w in zip(scales, weights, strict=True)]
    joined: dict[str, Any] = {}
    for name, tensors in held.items():
        if any((t is None) != (tensors[0] is None) for t in tensors):
            raise ValueError(f"join_columns: {name}: expected a tensor in all weights or in none, got some")
        present = [t for t in tensors if t is not None]
        joined[name] = torch.cat(present, -1) if present else None
    whole = replace(first, **joined)
    if parts is None:
        return whole
    count = len(weights)
    if sum(parts) != whole.N or min(parts) < 1 or any(size % count for size in parts):
        raise ValueError(
            f"join_columns: parts: expected multiples of {count} that sum to N = {whole.N}, got {list(parts)}"
        )
    shares = [size // count for size in parts]
    share = sum(shares)
    if any(share != weight.N for weight in weights):
        raise ValueError(
            f"join_columns: weights: expected {share} columns in each for parts={list(parts)}, "
            f"got {[weight.N for weight in weights]}"
        )
    order = [
        torch.arange(r * share + sum(shares[:i]), r * share + sum(shares[: i + 1]), device="cpu")
        for i in range(len(shares))
        for r in range(count)
    ]
    return reorder_columns(whole, torch.cat(order))


def join_rows(weights: Sequence[PackedWeight], *, perm: Tensor | None = None) -> PackedWeight:
    """Joins the results of `split_rows` to the complete weight, bit for bit.

    Args:
        weights: the weights, in order.
        perm: the `perm` of the complete weight, if it was split with `gathered=True`.

    Raises:
        ValueError: the weights differ in sizes, format, group size, global scale or table; a border of a weight is
            inside a group; a weight other than the first has a bias; or only some weights have a `perm`.
    """
    weights = with_same_scales(weights)
    first = _agreeing("join_rows", weights, ("K", "N", "weight_format", "group_size", "global_scale", "lut"))
    count, rows = len(weights), first.K
    one_group = (
        first.group_size == rows
        and weight_format(first.weight_format).fixed_group_size is None
        and (first.super_scales is None or rows * count <= SUPER_BLOCK)
        and all(_same(getattr(first, name), getattr(w, name)) for w in weights for name in (*_BY_GROUP, *_BY_BLOCK))
    )
    for i, weight in enumerate(weights[1:], 1):
        if weight.bias is not None:
            raise ValueError(f"join_rows: bias: expected none but in the first weight, got one in weight {i}")
    moved = [w.perm + i * rows for i, w in enumerate(weights) if w.perm is not None]
    if moved and (len(moved) != count or perm is not None):
        given = "one for the whole too" if len(moved) == count else "some"
        raise ValueError(f"join_rows: perm: expected a tensor in all weights or in none, got {given}")
    if moved:
        perm = torch.cat(moved)
    if not one_group and rows % first.group_size:
        raise ValueError(f"join_rows: weights: expected whole groups of {first.group_size} rows, got {rows} rows")
    if rows % SUPER_BLOCK and count > 1:
        weights = [weight.one_level() for weight in weights]
        first = weights[0]
    if one_group:  # the whole's group is too large for scales of blocks
        first = first.expanded_scales()
    joined: dict[str, Any] = {**_joined_planes(weights)}
    for name in (*_BY_GROUP, *_BY_BLOCK):
        held = [t for w in weights if (t := w.tensors().get(name)) is not None]
        if held and not one_group:
            joined[name] = torch.cat(held)
    return replace(first, **joined, group_size=rows * count if one_group else first.group_size, perm=perm)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other) if not isinstance(one, Tensor) and not isinstance(other, Tensor) else False


def _agreeing(function: str, weights: Sequence[PackedWeight], names: Sequence[str]) -> PackedWeight:
    """Checks that all weights have equal values in the given fields. Returns the first weight."""
    if not weights:
        raise ValueError(f"{function}: weights: expected at least one, got none")
    first = weights[0]
    for name in names:
        for i, weight in enumerate(weights):
            if not _same(getattr(first, name), getattr(weight, name)):
                raise ValueError(f"{function}: {name}: expected the same in all weights, got another in weight {i}")
    return first
