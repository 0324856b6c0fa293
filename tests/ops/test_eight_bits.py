"""Every operator with codes of 5, 6 and 8 bits agrees with fp64, for sampled formats, shapes, groups and dtypes."""

import re

import numpy as np
import pytest
import torch

import torch_marlin_metal as tmm
from tests.support import experts as reference_experts
from tests.support import reference
from tests.support.experts import make_experts, run
from tests.support.reference import random
from torch_marlin_metal.repack import pack_planes, unpack_planes

OPS = torch.ops.torch_marlin_metal
FLOATING_CODES = ("float8_e4m3", "mxfp8")
# Numbers of rows that use each kernel of the CPU and of the GPU; K that end inside a word row, a block and a group; N
# with tails.
ROWS = (1, 2, 3, 5, 8, 9, 17, 33, 64)
SHAPES = ((72, 129), (264, 40), (1000, 7), (8, 65))


# On mps, a sample is enough: zero points, E4M3 codes, coded scales, and planes with biases. tests/kernels/ tests the
# decoding of each format.
ON_MPS = ("uint8", "float8_e4m3", "mxfp8", "uint6_bias")
each_wide_format = pytest.mark.parametrize(
    "weight_format",
    [name if name in ON_MPS else pytest.param(name, marks=pytest.mark.beyond_sample) for name in reference.WIDE],
)


def weight_of(weight_format: str, K: int, N: int, turn: int, **options) -> reference.Weight:
    """Returns a weight whose group size, dtype of scales and dtype of zeros depend on `turn`."""
    group_size = (16, 64, K, 32, 128)[turn % 5]
    zeros = (None, *reference.DTYPES)[turn % 4] if weight_format in ("uint5", "uint6", "uint8") else None
    options = {"scales_dtype": reference.DTYPES[turn % 3], "zeros_dtype": zeros} | options
    return reference.make_weight(weight_format, K, N, group_size, seed=turn, **options)


def arguments(weight: reference.Weight) -> tuple[tuple[torch.Tensor, torch.Tensor], dict]:
    return (weight.b_packed, weight.scales), weight.arguments


@each_wide_format
def test_products_are_within_the_bound(weight_format, device):
    turn = reference.WIDE.index(weight_format)
    for i, (K, N) in enumerate(SHAPES if device == "cpu" else SHAPES[turn % 4 :][:1]):
        for dtype in reference.DTYPES if device == "cpu" else reference.DTYPES[(turn + 1) % 3 :][:1]:
            weight = weight_of(weight_format, K, N, turn + i)
            a, bias = random(max(ROWS), K, dtype=dtype, seed=K), random(N, dtype=dtype, seed=1)
            perm = np.random.default_rng(K).permutation(K).astype(np.int32) if i % 2 else None
            exact, bound = reference.gemm(a, weight, bias, perm, raw_codes=reference.sums_raw_codes(device))
            tensors, named = arguments(weight.to(device))
            if perm is not None:
                named = named | {"perm": torch.from_numpy(perm).to(device)}
            for M in ROWS if device == "cpu" else (1, 5, 17):
                result = OPS.gemm(a[:M].to(device), *tensors, **named, bias=bias.to(device))
                assert result.dtype == dtype
                reference.check_gemm(result, exact[:M], bound[:M])


@each_wide_format
def test_dequantize_and_embedding_round_the_exact_weight_once(weight_format, device):
    turn = reference.WIDE.index(weight_format)
    K, N, dtype = 72, 65, reference.DTYPES[turn % 3]
    weight = weight_of(weight_format, K, N, turn)
    perm = np.random.default_rng(turn).permutation(K).astype(np.int32)
    exact, magnitude = np.empty((K, N)), np.empty((K, N))
    exact[perm], magnitude[perm] = weight.exact, weight.magnitude
    tensors, named = arguments(weight.to(device))
    named = named | {"perm": torch.from_numpy(perm).to(device), "dtype": dtype}
    rounding = 2.0**-23 * magnitude + reference.UNIT_ROUNDOFF[dtype] * np.abs(exact) + reference.TINY[dtype]
    dense = OPS.dequantize(*tensors, **named)
    reference.check_gemm(dense, exact, rounding)
    ids = torch.tensor([[0, 64, 7]], device=device)
    assert torch.equal(OPS.embedding(ids, *tensors, **named), dense.T[ids])


@each_wide_format
def test_the_transposed_product_decodes_parts_of_every_size(weight_format, device, monkeypatch):
    K, N, turn = 200, 24, reference.WIDE.index(weight_format)
    weight = reference.make_weight(weight_format, K, N, 64)
    grad = random(3, N, dtype=torch.float32)
    exact = reference.to_numpy(grad) @ weight.exact.T
    bound = 32 * 2.0**-24 * (np.abs(reference.to_numpy(grad)) @ weight.magnitude.T)
    tensors, named = arguments(weight.to(device))
    for part_bytes in (1, 20 * 4 * N, 80 * 4 * N, 1 << 26) if device == "cpu" else (20 * 4 * N,):
        monkeypatch.setenv("TORCH_MARLIN_METAL_GRADIENT_BYTES", str(part_bytes + turn))
        reference.check_gemm(OPS.gemm_transposed(grad.to(device), *tensors, **named), exact, bound)


@pytest.mark.parametrize("weight_format", ["uint5b16", "uint5_bias"])
def test_parts_of_the_transposed_product_begin_at_words_of_upper_bits(weight_format, monkeypatch):
    """A group of 16 is half of a word of upper bits, so a part must not begin at every group."""
    K, N = 104, 24
    weight = reference.make_weight(weight_format, K, N, 16)
    grad = random(3, N, dtype=torch.float32)
    bound = 32 * 2.0**-24 * (np.abs(reference.to_numpy(grad)) @ weight.magnitude.T)
    tensors, named = arguments(weight)
    monkeypatch.setenv("TORCH_MARLIN_METAL_GRADIENT_BYTES", "1")
    reference.check_gemm(OPS.gemm_transposed(grad, *tensors, **named), reference.to_numpy(grad) @ weight.exact.T, bound)


@each_wide_format
def test_experts_are_within_the_bound(weight_format, device):
    turn = reference.WIDE.index(weight_format)
    experts = make_experts(weight_format, 5, 80, 42, 16, use_perm=turn % 2 == 1)
    ids = torch.tensor([[0, 4, 2], [4, 1, -1], [2, 2, 0], [5, -3, 3]])
    dtype = reference.DTYPES[turn % 3]
    for tokens in (1, 4) if device == "cpu" else (4,):
        a, reduce = random(tokens, 80, dtype=dtype), turn % 2 == 0
        exact, bound = reference_experts.moe_gemm(
            a, experts, ids[:tokens], reduce=reduce, raw_codes=reference.sums_raw_codes(device)
        )
        reference.check_gemm(run(a, experts, ids[:tokens], device, reduce=reduce), exact, bound)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("weight_format", FLOATING_CODES)
def test_nan_codes_reach_their_column_and_no_other(weight_format, code, device):
    K, N, column = 72, 40, 11
    weight = reference.make_weight(weight_format, K, N, 32)
    exact, bound = reference.gemm(random(33, K, dtype=torch.float32), weight, raw_codes=True)
    bytes_of_code = weight.b_packed.numpy().view(np.uint8).reshape(K // 4, N, 4)
    bytes_of_code[10, column, 2] = code
    tensors, named = arguments(weight.to(device))
    others = [n for n in range(N) if n != column]
    a = random(33, K, dtype=torch.float32).to(device)
    for M in (1, 4, 33):
        result = OPS.gemm(a[:M], *tensors, **named).cpu()
        assert torch.isnan(result[:, column]).all()
        reference.check_gemm(result[:, others], exact[:M, others], bound[:M, others])
    dense = OPS.dequantize(*tensors, **named, dtype=torch.bfloat16).cpu()
    assert torch.isnan(dense).nonzero().tolist() == [[42, column]]


@pytest.mark.parametrize("M", [1, 3])
def test_products_of_e4m3_keep_their_bits_down_to_2_to_the_minus_118(M):
    """docs/use/operators.md states this limit.

    The code 0x38 is 1, and only one activation is nonzero, so nothing is rounded.
    """
    words = torch.full((8, 16), 0x38383838, dtype=torch.int32)
    scales = torch.full((1, 16), 2.0**100)
    for exponent in (-118, -124):
        a = torch.zeros(M, 32)
        a[:, 5] = (1 + 2.0**-23) * 2.0**exponent
        result = OPS.gemm(a, words, scales, weight_format="float8_e4m3", group_size=32)
        lost = 0 if exponent == -118 else 2.0**-126 * 2.0**100
        assert (result.double() - a[:, 5:6].double() * 2.0**100).abs().max() <= lost


@pytest.mark.parametrize("K", [8, 16, 40, 264])
@pytest.mark.parametrize("code_bits", [5, 6])
def test_planes_hold_every_code(code_bits, K):
    """The planes have the layout of docs/formats/formats.md, and operators decode the codes that were packed."""
    codes = np.random.default_rng(K).integers(0, 1 << code_bits, (K, 9), dtype=np.uint8)
    low, high = pack_planes(torch.from_numpy(codes), code_bits)
    assert torch.equal(low, reference.pack(codes & 15))
    assert torch.equal(high, reference.pack_high(codes, code_bits))
    assert torch.equal(unpack_planes(low, high, code_bits), torch.from_numpy(codes))
    scales = torch.ones(1, 9)
    held = tmm.PackedWeight(low, scales, f"uint{code_bits}_bias", K, zeros=torch.zeros(1, 9), b_high=high)
    assert np.array_equal(held.validate().dequantize().numpy(), codes)


def test_planes_refuse_what_they_cannot_hold():
    codes = torch.full((8, 4), 33, dtype=torch.uint8)
    with pytest.raises(ValueError, match=re.escape("pack_planes: codes: expected codes 0..31, got 33")):
        pack_planes(codes, 5)
    low, high = pack_planes(codes, 6)
    with pytest.raises(ValueError, match=re.escape("unpack_planes: b_high: expected shape [1, 4], got None")):
        unpack_planes(low, None, 6)
    with pytest.raises(ValueError, match=re.escape("unpack_planes: b_high: expected shape [1, 4], got [2, 4]")):
        unpack_planes(low, torch.cat([high, high]), 6)


@pytest.mark.parametrize("code_bits", [4, 8])
def test_gptq_repack_moves_rows(code_bits, device):
    codes = np.random.default_rng(3).integers(0, 1 << code_bits, (72, 41), dtype=np.uint8)
    perm = np.random.default_rng(4).permutation(72).astype(np.int32)
    words = reference.pack(codes, code_bits).to(device)
    moved = OPS.gptq_repack(words, perm=torch.from_numpy(perm).to(device), code_bits=code_bits)
    assert torch.equal(moved.cpu(), reference.pack(codes[perm], code_bits))
    assert torch.equal(OPS.gptq_repack(words, code_bits=code_bits), words)


def test_bytes_of_rows_are_transposed_words(device):
    """Bytes `[N, K]`, as in checkpoints of 8 bits, become the packed layout."""
    codes = np.random.default_rng(5).integers(0, 256, (72, 41), dtype=np.uint8)
    stored = torch.from_numpy(np.ascontiguousarray(codes.T)).to(device)
    assert torch.equal(OPS.transpose_words(stored.view(torch.int32)).cpu(), reference.pack(codes, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b_packed": torch.zeros(3, 8, dtype=torch.int32)}, "expected an even number of rows: K is a multiple of 8"),
        ({"b_packed": torch.zeros(4, 8, dtype=torch.int64)}, "b_packed: expected int32 [K/4, N], got int64 [4, 8]"),
        ({"scales": torch.ones(2, 8)}, "scales: expected"),
        ({"zeros": torch.zeros(1, 8, dtype=torch.uint8)}, "zeros: expected none for uint8b128"),
        ({"weight_format": "uint8"}, "for uint8, got None"),
        ({"weight_format": "mxfp8", "group_size": 32}, "uint8 E8M0 codes"),
        ({"weight_format": "float8_e5m2"}, "weight_format: expected one of uint4b8"),
        ({"b_high": torch.zeros(1, 8, dtype=torch.int32)}, "b_high: expected none for uint8b128"),
        ({"weight_format": "uint5b16", "group_size": 32}, "b_high: expected int32 [K/32, N] for uint5b16, got None"),
        (
            {"weight_format": "uint6b32", "group_size": 32, "b_high": torch.zeros(1, 8, dtype=torch.int32)},
            "b_high: expected int32 [K/16, N] = [2, 8], got int32 [1, 8]",
        ),
        ({"group_size": 24}, "group_size: expected one of 16, 32, 64, 128, 256, or K = 16 for uint8b128, got 24"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    given = {
        "b_packed": torch.zeros(4, 8, dtype=torch.int32),
        "scales": torch.ones(1, 8),
        "weight_format": "uint8b128",
        "group_size": 16,
    } | change
    K = given["b_packed"].shape[0] * (8 if given["weight_format"] in reference.PLANES else 4)
    with pytest.raises(ValueError, match=re.escape(message)):
        OPS.gemm(torch.ones(1, K), **given)
