"""gemm and dequantize agree with fp64 within the error bound of docs/use/operators.md."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch

import torch_marlin_metal as tmm
from tests.support import reference
from tests.support.reference import random

OPS = torch.ops.torch_marlin_metal

M_ALL = (0, 1, 2, 3, 5, 6, 7, 8, 9, 11, 16, 17, 33, 64, 100)
N_ALL = (1, 7, 24, 100, 129)
K_ALL = (8, 16, 24, 40, 72, 136, 200, 264, 1000, 4096)


def group_sizes(weight_format: str, K: int) -> list[int]:
    fixed = reference.FIXED_GROUP_SIZES.get(weight_format)
    return [fixed] if fixed else sorted({*reference.GROUP_SIZES, K})


def run(a, weight, **extra) -> torch.Tensor:
    return OPS.gemm(a, weight.b_packed, weight.scales, **{**weight.arguments, **extra})


def check_shape(weight_format, dtype, K, N, group_size, rows, device, **options):
    weight = reference.make_weight(weight_format, K, N, group_size, **options)
    a = random(max(rows), K, dtype=dtype, seed=K + N)
    bias = random(N, dtype=dtype, seed=1)
    exact, bound = reference.gemm(a, weight, bias, raw_codes=reference.sums_raw_codes(device))
    a, bias, weight = a.to(device), bias.to(device), weight.to(device)
    for M in rows:
        result = run(a[:M], weight, bias=bias)
        assert result.dtype == dtype
        reference.check_gemm(result, exact[:M], bound[:M])


def pairs(Ns, K, weight_format, whole):
    """Returns pairs (N, group size): all if `whole`, otherwise each N once, with the group sizes in rotation.

    The first group size depends on K and on the format. The dtypes also rotate, so that over all formats each pair of
    a dtype and a group size occurs.
    """
    groups = group_sizes(weight_format, K)
    first = K_ALL.index(K) + reference.FORMATS.index(weight_format) // len(reference.DTYPES)
    turns = itertools.islice(itertools.cycle(groups), first, None)
    return list(itertools.product(Ns, groups) if whole else zip(Ns, turns, strict=False))


def dtypes(weight_format, K, whole):
    """Returns all dtypes if `whole`, otherwise one in rotation, so that each format and each K is tested with each
    dtype.
    """
    return reference.dtypes_in_turn(reference.FORMATS.index(weight_format) + K_ALL.index(K), whole)


@pytest.mark.parametrize("weight_format", reference.FORMATS)
@pytest.mark.parametrize("K", [pytest.param(K, marks=[pytest.mark.large] * (K > 40)) for K in K_ALL if K <= 264])
def test_small_shapes(weight_format, K, device, everything):
    whole = everything or device == "cpu"
    # On mps, each N and each number of rows needs separate kernels, so each K uses every second N, with rows in turn.
    Ns = N_ALL if whole else [N for i, N in enumerate(N_ALL) if (i + K_ALL.index(K)) % 2 == 0]
    for dtype in dtypes(weight_format, K, whole):
        for i, (N, group_size) in enumerate(pairs(Ns, K, weight_format, everything), K_ALL.index(K)):
            check_shape(weight_format, dtype, K, N, group_size, M_ALL if whole else ((1, 5, 33)[i % 3],), device)


@pytest.mark.parametrize("weight_format", reference.FORMATS)
@pytest.mark.parametrize("K", [K for K in K_ALL if K > 264])
@pytest.mark.large
def test_large_shapes(weight_format, K, device, everything):
    Ns = N_ALL if everything else (*N_ALL, *N_ALL) if device == "cpu" else (129,)
    shapes = pairs(Ns, K, weight_format, everything)
    types = dtypes(weight_format, K, everything or device == "cpu")
    cases = itertools.product(types, shapes) if everything else zip(itertools.cycle(types), shapes, strict=False)
    of_mps = ((1, 17, 65)[reference.FORMATS.index(weight_format) % 3],)  # each number of rows needs separate kernels
    for dtype, (N, group_size) in cases:
        rows = M_ALL if everything else (1, 2, 8, 17, 100) if device == "cpu" else of_mps
        check_shape(weight_format, dtype, K, N, group_size, rows, device)


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
@pytest.mark.parametrize("weight_format", ["uint4b8", "uint4", "uint4_bias", "float4_e2m1", "lut4"])
def test_scales_and_zeros_of_any_dtype(weight_format, dtype, device, everything):
    zeros = {"uint4": (torch.uint8, *reference.DTYPES), "uint4_bias": reference.DTYPES}.get(weight_format, (None,))
    rows, types = (1, 5, 33), list(itertools.product(reference.DTYPES, zeros))
    first = reference.DTYPES.index(dtype)
    if everything or device == "cpu":
        cases = ((*pair, M) for pair, M in itertools.product(types, rows))
    else:
        cases = ((*pair, rows[i % 3]) for i, pair in enumerate(types, first))
        if len(zeros) > 1:  # every pair of two dtypes occurs in one of the three tests
            cases = (
                (scales_dtype, zeros_dtype, rows[(first + zero) % 3])
                for (scale, scales_dtype), (zero, zeros_dtype) in itertools.product(
                    enumerate(reference.DTYPES), enumerate(zeros)
                )
                if (first + scale + zero) % 3 == 0
            )
    for scales_dtype, zeros_dtype, M in cases:
        check_shape(weight_format, dtype, 136, 65, 32, (M,), device, scales_dtype=scales_dtype, zeros_dtype=zeros_dtype)


@pytest.mark.parametrize("shape", [(), (1,), (-1,)], ids=["scalar", "one", "columns"])
@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_global_scale(dtype, shape, device):
    check_shape("nvfp4", dtype, 200, 65, 16, (1, 5, 33), device, global_scale_shape=shape)


@pytest.mark.parametrize("weight_format", reference.FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_activations_that_fp32_may_flush(weight_format, dtype, device):
    """Activations, and their products with codes, are below 2^-126; the scales bring the results back into range."""
    options = {"global_scale_shape": (1,)} if weight_format == "nvfp4" else {"scales_dtype": torch.float32}
    weight = reference.make_weight(weight_format, 136, 40, 32, exponent=90, **options)
    for size in (1e-38, 1e-40):
        a = random(5, 136).mul(size).to(dtype)
        exact, bound = reference.gemm(a, weight, raw_codes=reference.sums_raw_codes(device))
        for M in (1, 5):
            reference.check_gemm(run(a[:M].to(device), weight.to(device)), exact[:M], bound[:M])


@pytest.mark.large
@pytest.mark.parametrize("weight_format", reference.FORMATS)
def test_all_positive_inputs_stay_within_the_bound(weight_format, device):
    """All terms are positive, so rounding errors do not cancel, and a long chain of additions would exceed the bound."""
    K, N = 16384, 24
    codes = np.random.default_rng(0).integers(9, 16, (K, N), dtype=np.uint8)
    if weight_format in ("float4_e2m1", "nvfp4", "mxfp4"):
        codes -= 8
    weight = reference.make_weight(weight_format, K, N, K, codes=codes, scales_dtype=torch.float32)
    a = torch.rand(33, K, generator=torch.Generator().manual_seed(0)) + 0.5
    for M in (1, 4, 33):
        exact, bound = reference.gemm(a, weight, raw_codes=reference.sums_raw_codes(device))
        reference.check_gemm(run(a[:M].to(device), weight.to(device)), exact[:M], bound[:M])


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
@pytest.mark.parametrize("M", [1, 3, 20])
def test_perm_reads_the_activations_in_its_order(M, dtype, device):
    K, N = 136, 40
    perm = np.random.default_rng(0).permutation(K).astype(np.int32)
    weight = reference.make_weight("uint4", K, N, 32)
    a = random(M, K, dtype=dtype)
    exact, bound = reference.gemm(a, weight, perm=perm, raw_codes=reference.sums_raw_codes(device))
    result = run(a.to(device), weight.to(device), perm=torch.from_numpy(perm).to(device))
    reference.check_gemm(result, exact, bound)


@pytest.mark.parametrize(
    "view", ["transposed", "offset", "expanded", "every other column", "three dimensions", "vector"]
)
@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_strides_offsets_and_leading_dimensions(view, dtype, device):
    K, N = 72, 24
    weight = reference.make_weight("uint4b8", K, N, 16).to(device)
    base = random(9 * 2 * K + 5, dtype=dtype).to(device)
    a = {
        "transposed": base[: 9 * K].view(K, 9).t(),
        "offset": base[3 : 3 + 9 * K].view(9, K),
        "expanded": base[1 : 1 + K].expand(9, K),
        "every other column": base[: 18 * K].view(9, 2 * K)[:, ::2],
        "three dimensions": base[: 12 * K].view(4, 3, K).transpose(0, 1),
        "vector": base[1 : 1 + K],
    }[view]
    raw_codes = reference.sums_raw_codes(device)
    exact, bound = reference.gemm(a.cpu(), weight, raw_codes=raw_codes)
    result = run(a, weight)
    assert result.shape == (*a.shape[:-1], N)
    assert result.is_contiguous()
    reference.check_gemm(result, exact, bound)


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_tensors_at_odd_offsets(dtype, device):
    """Slices of larger tensors start at storage offsets that are not aligned for vector loads."""
    K, N = 72, 24
    weight = reference.make_weight("uint4", K, N, 16)
    a = random(5, K, dtype=dtype)
    exact, bound = reference.gemm(a, weight, raw_codes=reference.sums_raw_codes(device))

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=device)
        flat[1:] = tensor.reshape(-1).to(device)
        return flat[1:].view(tensor.shape)

    zeros = shifted(weight.arguments["zeros"])
    result = OPS.gemm(
        shifted(a), shifted(weight.b_packed), shifted(weight.scales), **{**weight.arguments, "zeros": zeros}
    )
    reference.check_gemm(result, exact, bound)


@pytest.mark.parametrize("weight_format", reference.FORMATS)
def test_zero_rows_and_zero_batches_give_an_empty_result(weight_format, device):
    weight = reference.make_weight(weight_format, 32, 24, 32).to(device)
    assert run(torch.empty(0, 32, device=device), weight).shape == (0, 24)
    assert run(torch.empty(4, 0, 32, device=device), weight).shape == (4, 0, 24)


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
@pytest.mark.parametrize("weight_format", reference.FORMATS)
def test_nonfinite_activations_reach_their_row_and_no_other(weight_format, dtype, device, everything):
    """On mps, each format and each dtype is tested with each value, but not each pair of a format and a dtype."""
    K, N, row, k = 72, 40, 1, 37
    turn = reference.FORMATS.index(weight_format) + reference.DTYPES.index(dtype)
    values = [np.nan, np.inf, -np.inf]
    if device == "mps" and not everything:
        values = [values[turn % 3]]
    weight = reference.make_weight(weight_format, K, N, 16)
    for M in (3, 33):
        a = random(M, K, dtype=dtype)
        exact, bound = reference.gemm(a, weight, raw_codes=reference.sums_raw_codes(device))
        others = [m for m in range(M) if m != row]
        for value in values:
            a[row, k] = value
            result = run(a.to(device), weight.to(device)).cpu()
            reference.check_gemm(result[others], exact[others], bound[others])
            assert not torch.isfinite(result[row]).any()
            if np.isnan(value):
                assert torch.isnan(result[row]).all()


@pytest.mark.parametrize("M", [1, 4, 33])
@pytest.mark.parametrize("weight_format", reference.FORMATS)
def test_nan_scales_reach_their_column_and_no_other(weight_format, M, device):
    K, N, column = 72, 40, 11
    weight = reference.make_weight(weight_format, K, N, 16)
    a = random(M, K)
    exact, bound = reference.gemm(a, weight, raw_codes=reference.sums_raw_codes(device))
    nan = {"nvfp4": 0x7F, "mxfp4": 0xFF}.get(weight_format, np.nan)
    weight.scales[1, column] = nan
    result = run(a.to(device), weight.to(device)).cpu()
    assert torch.isnan(result[:, column]).all()
    others = [n for n in range(N) if n != column]
    reference.check_gemm(result[:, others], exact[:, others], bound[:, others])


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_e4m3_nan_codes_of_either_sign(code, device):
    weight = reference.make_weight("nvfp4", 16, 8, 16, codes=np.zeros((16, 8), dtype=np.uint8))
    weight.scales[:] = code
    assert torch.isnan(run(torch.ones(1, 16, device=device), weight.to(device))).all()


def test_results_beyond_half_are_infinite(device):
    weight = reference.make_weight("uint4b8", 256, 8, 64, codes=np.full((256, 8), 15, dtype=np.uint8))
    weight.scales[:] = 1.0
    a = torch.full((2, 256), 100.0, dtype=torch.float16)
    a[1] = -100.0
    result = run(a.to(device), weight.to(device)).cpu()
    assert torch.equal(result[0], torch.full((8,), torch.inf, dtype=torch.float16))
    assert torch.equal(result[1], torch.full((8,), -torch.inf, dtype=torch.float16))


@pytest.mark.parametrize("M", [1, 8, 64])
@pytest.mark.parametrize("N", [8, 512])
def test_same_inputs_give_the_same_bits(M, N, device):
    weight = reference.make_weight("uint4", 4096, N, 128).to(device)
    a = random(M, 4096, dtype=torch.float16).to(device)
    assert torch.equal(run(a, weight), run(a, weight))


@pytest.mark.parametrize("variant", ["auto", "double_buffered", "single_stage", "striped", "fused", "gemv", "two_pass"])
def test_the_cpu_accepts_every_variant(variant):
    weight = reference.make_weight("uint4b8", 64, 24, 32)
    a = random(3, 64)
    assert torch.equal(run(a, weight, variant=variant), run(a, weight))


@pytest.fixture
def default_precision():
    """Restores the float32 matmul precision after the test."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"


def set_backend(backend, precision):
    backend.matmul.fp32_precision = precision


PERMISSIONS = {
    "high": partial(torch.set_float32_matmul_precision, "high"),
    "medium": partial(torch.set_float32_matmul_precision, "medium"),
    "mkldnn tf32": partial(set_backend, torch.backends.mkldnn, "tf32"),
    "mkldnn bf16": partial(set_backend, torch.backends.mkldnn, "bf16"),
}


@pytest.mark.parametrize("M", [1, 9])
@pytest.mark.parametrize("permit", PERMISSIONS.values(), ids=PERMISSIONS)
def test_reduced_float32_precision_changes_float32_activations_only(permit, M, default_precision):
    """Only results of float32 activations change, and only on CPUs that have kernels of lower precision."""
    K, group_size = 288, 32
    weight = reference.make_weight("uint4b8", K, 40, group_size)
    rows = {dtype: random(M, K, dtype=dtype) for dtype in reference.DTYPES}
    highest = {dtype: run(a, weight) for dtype, a in rows.items()}
    permit()
    capability = tmm.cpu_capability()
    byte_dot = capability.isa in ("avx512", "amx", "neon") and {"avx512_vnni", "dotprod"} & set(capability.features)
    fewer = bool(byte_dot) or (capability.isa == "avx2" and M == 1)
    for dtype, a in rows.items():
        assert torch.equal(run(a, weight), highest[dtype]) != (fewer and dtype == torch.float32)
    a = reference.to_numpy(rows[torch.float32])
    largest = np.abs(a).reshape(M, -1, group_size).max(2).repeat(group_size, 1)
    exact = a @ weight.exact
    planes = 16 * 2.0**-24 * largest @ weight.magnitude
    parts = (2.0**-17 if capability.isa == "amx" and M > 1 else 0) * np.abs(a) @ weight.magnitude
    result = run(rows[torch.float32], weight)
    reference.check_gemm(result, exact, np.maximum(planes, parts) + 2.0**-24 * np.abs(exact))


def test_the_precision_of_another_backend_changes_nothing(default_precision):
    weight = reference.make_weight("uint4b8", 64, 24, 32)
    a = random(3, 64)
    highest = run(a, weight)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert torch.equal(run(a, weight), highest)


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
@pytest.mark.parametrize("weight_format", reference.FORMATS)
def test_dequantize_rounds_the_exact_weight_once(weight_format, dtype, device):
    for K, N in ((8, 1), (72, 7), (264, 129)):
        for group_size in group_sizes(weight_format, K):
            options = {"global_scale_shape": (-1,)} if weight_format == "nvfp4" else {}
            weight = reference.make_weight(weight_format, K, N, group_size, **options)
            perm = np.random.default_rng(1).permutation(K).astype(np.int32)
            expected = np.empty((K, N))
            expected[perm] = weight.exact
            moved = weight.to(device)
            got = OPS.dequantize(
                moved.b_packed, moved.scales, **moved.arguments, perm=torch.from_numpy(perm).to(device), dtype=dtype
            )
            # dequantize rounds at most twice in fp32, after a product and after a sum. It then rounds to the output's
            # dtype.
            magnitude = np.empty((K, N))
            magnitude[perm] = weight.magnitude
            bound = 2.0**-23 * magnitude + reference.UNIT_ROUNDOFF[dtype] * np.abs(expected) + reference.TINY[dtype]
            reference.check_gemm(got, expected, bound)


@pytest.mark.parametrize("weight_format", ["uint4b8", "uint4", "float4_e2m1", "nvfp4", "mxfp4", "lut4"])
def test_dequantize_to_float32_is_exact_if_the_product_is(weight_format, device):
    """fp16 scales times integer or E2M1 codes have at most 24 significant bits, so fp32 holds the product exactly."""
    weight = reference.make_weight(weight_format, 64, 24, 32)
    if weight_format == "lut4":
        weight.arguments["lut"] = torch.arange(16, dtype=torch.float32) - 5
        s = reference.to_numpy(weight.scales)[np.arange(64) // 32]
        codes = np.stack([(weight.b_packed.numpy().view(np.uint32) >> (4 * j)) & 15 for j in range(8)], 1).reshape(
            64, 24
        )
        weight.exact = (codes.astype(np.float64) - 5) * s
    moved = weight.to(device)
    got = OPS.dequantize(moved.b_packed, moved.scales, **moved.arguments, dtype=torch.float32)
    assert np.array_equal(reference.to_numpy(got), weight.exact)


def test_a_weight_of_more_than_2_to_the_31_elements():
    K, N = 65536 + 8, 32776
    b_packed = torch.zeros(K // 8, N, dtype=torch.int32)
    b_packed[-1, -3:] = torch.tensor([0x10000000, 0x20000000, 0x30000000], dtype=torch.int32)
    a = torch.zeros(1, K)
    a[0, -1] = 2.0
    result = OPS.gemm(a, b_packed, torch.ones(1, N), weight_format="uint4_bias", group_size=K, zeros=torch.zeros(1, N))
    assert result[0, -3:].tolist() == [2.0, 4.0, 6.0]
    assert not result[0, :-3].any()
