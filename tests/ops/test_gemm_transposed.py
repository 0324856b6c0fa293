"""`gemm_transposed`, the derivative of gemm with respect to its activations: values, memory, derivatives, bad input."""

import warnings

import numpy as np
import pytest
import torch

from tests.ops.test_contract import utils
from tests.support import reference
from tests.support.dispatches import peak_bytes
from tests.support.reference import random

OPS = torch.ops.torch_marlin_metal
VARIABLE = "TORCH_MARLIN_METAL_GRADIENT_BYTES"
K, N = 200, 24  # with groups of 32, the last group is short
PART_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.bfloat16, torch.float32: torch.float32}


def weight_of(weight_format: str, device: str, group_size: int = 32, **options) -> reference.Weight:
    if weight_format == "nvfp4":
        options["global_scale_shape"] = (-1,)
    return reference.make_weight(weight_format, K, N, group_size, **options).to(device)


def run(a: torch.Tensor, weight: reference.Weight) -> torch.Tensor:
    return OPS.gemm_transposed(a, weight.b_packed, weight.scales, **weight.arguments)


def bound_of(rows: np.ndarray, weight: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns the exact product and the bound of docs/use/operators.md.

    If parts are in bf16, the bound includes the rounding of each weight.
    """
    exact, weighted = rows @ weight.T, np.abs(rows) @ np.abs(weight).T
    part = PART_DTYPES[dtype]
    rounding = reference.UNIT_ROUNDOFF[part] if part != torch.float32 else 0.0
    bound = reference.UNIT_ROUNDOFF[dtype] * np.abs(exact) + reference.TINY[dtype]
    return exact, bound + (16 * 2.0**-24 + rounding * (1 + reference.UNIT_ROUNDOFF[dtype])) * weighted


# The operator decodes the weight in parts of at most this many bytes. The four limits give parts of a single row, parts
# within a group, parts of several groups, and one part for the complete weight.
@pytest.mark.parametrize("part_bytes", [1, 20 * 4 * N, 80 * 4 * N, 1 << 26])
@pytest.mark.parametrize("weight_format", reference.FORMATS)
def test_parts_of_every_size_match_the_exact_weight(weight_format, part_bytes, device, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(part_bytes))
    dtype = reference.DTYPES[(reference.FORMATS.index(weight_format) + part_bytes) % 3]
    weight = weight_of(weight_format, device)
    a = random(2, 3, N, dtype=dtype)
    got = run(a.to(device), weight)
    assert (got.dtype, got.shape) == (dtype, (2, 3, K))
    exact, bound = bound_of(reference.to_numpy(a), weight.exact, dtype)
    reference.check_gemm(got, exact, bound)
    assert torch.equal(got.cpu(), run(a.to(device), weight).cpu())  # a second call gives the same bits


def test_parts_that_do_not_divide_a_group(device, monkeypatch):
    """A limit of 24 rows gives parts of 24, 24 and 16 rows in each group of 64, and no part crosses a group border."""
    monkeypatch.setenv(VARIABLE, str(24 * 4 * N))
    weight = weight_of("uint4", device, group_size=64)
    a = random(3, N)
    exact, bound = bound_of(reference.to_numpy(a), weight.exact, torch.float32)
    reference.check_gemm(run(a.to(device), weight), exact, bound)


@pytest.mark.parametrize("part_bytes", [1, 80 * 4 * N])
def test_act_order_and_a_group_of_the_whole_row(part_bytes, device, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(part_bytes))
    weight = weight_of("uint4", device, group_size=K)
    perm = np.random.default_rng(0).permutation(K).astype(np.int32)
    weight.arguments["perm"] = torch.from_numpy(perm).to(device)
    original = np.empty_like(weight.exact)
    original[perm] = weight.exact
    a = random(3, 2 * N)[:, ::2]  # strides
    reference.check_gemm(run(a.to(device), weight), *bound_of(reference.to_numpy(a), original, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_weights_beyond_the_range_of_fp16(dtype, device, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(80 * 4 * N))
    for exponent in (17, -30):  # weights round to infinity and to zero in fp16
        weight = weight_of("uint4b8", device, scales_dtype=torch.float32, exponent=exponent)
        a = (random(3, N) * 2.0 ** (-exponent if exponent > 0 else 12)).to(dtype)
        exact, bound = bound_of(reference.to_numpy(a), weight.exact, dtype)
        reference.check_gemm(run(a.to(device), weight), exact, bound)


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_the_gradient_of_gemm_is_this_product(dtype, device):
    weight = weight_of("uint4", device)
    weight.arguments["perm"] = torch.arange(K - 1, -1, -1, dtype=torch.int32, device=device)
    a = torch.zeros(3, K, dtype=dtype, device=device, requires_grad=True)
    upstream = random(3, N, dtype=dtype).to(device)
    OPS.gemm(a, weight.b_packed, weight.scales, **weight.arguments).backward(upstream)
    assert a.grad.dtype == dtype
    assert torch.equal(a.grad.cpu(), run(upstream, weight).cpu())


def test_gradcheck_in_fp32(device):
    """Both operators are linear in their activations, so finite differences are exact for any step, apart from rounding.

    A large step keeps the rounding errors of fp32 small.
    """
    weight = weight_of("uint4_bias", device)
    fixed = (weight.b_packed, weight.scales)
    wide, narrow = random(2, K).to(device).requires_grad_(), random(2, N).to(device).requires_grad_()
    options = {"eps": 0.5, "atol": 1e-3, "rtol": 1e-3, "fast_mode": True, "check_forward_ad": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input #0 requires gradient and is not a double precision")
        assert torch.autograd.gradcheck(lambda a: OPS.gemm(a, *fixed, **weight.arguments), (wide,), **options)
        assert torch.autograd.gradcheck(
            lambda a: OPS.gemm_transposed(a, *fixed, **weight.arguments), (narrow,), **options
        )
    (second,) = torch.autograd.grad(
        torch.autograd.grad(OPS.gemm(wide, *fixed, **weight.arguments), wide, narrow, create_graph=True)[0].sum(),
        narrow,
    )
    expected = np.ones((2, K)) @ weight.exact
    bound = 2.0**-19 * (np.ones((2, K)) @ weight.magnitude)
    assert (np.abs(reference.to_numpy(second) - expected) <= bound).all()


def test_autocast_does_not_round_the_gradient(device):
    weight = weight_of("uint4b8", device)
    a = random(3, N).to(device)
    expected = run(a, weight)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(run(a, weight).cpu(), expected.cpu())


@pytest.mark.parametrize("weight_format", ["uint4", "nvfp4", "lut4"])
def test_opcheck(weight_format, device):
    weight = weight_of(weight_format, device)
    for requires_grad in (False, True):
        a = random(2, 3, N).to(device).requires_grad_(requires_grad)
        operands = (a, weight.b_packed, weight.scales)
        torch.library.opcheck(OPS.gemm_transposed.default, operands, weight.arguments, test_utils=utils(device))


@pytest.mark.parametrize(("dtype", "group_size"), [(torch.bfloat16, 64), (torch.float32, 64), (torch.float32, 1024)])
def test_backward_allocates_no_copy_of_the_weight(dtype, group_size, mps, monkeypatch):
    """A part has 128 rows of K: two groups of 64, or an eighth of the only group of 1024."""
    rows, wide, columns = 4, 1024, 256
    weight = reference.make_weight("uint4b8", wide, columns, group_size).to("mps")
    whole = wide * columns * torch.finfo(dtype).bits // 8
    monkeypatch.setenv(VARIABLE, str(whole // 8))
    a = torch.randn(rows, wide, dtype=dtype, device="mps", requires_grad=True)
    y = OPS.gemm(a, weight.b_packed, weight.scales, **weight.arguments)
    upstream = torch.ones_like(y)
    kept = peak_bytes(lambda: torch.autograd.grad(y, a, upstream, retain_graph=True))
    activation_bytes = 6 * rows * (wide + columns) * 4  # the result, and copies of rows
    assert whole // 8 <= kept <= whole // 8 + activation_bytes < whole // 2


@pytest.mark.parametrize("with_bias", [False, True])
def test_backward_in_fp16_copies_no_whole_gradient_to_fp32(with_bias, mps, monkeypatch):
    rows, wide, columns = 256, 128, 1024
    weight = reference.make_weight("uint4b8", wide, columns, 64).to("mps")
    monkeypatch.setenv(VARIABLE, str(limit := 1 << 17))
    a = torch.randn(rows, wide, dtype=torch.float16, device="mps", requires_grad=not with_bias)
    bias = torch.zeros(columns, dtype=torch.float16, device="mps", requires_grad=with_bias)
    y = OPS.gemm(a, weight.b_packed, weight.scales, **weight.arguments, bias=bias)
    upstream = torch.randn(y.shape).half().to("mps")
    (wanted,) = (tensor for tensor in (a, bias) if tensor.requires_grad)
    result = torch.autograd.grad(y, wanted, upstream, retain_graph=True)[0]
    kept = peak_bytes(lambda: torch.autograd.grad(y, wanted, upstream, retain_graph=True))
    assert kept <= limit + result.nbytes + 8192 < rows * columns * 4 / 2
    grad = upstream.cpu().double()
    exact = grad.sum(0) if with_bias else grad @ torch.from_numpy(weight.exact.T)
    torch.testing.assert_close(result.cpu().double(), exact, rtol=2**-10, atol=2**-10 * exact.abs().max().item())


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_a_wide_matrix_by_parts(dtype, device, monkeypatch):
    """Multiplies by parts whose rows are as long as in a model's layer. The last part is smaller."""
    columns = 3000
    weight = reference.make_weight("uint4", K, columns, 32).to(device)
    monkeypatch.setenv(VARIABLE, str(72 * 4 * columns))
    a = random(5, columns, dtype=dtype)
    exact, bound = bound_of(reference.to_numpy(a), weight.exact, dtype)
    reference.check_gemm(run(a.to(device), weight), exact, bound)


@pytest.mark.parametrize(("dtype", "parts"), [(torch.bfloat16, 2), (torch.float32, 3), (torch.float16, 5)], ids=str)
def test_parts_on_the_cpu_have_at_most_16_mib(dtype, parts):
    """Larger blocks of memory are returned to the system after each part, and their page faults take long."""
    # 20 MiB in bf16, 40 MiB in fp32; fp16 parts are in fp32 and half of the bytes are for copies
    rows, columns = 1280, 8192
    packed = torch.zeros(rows // 8, columns, dtype=torch.int32)  # each code means -8
    a = torch.ones(1, columns, dtype=dtype)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = OPS.gemm_transposed(
            a, packed, torch.full((rows // 32, columns), 0.125), weight_format="uint4b8", group_size=32
        )
    assert sum(event.name == "aten::mm" for event in profile.events()) == parts
    assert torch.equal(y, torch.full((1, rows), -float(columns), dtype=dtype))


@pytest.mark.parametrize("value", ["0", "-1", "many", "64M", "99999999999999999999"])
def test_a_wrong_number_of_bytes_is_named(value, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=f"{VARIABLE}: expected bytes, at least 1, got '{value}'"):
        run(random(2, N), weight_of("uint4b8", "cpu"))


def test_bad_input_is_named(device):
    weight = weight_of("uint4b8", device)
    name = "torch_marlin_metal::gemm_transposed: "
    for a, message in (
        (
            torch.ones(2, N + 1),
            rf"a: expected \[..., N\] with N = {N} \(the columns of b_packed\), got float32 \[2, 25\]",
        ),
        (torch.ones(2, N).double(), r"a: expected float16, bfloat16 or float32 \[..., N\], got float64"),
        (torch.tensor(1.0), r"a: expected float16, bfloat16 or float32 \[..., N\], got float32 \[\]"),
    ):
        with pytest.raises(ValueError, match=name + message):
            run(a.to(device) if a.dtype != torch.float64 or device == "cpu" else a, weight)
    a = torch.ones(2, N, device=device)
    with pytest.raises(ValueError, match=name + "group_size: expected one of"):
        OPS.gemm_transposed(a, weight.b_packed, weight.scales, weight_format="uint4b8", group_size=48)
    with pytest.raises(ValueError, match=name + "scales: expected a tensor that does not require grad"):
        OPS.gemm_transposed(a, weight.b_packed, weight.scales.clone().requires_grad_(), **weight.arguments)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        with pytest.raises(ValueError, match=name + "a: expected no forward-mode tangent"):
            run(dual, weight)
    assert run(a[:0], weight).shape == (0, K)
    described = [t.to("meta") for t in (a, weight.b_packed, weight.scales)]
    assert OPS.gemm_transposed(*described, **weight.arguments).shape == (2, K)
