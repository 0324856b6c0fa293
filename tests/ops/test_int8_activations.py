"""`activations="int8"`: compares products of activations that are rounded to 8 bits with NumPy in fp64."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import torch_marlin_metal as tmm
from tests.support import reference

OPS = torch.ops.torch_marlin_metal
N = 70  # not a multiple of the width of a strip
FORMATS = ("uint4b8", "uint4", "uint4_bias", "nvfp4", "mxfp4", "uint8b128", "uint8", "uint5_bias", "uint6b32")

ISA = tmm.cpu_capability().isa

pytestmark = pytest.mark.skipif(ISA in ("portable", "neon"), reason="needs AVX2 for all codes")


def rounded(rows: np.ndarray, group_size: int) -> np.ndarray:
    """Rounds each row to 8 bits, in groups of 32 values along K that do not cross the groups of the weight."""
    out = np.empty_like(rows)
    for start in range(0, rows.shape[1], group_size):
        end = min(start + group_size, rows.shape[1])
        for k in range(start, end, 32):
            part = rows[:, k : min(k + 32, end)]
            largest = np.abs(part).max(1, keepdims=True).astype(np.float32)
            units = (np.float32(127) / largest).astype(np.float64)
            out[:, k : min(k + 32, end)] = np.rint(part * units) * (largest / np.float32(127)).astype(np.float64)
    return out


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_products_are_those_of_rounded_activations(name, dtype):
    K = 336  # the last group of 64 is short
    weight = reference.make_weight(name, K, N, 64)
    bias = torch.linspace(-4, 4, N)
    for M in (1, 3, 11):
        a = reference.random(M, K, dtype=dtype, seed=M)
        call = {"bias": bias, **weight.arguments}
        got = reference.to_numpy(OPS.gemm(a, weight.b_packed, weight.scales, activations="int8", **call))
        exact = reference.to_numpy(a)
        within = {}
        for kind, rows in (("rounded", rounded(exact, weight.arguments["group_size"])), ("exact", exact)):
            y = rows @ weight.exact + reference.to_numpy(bias)
            size = np.abs(rows) @ weight.raw_magnitude + np.abs(reference.to_numpy(bias))
            bound = reference.UNIT_ROUNDOFF[dtype] * np.abs(y) + reference.TINY[dtype] + 16 * 2.0**-24 * size
            within[kind] = bool((np.abs(got - y) <= bound).all())
        # One row is exact on AMD's CPUs with AVX-512, and with AVX2 if codes have 8 bits.
        is_exact = ISA == "avx512" or (ISA == "avx2" and name in ("uint8b128", "uint8"))
        assert within["rounded"] or (M == 1 and is_exact and within["exact"]), (M, within)
        assert M == 1 or not within["exact"]


def test_gemm_fp32_rounds_too():
    weight = reference.make_weight("uint4b8", 256, N, 32)
    a = torch.randn(3, 256)
    y = OPS.gemm_fp32(a, weight.b_packed, weight.scales, activations="int8", **weight.arguments)
    assert torch.equal(y, OPS.gemm(a, weight.b_packed, weight.scales, activations="int8", **weight.arguments))


def test_a_row_that_8_bits_cannot_hold_gives_the_exact_products():
    weight = reference.make_weight("uint4b8", 256, N, 32)
    a = torch.randn(3, 256)
    for value in (float("nan"), float("inf"), 2.0**-110):
        a[1, 32:64] = value
        got = OPS.gemm(a, weight.b_packed, weight.scales, activations="int8", **weight.arguments)
        exact = OPS.gemm(a, weight.b_packed, weight.scales, **weight.arguments)
        torch.testing.assert_close(got, exact, atol=1e-4, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("uint4b8", {"activations": "int4"}, "gemm: activations: expected None or 'int8', got 'int4'"),
        ("uint4b8", {"variant": "two_pass"}, "gemm: variant: expected 'auto' with activations='int8', got 'two_pass'"),
        ("lut4", {}, "gemm: activations: expected None for lut4, whose codes are no integers"),
        ("float8_e4m3", {}, "gemm: activations: expected None for float8_e4m3, whose codes are no integers"),
    ],
)
def test_what_cannot_be_rounded_is_refused(name, options, message):
    weight = reference.make_weight(name, 64, 8, 32)
    for device in ("cpu", "meta"):
        call = {key: value.to(device) if torch.is_tensor(value) else value for key, value in weight.arguments.items()}
        tensors = (torch.randn(2, 64, device=device), weight.b_packed.to(device), weight.scales.to(device))
        with pytest.raises(ValueError, match=message):
            OPS.gemm(*tensors, **{"activations": "int8", **call, **options})


def test_gradients_ignore_the_rounding():
    weight = tmm.quantize_weight(torch.randn(24, 64), "uint4", group_size=32)
    a = torch.randn(5, 64, requires_grad=True)
    tmm.gemm(a, weight, activations="int8").sum().backward()
    assert torch.equal(a.grad, tmm.gemm_transposed(torch.ones(5, 24), weight))


def test_a_model_rounds_on_request():
    torch.manual_seed(0)
    model = nn.Sequential(*(tmm.MarlinLinear.from_linear(nn.Linear(64, 64), "uint4b8", 32) for _ in range(2)))
    saved, x = set(model.state_dict()), torch.randn(3, 64)
    exact = model(x)
    assert tmm.set_activations(model, "int8") == ["0", "1"]
    got = model(x)
    assert 1e-4 < float(((got - exact).norm() / exact.norm()).detach()) < 0.03
    assert torch.equal(copy.deepcopy(model)(x), got)
    assert set(model.state_dict()) == saved
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), got)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), got)
    tmm.set_activations(model, None)
    assert torch.equal(model(x), exact)
    assert torch.equal(compiled(x), exact)


def test_fused_projections_round_too():
    model = nn.Module()
    for name in ("q_proj", "k_proj", "v_proj"):
        model.add_module(name, tmm.MarlinLinear.from_linear(nn.Linear(64, 32), "uint4b8", 32))
    tmm.set_activations(model, "int8")
    x = torch.randn(3, 64)
    expected = model.q_proj(x)
    assert len(tmm.fuse_projections(model).fused) == 1
    torch.testing.assert_close(model.q_proj(x), expected, atol=1e-5, rtol=1e-5)


def test_set_activations_refuses_what_no_kernel_takes():
    layer = tmm.MarlinLinear.from_linear(nn.Linear(64, 64), "nf4")
    model = nn.Sequential(tmm.MarlinLinear.from_linear(nn.Linear(64, 64)), layer)
    with pytest.raises(ValueError, match=r"expected None, because the codes of layer '1' \(lut4\) are no integers"):
        tmm.set_activations(model, "int8")
    assert model[0].activations is None
    with pytest.raises(ValueError, match="set_activations: activations: expected None or 'int8', got 'fp8'"):
        tmm.set_activations(model, "fp8")
    with pytest.raises(ValueError, match="set_activations: model: expected MarlinLinear layers, got ReLU"):
        tmm.set_activations(nn.ReLU(), "int8")


def test_mps_refuses_to_round(mps):
    weight = tmm.quantize_weight(torch.randn(24, 64), "uint4", group_size=32).to(mps)
    with pytest.raises(ValueError, match="activations: expected None for tensors on mps: only the CPU rounds"):
        tmm.gemm(torch.randn(2, 64, device=mps), weight, activations="int8")
