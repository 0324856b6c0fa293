"""Layers, files, parts and stacks store scales of two levels without loss."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import torch_marlin_metal as tmm
from tests.support import reference
from torch_marlin_metal import convert
from torch_marlin_metal.checkpoints.formats.gguf_orders import permute_columns
from torch_marlin_metal.checkpoints.formats.native import NativeExporter
from torch_marlin_metal.checkpoints.part import Part
from torch_marlin_metal.layers.common_format import stack_exactly
from torch_marlin_metal.layers.experts import ExpertWeights
from torch_marlin_metal.layers.fuse import fuse_projections
from torch_marlin_metal.packed_weight import PackedWeight, PackedWeightError
from torch_marlin_metal.parallel.split import join_columns, join_rows, split_columns, split_rows


def weight_of(
    weight_format: str = "uint4_bias", K: int = 512, N: int = 24, group: int = 32, seed: int = 0
) -> PackedWeight:
    signed = not weight_format.endswith("_bias")
    options = {"scales_dtype": torch.int8 if signed else torch.uint8, "zeros_dtype": None if signed else torch.uint8}
    made = reference.make_weight(weight_format, K, N, group, super_dtype=torch.float16, seed=seed, **options)
    return PackedWeight(made.b_packed, made.scales, **made.arguments)


def same(one: PackedWeight, other: PackedWeight) -> bool:
    mine, theirs = one.tensors(), other.tensors()
    return mine.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in mine.items()
    )


def stored(path: Path, weight: PackedWeight) -> convert.CheckpointReader:
    """Writes a weight in the package's own format, and opens the directory."""
    exporter = NativeExporter()
    tensors = {f"a.{name}": tensor for name, tensor in exporter.own_tensors(weight, "a").items()}
    (path / "config.json").write_text(json.dumps({"quantization_config": exporter.settings()}))
    save_file(tensors, path / "model.safetensors")
    return convert.open_reader(path)


@pytest.mark.parametrize("weight_format", ["uint4_bias", "lut4", "uint4b8", "uint6_bias"])
def test_a_layer_keeps_them_in_a_state_dict_and_in_other_dtypes(weight_format) -> None:
    weight = weight_of(weight_format)
    layer = tmm.MarlinLinear.from_packed(weight)
    assert layer.dtype == torch.float16
    empty = tmm.MarlinLinear(
        512, 24, bias=False, weight_format=weight_format, group_size=32, scale_dtype=weight.scales.dtype,
        zeros_dtype=None if weight.zeros is None else torch.uint8, super_dtype=torch.float16, device="meta",
    )  # fmt: skip
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert same(empty.to_packed(), weight)
    a = torch.randn(3, 512)
    assert torch.equal(empty.float()(a), tmm.gemm(a, weight)) and same(empty.to_packed(), weight)
    plain = tmm.MarlinLinear(512, 24, bias=False, weight_format=weight_format, group_size=32)
    with pytest.raises(RuntimeError, match=r"scales: expected torch.float16, got torch.u?int8"):
        plain.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("weight_format", ["uint4_bias", "uint5_bias"])
def test_the_own_format_keeps_them(tmp_path, weight_format) -> None:
    weight = weight_of(weight_format)
    reader = stored(tmp_path, weight)
    assert same(reader.read(0), weight)
    for by, parts in (("columns", split_columns(weight, 2)), ("rows", split_rows(weight, 2))):
        assert all(same(reader.read_part(0, Part(by, 2, rank)), part) for rank, part in enumerate(parts))
    assert reader.read_part(0, Part("rows", 4, 0)) is None  # a border of this part is inside a block of 256


@pytest.mark.parametrize("weight_format", ["uint5b16", "uint6b32"])
def test_parts_of_codes_in_two_planes_of_the_own_format(tmp_path, weight_format) -> None:
    """Only parts that begin with a word of `b_high` are read. In halves, a part of 48 rows ends inside a word of 32."""
    made = reference.make_weight(weight_format, 96, 24, 16)
    weight = PackedWeight(made.b_packed, made.scales, **made.arguments)
    reader = stored(tmp_path, weight)
    assert same(reader.read(0), weight)
    for rank, part in enumerate(split_rows(weight, 2)):
        read = reader.read_part(0, Part("rows", 2, rank))
        assert read is None if weight_format == "uint5b16" else read is not None and same(read, part)
    for rank, part in enumerate(split_rows(weight, 3)):
        read = reader.read_part(0, Part("rows", 3, rank))
        assert read is not None and same(read, part)


@pytest.mark.parametrize(("K", "count"), [(1024, 2), (1024, 8), (384, 3)])
def test_parts_of_8_bit_codes_of_the_own_format(tmp_path, K, count) -> None:
    """The reader knows how many codes a word has only from the number of blocks of the super scales."""
    weight = weight_of("uint8b128", K=K, group=16)
    reader = stored(tmp_path, weight)
    for rank, part in enumerate(split_rows(weight, count)):
        read = reader.read_part(0, Part("rows", count, rank))
        assert same(read, part) if K // count % 256 == 0 else read is None


def test_compiled_and_exported_layers() -> None:
    layer, a = tmm.MarlinLinear.from_packed(weight_of()), torch.randn(3, 512)
    exported = torch.export.export(nn.Sequential(layer), (a,)).module()
    assert torch.equal(exported(a), layer(a))
    weight = weight_of()
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in weight.tensors().items()}
        assert tmm.gemm(torch.empty(3, 512), replace(weight, **fakes)).shape == (3, 24)


@pytest.mark.parametrize(("count", "kept"), [(2, True), (4, False)])
def test_parts_by_rows_and_columns(count, kept) -> None:
    weight = weight_of()
    assert same(join_columns(split_columns(weight, count)), weight)
    parts = split_rows(weight, count)  # a border inside a block of 256 needs scales of one level
    assert all((part.super_scales is not None) == kept for part in parts)
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), weight.dequantize())
    joined = join_rows(parts)
    assert torch.equal(joined.dequantize(), weight.dequantize())
    assert not kept or same(joined, weight)


def test_equal_codes_of_other_blocks_are_not_one_group() -> None:
    whole = weight_of(group=256)
    whole.scales[:], whole.zeros[:] = whole.scales[0].clone(), whole.zeros[0].clone()
    assert same(join_rows(split_rows(whole, 2)), whole)
    one = weight_of(K=128, group=128)
    other = replace(one, super_scales=3 * one.super_scales)
    joined = join_rows([one, other])
    assert torch.equal(joined.dequantize(), torch.cat([one.dequantize(), other.dequantize()]))


def test_projections_are_fused() -> None:
    model = nn.Module()
    for index, name in enumerate(("q", "k", "v")):
        model.add_module(name, tmm.MarlinLinear.from_packed(weight_of(seed=index)))
    a, weights = torch.randn(2, 512), [weight_of(seed=index) for index in range(3)]
    report = fuse_projections(model, [("q", "k", "v")])
    assert len(report.fused) == 1
    for name, weight in zip(("q", "k", "v"), weights, strict=True):
        assert torch.equal(getattr(model, name)(a), tmm.gemm(a, weight)) and same(
            getattr(model, name).to_packed(), weight
        )


@pytest.mark.parametrize("weight_format", ["uint4_bias", "uint6_bias"])
def test_stacks_of_experts(weight_format) -> None:
    weights = [weight_of(weight_format, seed=index) for index in range(3)]
    stack = ExpertWeights.from_packed([[weight] for weight in weights])
    assert all(same(stack.to_packed(index), weight) for index, weight in enumerate(weights))
    both = ExpertWeights.from_packed([[weights[0], weights[1]]])
    assert same(both.to_packed(0, 1), weights[1])
    symmetric = weight_of("uint4b8" if weight_format == "uint4_bias" else "uint6b32", group=16)
    mixed = [[weights[0]], [symmetric]]  # the common format has fp32 scales of one level
    common = stack_exactly(lambda: mixed, 2, None)
    for index, (weight,) in enumerate(mixed):
        assert torch.equal(common.to_packed(index).dequantize(), weight.dequantize())


@pytest.mark.parametrize("weight_format", ["uint4_bias", "uint5_bias"])
@pytest.mark.parametrize(("unit", "kept"), [(256, True), (64, False)])
def test_rows_are_reordered(unit, kept, weight_format) -> None:
    weight = weight_of(weight_format)
    order = torch.arange(512).reshape(-1, unit).flip(0).flatten()
    moved = permute_columns(weight, order)
    assert moved is not None and torch.equal(moved.dequantize(), weight.dequantize()[order])
    assert (moved.super_scales is not None) == kept


def test_other_formats_of_integers_take_them_as_one_level(tmp_path) -> None:
    weight = replace(weight_of("uint4b8"), name="a")
    convert.export_checkpoint([weight], tmp_path / "gptq", "gptq", version=2)
    (read,) = convert.read_layers(tmp_path / "gptq")
    assert torch.equal(read.dequantize(), weight.dequantize())


def test_scales_that_are_not_finite_are_refused() -> None:
    weight = weight_of()
    weight.super_zeros[1, 2] = torch.inf
    with pytest.raises(PackedWeightError, match="super_zeros: expected finite values"):
        weight.validate()
