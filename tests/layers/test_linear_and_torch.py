"""MarlinLinear with PyTorch's tools for modules: parametrizations, FLOP counts, fake tensors, double()."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.reference import FORMATS
from torch_marlin_metal import MarlinLinear, quantize_weight


def layer_of(weight_format: str = "uint4b8") -> MarlinLinear:
    torch.manual_seed(0)
    return MarlinLinear.from_linear(nn.Linear(64, 32), weight_format)


class Half(nn.Module):
    def forward(self, scales: torch.Tensor) -> torch.Tensor:
        return scales / 2


def test_a_parametrized_tensor_is_the_one_that_is_used():
    layer, a = layer_of(), torch.randn(3, 64)
    with torch.no_grad():
        product = layer(a) - layer.bias
        weight = layer.dequantize()
        parametrize.register_parametrization(layer, "scales", Half())
        assert torch.allclose(layer(a) - layer.bias, product / 2, atol=1e-6)
        assert torch.equal(layer.dequantize(), weight / 2)
        assert torch.equal(layer.to_packed().scales, layer.scales)
        assert "scales=float16" in repr(layer)
        assert layer.to("cpu").half().bias.dtype == torch.float16
        layer.load_state_dict(layer.state_dict())
        parametrize.remove_parametrizations(layer, "scales")
        assert torch.equal(layer.dequantize(), weight / 2)


def test_flops_are_counted_as_those_of_linear():
    a = torch.randn(2, 3, 64)
    counts = []
    for module in (nn.Linear(64, 32), layer_of()):
        with FlopCounterMode(display=False) as counter:
            module(a)
        counts.append(counter.get_total_flops())
    assert counts == [2 * 6 * 64 * 32] * 2


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_weight_without_values_gives_a_layer_of_the_same_shapes(weight_format):
    expected = layer_of(weight_format)
    with FakeTensorMode():
        made = layer_of(weight_format)
        assert made(torch.ones(3, 64)).shape == (3, 32)
    shapes = [
        {name: (tensor.shape, tensor.dtype) for name, tensor in layer.state_dict().items()}
        for layer in (made, expected)
    ]
    assert shapes[0] == shapes[1]


def test_a_weight_without_values_keeps_its_other_rules():
    with FakeTensorMode():
        w = torch.randn(32, 64)
        with pytest.raises(ValueError, match="group_size: expected one of 16, 32, 64, 128, 256, or K = 64"):
            quantize_weight(w, group_size=48)
        packed = quantize_weight(w)
        packed.scales = torch.ones(3, 3)
        with pytest.raises(ValueError, match=r"scales: expected shape \[1, 32\], got \[3, 3\]"):
            packed.validate()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_double_leaves_a_layer_that_computes(requires_grad):
    layer = layer_of()
    bias = layer.bias.requires_grad_(requires_grad)
    expected = layer(torch.ones(2, 64))
    layer.double()
    assert layer.bias is bias
    assert (bias.dtype, layer.weight.dtype) == (torch.float32, torch.float32)
    assert torch.equal(layer(torch.ones(2, 64)), expected)
    assert layer.bfloat16().double().bias.dtype == torch.float32


def test_an_average_of_weights_keeps_packed_codes_by_default():
    layer = layer_of()
    layer.b_packed[0, 0] = 1_000_000_007  # float32 cannot represent this number
    model = nn.Sequential(layer)
    averaged, with_buffers = AveragedModel(model), AveragedModel(model, use_buffers=True)
    for _ in range(3):
        averaged.update_parameters(model)
        with_buffers.update_parameters(model)
    assert torch.equal(averaged.module[0].b_packed, layer.b_packed)
    assert not torch.equal(with_buffers.module[0].b_packed, layer.b_packed)  # docs/use/fine-tuning.md warns of it
