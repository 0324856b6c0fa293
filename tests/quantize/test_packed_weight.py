"""Tests a PackedWeight that is called, passed to `linear`, or printed."""

import pytest
import torch

import torch_marlin_metal as tmm


@pytest.mark.parametrize("weight_format", tmm.WEIGHT_FORMATS)
def test_a_weight_multiplies_with_its_scales_table_and_bias(weight_format) -> None:
    torch.manual_seed(0)
    options = {"lut": torch.linspace(-1, 1, 16)} if weight_format == "lut4" else {}
    weight = tmm.quantize_weight(torch.randn(24, 128), weight_format, **options)
    weight.bias = torch.randn(24)
    a = torch.randn(2, 3, 128)
    exact = a.double() @ weight.dequantize().double() + weight.bias.double()
    torch.testing.assert_close(weight(a).double(), exact, rtol=1e-5, atol=1e-4)
    assert torch.equal(tmm.linear(a, weight), weight(a))


def test_linear_refuses_a_plain_tensor() -> None:
    with pytest.raises(TypeError, match="linear: weight: expected a PackedWeight, got Tensor"):
        tmm.linear(torch.ones(1, 64), torch.ones(8, 64))


def test_a_weight_prints_on_one_line() -> None:
    weight = tmm.quantize_weight(torch.randn(24, 128), "uint4", 32)
    assert repr(weight) == "PackedWeight(K=128, N=24, uint4, group_size=32, scales=float16, zeros, device=cpu)"
    weight.name = "up"
    assert repr(weight).startswith("PackedWeight('up', K=128")
