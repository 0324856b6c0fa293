"""The operators of a decoder layer agree with fp64, for any strides, and work with PyTorch's features."""

import re

import pytest
import torch
from torch.nn import functional

import torch_marlin_metal as tmm
from tests.ops.test_contract import utils
from tests.support import reference
from tests.support.decoder_reference import (
    ACTIVATIONS,
    CLAMPED,
    check,
    exact_activation,
    exact_norm,
    exact_rotary,
    rotary_magnitude,
)
from tests.support.dispatches import dispatches_of
from tests.support.reference import random

OPS = torch.ops.torch_marlin_metal


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_rms_norm(dtype, device):
    other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float32, torch.float32: torch.float16}[dtype]
    # Columns: fewer than the lanes of a simdgroup; 777, which leaves a tail; more than the threads of a threadgroup.
    for shape, offset in (((1, 1), 0.0), ((3, 5), 1.0), ((2, 3, 777), 1.0), ((2, 9001), 0.0)):
        x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=other, seed=1)
        got = tmm.ops.rms_norm(x.to(device), weight.to(device), eps=1e-5, weight_offset=offset)
        assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, x.shape, True)
        exact = exact_norm(x.double(), weight.double(), 1e-5, offset)
        # The sum of weight and offset is rounded, so the error is relative to the larger of the two.
        check(got, exact, exact_norm(x.double(), weight.double().abs(), 1e-5, offset).abs())


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_add_rms_norm(dtype, device):
    x, residual, weight = random(3, 2, 300, dtype=dtype), random(2, 3, 600, dtype=dtype, seed=2), random(300, seed=1)
    residual = residual.transpose(0, 1)[..., ::2]  # neither unit stride nor rows in order
    got, total = tmm.ops.add_rms_norm(x.to(device), residual.to(device), weight.to(device), eps=1e-6)
    assert torch.equal(total.cpu(), x + residual)
    exact = exact_norm((x + residual).double(), weight.double(), 1e-6, 0.0)
    check(got, exact, exact.abs())


def test_a_norm_of_rows_far_apart(device):
    x = random(4, 6, 40)[:, 2].to(device)  # a row stride of 240
    weight = random(40, seed=1).to(device)
    assert torch.equal(tmm.ops.rms_norm(x, weight, eps=1e-5), tmm.ops.rms_norm(x.contiguous(), weight, eps=1e-5))
    assert tmm.ops.rms_norm(x[:0], weight, eps=1e-5).shape == (0, 40)
    x = x.clone()
    x[1, 3] = float("nan")
    assert tmm.ops.rms_norm(x, weight, eps=1e-5).isnan().any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved, dtype, device):
    B, S = 2, 3
    for heads, kv_heads, D, R in ((3, 1, 16, 16), (2, 5, 12, 6), (1, 1, 70, 70)):
        q = random(B, S, heads, D, dtype=dtype).transpose(1, 2)
        k = random(B, S, kv_heads, D, dtype=dtype, seed=1).transpose(1, 2)
        tables_dtype = torch.float32 if D == 12 else dtype
        cos, sin = (random(B, S, R, dtype=tables_dtype, seed=seed) for seed in (2, 3))
        got = tmm.ops.rotary(*(t.to(device) for t in (q, k, cos, sin)), interleaved=interleaved)
        for out, x in zip(got, (q, k), strict=True):
            assert (out.dtype, out.shape) == (dtype, x.shape)
            assert out.transpose(1, 2).is_contiguous()  # like x
            wide = [t.double() for t in (x, cos, sin)]
            check(out, exact_rotary(*wide, interleaved), rotary_magnitude(*wide, interleaved))


def test_rotary_keeps_the_order_of_heads_and_tokens(device):
    q, k = random(2, 3, 4, 8).to(device), random(2, 4, 5, 8, seed=1).to(device).transpose(1, 2)
    tables = random(2, 4, 8, seed=2).to(device), random(2, 4, 8, seed=3).to(device)
    got = tmm.ops.rotary(q, k, *tables)
    assert got[0].is_contiguous() and got[1].transpose(1, 2).is_contiguous() and not got[1].is_contiguous()
    expected = tmm.ops.rotary(q.transpose(1, 2).contiguous().transpose(1, 2), k.contiguous(), *tables)
    assert not expected[0].is_contiguous() and expected[1].is_contiguous()
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_tables_of_one_batch_and_of_pairs(interleaved, device):
    q, k = random(2, 2, 3, 8).to(device), random(2, 1, 3, 8, seed=1).to(device)
    cos, sin = random(1, 3, 6).to(device), random(1, 3, 6, seed=2).to(device)
    repeated = [table.expand(2, -1, -1) for table in (cos, sin)]
    expected = tmm.ops.rotary(q, k, *repeated, interleaved=interleaved)
    assert all(map(torch.equal, tmm.ops.rotary(q, k, cos, sin, interleaved=interleaved), expected))
    pairs = [table[..., :3] for table in (cos, sin)]
    whole = [t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in pairs]
    expected = tmm.ops.rotary(q, k, *whole, interleaved=interleaved)
    assert all(map(torch.equal, tmm.ops.rotary(q, k, *pairs, interleaved=interleaved, per_pair=True), expected))


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
def test_write_cache(dtype, device):
    keys, values = random(2, 3, 9, 40, dtype=dtype), random(2, 3, 9, 8, dtype=dtype, seed=1)
    k = random(2, 4, 3, 80, dtype=dtype, seed=2).transpose(1, 2)[..., ::2]  # neither unit stride nor rows in order
    v = random(2, 3, 4, 8, dtype=dtype, seed=3)
    for start in (torch.tensor(0), torch.tensor([5])):
        expected = keys.clone(), values.clone()
        for cache, new in zip(expected, (k, v), strict=True):
            cache.index_copy_(2, start + torch.arange(4), new)
        written = keys.to(device, copy=True), values.to(device, copy=True)
        versions = [cache._version for cache in written]
        tmm.ops.write_cache(*written, *(t.to(device) for t in (k, v, start)))
        assert all(torch.equal(got.cpu(), cache) for got, cache in zip(written, expected, strict=True))
        assert [cache._version for cache in written] == [version + 1 for version in versions]
    none = k[:, :, :0].to(device), v[:, :, :0].to(device)
    tmm.ops.write_cache(*written, *none, start.to(device))
    assert torch.equal(written[0].cpu(), expected[0])


def test_tokens_that_do_not_fit_into_a_cache(mps):
    keys, new = random(1, 2, 6, 8), random(1, 2, 3, 8, seed=1)
    for start in (-1, 4):
        with pytest.raises(ValueError, match=f"write_cache: start: expected 0 to L - S = 3, got {start}"):
            tmm.ops.write_cache(keys.clone(), keys.clone(), new, new, torch.tensor(start))
        written = keys.to(mps), keys.to(mps, copy=True)
        tmm.ops.write_cache(*written, new.to(mps), new.to(mps), torch.tensor(start).to(mps))
        for got in written:
            assert got[:, :, :3].isnan().all()
            assert torch.equal(got[:, :, 3:].cpu(), keys[:, :, 3:])


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
@pytest.mark.parametrize("options", ACTIVATIONS, ids=lambda options: options["activation"])
def test_gated_activation(options, dtype, device):
    both = 3 * random(2, 3, 1300, dtype=dtype)
    halves = {"concatenated": both.chunk(2, -1), "interleaved": (both[..., ::2], both[..., 1::2])}
    for gate, up in halves.values():
        moved = both.to(device)
        parts = moved.chunk(2, -1) if gate.stride(-1) == 1 else (moved[..., ::2], moved[..., 1::2])
        got = tmm.ops.gated_activation(*parts, **options)
        assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, gate.shape, True)
        exact = exact_activation(gate.double(), up.double(), **options)
        check(got, exact, gate.double().abs() * (up.double().abs() + 1))


@pytest.mark.parametrize("options", ACTIVATIONS, ids=lambda options: options["activation"])
def test_activations_of_extreme_values(options, device):
    gate = torch.tensor([0.0, 1e4, -1e4, float("nan"), float("inf"), 88.5, -88.5, -1e30], device=device)
    got = tmm.ops.gated_activation(gate, torch.ones_like(gate), **options).cpu()
    exact = exact_activation(gate.cpu().double(), torch.ones(8).double(), **options)
    assert got[3].isnan()
    finite = exact.isfinite()
    assert ((got.double() - exact).abs()[finite] <= 1e-6 * exact.abs()[finite] + 1e-30).all()
    assert not got[~finite].isfinite().any()


def test_a_cached_launch_has_the_call_s_own_numbers(mps):
    """Calls with equal shapes and strides differ in one argument; a launch that was cached for another call would be
    wrong.
    """
    x, weight, q = random(3, 40), random(40), random(1, 2, 3, 16)
    tables = random(1, 3, 16, seed=1), random(1, 3, 16, seed=2)
    calls = [
        *(({"eps": eps, "weight_offset": offset}, tmm.ops.rms_norm, (x, weight)) for eps, offset in ((1e-5, 0.0), (1.0, 0.0), (1.0, 1.0))),
        *(({"interleaved": interleaved}, tmm.ops.rotary, (q, q, *tables)) for interleaved in (False, True)),
        *(({"activation": name}, tmm.ops.gated_activation, (x, x)) for name in ("silu", "gelu")),
        *(({**CLAMPED, **other}, tmm.ops.gated_activation, (9 * x, 9 * x)) for other in ({}, {"limit": 3.0}, {"alpha": 1.0})),
    ]  # fmt: skip
    for options, call, inputs in calls:
        got, expected = call(*(t.to(mps) for t in inputs), **options), call(*inputs, **options)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-6)


def test_each_operator_is_one_dispatch(mps):
    x, weight, q = random(2, 3, 40).to(mps), random(40).to(mps), random(2, 2, 3, 16).to(mps)
    tables = [random(2, 3, 16).to(mps) for _ in range(2)]
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    caches, start = [random(2, 2, 8, 16).to(mps) for _ in range(2)], torch.tensor(4).to(mps)
    calls = (
        ("rms_norm", lambda: tmm.ops.rms_norm(x, weight, eps=1e-5)),
        ("rms_norm", lambda: tmm.ops.add_rms_norm(x, x, weight, eps=1e-5)),
        ("rotary", lambda: tmm.ops.rotary(q, turned, *tables)),
        ("gated_activation", lambda: tmm.ops.gated_activation(x[..., ::2], x[..., 1::2])),
        ("write_cache", lambda: tmm.ops.write_cache(*caches, q, q, start)),
    )
    for kernel, call in calls:
        (record,) = dispatches_of(call)
        assert record.kernel.startswith(kernel)


def functions(device: str):
    """Returns each operator as (function of its differentiable inputs, the same in plain PyTorch, inputs)."""
    x, residual, weight = random(3, 20), random(3, 20, seed=1), random(20, seed=2)
    q, k = random(1, 2, 3, 8), random(1, 1, 3, 8, seed=1)
    cos, sin = random(1, 3, 6, seed=2).to(device), random(1, 3, 6, seed=3).to(device)

    def tables(t):
        return cos.to(t.device, t.dtype), sin.to(t.device, t.dtype)

    def plain_add_norm(x, residual, weight):
        return exact_norm(x + residual, weight, 1e-5, 1.0), x + residual

    yield (lambda x, w: tmm.ops.rms_norm(x, w, eps=1e-5, weight_offset=1.0),
           lambda x, w: exact_norm(x, w, 1e-5, 1.0), (x, weight))  # fmt: skip
    yield lambda *t: tmm.ops.add_rms_norm(*t, eps=1e-5, weight_offset=1.0), plain_add_norm, (x, residual, weight)
    for interleaved in (False, True):
        yield (lambda q, k, i=interleaved: tmm.ops.rotary(q, k, *tables(q), interleaved=i),
               lambda q, k, i=interleaved: tuple(exact_rotary(t, *tables(t), i) for t in (q, k)), (q, k))  # fmt: skip
    for options in ACTIVATIONS:
        yield (lambda *t, o=options: tmm.ops.gated_activation(*t, **o),
               lambda *t, o=options: exact_activation(*t, **o), (2 * x, 2 * residual))  # fmt: skip


def test_derivatives(device):
    for ours, plain, inputs in functions(device):
        mine = [t.detach().clone().to(device).requires_grad_() for t in inputs]
        wide = [t.detach().double().requires_grad_() for t in inputs]
        out, exact = ours(*mine), plain(*wide)
        out, exact = ((t,) if isinstance(t, torch.Tensor) else t for t in (out, exact))
        grads = [random(*t.shape, seed=7 + i) for i, t in enumerate(exact)]
        torch.autograd.backward(out, [g.to(device) for g in grads])
        torch.autograd.backward(exact, [g.double() for g in grads])
        for got, expected in zip(mine, wide, strict=True):
            torch.testing.assert_close(got.grad.cpu().double(), expected.grad, rtol=1e-5, atol=1e-5)


def test_derivatives_agree_with_differences():
    for ours, _, inputs in functions("cpu"):
        points = [t[:1, ..., :8].clone().requires_grad_() if t.dim() == 2 else t.requires_grad_() for t in inputs]
        if len(points) > 1 and points[-1].dim() == 1:
            points[-1] = points[-1].detach()[:8].requires_grad_()
        torch.autograd.gradcheck(ours, points, eps=1e-2, atol=2e-2, rtol=2e-2, nondet_tol=0.0)


def test_opcheck(device):
    x, weight = random(3, 20).to(device).requires_grad_(), random(20).to(device).requires_grad_()
    q, k = random(1, 2, 3, 8).to(device).requires_grad_(), random(1, 1, 3, 8).to(device).requires_grad_()
    cos, caches = random(1, 3, 6).to(device), [random(1, 1, 5, 8, seed=seed).to(device) for seed in (5, 6)]
    for op, arguments, options in (
        (OPS.rms_norm, (x, weight), {"eps": 1e-5}),
        (OPS.add_rms_norm, (x, random(3, 20).to(device), weight), {"eps": 1e-5, "weight_offset": 1.0}),
        (OPS.rotary, (q, k, cos, cos), {"interleaved": True}),
        (OPS.gated_activation, (x, x.detach()[:, :]), {"activation": "gelu"}),
        (OPS.rotary, (q, k.transpose(1, 2).contiguous().transpose(1, 2), cos, cos), {}),
        (OPS.write_cache, (*caches, k.detach(), k.detach(), torch.tensor(2).to(device)), {}),
    ):
        torch.library.opcheck(op.default, arguments, options, test_utils=utils(device))


def test_compiles_to_one_graph():
    def block(x, residual, weight, q, k, cos, sin):
        y, total = tmm.ops.add_rms_norm(x, residual, weight, eps=1e-5)
        return tmm.ops.gated_activation(y, tmm.ops.rms_norm(total, weight, eps=1e-5)), *tmm.ops.rotary(q, k, cos, sin)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        inputs = [random(rows, 20), random(rows, 20, seed=1), random(20, seed=2), random(1, 2, rows, 8)]
        inputs += [random(1, 1, rows, 8), random(1, rows, 8), random(1, rows, 8, seed=4)]
        for tensor in inputs[:5]:
            tensor.requires_grad_()
        for got, expected in zip(compiled(*inputs), block(*inputs), strict=True):
            assert torch.equal(got, expected)
        sum(t.sum() for t in compiled(*inputs)).backward()


START = torch.tensor(0)
X, ROW, Q, TABLE = torch.ones(2, 8), torch.ones(8), torch.ones(1, 2, 3, 8), torch.ones(1, 3, 8)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: tmm.ops.rms_norm(X.double(), ROW, eps=1e-5), "rms_norm: x: expected float16, bfloat16 or float32 [..., N], got float64 [2, 8]"),
    (lambda: tmm.ops.rms_norm(X, ROW[:7], eps=1e-5), "rms_norm: weight: expected float16, bfloat16 or float32 [N] = [8], got float32 [7]"),
    (lambda: tmm.ops.rms_norm(X, ROW, eps=-1.0), "rms_norm: eps: expected a number of at least 0, got -1"),
    (lambda: tmm.ops.add_rms_norm(X, X[:1], ROW, eps=1e-5), "add_rms_norm: residual: expected float32 [2, 8] like x, got float32 [1, 8]"),
    (lambda: tmm.ops.rotary(Q[0], Q, TABLE, TABLE), "rotary: q: expected float16, bfloat16 or float32 [B, H, S, D], got float32 [2, 3, 8]"),
    (lambda: tmm.ops.rotary(Q, Q.half(), TABLE, TABLE), "rotary: k: expected float32 [B, heads, S, D]"),
    (lambda: tmm.ops.rotary(Q, Q, TABLE[:, :2], TABLE), "rotary: cos: expected float16, bfloat16 or float32 [B or 1, S, R]"),
    (lambda: tmm.ops.rotary(Q, Q, TABLE, TABLE[..., :6]), "rotary: sin: expected float32 [1, 3, 8] like cos, got float32 [1, 3, 6]"),
    (lambda: tmm.ops.rotary(Q, Q, TABLE, TABLE, per_pair=True), "rotary: cos: expected a last dimension R with 2 R of at most D = 8"),
    (lambda: tmm.ops.rotary(Q, Q, TABLE.clone().requires_grad_(), TABLE), "rotary: cos: expected a tensor that does not require grad"),
    (lambda: tmm.ops.gated_activation(X, X.half()), "gated_activation: up: expected float32 [2, 8] like gate, got float16 [2, 8]"),
    (lambda: tmm.ops.gated_activation(X, X, activation="relu"), "gated_activation: activation: expected one of silu, gelu, gelu_tanh, clamped_silu, limited_silu, got 'relu'"),
    (lambda: tmm.ops.gated_activation(X, X, limit=1.0), "gated_activation: limit: expected None for silu, got 1"),
    (lambda: tmm.ops.gated_activation(X, X, activation="clamped_silu", limit=1.0), "gated_activation: alpha: expected a number for clamped_silu, got None"),
    (lambda: tmm.ops.gated_activation(X, X, activation="limited_silu"), "gated_activation: limit: expected a number above 0 for limited_silu, got None"),
    (lambda: tmm.ops.gated_activation(X, X, activation="limited_silu", limit=1.0, alpha=1.0), "gated_activation: alpha: expected None for limited_silu, got 1"),
    (lambda: tmm.ops.write_cache(Q[0], Q, Q, Q, START), "write_cache: keys: expected float16, bfloat16 or float32 [B, H, L, D], got float32 [2, 3, 8]"),
    (lambda: tmm.ops.write_cache(Q.transpose(1, 2), Q, Q, Q, START), "write_cache: keys: expected a contiguous tensor"),
    (lambda: tmm.ops.write_cache(Q.clone(), Q.half(), Q, Q, START), "write_cache: values: expected float32 [B, H, L, any] with the B, H and L of keys"),
    (lambda: tmm.ops.write_cache(Q, Q, Q.repeat(1, 1, 2, 1), Q, START), "write_cache: k: expected float32 [B, H, S, D]"),
    (lambda: tmm.ops.write_cache(Q, Q, Q[..., :4], Q, START), "write_cache: k: expected float32 [B, H, S, D]"),
    (lambda: tmm.ops.write_cache(Q, Q, Q, Q[:, :, :2], START), "write_cache: v: expected float32 [B, H, S, DV]"),
    (lambda: tmm.ops.write_cache(Q, Q, Q, Q, START.int()), "write_cache: start: expected int64 [] or [1], got int32 []"),
    (lambda: tmm.ops.write_cache(Q, Q, Q.clone().requires_grad_(), Q, START), "write_cache: k: expected a tensor that does not require grad"),
])  # fmt: skip
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=re.escape(f"torch_marlin_metal::{message}")):
        call()


def test_tensors_on_two_devices_are_refused(mps):
    with pytest.raises(ValueError, match="rms_norm: weight: expected a tensor on mps"):
        tmm.ops.rms_norm(X.to(mps), ROW, eps=1e-5)


def test_meta_tensors():
    x = torch.empty(2, 8, dtype=torch.bfloat16, device="meta")
    y, total = tmm.ops.add_rms_norm(x, x, torch.empty(8, device="meta"), eps=1e-5)
    assert (y.shape, total.dtype, y.device.type) == ((2, 8), torch.bfloat16, "meta")


def test_many_rows_run_on_several_threads():
    x, weight = random(3000, 64), random(64, seed=1)
    torch.testing.assert_close(tmm.ops.rms_norm(x, weight, eps=1e-5), functional.rms_norm(x, (64,), weight, 1e-5))
    exact = exact_activation(x.double(), x.double(), "silu")
    check(tmm.ops.gated_activation(x, x), exact, x.double().square())
