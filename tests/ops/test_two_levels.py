"""Scales of two levels: integer codes of groups times the scales of blocks of 256 k, in every operator."""

import re

import numpy as np
import pytest
import torch

from tests.support import experts as reference_experts
from tests.support import reference
from tests.support.reference import random
from torch_marlin_metal.packed_weight import PackedWeight

OPS = torch.ops.torch_marlin_metal
U8, I8, F16, BF16, F32 = torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32
# Weight format, dtypes of scales, zeros and super_scales, K, N, group size, dtype of activations. With K = 520 and K =
# 264, the last group and the last block are short.
CASES = [
    ("uint4_bias", U8, U8, F16, 520, 41, 32, F16),
    ("uint4_bias", U8, U8, BF16, 264, 40, 16, BF16),
    ("uint4_bias", I8, F16, F32, 72, 40, 72, F32),
    ("lut4", I8, None, F16, 512, 40, 32, F32),
    ("uint4b8", I8, None, F32, 264, 33, 16, F16),
    ("uint4", U8, U8, F16, 576, 24, 64, BF16),
    ("float4_e2m1", U8, None, BF16, 512, 24, 256, F16),
    ("uint5_bias", U8, U8, F16, 520, 24, 32, F32),  # as Q5_K
    ("uint6b32", I8, None, F16, 264, 41, 16, F16),  # as Q6_K
]


def weight_of(case: tuple) -> reference.Weight:
    weight_format, scales, zeros, super_dtype, K, N, group_size, _ = case
    options = {"scales_dtype": scales, "zeros_dtype": zeros, "super_dtype": super_dtype}
    return reference.make_weight(weight_format, K, N, group_size, **options)


def packed(weight: reference.Weight) -> PackedWeight:
    return PackedWeight(weight.b_packed, weight.scales, **weight.arguments)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case, device) -> None:
    weight, dtype = weight_of(case), case[-1]
    K, N = weight.exact.shape
    perm = np.random.default_rng(0).permutation(K).astype(np.int32) if N % 2 == 0 else None
    held = packed(weight.to(device))
    held.perm = None if perm is None else torch.from_numpy(perm).to(device)
    a, bias = random(33, K, dtype=dtype), random(N, dtype=dtype)
    exact, bound = reference.gemm(a, weight, bias, perm, reference.sums_raw_codes(device))
    rows = (1, 5, 33)
    turn = CASES.index(case) % 3  # on mps, each number of rows needs separate kernels
    for M in rows if device == "cpu" else rows[turn : turn + 1]:
        result = OPS.gemm(a[:M].to(device), **held.arguments(), bias=bias.to(device))
        reference.check_gemm(result, exact[:M], bound[:M])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decoded_weights_and_rows(case, device) -> None:
    weight = weight_of(case)
    held = packed(weight).validate()
    N = weight.exact.shape[1]
    dense = held.to(device).dequantize().cpu()
    reference.check_gemm(dense, weight.exact, 2.0**-23 * weight.magnitude + reference.TINY[F32])
    assert torch.equal(dense, held.one_level().dequantize())
    ids = torch.tensor([0, N - 1, 7])
    rows = OPS.embedding(ids.to(device), **held.to(device).arguments(), dtype=F32)
    assert torch.equal(rows.cpu(), dense.T[ids])


# Parts of single words, of some groups, and of all of K; a part may begin inside a block of 256.
@pytest.mark.parametrize("rows", [1, 20, 96, 10_000])
def test_transposed_products_in_parts_of_every_size(rows, device, monkeypatch) -> None:
    weight = weight_of(CASES[0])
    monkeypatch.setenv("TORCH_MARLIN_METAL_GRADIENT_BYTES", str(rows * 4 * 41))
    a = random(3, 41)
    got = OPS.gemm_transposed(a.to(device), **packed(weight.to(device)).arguments())
    exact = reference.to_numpy(a) @ weight.exact.T
    weighted = np.abs(reference.to_numpy(a)) @ weight.magnitude.T
    reference.check_gemm(got, exact, (2.0**-24 + 16 * 2.0**-24) * weighted)


def test_gradients() -> None:
    held = packed(weight_of(CASES[0]))
    a = random(3, 520).requires_grad_()
    OPS.gemm(a, **held.arguments()).sum().backward()
    assert torch.equal(a.grad, OPS.gemm_transposed(torch.ones(3, 41), **held.arguments()))


@pytest.mark.parametrize(("weight_format", "scales", "zeros", "use_perm"), [
    ("uint4_bias", U8, U8, True), ("lut4", I8, None, False), ("uint6_bias", U8, U8, True)])  # fmt: skip
def test_experts(weight_format, scales, zeros, use_perm, device) -> None:
    options = {"scales_dtype": scales, "zeros_dtype": zeros, "super_dtype": F16}
    experts = reference_experts.make_experts(weight_format, 4, 264, 24, 32, use_perm=use_perm, **options)
    ids = torch.tensor([[0, 3], [3, 1], [2, -1]])
    a = random(3, 264, dtype=F16)
    exact, bound = reference_experts.moe_gemm(a, experts, ids, raw_codes=reference.sums_raw_codes(device))
    reference.check_gemm(reference_experts.run(a, experts, ids, device), exact, bound)
    held = experts.to(device)
    stack = PackedWeight(held.b_packed, held.scales, **held.arguments)
    both = [w.arguments() for w in (stack, stack.one_level())]
    a, ids = a.to(device), ids.to(device)
    gated = [OPS.moe_gemm_gated(a=a, expert_ids=ids, **arguments, activation="silu") for arguments in both]
    assert torch.equal(gated[0], gated[1])
    grad = random(3, 2, 24).to(device)
    backward = [OPS.moe_gemm_grad_a(grad=grad, expert_ids=ids, **arguments) for arguments in both]
    assert torch.equal(backward[0], backward[1])


@pytest.mark.large
def test_kernels_of_many_rows(device) -> None:
    """Products of many rows use separate kernels, also on the CPU."""
    weight = weight_of(("uint4_bias", U8, U8, F16, 520, 72, 32, F16))
    a = random(130, 520, dtype=F16)
    exact, bound = reference.gemm(a, weight, raw_codes=reference.sums_raw_codes(device))
    variants = ("auto", "rounded") if device == "cpu" else ("striped", "double_buffered")
    for variant in variants:
        got = OPS.gemm(a.to(device), **packed(weight.to(device)).arguments(), variant=variant)
        reference.check_gemm(got, exact, bound)


ERRORS = [
    ({"super_scales": torch.zeros(2, 41, dtype=F16)}, "super_scales: expected .* [K/256, N] = [3, 41], got float16 [2, 41]"),
    ({"super_scales": torch.zeros(3, 41, dtype=I8)}, "super_scales: expected float16, bfloat16 or float32"),
    ({"scales": torch.zeros(17, 41, dtype=F16)}, "scales: expected uint8 or int8 codes [G, N]"),
    ({"zeros": torch.zeros(17, 41, dtype=F16)}, "zeros: expected uint8 codes [G, N]"),
    ({"super_zeros": torch.zeros(3, 41)}, "super_zeros: expected the dtype of super_scales, float16, got float32"),
    ({"super_scales": None}, "super_zeros: expected none without super_scales"),
    ({"weight_format": "mxfp4"}, "super_scales: expected none for mxfp4"),
    ({"weight_format": "uint4"}, "super_zeros: expected none for uint4"),
    ({"group_size": 520, "scales": torch.zeros(1, 41, dtype=U8)}, "group_size: expected at most 256 with super_scales"),
    ({"super_scales": None, "super_zeros": None}, "scales: expected float16, bfloat16 or float32 [G, N]"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_wrong_arguments_are_refused_by_name(changed, message) -> None:
    arguments = {**packed(weight_of(CASES[0])).arguments(), **changed}
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")):
        OPS.dequantize(**arguments, dtype=F32)
    with pytest.raises(ValueError, match=message.split(":")[0]):
        PackedWeight(**arguments).validate()
