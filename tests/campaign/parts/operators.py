"""Compares products of random shapes, formats and magnitudes with fp64, within the bound of docs/use/operators.md."""

import random
from pathlib import Path

import torch

import torch_marlin_metal as tmm
from tests.support import reference

OPS = torch.ops.torch_marlin_metal


def case(rng: random.Random, work: Path) -> str:
    """Multiplies and dequantizes.

    The memory around the operands is NaN, so that a read outside of them changes the result.
    """
    del work
    name = rng.choice(reference.ANY_FORMAT)
    K, N = 8 * rng.choice((1, 2, 3, 5, 16, 17, 32, 65, 128, 256)), rng.choice((1, 2, 7, 8, 15, 33, 64, 100, 129, 300))
    M = rng.choice((0, 1, 1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 64))
    dtype = rng.choice(reference.DTYPES)
    scales_dtype = rng.choice(reference.DTYPES)
    group_size = reference.FIXED_GROUP_SIZES.get(name) or rng.choice((*reference.GROUP_SIZES, K))
    wide = name in ("mxfp4", "mxfp8") or (name not in ("nvfp4",) and scales_dtype != torch.float16)
    options = {"scales_dtype": scales_dtype, "seed": rng.randrange(1 << 30)}
    if name == "nvfp4" and rng.random() < 0.5:
        options["global_scale_shape"] = rng.choice(((), (1,), (-1,)))
    if tmm.WEIGHT_FORMATS[name].scale_coding == "floating" and group_size <= 256 and rng.random() < 0.3:
        codes = {"scales_dtype": rng.choice((torch.uint8, torch.int8)), "super_dtype": scales_dtype}
        has_bias = tmm.WEIGHT_FORMATS[name].zeros_role == "bias"
        options |= codes | {"zeros_dtype": rng.choice((torch.uint8, scales_dtype)) if has_bias else None}
    if name == "float8_e4m3" and "super_dtype" not in options and rng.random() < 0.5:
        N, group_size = rng.choice((128, 256, 384)), 128
        options["block_scales"] = True
    if wide and rng.random() < 0.5:
        options["exponent"] = rng.randrange(-90, 96)
    if name in ("mxfp4", "mxfp8") and "exponent" in options:
        options["exponent"] = max(-99, min(options["exponent"], 112))
    weight = reference.make_weight(name, K, N, group_size, **options)
    torch.set_num_threads(rng.choice((1, 2, 3)))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    padding = rng.choice((0, 1, 3))
    around = torch.full((M + 2, K + 2 * padding + 1), torch.nan, dtype=dtype)
    a = around[1 : M + 1, padding : padding + K]
    size = 2.0 ** rng.choice((0, 0, 0, -10, 10, *((-130, -100, 60) if dtype != torch.float16 else ())))
    a.copy_((torch.randn(M, K, generator=generator) * size).to(dtype))
    bias = torch.randn(N, generator=generator).to(rng.choice(reference.DTYPES)) if rng.random() < 0.5 else None
    exact, bound = reference.gemm(a, weight, bias)
    # The byte_split kernels round each activation relative to the largest activation of its group, so the bound
    # contains the largest activation.
    largest = float(a.float().abs().max()) if M else 0.0
    bound = bound + 16 * 2.0**-24 * largest * weight.magnitude.sum(0)
    result = OPS.gemm(a, weight.b_packed, weight.scales, **weight.arguments, bias=bias)
    if float(abs(weight.exact).max()) * largest * K < 2.0**100:
        reference.check_gemm(result, exact, bound)
    dense = OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments, dtype=torch.float32)
    assert torch.isfinite(dense).all() or float(abs(weight.exact).max()) > 2.0**127
    return name
