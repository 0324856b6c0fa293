"""moe_gemm_gated computes moe_gemm and gated_activation; with few rows, in one dispatch on mps."""

import re

import pytest
import torch

import torch_marlin_metal as tmm
from tests.support import experts as reference_experts
from tests.support import reference
from tests.support.decoder_reference import exact_activation
from tests.support.dispatches import dispatches_of, longest_plan
from tests.support.experts import Experts, experts_of, run
from tests.support.reference import random
from tests.support.samples import covering

OPS = torch.ops.torch_marlin_metal
CLAMPED = {"activation": "clamped_silu", "interleaved": True, "limit": 2.0, "alpha": 1.7}
IDS = torch.tensor([[0, 4, 2], [4, 1, -1], [5, 2, 0]])  # -1 and 5 name no expert
STEEPEST = 1.2  # no activation has a larger derivative (gelu: 1.129, silu: 1.0999)


def run_gated(a: torch.Tensor, experts: Experts, ids: torch.Tensor, device: str = "cpu", **options) -> torch.Tensor:
    held = experts.to(device)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return OPS.moe_gemm_gated(a.to(device), held.b_packed, held.scales, ids.to(device), **{**held.arguments, **moved})


def halves(products: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return (products[..., ::2], products[..., 1::2]) if interleaved else products.chunk(2, -1)


def in_two_steps(a: torch.Tensor, experts: Experts, ids: torch.Tensor, device: str = "cpu", **options) -> torch.Tensor:
    names = ("activation", "limit", "alpha")
    own = {name: options.pop(name) for name in names if name in options}
    interleaved = options.pop("interleaved", False)
    products = run(a, experts, ids, device, **options).to(device)
    return tmm.ops.gated_activation(*halves(products, interleaved), **own)


def check_two_steps(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares bits on the CPU. On mps, the exp of each kernel may have its own error, of 4 ulp of fp32.

    In the tails of gelu, this is an error relative to gate * up.
    """
    assert got.dtype == expected.dtype
    if got.is_mps:
        rtol = 2.0**-20 + 2 * reference.UNIT_ROUNDOFF[got.dtype]
        torch.testing.assert_close(got, expected, rtol=rtol, atol=2.0**-19)
    else:
        assert torch.equal(got, expected)


def check_exact(
    got: torch.Tensor, a: torch.Tensor, experts: Experts, ids: torch.Tensor, device: str, **options
) -> None:
    """Compares with fp64. The bound contains the propagated errors of gate and up, and the rounding of the result."""
    interleaved, bias = options.pop("interleaved", False), options.pop("bias", None)
    raw_codes = reference.sums_raw_codes(device)
    exact, bound = map(torch.from_numpy, reference_experts.moe_gemm(a, experts, ids, bias=bias, raw_codes=raw_codes))
    (gate, up), (gate_error, up_error) = halves(exact, interleaved), halves(bound, interleaved)
    activation = {"activation": "silu"} | options
    result = exact_activation(gate, up, **activation)
    factor = up.abs() + up_error + (1 if activation["activation"] == "clamped_silu" else 0)
    error = STEEPEST * gate_error * factor + gate.abs() * up_error + 2e-7 * gate.abs() * factor
    error += reference.UNIT_ROUNDOFF[a.dtype] * (result.abs() + error) + reference.TINY[a.dtype]
    reference.check_gemm(got.cpu(), result.numpy(), error.numpy())


KINDS = [{}, CLAMPED, {"activation": "gelu_tanh", "interleaved": True}, {"activation": "gelu"}]
KINDS += [{"activation": "limited_silu", "limit": 1.5}]
CASES = [
    (weight_format, reference.DTYPES[(i + j) % 3], 3 * i + j)
    for i, weight_format in enumerate(reference.FORMATS)
    for j in range(2)
]
# On mps the sample has each value of each axis: format, dtype, activation, bias and N, perm, and shape of `a`.
ON_MPS = covering(
    [{f, dtype, f"kind {n % 5}", f"bias {n % 3}", f"perm {n % 2}", f"3-D {n % 4 == 3}"} for f, dtype, n in CASES]
)


@pytest.mark.parametrize(
    ("weight_format", "dtype", "case"),
    [pytest.param(*case, marks=() if i in ON_MPS else pytest.mark.beyond_sample) for i, case in enumerate(CASES)],
)
def test_the_two_operators_and_fp64(weight_format, dtype, case, device):
    experts = experts_of(weight_format, K=144, N=(256, 82)[case % 3 == 2], use_perm=case % 2 == 1)
    N = experts.scales.shape[-1]
    a = random(3, 3, 144, dtype=dtype) if case % 4 == 3 else random(3, 144, dtype=dtype)
    options = KINDS[case % 5] | ({"bias": random(5, N, dtype=torch.float16, seed=1)} if case % 3 else {})
    ids = IDS.int() if case % 2 else IDS
    got = run_gated(a, experts, ids, device, **options)
    assert got.dtype == dtype and got.shape == (3, 3, N // 2) and got.is_contiguous()
    check_two_steps(got, in_two_steps(a, experts, ids, device, **options))
    assert not got[1, 2].any() and not got[2, 0].any()
    check_exact(got, a, experts, ids, device, **options)


@pytest.mark.parametrize(
    ("tokens", "N", "kernels"),
    [
        (1, 256, ["moe_gemv_gated"]),
        (1, 192, ["moe_gemv", "gated_activation"]),  # a threadgroup computes 64 columns of the result, or none
        (600, 256, ["moe_sort", "moe_fused", "gated_activation"]),
    ],
)
def test_which_products_take_one_dispatch(tokens, N, kernels, mps):
    experts = experts_of("uint4b8", K=144, N=N)
    held, a = experts.to(mps), random(tokens, 144, dtype=torch.float16).to(mps)
    ids = (torch.arange(2 * tokens).view(tokens, 2) % 5).to(mps)
    results = []
    counters = dispatches_of(lambda: results.append(run_gated(a, held, ids, mps)))
    assert [re.split("_uint4b8|_float16", record.kernel)[0] for record in counters] == kernels
    if tokens == 1:
        assert counters[0].buffers[1]["distinct_read"] == 2 * 144 * N // 2  # the packed words of two experts
    check_two_steps(results[0], in_two_steps(a, experts, ids, mps))


def test_products_that_are_divided_take_two_dispatches_for_each_part(mps):
    experts = experts_of("uint4b8", K=144, N=256)
    ids = torch.randint(-1, 5, (150, 2), generator=torch.Generator().manual_seed(0))
    with longest_plan(1e-9):
        got = run_gated(random(150, 144), experts, ids, mps)
    check_exact(got, random(150, 144), experts, ids, mps)


@pytest.mark.parametrize(("T", "top_k"), [(0, 2), (3, 0)])
def test_nothing_to_do(T, top_k, device):
    got = run_gated(random(T, 144), experts_of("uint4b8", K=144, N=256), torch.zeros(T, top_k).long(), device)
    assert got.shape == (T, top_k, 128)


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad, options):
    experts = experts_of("uint4_bias", N=42)
    a = random(3, 80).requires_grad_(requires_grad)
    arguments = {**experts.arguments, "bias": random(5, 42), **options}
    torch.library.opcheck(
        OPS.moe_gemm_gated.default, (a, experts.b_packed, experts.scales, torch.tensor([[0], [4], [5]])), arguments
    )


def test_gradients_are_those_of_the_two_operators(device):
    experts = experts_of("nvfp4", K=144, N=256)
    gradients = []
    for function in (run_gated, in_two_steps):
        a = random(3, 144).requires_grad_()
        function(a, experts, IDS, device, **CLAMPED).square().sum().backward()
        gradients.append(a.grad)
    torch.testing.assert_close(*gradients, rtol=2.0**-15, atol=2.0**-15)
    assert gradients[0].any()


def test_a_dynamic_number_of_tokens_compiles_once():
    experts = experts_of("uint4", N=42)
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda a, ids: 2 * run_gated(a, experts, ids), fullgraph=True, dynamic=True, backend=counter
    )
    for T in (3, 17, 5):
        a, ids = random(T, 80), torch.arange(2 * T).reshape(T, 2) % 7
        assert torch.equal(compiled(a, ids), 2 * run_gated(a, experts, ids))
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    assert any("moe_gemm_gated" in str(node.target) for node in graph.graph.nodes)


def test_autocast_rounds_the_activations(device):
    experts = experts_of("uint4b8", K=144, N=256)
    with torch.autocast(device, dtype=torch.float16):
        got = run_gated(random(3, 144), experts, IDS, device)
    check_two_steps(got, run_gated(random(3, 144).half(), experts, IDS, device))


WRONG = [
    ({"N": 41}, {}, "b_packed: expected int32 [E, rows, N] with an even N, for gate and up, got int32 [5, 10, 41]"),
    (
        {},
        {"activation": "relu"},
        "activation: expected one of silu, gelu, gelu_tanh, clamped_silu, limited_silu, got 'relu'",
    ),
    ({}, {"limit": 1.0}, "limit: expected None for silu, got 1"),
    ({}, {"activation": "clamped_silu", "limit": 1.0}, "alpha: expected a number for clamped_silu, got None"),
    ({}, {"bias": torch.zeros(42)}, "bias: expected float16, bfloat16 or float32 [E, N] = [5, 42], got float32 [42]"),
    ({}, {"a": torch.zeros(3, 72)}, "a: expected [T, K] or [T, top_k, K] with K = 80, got"),
]


@pytest.mark.parametrize(("sizes", "options", "message"), WRONG)
def test_wrong_arguments_are_named(sizes, options, message, device):
    experts = experts_of("uint4b8", **{"N": 42} | sizes)
    a = options.get("a", random(3, 80))
    options = {name: value for name, value in options.items() if name != "a"}
    with pytest.raises(ValueError, match=re.escape(f"torch_marlin_metal::moe_gemm_gated: {message}")):
        run_gated(a, experts, IDS, device, **options)


def test_tensors_that_require_grad_are_refused():
    experts = experts_of("uint4b8", N=42)
    experts.scales.requires_grad_()
    with pytest.raises(ValueError, match="moe_gemm_gated: scales: expected a tensor that does not require grad"):
        run_gated(random(3, 80), experts, IDS)
