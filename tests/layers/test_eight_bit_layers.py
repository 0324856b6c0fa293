"""Weights of 5, 6 and 8 bits: quantization error below half a step, training, splitting and widening of layers."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import torch_marlin_metal as tmm
from tests.support import reference
from torch_marlin_metal.layers.common_format import common_of, widened, wider
from torch_marlin_metal.parallel import split_rows

K, N = 128, 24


def weights() -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("weight_format", reference.WIDE)
def test_quantizing_keeps_each_weight_within_half_a_step(weight_format):
    w = weights()
    packed = tmm.quantize_weight(w, weight_format, 32, scale_dtype=torch.float32).validate()
    scales = packed.scales if weight_format != "mxfp8" else (packed.scales.int() << 23).view(torch.float32)
    steps = scales.repeat_interleave(32, 0).T
    if weight_format in ("float8_e4m3", "mxfp8"):  # three mantissa bits, and 2^-9 between the smallest codes
        steps = torch.maximum(w.abs() / 8, steps * 2.0**-9)
        # MX formats round the exponent of the scale down, so the largest codes saturate at 448
        steps = torch.maximum(steps, 2 * (w.abs() - scales.repeat_interleave(32, 0).T * 448))
    error = (packed.dequantize().T - w).abs()
    assert (error <= 0.5001 * steps).all(), (error / steps).max()
    best = tmm.quantize_weight(w, weight_format, 32, "mse", scale_dtype=torch.float32)
    assert (best.dequantize().T - w).square().sum() <= (packed.dequantize().T - w).square().sum()


@pytest.mark.parametrize("weight_format", ["uint8b128", "mxfp8", "uint5_bias"])
def test_a_layer_has_the_gradient_of_its_decoded_weight(weight_format):
    linear = nn.Linear(K, N)
    layer = tmm.MarlinLinear.from_linear(linear, weight_format, 32)
    a = torch.randn(5, K, requires_grad=True)
    layer(a).sum().backward()
    torch.testing.assert_close(a.grad, layer.to_packed().dequantize().sum(1).expand(5, K), rtol=1e-5, atol=1e-5)
    other = tmm.MarlinLinear(K, N, weight_format=weight_format, group_size=32, scale_dtype=layer.scales.dtype)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(a), layer(a))


@pytest.mark.parametrize("weight_format", reference.WIDE)
def test_rows_split_into_parts_whose_products_add_up(weight_format):
    whole = tmm.quantize_weight(weights(), weight_format, 32)
    parts = split_rows(whole, 2)
    assert [part.validate().K for part in parts] == [K // 2] * 2
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), whole.dequantize())


def test_eight_bits_hold_each_role_and_fewer_bits():
    one, other = (common_of(tmm.quantize_weight(weights(), name, 32)) for name in ("uint8b128", "uint8"))
    assert one is not None and other is not None
    both = wider(one, other, K)
    packed = tmm.quantize_weight(weights(), "uint8b128", 32)
    assert both is not None
    assert torch.equal(widened(packed, both).dequantize(), packed.dequantize())
    assert wider(one, replace(one, bits=4), K) == one


def test_a_model_has_a_format_for_its_vocabulary():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    tmm.quantize_model(model, "uint4b8", 32, vocabulary_format="uint8b128", progress=False)
    assert (model.lm_head.weight_format, model.model.embed_tokens.weight_format) == ("uint8b128", "uint8b128")
    assert model.model.layers[0].mlp.up_proj.weight_format == "uint4b8"
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
