"""Tests custom operators and torch.compile on the software device: eager, aot_eager, and Inductor's Metal kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import softmetal


@pytest.fixture(scope="module")
def twice_op() -> object:
    library = torch.mps.compile_shader(
        "kernel void twice(device const float* x, device float* y, uint i [[thread_position_in_grid]])"
        " { y[i] = 2 * x[i]; }"
    )

    @torch.library.custom_op("softmetal_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        library.twice(x, y)
        return y

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    twice.register_autograd(lambda ctx, grad: twice(grad))
    return twice


def test_opcheck(twice_op) -> None:
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")
    for x in (torch.randn(5, 3, device="mps"), torch.randn(4, device="mps", requires_grad=True)):
        assert set(torch.library.opcheck(twice_op, (x,), test_utils=utils).values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(twice_op, backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.Linear(6, 6).to("mps")

    def f(x: Tensor) -> Tensor:
        return (twice_op(layer(x)).relu() + x).softmax(-1).sum(0)

    compiled = torch.compile(f, backend=backend, fullgraph=True, dynamic=True)
    for rows in (3, 8, 17):
        x = torch.randn(rows, 6, device="mps", requires_grad=True)
        y = torch.randn(rows, 6, device="mps", requires_grad=True)
        y.data.copy_(x.data)
        torch.testing.assert_close(compiled(x), f(y))
        compiled(x).square().sum().backward()
        f(y).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


def test_inductor_runs_its_own_metal_kernels() -> None:
    """On mps, Inductor generates MSL for reductions and pointwise operators, and compiles it with compile_shader."""
    torch._dynamo.reset()
    softmetal.faults()

    def f(x: Tensor, i: Tensor) -> Tensor:
        return (x.sigmoid() * 3 - x.amax(-1, keepdim=True)).var(-1) + x[i, 0]

    x, i = torch.randn(7, 300, device="mps"), torch.tensor([6, 0, 1, 1, 2, 3, 5], device="mps")
    torch.testing.assert_close(torch.compile(f, fullgraph=True)(x, i).cpu(), f(x.cpu(), i.cpu()))
    assert any(c.kernel.startswith("generated_kernel") for c in softmetal.counters())


def test_export() -> None:
    layer = nn.Linear(4, 2).to("mps")
    program = torch.export.export(layer, (torch.randn(3, 4, device="mps"),))
    x = torch.randn(3, 4, device="mps")
    assert torch.equal(program.module()(x), layer(x))
