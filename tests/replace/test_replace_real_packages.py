"""Tests replace_linear_layers on layers that installed packages create. If a package is missing, its tests are skipped.

To install the packages beside torch 2.13.0, run pip install --no-deps bitsandbytes==0.50.2 hqq==0.2.8.post1
autoawq==0.2.9 compressed-tensors==0.20.0. Then install gptqmodel==7.7.0 with BUILD_CUDA_EXT=0 and --no-build-isolation.
Finally import each package, and install the modules that the import does not find.
"""

import os

import pytest
import torch
from torch import nn

from torch_marlin_metal import MarlinLinear
from torch_marlin_metal.convert import replace_linear_layers

K, N = 256, 96
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # GPTQModel refuses fewer than two workers, even on one core


def package(name: str):
    """Imports a package. If the package or a dependency is missing, skips the test and names the package."""
    try:
        return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)
    except (RuntimeError, OSError) as error:
        pytest.skip(f"{name} does not start here: {error}")


def linear(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(K, N, bias=bias, dtype=dtype)


def replaced(layer: nn.Module) -> MarlinLinear:
    model = nn.ModuleDict({"layer": layer})
    (entry,) = replace_linear_layers(model, progress=False).layers
    assert not entry.reason
    new = model["layer"]
    assert isinstance(new, MarlinLinear)
    return new


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(kind, double_quant, used):
    """Tests layers before and after a forward, because on some CPUs a forward of bitsandbytes rearranges the weight."""
    bnb = package("bitsandbytes")
    source = linear(torch.bfloat16)
    layer = bnb.nn.Linear4bit(K, N, quant_type=kind, compress_statistics=double_quant, compute_dtype=torch.bfloat16)
    layer.load_state_dict(source.state_dict())
    layer.eval().to("cpu")
    words, state = layer.weight.data.clone(), layer.weight.quant_state
    absmax = state.absmax
    if state.nested:
        absmax = bnb.functional.dequantize_blockwise(absmax, state.state2) + state.offset
    x = torch.randn(3, K, dtype=torch.bfloat16)
    with torch.no_grad():
        y = layer(x) if used else None
        if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            absmax = absmax.bfloat16().float()  # the rearranged layer holds absmax as bf16
        exact = bnb.functional.QuantState(absmax, (N, K), state.code, 64, kind, torch.float32)
        packed = layer.weight.data.clone()
        new = replaced(layer)
        assert torch.equal(new.dequantize(), bnb.functional.dequantize_4bit(words, exact))
        assert torch.equal(layer.weight.data, packed)
        if y is not None:
            assert float((new(x) - y).norm() / y.norm()) < 2**-7  # bitsandbytes rounds weights and sums to bf16


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_hqq(group_size):
    quantize = package("hqq.core.quantize")
    settings = quantize.BaseQuantizeConfig(nbits=4, group_size=group_size, axis=1)
    layer = quantize.HQQLinear(linear(), settings, compute_dtype=torch.float32, device="cpu")
    expected, bias = layer.dequantize(), layer.bias.clone()
    new = replaced(layer)
    assert torch.equal(new.dequantize(), expected)
    assert torch.equal(new.bias, bias)


def awq_parts(group_size: int):
    """Returns the quantizer's scales and zero points, `[N, G]`, and the decoded weight."""
    torch.manual_seed(0)
    source = nn.Linear(K, 64, bias=False).half()
    grouped = source.weight.float().reshape(-1, group_size)
    low, high = grouped.amin(1, keepdim=True).clamp(max=0), grouped.amax(1, keepdim=True).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-torch.round(low / scales.float())).clamp(0, 15)
    codes = (torch.round(grouped / scales.float()) + zeros).clamp(0, 15)
    expected = ((codes - zeros) * scales.float()).reshape(64, K)
    source.weight.data = expected.half()
    return source, scales.reshape(64, -1), zeros.reshape(64, -1).half(), expected


@pytest.mark.parametrize("version", ["GEMM", "GEMV", "GEMVFast"])
@pytest.mark.parametrize("group_size", [64, 128])
def test_autoawq(version, group_size):
    modules = package("awq.modules.linear")
    source, scales, zeros, expected = awq_parts(group_size)
    if version == "GEMM":
        scales, zeros = scales.t().contiguous(), zeros.t().contiguous()
    layer = getattr(modules, f"WQLinear_{version}").from_linear(source, 4, group_size, scales=scales, zeros=zeros)
    new = replaced(layer)
    assert new.weight_format == "uint4"
    assert torch.equal(new.dequantize(), expected)


@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "NVFP4A16", "MXFP4A16"])
def test_compressed_tensors(preset):
    ct = package("compressed_tensors.quantization")
    compressors = package("compressed_tensors.compressors")
    model = nn.ModuleDict({"layer": linear(bias=False)})
    settings = ct.QuantizationConfig(config_groups={preset: ["Linear"]})
    ct.apply_quantization_config(model, settings)
    layer, scheme = model["layer"], model["layer"].quantization_scheme.weights
    grouped = layer.weight.data.reshape(N, -1, scheme.group_size)
    low, high = grouped.amin(-1), grouped.amax(-1)
    options = {"global_scale": None}
    if hasattr(layer, "weight_global_scale"):
        layer.weight_global_scale.data = ct.utils.generate_gparam(low.amin(), high.amax()).reshape(1)
        options["global_scale"] = layer.weight_global_scale.data
    scale, zero = ct.utils.calculate_qparams(low, high, scheme, **options)
    layer.weight_scale.data = scale
    if hasattr(layer, "weight_zero_point"):
        layer.weight_zero_point.data = zero
    expected = ct.fake_quantize(layer.weight.data, scale, zero, scheme, global_scale=options["global_scale"])
    layer.quantization_status = ct.QuantizationStatus.FROZEN
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    assert hasattr(model["layer"], "weight_packed")
    new = replaced(model["layer"])
    # The package divides by the global scale. Our operator multiplies by the inverse, which is rounded.
    torch.testing.assert_close(new.dequantize(), expected, rtol=2**-21 if preset == "NVFP4A16" else 0, atol=0)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("sym", [True, False])
def test_gptqmodel(sym, act_order):
    package("gptqmodel")
    torch_linear = package("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    torch.manual_seed(0)
    group_size = 64
    layer = torch_linear(
        bits=4, group_size=group_size, sym=sym, desc_act=act_order, in_features=K, out_features=N, bias=True,
        pack_dtype=torch.int32, register_buffers=True,
    )  # fmt: skip
    groups = torch.arange(K) // group_size
    if act_order:
        groups = groups[torch.randperm(K)]
    scales, zeros = torch.rand(N, K // group_size).half() / 8, torch.full((N, K // group_size), 8)
    if not sym:
        zeros = torch.randint(0, 16, zeros.shape)
    codes = torch.randint(0, 16, (N, K))
    source = linear()
    source.weight.data = (codes - zeros[:, groups]) * scales.float()[:, groups]
    layer.pack(source, scales=scales, zeros=zeros, g_idx=groups)
    layer.post_init()
    expected = source.weight.data.clone()
    new = replaced(layer)
    assert new.weight_format == ("uint4b8" if sym else "uint4")
    assert torch.equal(new.dequantize(), expected)
