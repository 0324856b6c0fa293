"""gemm_fp32 returns the result of gemm before the rounding to the dtype of the activations."""

import numpy as np
import pytest
import torch

from tests.ops.test_contract import utils
from tests.support import reference

OPS = torch.ops.torch_marlin_metal
K, N = 200, 72


def case(weight_format: str, dtype: torch.dtype, M: int):
    """Returns a weight and activations with an act-order and a bias, as arguments of the operator."""
    weight = reference.make_weight(weight_format, K, N, 64)
    generator = torch.Generator().manual_seed(M)
    a = torch.randn(M, K, generator=generator).to(dtype)
    perm = torch.randperm(K, generator=generator).int()
    return weight, a, {"perm": perm, "bias": torch.randn(N, generator=generator)}


def on(device: str, weight, a, extra):
    weight = weight.to(device)
    moved = {name: tensor.to(device) for name, tensor in extra.items()}
    return (a.to(device), weight.b_packed, weight.scales), {**weight.arguments, **moved}


@pytest.mark.parametrize("weight_format", reference.FORMATS)
def test_sums_keep_the_bound_of_fp32_and_round_to_the_result_of_gemm(weight_format, device):
    """On the CPU, one row, few rows and many rows use different kernels; on x86, many rows may also use AMX tiles."""
    index = reference.FORMATS.index(weight_format)
    for i, M in enumerate((1, 3, 9, 40) if device == "cpu" else (3,)):
        for dtype in reference.dtypes_in_turn(index + i, device == "cpu"):
            weight, a, extra = case(weight_format, dtype, M)
            arguments, options = on(device, weight, a, extra)
            sums = OPS.gemm_fp32(*arguments, **options)
            assert sums.dtype == torch.float32 and sums.shape == (M, N)
            exact, bound = reference.gemm(
                a.float(), weight, extra["bias"], perm=extra["perm"].numpy(), raw_codes=reference.sums_raw_codes(device)
            )
            reference.check_gemm(sums, exact, bound)
            assert torch.equal(sums, OPS.gemm_fp32(*arguments, **options))
            if device == "cpu" or dtype == torch.float32:
                assert torch.equal(sums.to(dtype), OPS.gemm(*arguments, **options))


def test_sums_beyond_half_are_finite(device):
    codes = np.full((256, 8), 15, dtype=np.uint8)
    weight = reference.make_weight("uint4b8", 256, 8, 64, codes=codes).to(device)
    weight.scales[:] = 1.0
    a = torch.full((2, 256), 100.0, dtype=torch.float16, device=device)
    sums = OPS.gemm_fp32(a, weight.b_packed, weight.scales, **weight.arguments)
    assert torch.equal(sums.cpu(), torch.full((2, 8), 7 * 100.0 * 256))


@pytest.mark.parametrize("weight_format", ["uint4", "nvfp4"])
def test_opcheck(weight_format, device):
    arguments, options = on(device, *case(weight_format, torch.bfloat16, 3))
    torch.library.opcheck(OPS.gemm_fp32.default, arguments, options, test_utils=utils(device))


def test_leading_dimensions_and_empty_rows(device):
    (a, *weight), options = on(device, *case("uint4b8", torch.float16, 6))
    sums = OPS.gemm_fp32(a, *weight, **options)
    assert torch.equal(OPS.gemm_fp32(a.view(2, 3, K), *weight, **options), sums.view(2, 3, N))
    empty = OPS.gemm_fp32(a[:0], *weight, **options)
    assert empty.shape == (0, N) and empty.dtype == torch.float32


def test_wrong_arguments_are_named(device):
    (a, *weight), options = on(device, *case("uint4b8", torch.float16, 2))
    with pytest.raises(ValueError, match=r"gemm_fp32: a: expected \[\.\.\., K\] with K = 200"):
        OPS.gemm_fp32(a[:, 8:], *weight, **options)
    with pytest.raises(ValueError, match="gemm_fp32: a: expected a tensor that does not require grad"):
        OPS.gemm_fp32(a.requires_grad_(), *weight, **options)
    options["bias"] = torch.randn(N, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="gemm_fp32: bias: expected a tensor that does not require grad"):
        OPS.gemm_fp32(a.detach(), *weight, **options)
    if device == "cpu":
        options |= {"bias": None, "perm": torch.full((K,), K, dtype=torch.int32)}
        with pytest.raises(IndexError, match=r"gemm_fp32: perm: expected indices in \[0, K\) with K = 200, got 200"):
            OPS.gemm_fp32(a.detach(), *weight, **options)


def test_flops_are_those_of_gemm():
    arguments, options = on("cpu", *case("uint4b8", torch.float16, 3))
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        OPS.gemm_fp32(*arguments, **options)
    assert counter.get_total_flops() == 2 * 3 * K * N
