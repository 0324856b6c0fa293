"""Gradients of moe_gemm: compared with fp64, under autocast and torch.compile, and refusals."""

import pytest
import torch

from tests.support.dispatches import peak_bytes
from tests.support.experts import experts_of, make_experts, run
from tests.support.reference import random

OPS = torch.ops.torch_marlin_metal


@pytest.mark.parametrize(
    ("weight_format", "by_slot", "reduce"),
    [("uint4b8", False, False), ("uint4b8", True, True), ("uint8b128", False, True), ("mxfp8", True, False)],
)
def test_gradients(weight_format, by_slot, reduce, device):
    experts = experts_of(weight_format, use_perm=True)
    ids = torch.tensor([[0, 4], [4, 5], [2, 1]])
    a, weights = random(3, 2, 80) if by_slot else random(3, 80), random(3, 2, seed=4)
    bias, upstream = random(5, 41, seed=5), random(*((3, 41) if reduce else (3, 2, 41)), seed=6)
    leaves = [tensor.to(device).requires_grad_() for tensor in (a, weights)]
    held = experts.to(device)
    got = torch.autograd.grad(
        OPS.moe_gemm(leaves[0], held.b_packed, held.scales, ids.to(device), bias=bias.to(device),
                     row_weights=leaves[1], reduce=reduce, **held.arguments),
        leaves, upstream.to(device))  # fmt: skip

    dense = torch.zeros(6, 80, 41, dtype=torch.float64)  # expert 5 does not exist: zeros
    for e, weight in enumerate(experts.weights):
        dense[e, torch.from_numpy(experts.perms[e]).long()] = torch.from_numpy(weight.exact)
    shifts = torch.cat([bias.double(), torch.zeros(1, 41, dtype=torch.float64)])
    exact = [tensor.double().requires_grad_() for tensor in (a, weights)]
    rows = exact[0] if by_slot else exact[0][:, None].expand(3, 2, 80)
    y = (torch.einsum("tsk,tskn->tsn", rows, dense[ids]) + shifts[ids]) * exact[1][..., None]
    expected = torch.autograd.grad(y.sum(1) if reduce else y, exact, upstream.double())
    for ours, exact_grad in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), exact_grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduce", [False, True])
def test_autocast_does_not_round_the_gradients(reduce, device):
    experts = experts_of("uint4b8").to(device)
    ids = torch.tensor([[0, 4], [1, 5]], device=device)
    leaves = [random(2, 80).bfloat16().to(device), random(2, 2, seed=1).to(device)]
    grads = []
    for enabled in (False, True):
        a, weights = (leaf.clone().requires_grad_() for leaf in leaves)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            y = OPS.moe_gemm(a, experts.b_packed, experts.scales, ids, row_weights=weights, reduce=reduce,
                             **experts.arguments)  # fmt: skip
            y.float().sum().backward()
        grads.append((a.grad, weights.grad))
    for without, within in zip(*grads, strict=True):
        assert torch.equal(without, within)


def test_a_product_beyond_fp16_with_a_small_weight_has_a_gradient():
    experts = experts_of("uint4b8", exponent=14)
    a, weights = random(2, 80, dtype=torch.float16), torch.full((2, 2), 2.0**-12, requires_grad=True)
    ids = torch.tensor([[0, 4], [1, 2]])
    options = {**experts.arguments, "row_weights": weights, "reduce": True}
    y = OPS.moe_gemm(a, experts.b_packed, experts.scales, ids, **options)
    y.sum().backward()
    exact = torch.stack([torch.stack([a[t].double() @ torch.from_numpy(experts.weights[e].exact) for e in row])
                         for t, row in enumerate(ids.tolist())])  # fmt: skip
    assert exact.abs().max() > 65504 and y.isfinite().all()
    torch.testing.assert_close(weights.grad.double(), exact.sum(-1), rtol=1e-4, atol=1.0)


def test_second_derivatives_and_tangents_are_refused():
    experts = experts_of("uint4b8")
    a, ids = random(2, 80).requires_grad_(), torch.tensor([[0, 4], [1, 2]])
    y = OPS.moe_gemm(a, experts.b_packed, experts.scales, ids, **experts.arguments)
    with pytest.raises(ValueError, match="moe_gemm_grad_a: grad: expected a tensor that does not require grad"):
        torch.autograd.grad(y.square().sum(), a, create_graph=True)
    with torch.autograd.forward_ad.dual_level():
        bias = torch.autograd.forward_ad.make_dual(torch.zeros(5, 41), torch.ones(5, 41))
        with pytest.raises(ValueError, match="moe_gemm: bias: expected no forward-mode tangent"):
            run(random(2, 80), experts, ids, bias=bias)


@pytest.mark.parametrize("device_of_call", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("grad", torch.zeros(3, 2, 40), r"grad: expected .* \[T, top_k, N\] with N = 41, got float32 \[3, 2, 40\]"),
        ("grad", torch.zeros(3, 41), r"grad: expected .* got float32 \[3, 41\]"),
        ("ids", torch.zeros(2, 3, dtype=torch.int64), r"expert_ids: expected int32 or int64 \[T, top_k\] = \[3, 2\]"),
        ("ids", torch.zeros(3, 2), r"expert_ids: expected int32 or int64 .* got float32 \[3, 2\]"),
        ("ids", torch.zeros(3, 2, dtype=torch.int16), r"expert_ids: .* got int16 \[3, 2\]"),
        ("ids", torch.zeros(3, 2, dtype=torch.bool), r"expert_ids: .* got bool \[3, 2\]"),
    ],
)
def test_wrong_arguments_of_the_gradient_are_named(name, value, message, device_of_call):
    experts = experts_of("uint4b8").to(device_of_call)
    given = {"grad": torch.zeros(3, 2, 41), "ids": torch.zeros(3, 2, dtype=torch.int64)} | {name: value}
    grad, ids = (tensor.to(device_of_call) for tensor in given.values())
    with pytest.raises(ValueError, match=f"moe_gemm_grad_a: {message}"):
        OPS.moe_gemm_grad_a(grad, experts.b_packed, experts.scales, ids, **experts.arguments)


def test_compile_forward_and_backward():
    experts = experts_of("mxfp4", K=96)
    ids = torch.tensor([[0, 4], [1, 5], [2, 2]])

    def loss(a, weights):
        options = {**experts.arguments, "row_weights": weights, "reduce": True}
        return OPS.moe_gemm(a, experts.b_packed, experts.scales, ids, **options).square().sum()

    leaves = [random(3, 96).requires_grad_(), random(3, 2).requires_grad_()]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch._dynamo.reset()
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*leaves), leaves)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("use_perm", [False, True])
def test_an_expert_is_decoded_in_parts(use_perm, monkeypatch):
    """The limit makes parts of two groups: three parts for each of the two experts that have rows."""
    experts = experts_of("uint4b8", use_perm=use_perm)  # K = 80 in groups of 16, N = 41
    grad, ids = random(3, 2, 41), torch.tensor([[0, 3], [3, 7], [0, -1]])
    whole = OPS.moe_gemm_grad_a(grad, experts.b_packed, experts.scales, ids, **experts.arguments)
    monkeypatch.setenv("TORCH_MARLIN_METAL_GRADIENT_BYTES", str(32 * 41 * 4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        parts = OPS.moe_gemm_grad_a(grad, experts.b_packed, experts.scales, ids, **experts.arguments)
    assert sum(event.name == "torch_marlin_metal::dequantize" for event in profile.events()) == 6
    torch.testing.assert_close(parts, whole)


def test_backward_allocates_no_copy_of_an_expert(mps, monkeypatch):
    wide, columns, rows = 1024, 256, 4
    experts = make_experts("uint4b8", 3, wide, columns, 64).to(mps)
    whole = wide * columns * 4
    monkeypatch.setenv("TORCH_MARLIN_METAL_GRADIENT_BYTES", str(whole // 8))
    a = random(rows, wide).to(mps).requires_grad_()
    ids = torch.tensor([[0, 2]] * rows, device=mps)
    y = OPS.moe_gemm(a, experts.b_packed, experts.scales, ids, **experts.arguments)
    upstream = torch.ones_like(y)
    kept = peak_bytes(lambda: torch.autograd.grad(y, a, upstream, retain_graph=True))
    activation_bytes = 6 * rows * 2 * (wide + columns) * 4  # the result, and copies of rows
    assert whole // 8 <= kept <= whole // 8 + activation_bytes < whole // 2


def test_flops_of_each_pair_of_row_and_expert():
    experts = experts_of("uint4b8")
    a, ids = random(3, 80).requires_grad_(), torch.tensor([[0, 4]] * 3)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        y = OPS.moe_gemm(a, experts.b_packed, experts.scales, ids, **experts.arguments)
    assert counter.get_total_flops() == 2 * 6 * 80 * 41
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 2 * 6 * 80 * 41
    gated = make_experts("uint4b8", 3, 80, 32, 16)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        OPS.moe_gemm_gated(a.detach(), gated.b_packed, gated.scales, ids % 3, **gated.arguments)
    assert counter.get_total_flops() == 2 * 6 * 80 * 32
