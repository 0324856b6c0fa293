"""MarlinLinear in models: hooks, torch.compile, export, autocast, gradients."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.linear_layers import K, N, activations, layer_of
from tests.support.reference import FORMATS
from torch_marlin_metal.layers.linear import MarlinLinear


def test_sequential_and_hooks(device):
    layer = layer_of(device=device)
    seen = []
    model = nn.Sequential(nn.LayerNorm(K, device=device), layer, nn.GELU())
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    layer.register_forward_hook(lambda module, args, output: output + 1)
    a = activations(4, K, device=device)
    torch.testing.assert_close(model(a), nn.functional.gelu(layer.forward(model[0](a)) + 1))
    assert seen == [torch.Size([4, K])]


@pytest.mark.parametrize("weight_format", FORMATS)
def test_compile_in_one_graph_without_recompiling(weight_format, device):
    torch._dynamo.reset()
    layer = layer_of(weight_format, device, perm=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for M in (2, 3, 5, 8):
        a = activations(M, K, device=device)
        with torch.inference_mode():
            assert torch.equal(compiled(a), layer(a))
    assert counter.frame_count == 1


def test_compile_with_inductor(device):
    torch._dynamo.reset()
    model = nn.Sequential(layer_of(device=device), nn.GELU(), nn.LayerNorm(N, device=device)).eval()
    a = activations(4, K, device=device)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(a), model(a))


def test_export(device):
    layer = layer_of(device=device)
    a = activations(4, K, device=device)
    program = torch.export.export(layer, (a,), dynamic_shapes=({0: torch.export.Dim("M")},))
    assert torch.equal(program.module()(a[:3]), layer(a[:3]))


def test_inference_mode_and_autocast(device):
    layer = layer_of(device=device)
    a = activations(4, K, device=device)
    with torch.inference_mode():
        assert torch.equal(layer(a), layer(a.clone()))
    dtype = torch.bfloat16 if device == "cpu" else torch.float16
    with torch.autocast(device, dtype=dtype):
        result = layer(a)
    assert result.dtype == dtype
    assert torch.equal(result, layer(a.to(dtype)))


def test_gradients_of_activations_and_bias(device):
    layer = MarlinLinear.from_linear(nn.Linear(K, N, device=device), "nvfp4")
    a = activations(4, K, device=device).requires_grad_()
    g = activations(4, N, device=device)
    layer(a).backward(g)
    torch.testing.assert_close(a.grad, g @ layer.dequantize(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.bias.grad, g.sum(0))


def test_a_fused_transformer_layer_leaves_its_fast_path(device):
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, device=device).eval()
    a = activations(2, 5, 64, device=device)
    for name in ("linear1", "linear2"):
        encoder.set_submodule(name, MarlinLinear.from_linear(encoder.get_submodule(name), "uint4", 32))
    dense = copy.deepcopy(encoder)
    for name in ("linear1", "linear2"):
        layer = encoder.get_submodule(name)
        linear = nn.Linear(layer.in_features, layer.out_features, device=device)
        linear.weight, linear.bias = nn.Parameter(layer.dequantize()), layer.bias
        dense.set_submodule(name, linear)
    with torch.inference_mode():
        torch.testing.assert_close(encoder(a), dense(a), rtol=1e-4, atol=1e-4)
