"""MarlinLinear: results are within the operators' bound, and PyTorch's operations on an nn.Module work."""

import copy
import io
import pickle
import re
import warnings

import pytest
import torch
from torch import nn

from tests.support.linear_layers import K, N, activations, layer_of, packed_of
from tests.support.reference import FIXED_GROUP_SIZES, FORMATS, check_gemm, dtypes_in_turn, gemm
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.packed_weight import WEIGHT_TENSORS, PackedWeightError
from torch_marlin_metal.quantize.weight import quantize_weight


def same_tensors(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


@pytest.mark.parametrize("perm", [False, True])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_forward_is_within_the_bound(weight_format, perm, device, everything):
    weight, packed = packed_of(weight_format, perm=perm, device=device)
    layer = MarlinLinear.from_packed(packed)
    order = packed.perm.cpu().numpy() if perm else None
    for dtype in dtypes_in_turn(FORMATS.index(weight_format) + perm, everything or device == "cpu"):
        a = activations(2, 3, K, dtype=dtype, device=device)
        check_gemm(layer(a), *gemm(a, weight, packed.bias, order, raw_codes=device == "mps"))


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_from_linear(weight_format, method, device):
    linear = nn.Linear(K, N, device=device).eval()
    layer = MarlinLinear.from_linear(linear, weight_format, FIXED_GROUP_SIZES.get(weight_format, 64), method)
    assert not layer.training
    assert layer.bias is linear.bias
    w4 = layer.dequantize()
    assert w4.shape == linear.weight.shape
    relative = ((w4 - linear.weight).norm() / linear.weight.norm()).item()
    assert 0.01 < relative < 0.13
    a = activations(5, K, device=device)
    torch.testing.assert_close(layer(a), nn.functional.linear(a, w4, linear.bias), rtol=1e-4, atol=1e-5)


def test_from_linear_without_bias_and_in_bf16(device):
    linear = nn.Linear(K, N, bias=False, dtype=torch.bfloat16, device=device)
    layer = MarlinLinear.from_linear(linear, "u4b8", -1, scale_dtype=torch.bfloat16)
    assert (layer.group_size, layer.scales.dtype, layer.weight.dtype) == (K, torch.bfloat16, torch.bfloat16)
    assert layer.bias is None
    assert layer(activations(1, K, dtype=torch.bfloat16, device=device)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("weight_format", "extra"),
    [
        ("uint4b8", []),
        ("uint4", ["zeros"]),
        ("uint4_bias", ["zeros"]),
        ("float4_e2m1", []),
        ("nvfp4", ["global_scale"]),
        ("mxfp4", []),
        ("lut4", ["lut"]),
    ],
)
def test_state_dict_names(weight_format, extra, device):
    state = layer_of(weight_format, device).state_dict()
    assert sorted(state) == sorted(["b_packed", "scales", "packed_format", "bias", "weight", *extra])
    state = layer_of(weight_format, device, perm=True, bias=False).state_dict()
    assert sorted(state) == sorted(["b_packed", "scales", "packed_format", "perm", "weight", *extra])
    group_size = FIXED_GROUP_SIZES.get(weight_format, 64)
    assert state["packed_format"].tolist() == [1, FORMATS.index(weight_format), group_size]


def empty_like(layer: MarlinLinear, device: str) -> MarlinLinear:
    return MarlinLinear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        weight_format=layer.weight_format,
        group_size=layer.group_size,
        scale_dtype=layer.scales.dtype,
        zeros_dtype=None if layer.zeros is None else layer.zeros.dtype,
        global_scale_per_column=layer.global_scale is not None and layer.global_scale.numel() > 1,
        perm=layer.perm is not None,
        device=device,
        dtype=layer.dtype,
    )


@pytest.mark.parametrize("perm", [False, True])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_an_empty_layer_loads_a_state_dict(weight_format, perm, device):
    layer = layer_of(weight_format, device, perm=perm)
    a = activations(3, K, device=device)
    on_device = empty_like(layer, device)
    on_device.load_state_dict(layer.state_dict(), strict=True)
    assert same_tensors(on_device, layer)
    assert torch.equal(on_device(a), layer(a))
    on_meta = empty_like(layer, "meta")
    assert all(tensor.is_meta for tensor in on_meta.state_dict().values())
    on_meta.load_state_dict(layer.state_dict(), strict=True, assign=True)
    assert torch.equal(on_meta(a), layer(a))
    materialised = empty_like(layer, "meta").to_empty(device=device)
    materialised.load_state_dict(layer.state_dict())
    assert torch.equal(materialised(a), layer(a))


@pytest.mark.parametrize("start", ["meta", "cpu"])
def test_a_layer_filled_after_to_empty_can_be_saved_and_loaded(start, device):
    layer = layer_of("nvfp4", device, perm=True)
    torch.use_deterministic_algorithms(True)  # PyTorch then fills new memory with NaN
    try:
        filled = empty_like(layer, start).to_empty(device=device)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, tensor in layer.to_packed().tensors().items():
        getattr(filled, name).data.copy_(tensor)
    loaded = empty_like(layer, device)
    loaded.load_state_dict(filled.state_dict())
    assert same_tensors(loaded, layer)


@pytest.mark.parametrize("assign", [False, True])
def test_words_of_other_strides_load(assign, device):
    layer = layer_of(device=device)
    state = layer.state_dict()
    state["b_packed"] = state["b_packed"].t().contiguous().t()
    assert not state["b_packed"].is_contiguous()
    loaded = empty_like(layer, device)
    loaded.load_state_dict(state, assign=assign)
    assert not state["b_packed"].is_contiguous()  # the caller's dictionary is not changed
    a = activations(3, K, device=device)
    assert torch.equal(loaded(a), layer(a))
    packed = packed_of("uint4", device=device)[1]
    packed.b_packed = state["b_packed"]
    message = r"b_packed: expected a contiguous tensor, got \[17, 72\] with strides \[1, 17\]"
    with pytest.raises(PackedWeightError, match=message):
        MarlinLinear.from_packed(packed)


def test_global_scale_shapes(device):
    for shape, stored in [(None, [1]), ((), [1]), ((1,), [1]), ((-1,), [N])]:
        weight, packed = packed_of("nvfp4", device=device, global_scale_shape=shape)
        layer = MarlinLinear.from_packed(packed)
        assert list(layer.global_scale.shape) == stored
        a = activations(2, K, device=device)
        check_gemm(layer(a), *gemm(a, weight, packed.bias))


@pytest.mark.parametrize("lost", ["perm", "scales", "b_packed"])
def test_a_weight_is_loaded_whole_or_not_at_all(lost):
    layer, other = layer_of("uint4", perm=True), layer_of("uint4", perm=True)
    state = copy.deepcopy(layer.state_dict())
    other.scales.mul_(2)
    before = copy.deepcopy(other)
    message = r"MarlinLinear: b_packed: expected all of b_packed, perm, scales, zeros and no other, got"
    with pytest.raises(RuntimeError, match=message):
        other.load_state_dict({name: tensor for name, tensor in state.items() if name != lost}, strict=False)
    assert same_tensors(other, before)
    with pytest.raises(RuntimeError, match=r"all of b_packed, scales, zeros and no other, got b_packed, perm"):
        layer_of("uint4").load_state_dict(state, strict=False)
    assert not other.load_state_dict({"bias": state["bias"]}, strict=False).unexpected_keys


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            {"weight_format": "uint4b8"},
            r"packed_format: expected uint4b8 with group_size 64, got uint4 with group_size 64",
        ),
        ({"group_size": 32}, r"packed_format: expected uint4 with group_size 32, got uint4 with group_size 64"),
        ({"in_features": 128}, r"b_packed: expected shape \[16, 72\], got \[17, 72\]"),
        ({"out_features": 64}, r"scales: expected shape \[3, 64\], got \[3, 72\]"),
        ({"scale_dtype": torch.float32}, r"scales: expected torch.float32, got torch.float16"),
        ({"zeros_dtype": torch.float16}, r"zeros: expected torch.float16, got torch.uint8"),
        ({"perm": True}, r"Missing key\(s\) in state_dict: \"proj.perm\""),
        ({"bias": False}, r"Unexpected key\(s\) in state_dict: \"proj.bias\""),
    ],
)
def test_load_state_dict_says_what_differs(target, message, device):
    source = nn.ModuleDict({"proj": layer_of("uint4", device)})
    arguments = {"in_features": K, "out_features": N, "weight_format": "uint4", "group_size": 64, **target}
    other = nn.ModuleDict({"proj": MarlinLinear(**arguments, device=device)})
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(RuntimeError, match=message) as error:
        other.load_state_dict(source.state_dict(), strict=True)
    if "key(s)" not in str(error.value):
        assert "proj." in str(error.value)
        for key, tensor in other.state_dict().items():  # no tensor was copied before the error
            assert torch.equal(tensor.view(torch.uint8), before[key].view(torch.uint8)), key


@pytest.mark.parametrize(
    ("weight_format", "name", "value", "message"),
    [
        ("uint4b8", "scales", torch.tensor(2.0**101, dtype=torch.float32), r"proj.scales: .*at most 2\^100"),
        ("uint4b8", "scales", torch.tensor(float("inf")), r"proj.scales: .*at most 2\^100"),
        (
            "mxfp4",
            "scales",
            torch.tensor(15, dtype=torch.uint8),
            r"proj.scales: expected E8M0 codes in 16..240, got .* 15",
        ),
        (
            "mxfp4",
            "scales",
            torch.tensor(241, dtype=torch.uint8),
            r"proj.scales: expected E8M0 codes in 16..240, got .* 241",
        ),
    ],
)
def test_values_outside_the_promise_are_refused(weight_format, name, value, message, device):
    kw = {} if weight_format == "mxfp4" else {"scales_dtype": torch.float32}
    layer = layer_of(weight_format, device, **kw)
    state = copy.deepcopy(nn.ModuleDict({"proj": layer}).state_dict())
    state[f"proj.{name}"][1, 2] = value
    with pytest.raises(RuntimeError, match=message):
        nn.ModuleDict({"proj": layer}).load_state_dict(state)
    packed = packed_of(weight_format, device=device, **kw)[1]
    getattr(packed, name)[1, 2] = value
    with pytest.raises(PackedWeightError, match=message.removeprefix("proj.")):
        MarlinLinear.from_packed(packed)


def test_a_newer_format_version_is_refused(device):
    layer = layer_of(device=device)
    state = copy.deepcopy(layer.state_dict())
    for change in ([2, 1, 64], [1, 99, 64], [1, 1]):
        state["packed_format"] = torch.tensor(change, dtype=torch.int32)
        message = f"packed_format: expected uint4 with group_size 64, got an unknown version or format {change}"
        with pytest.raises(RuntimeError, match=re.escape(message)):
            layer.load_state_dict(state)
    del state["packed_format"]
    with pytest.raises(RuntimeError, match=r"Missing key.*packed_format"):
        layer.load_state_dict(state)


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.bfloat16, lambda m: m.to(torch.float16)])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_dtype_changes_leave_the_weight_alone(weight_format, convert, device):
    layer = layer_of(weight_format, device, perm=True, scales_dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    model = convert(nn.Sequential(layer, nn.LayerNorm(N, device=device)))
    dtype = model[1].weight.dtype
    assert dtype != torch.float32
    for name, tensor in layer.state_dict().items():
        if name == "bias":
            assert tensor.dtype == dtype
        else:
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor, before[name]), name
    assert layer.weight.dtype == dtype
    model.float()
    assert (layer.bias.dtype, layer.weight.dtype) == (torch.float32, torch.float32)


def test_moves_between_devices(device):
    layer = layer_of("nvfp4", perm=True)
    a = activations(3, K)
    expected = layer(a)
    moved = copy.deepcopy(layer).to(device)
    assert {tensor.device.type for tensor in moved.state_dict().values()} == {device}
    assert moved.weight.device.type == device
    torch.testing.assert_close(moved(a.to(device)).cpu(), expected, rtol=1e-5, atol=1e-5)
    assert same_tensors(moved.cpu(), layer)
    both = copy.deepcopy(layer).to(device, torch.float16)
    assert (both.scales.device.type, both.scales.dtype, both.bias.dtype) == (device, torch.uint8, torch.float16)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_copies(weight_format, device):
    layer = layer_of(weight_format, device, perm=True)
    a = activations(2, K, device=device)
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    loaded = empty_like(layer, device)
    loaded.load_state_dict(torch.load(stream, weights_only=True))
    whole = io.BytesIO()
    torch.save(layer, whole)
    whole.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded, torch.load(whole, weights_only=False)]
    for other in copies:
        assert same_tensors(other, layer)
        assert other.b_packed.data_ptr() != layer.b_packed.data_ptr()
        assert torch.equal(other(a), layer(a))


def test_from_packed_and_back_share_tensors(device):
    _, packed = packed_of("uint4", perm=True, device=device)
    layer = MarlinLinear.from_packed(packed)
    back = layer.to_packed().validate()
    for name in WEIGHT_TENSORS:
        assert getattr(layer, name) is getattr(packed, name), name
        assert getattr(back, name) is getattr(packed, name), name
    assert (back.weight_format, back.group_size) == (packed.weight_format, packed.group_size)


def test_repr_names_what_matters(device):
    assert repr(layer_of("uint4b8", device, perm=True)) == (
        "MarlinLinear(in_features=136, out_features=72, bias=True, weight_format=uint4b8, group_size=64, "
        "scales=float16, perm=True)"
    )
    assert "weight_format=nvfp4, group_size=16)" in repr(layer_of("nvfp4", device))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"in_features": 12},
            r"MarlinLinear: expected in_features a multiple of 8 and out_features >= 1, got 12 and 72",
        ),
        ({"out_features": 0}, r"got 136 and 0"),
        ({"weight_format": "int4"}, r"weight_format: expected one of .*got 'int4'"),
        ({"group_size": 48}, r"MarlinLinear: group_size: expected one of .*got 48"),
        ({"group_size": 64.0}, r"MarlinLinear: group_size: expected one of .*got 64.0"),
        (
            {"weight_format": "nvfp4", "group_size": 32},
            r"MarlinLinear: group_size: expected 16 for nvfp4, got 32",
        ),
    ],
)
def test_constructor_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        MarlinLinear(**{"in_features": K, "out_features": N, **arguments})


def test_wrong_activations_are_refused_by_name(device):
    layer = layer_of(device=device)
    with pytest.raises(ValueError, match="gemm: a: "):
        layer(activations(2, K + 8, device=device))
    with pytest.raises(ValueError, match="gemm: a: "):
        layer(activations(2, K, dtype=torch.float64, device="cpu").to(torch.int32))


def test_no_warnings_from_loading(device):
    layer = layer_of(device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        empty_like(layer, "meta").load_state_dict(layer.state_dict(), assign=True)


@pytest.mark.parametrize("written", ["the layer that moves later", "the layer that has moved"])
def test_a_layer_that_loads_after_another_has_moved_keeps_its_own_weight(written):
    """After a move, layers still share tensors, unless one of the layers has loaded another weight."""
    dense = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0))
    first, second = (quantize_weight(weight, "uint4b8", group_size=32) for weight in dense)
    before = first.b_packed.clone()  # load_state_dict writes into the tensors of `first`
    stays, moves = MarlinLinear.from_packed(first), MarlinLinear.from_packed(first)
    moves._apply(torch.clone)
    loads, other = (stays, moves) if written == "the layer that moves later" else (moves, stays)
    loads.load_state_dict(MarlinLinear.from_packed(second).state_dict())
    stays._apply(torch.clone)
    assert torch.equal(loads.b_packed, second.b_packed)
    assert torch.equal(other.b_packed, before)
