"""The parts of a packed weight have the same bits as in the complete weight, and can be joined again."""

from dataclasses import fields, replace

import pytest
import torch

from tests.support import reference
from tests.support.linear_layers import activations, packed_of
from torch_marlin_metal import gemm
from torch_marlin_metal.formats import WEIGHT_FORMATS
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.parallel import join_columns, join_rows, reorder_columns, split_columns, split_rows

K, N = 192, 96


def weight_of(weight_format: str = "uint4", *, group_size: int | None = None, perm: bool = False, **kw) -> PackedWeight:
    if group_size is None:
        return packed_of(weight_format, K=K, N=N, perm=perm, **kw)[1]
    made = reference.make_weight(weight_format, K, N, group_size)
    return PackedWeight(b_packed=made.b_packed, scales=made.scales, **made.arguments)


def assert_same(one: PackedWeight, other: PackedWeight) -> None:
    for field in fields(PackedWeight):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b), field.name
        elif field.name == "bias":
            assert (a is None) == (b is None)
        else:
            assert a == b, field.name


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_columns_have_the_bits_of_the_whole_and_join_to_it(weight_format, count):
    whole = weight_of(weight_format, perm=True)
    parts = split_columns(whole, count)
    assert [p.validate().N for p in parts] == [N // count] * count
    a = activations(5, K)
    assert torch.equal(torch.cat([gemm(a, part) for part in parts], -1), gemm(a, whole))
    assert_same(join_columns(parts), whole)


def test_a_global_scale_per_column_is_cut():
    whole = weight_of("nvfp4", global_scale_shape=(-1,))
    parts = split_columns(whole, 3)
    assert all(p.global_scale.shape == (N // 3,) for p in parts)
    assert_same(join_columns(parts), whole)


def test_fused_projections_are_cut_one_by_one():
    whole = weight_of()
    q, k, v = whole.dequantize().split((48, 24, 24), -1)
    first, second = split_columns(whole, 2, parts=(48, 24, 24))
    assert torch.equal(first.dequantize(), torch.cat([q[:, :24], k[:, :12], v[:, :12]], -1))
    assert torch.equal(second.dequantize(), torch.cat([q[:, 24:], k[:, 12:], v[:, 12:]], -1))
    assert_same(join_columns([first, second], parts=(48, 24, 24)), whole)


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_rows_are_the_rows_of_the_whole_and_join_to_it(weight_format):
    whole = weight_of(weight_format)
    parts = split_rows(whole, 3)
    assert torch.equal(torch.cat([p.validate().dequantize() for p in parts]), whole.dequantize())
    assert [p.bias is None for p in parts] == [False, True, True]
    assert_same(join_rows(parts), whole)


def test_parts_of_one_group_share_its_scales():
    whole = weight_of("uint4b8", group_size=K)
    parts = split_rows(whole, 4)
    assert [p.validate().group_size for p in parts] == [K // 4] * 4
    assert torch.equal(torch.cat([p.dequantize() for p in parts]), whole.dequantize())
    assert_same(join_rows(parts), whole)


@pytest.mark.parametrize("weight_format", ["uint5_bias", "uint6b32"])
def test_borders_inside_a_word_of_the_second_plane(weight_format):
    """Parts have 48 or 24 rows; a word of `b_high` holds 32 or 16."""
    for group_size, count in ((16, 4), (K, 8)):
        whole = weight_of(weight_format, group_size=group_size)
        parts = split_rows(whole, count)
        assert torch.equal(torch.cat([p.validate().dequantize() for p in parts]), whole.dequantize())
        assert_same(join_rows(parts), whole)
        assert_same(split_rows(whole, count, only=3)[0], parts[3])


def test_groups_whose_scales_happen_to_be_equal_are_not_one_group():
    whole = weight_of("uint4", group_size=64)
    whole.scales[:] = whole.scales[0]
    assert_same(join_rows(split_rows(whole, 3)), whole)
    whole = packed_of("mxfp4", K=96, N=8)[1]
    whole.scales[:] = whole.scales[0]
    assert_same(join_rows(split_rows(whole, 3)).validate(), whole)


def test_act_order_inside_the_parts_stays():
    whole = weight_of(perm=True)
    order = torch.cat([torch.randperm(64, generator=torch.Generator().manual_seed(i)) + 64 * i for i in range(3)])
    whole.perm = order.int()
    parts = split_rows(whole, 3)
    assert torch.equal(torch.cat([p.validate().dequantize() for p in parts]), whole.dequantize())
    assert_same(join_rows(parts), whole)


def test_act_order_between_the_parts_needs_gathered_features():
    whole = weight_of(perm=True)
    with pytest.raises(ValueError, match=r"split_rows: perm: .*gathered=True"):
        split_rows(whole, 3)
    parts = split_rows(whole, 3, gathered=True)
    rows = whole.dequantize()[whole.perm.long()]
    assert torch.equal(torch.cat([p.validate().dequantize() for p in parts]), rows)
    assert_same(join_rows(parts, perm=whole.perm), whole)


def test_the_layer_before_can_write_features_in_packed_order():
    down = weight_of(perm=True)
    up = packed_of("uint4b8", K=64, N=K)[1]
    ordered = reorder_columns(up, down.perm)
    hidden = gemm(activations(3, 64), ordered)
    assert torch.equal(hidden, gemm(activations(3, 64), up)[:, down.perm.long()])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: split_columns(w, 5), r"split_columns: count: expected a divisor of 96 columns, got 5"),
        (lambda w: split_columns(w, 0), r"split_columns: count: .* got 0"),
        (lambda w: split_columns(w, 2, parts=(48, 47)), r"split_columns: parts: .*sum to N = 96, got \[48, 47\]"),
        (lambda w: split_columns(w, 2, parts=(93, 3)), r"split_columns: count: expected a divisor of 93 and 3 columns"),
        (lambda w: split_rows(w, 2), r"split_rows: count: .*K = 192.*multiple of 64 rows.*group_size=64.*got 2"),
        (lambda w: split_rows(w, 0), r"split_rows: count: .* got 0"),
        (lambda w: reorder_columns(w, torch.tensor([0, 96])), r"reorder_columns: order: .*0\.\.95.*values 0 to 96"),
        (lambda w: join_columns([]), r"join_columns: weights: expected at least one"),
        (lambda w: join_columns([w, weight_of("uint4b8")]), r"join_columns: weight_format: .*another in weight 1"),
        (lambda w: join_columns([w, weight_of(bias=False)]), r"join_columns: bias: .*all weights or in none"),
        (
            lambda w: join_columns([reorder_columns(w, torch.arange(*n)) for n in ((24,), (24, N))], parts=(48, 48)),
            r"join_columns: weights: expected 48 columns in each for parts=\[48, 48\], got \[24, 72\]",
        ),
        (lambda w: join_rows([w, w]), r"join_rows: bias: expected none but in the first weight, got one in weight 1"),
        (
            lambda w: join_rows([w, replace(weight_of(bias=False), perm=torch.arange(K))]),
            r"join_rows: perm: expected a tensor in all weights or in none, got some",
        ),
        (
            lambda w: join_rows([replace(w, perm=torch.arange(K))], perm=torch.arange(K)),
            r"join_rows: perm: .* got one for the whole too",
        ),
        (lambda w: join_rows([w, weight_of("uint4b8")]), r"join_rows: weight_format: .*another in weight 1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(weight_of())
