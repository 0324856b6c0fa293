"""Every bad input raises one error that names the operator, the argument, the expected value and the actual value."""

import re

import pytest
import torch

import torch_marlin_metal as tmm
from tests.support import reference

OPS = torch.ops.torch_marlin_metal

K, N = 64, 24


def call(device, base="uint4b8", **changes):
    weight = reference.make_weight(base, K, N, 32).to(device)
    arguments = {
        "a": torch.randn(3, K, device=device),
        "b_packed": weight.b_packed,
        "scales": weight.scales,
        **weight.arguments,
    }
    arguments.update({k: v(arguments) if callable(v) else v for k, v in changes.items()})
    return OPS.gemm(arguments.pop("a"), arguments.pop("b_packed"), arguments.pop("scales"), **arguments)


def f32(*shape, **options):
    return lambda arguments: torch.zeros(shape, device=arguments["a"].device, **options)


CASES = {
    "activations of an integer dtype": ("uint4b8", {"a": f32(3, K, dtype=torch.int32)},
        "a: expected float16, bfloat16 or float32 [..., K], got int32 [3, 64]"),
    "complex activations": ("uint4b8", {"a": f32(3, K, dtype=torch.complex64)},
        "a: expected float16, bfloat16 or float32 [..., K], got ComplexFloat [3, 64]"),
    "a scalar for activations": ("uint4b8", {"a": f32()},
        "a: expected float16, bfloat16 or float32 [..., K], got float32 []"),
    "K mismatch": ("uint4b8", {"a": f32(3, 72)},
        "a: expected [..., K] with K = 64, got float32 [3, 72]"),
    "packed words of another dtype": ("uint4b8", {"b_packed": f32(8, N, dtype=torch.int64)},
        "b_packed: expected int32 [K/8, N], got int64 [8, 24]"),
    "packed words of another rank": ("uint4b8", {"b_packed": lambda x: x["b_packed"][None]},
        "b_packed: expected int32 [K/8, N], got int32 [1, 8, 24]"),
    "packed words that are not contiguous": ("uint4b8", {"b_packed": lambda x: x["b_packed"].t().contiguous().t()},
        "b_packed: expected a contiguous tensor, got int32 [8, 24] with strides [1, 8]"),
    "no packed words": ("uint4b8", {"b_packed": f32(0, N, dtype=torch.int32)},
        "b_packed: expected at least one word and one column, got int32 [0, 24]"),
    "N mismatch": ("uint4b8", {"scales": f32(2, 25)},
        "scales: expected float16, bfloat16 or float32 [G, N] = [2, 24], got float32 [2, 25]"),
    "wrong number of groups": ("uint4b8", {"scales": f32(3, N)},
        "scales: expected float16, bfloat16 or float32 [G, N] = [2, 24], got float32 [3, 24]"),
    "scales of another rank": ("uint4b8", {"scales": f32(N)}, "scales: expected float16"),
    "integer scales for a format with floating scales": ("uint4b8", {"scales": f32(2, N, dtype=torch.uint8)},
        "scales: expected float16, bfloat16 or float32 [G, N] = [2, 24], got uint8 [2, 24]"),
    "floating scales for a format with coded scales": ("nvfp4", {"scales": f32(4, N)},
        "scales: expected uint8 E4M3 codes (view float8 tensors as uint8) [G, N] = [4, 24], got float32 [4, 24]"),
    "float8 scales": ("nvfp4", {"scales": lambda x: x["scales"].view(torch.float8_e4m3fn)},
        "scales: expected uint8 E4M3 codes (view float8 tensors as uint8) [G, N] = [4, 24], got Float8_e4m3fn [4, 24]"),
    "a group size that is none": ("uint4b8", {"group_size": 48},
        "group_size: expected one of 16, 32, 64, 128, 256, or K = 64 for uint4b8, got 48"),
    "group size -1 in the operator": ("uint4b8", {"group_size": -1}, "group_size: expected one of 16"),
    "group size 0": ("uint4b8", {"group_size": 0}, "group_size: expected one of 16"),
    "a group size that the format does not have": ("nvfp4", {"group_size": 32},
        "group_size: expected 16 for nvfp4, got 32"),
    "mxfp4 with K as its group": ("mxfp4", {"group_size": K}, "group_size: expected 32 for mxfp4, got 64"),
    "zeros missing": ("uint4", {"zeros": None},
        "zeros: expected uint8 codes or float16, bfloat16 or float32 zero points [G, N] for uint4, got None"),
    "biases missing": ("uint4_bias", {"zeros": None},
        "zeros: expected float16, bfloat16 or float32 [G, N] for uint4_bias, got None"),
    "integer biases": ("uint4_bias", {"zeros": f32(2, N, dtype=torch.uint8)},
        "zeros: expected float16, bfloat16 or float32 [G, N] = [2, 24], got uint8 [2, 24]"),
    "zeros of another shape": ("uint4", {"zeros": f32(2, 3, dtype=torch.uint8)},
        "zeros: expected uint8 codes or float16, bfloat16 or float32 zero points [G, N] = [2, 24], got uint8 [2, 3]"),
    "zeros too many": ("uint4b8", {"zeros": f32(2, N, dtype=torch.uint8)},
        "zeros: expected none for uint4b8, got uint8 [2, 24]"),
    "global scale too many": ("mxfp4", {"global_scale": f32()},
        "global_scale: expected none for mxfp4, got float32 []"),
    "global scale of another dtype": ("nvfp4", {"global_scale": f32(dtype=torch.float16)},
        "global_scale: expected float32 [], [1] or [N] = [24], got float16 []"),
    "global scale of another shape": ("nvfp4", {"global_scale": f32(2)},
        "global_scale: expected float32 [], [1] or [N] = [24], got float32 [2]"),
    "lut missing": ("lut4", {"lut": None}, "lut: expected float32 [16] for lut4, got None"),
    "lut for a format without one": ("uint4b8", {"lut": f32(16)}, "lut: expected none for uint4b8, got float32 [16]"),
    "lut of another shape": ("lut4", {"lut": f32(15)}, "lut: expected float32 [16], got float32 [15]"),
    "perm of another dtype": ("uint4b8", {"perm": f32(K, dtype=torch.int64)},
        "perm: expected int32 [K] = [64], got int64 [64]"),
    "perm of another length": ("uint4b8", {"perm": f32(K - 8, dtype=torch.int32)},
        "perm: expected int32 [K] = [64], got int32 [56]"),
    "bias of another shape": ("uint4b8", {"bias": f32(1)},
        "bias: expected float16, bfloat16 or float32 [N] = [24], got float32 [1]"),
    "bias of another dtype": ("uint4b8", {"bias": f32(N, dtype=torch.int32)}, "bias: expected float16"),
    "an unknown format": ("uint4b8", {"weight_format": "int3"},
        f"weight_format: expected one of {', '.join(tmm.WEIGHT_FORMATS)}, got 'int3'"),
    "an alias in the operator": ("uint4b8", {"weight_format": "u4b8"}, "weight_format: expected one of uint4b8"),
    "an unknown variant": ("uint4b8", {"variant": "fastest"},
        "variant: expected one of auto, rounded, gemv, fused, double_buffered, single_stage, striped, tensor, two_pass, or VARIANT:TILE, "
        "such as 'double_buffered:128x64x16', got 'fastest'"),
    "a tile that its variant does not have": ("uint4b8", {"variant": "striped:96x64x32"},
        "variant: expected one of auto, rounded, gemv, fused, double_buffered, single_stage, striped, tensor, two_pass, or VARIANT:TILE, "
        "such as 'double_buffered:128x64x16', got 'striped:96x64x32'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_gemm_refuses(case, device):
    base, changes, message = CASES[case]
    with pytest.raises(ValueError, match=re.escape(f"torch_marlin_metal::gemm: {message}")):
        call(device, base, **changes)


def test_gemm_refuses_float64_activations():
    with pytest.raises(
        ValueError, match=re.escape("gemm: a: expected float16, bfloat16 or float32 [..., K], got float64")
    ):
        call("cpu", a=torch.zeros(3, K, dtype=torch.float64))


@pytest.mark.parametrize("case", CASES)
def test_fake_kernels_refuse_the_same(case):
    base, changes, message = CASES[case]
    with pytest.raises(ValueError, match=re.escape(f"torch_marlin_metal::gemm: {message}")):
        call("meta", base, **changes)


@pytest.mark.parametrize("argument", ["b_packed", "scales", "zeros", "lut", "global_scale", "perm", "bias"])
def test_tensors_on_another_device_are_refused(argument):
    weight_format = {"lut": "lut4", "global_scale": "nvfp4", "zeros": "uint4"}.get(argument, "uint4b8")

    def elsewhere(arguments):
        tensors = {"perm": torch.arange(K, dtype=torch.int32), "bias": torch.zeros(N), "global_scale": torch.ones(())}
        return arguments.get(argument, tensors.get(argument)).to("meta")

    with pytest.raises(
        ValueError, match=r"gemm: \w+: expected a tensor on \w+.* like the first argument, got .* on \w+"
    ):
        call("cpu", weight_format, **{argument: elsewhere})


@pytest.mark.parametrize("index", [-1, K, 2**31 - 1])
def test_perm_out_of_range_is_refused_on_the_cpu(index):
    perm = torch.arange(K, dtype=torch.int32)
    perm[5] = index
    message = re.escape(f"perm: expected indices in [0, K) with K = 64, got {index}")
    with pytest.raises(IndexError, match="gemm: " + message):
        call("cpu", perm=perm)
    weight = reference.make_weight("uint4b8", K, N, 32)
    with pytest.raises(IndexError, match="dequantize: " + message):
        OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments, perm=perm)
    with pytest.raises(IndexError, match="gptq_repack: " + message):
        tmm.ops.gptq_repack(weight.b_packed, perm=perm)


@pytest.mark.parametrize("shape", [(), (8,), (1, 8, N)])
def test_words_of_another_rank_are_refused_if_the_group_is_all_of_k(shape, device):
    words = torch.zeros(shape, dtype=torch.int32, device=device)
    weight = tmm.PackedWeight(words, torch.ones(1, N, device=device), "uint4b8", -1)
    message = re.escape(f"b_packed: expected int32 [K/8, N], got int32 {list(shape)}")
    with pytest.raises(ValueError, match="gemm: " + message):
        tmm.gemm(torch.zeros(3, K, device=device), weight)
    with pytest.raises(ValueError, match="dequantize: " + message):
        weight.dequantize()


def test_dequantize_refuses_other_dtypes(device):
    weight = reference.make_weight("uint4b8", K, N, 32).to(device)
    with pytest.raises(ValueError, match="dequantize: dtype: expected float16, bfloat16 or float32, got int32"):
        OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments, dtype=torch.int32)


def test_unknown_names_in_python_list_the_known_ones():
    with pytest.raises(
        ValueError,
        match=r"expected one of uint4b8, .*uint6_bias \(or u4b8, u4, .*, float8_e4m3fn, fp8, q4_k, q5_k, q6_k\), got 'q4'",
    ):
        tmm.formats.weight_format("q4")


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("gptq_repack", {"qweight": ((8, 24), torch.int64)}, "qweight: expected int32 [K/8, N], got int64 [8, 24]"),
        ("gptq_repack", {"qweight": ((8,), torch.int32)}, "qweight: expected int32 [K/8, N], got int32 [8]"),
        ("gptq_repack", {"qweight": ((8, 24), torch.int32), "perm": ((8,), torch.int32)},
            "perm: expected int32 [K] = [64], got int32 [8]"),
        ("awq_repack", {"qweight": ((12, 3), torch.int32)},
            "qweight: expected [K, N/8] with K a multiple of 8, got int32 [12, 3]"),
        ("awq_repack", {"qweight": ((16, 3), torch.float32)}, "qweight: expected int32 [K, N/8], got float32 [16, 3]"),
        ("awq_unpack_zeros", {"qzeros": ((2, 3), torch.uint8)}, "qzeros: expected int32 [G, N/8], got uint8 [2, 3]"),
        ("transpose_words", {"words": ((2, 3), torch.uint8)}, "words: expected int32 [N, K/8], got uint8 [2, 3]"),
        ("gptq_unpack_zeros", {"qzeros": ((2,), torch.int32), "checkpoint_version": 1},
            "qzeros: expected int32 [G, N/8], got int32 [2]"),
        ("gptq_unpack_zeros", {"qzeros": ((2, 3), torch.int32), "checkpoint_version": 3},
            "checkpoint_version: expected 1 or 2, got 3"),
        ("gptq_unpack_zeros", {"qzeros": ((2, 3), torch.int32), "checkpoint_version": 1, "rule": "minus"},
            "rule: expected one of word, masked, unmasked, got 'minus'"),
    ],
)  # fmt: skip
def test_repacks_refuse(op, arguments, message, device):
    built = {
        name: torch.zeros(value[0], dtype=value[1], device=device) if isinstance(value, tuple) else value
        for name, value in arguments.items()
    }
    with pytest.raises(ValueError, match=re.escape(f"torch_marlin_metal::{op}: {message}")):
        getattr(tmm.ops, op)(**built)


def test_repacks_refuse_strided_words(device):
    words = torch.zeros(24, 8, dtype=torch.int32, device=device).t()
    for op in (tmm.ops.gptq_repack, tmm.ops.awq_repack, tmm.ops.transpose_words):
        with pytest.raises(
            ValueError, match=r"(qweight|words): expected a contiguous tensor, got .* with strides \[1, 8\]"
        ):
            op(words)
