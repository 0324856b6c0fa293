"""fuse_projections computes all projections of one input in one call. Layers that do not match stay as they are."""

import copy

import pytest
import torch
from torch import nn

from torch_marlin_metal import WEIGHT_FORMATS, MarlinLinear, fuse_projections, quantize_weight
from torch_marlin_metal.layers.fuse import FusedLinear, unfused


class Attention(nn.Module):
    def __init__(
        self, weight_format: str = "uint4", sizes: tuple[int, int, int] = (64, 32, 32), bias: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, N in zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True):
            linear = nn.Linear(128, N, bias=bias)
            size = 16 if weight_format == "nvfp4" else 32
            self.add_module(name, MarlinLinear.from_linear(linear, weight_format, size))

    def forward(self, a: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        other = a if other is None else other
        return torch.cat((self.q_proj(a), self.k_proj(other), self.v_proj(other)), dim=-1)


class Model(nn.Module):
    def __init__(self, **arguments) -> None:
        super().__init__()
        self.attention = Attention(**arguments)

    def forward(self, a: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        return self.attention(a, other)


CASES = [(name, "cpu") for name in WEIGHT_FORMATS] + [("uint4", "mps"), ("nvfp4", "mps")]


@pytest.mark.parametrize(("weight_format", "where"), CASES)
def test_a_fused_group_computes_the_same_and_comes_apart_again(weight_format, where, request) -> None:
    """The planner splits K in the same way for the wide matrix and for each narrow matrix, so results have equal bits."""
    device = request.getfixturevalue("mps") if where == "mps" else where
    model = Model(weight_format=weight_format).to(device)
    before = {name: weight.tensors() for name, weight in unfused(model)}
    a, other = torch.randn(2, 5, 128, device=device), torch.randn(2, 5, 128, device=device)
    expected, crossed = model(a), model(a, other)
    report = fuse_projections(model)
    assert report.fused == [tuple(f"attention.{name}" for name in ("q_proj", "k_proj", "v_proj"))]
    assert sum(isinstance(module, MarlinLinear) for module in model.modules()) == 1
    assert torch.equal(model(a), expected)
    assert torch.equal(model(a, other), crossed)
    assert torch.equal(copy.deepcopy(model)(a), expected)
    after = {name: weight.tensors() for name, weight in unfused(model)}
    assert before.keys() == after.keys()
    assert torch.equal(model.attention.v_proj.bias, before["attention.v_proj"]["bias"])
    for name, tensors in before.items():
        assert tensors.keys() == after[name].keys()
        assert all(torch.equal(tensor, after[name][key]) for key, tensor in tensors.items())


def test_one_call_and_nothing_kept(monkeypatch) -> None:
    model, calls = Model(), []
    fuse_projections(model)
    group = model.attention.q_proj.group
    group.layer.register_forward_hook(lambda module, a, y: calls.append(y.shape))
    model(torch.randn(3, 128))
    assert calls == [(3, 128)]
    assert group.latest is None


def test_a_kept_result_is_for_the_same_values_and_the_same_modes() -> None:
    model = Model()
    alone = copy.deepcopy(model).attention
    fuse_projections(model)
    fused, a = model.attention, torch.randn(3, 128)
    fused.q_proj(a)
    a.mul_(2)
    assert torch.equal(fused.k_proj(a), alone.k_proj(a))
    with torch.no_grad():
        fused.q_proj(a.requires_grad_())
    assert fused.k_proj(a).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused.v_proj(a), alone.v_proj(a))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a.detach()), alone(a.detach()))


def test_moving_a_fused_model_moves_every_projection(mps) -> None:
    model = Model()
    fuse_projections(model)
    a = torch.randn(3, 128)
    expected = model(a)
    torch.testing.assert_close(model.to(mps)(a.to(mps)).cpu(), expected, rtol=0, atol=1e-5)
    assert model.attention.v_proj.weight.device.type == "mps"
    assert model.half().attention.v_proj.weight.dtype == torch.float16
    assert model.attention.k_proj.weight.shape == (32, 128)


def replace(model: Model, **changes) -> None:
    packed = model.attention.k_proj.to_packed()
    for name, value in changes.items():
        setattr(packed, name, value)
    model.attention.k_proj = MarlinLinear.from_packed(packed)


DIFFERENCES = {
    "act-orders": (lambda m: replace(m, perm=torch.arange(127, -1, -1, dtype=torch.int32)), "their act-orders differ"),
    "bias": (lambda m: replace(m, bias=None), "only some have a bias"),
    "dtypes": (lambda m: replace(m, scales=m.attention.k_proj.scales.float()), "their scales differ in dtype"),
    "format": (lambda m: other_format(m), "their sizes, weight formats or group sizes differ"),
    "hooks": (lambda m: m.attention.k_proj.register_forward_hook(lambda *_: None), "one has hooks"),
    "kind": (lambda m: setattr(m.attention, "k_proj", nn.Linear(128, 32)), "not all of them are MarlinLinear"),
}


def other_format(model: Model) -> None:
    model.attention.k_proj = MarlinLinear.from_packed(quantize_weight(torch.randn(32, 128), "uint4b8", 32))


@pytest.mark.parametrize("case", DIFFERENCES)
def test_layers_that_differ_stay_apart_with_the_reason(case) -> None:
    model = Model()
    change, reason = DIFFERENCES[case]
    change(model)
    report = fuse_projections(model)
    assert [entry[1] for entry in report.left] == [reason]
    assert report.fused == []
    assert not any(isinstance(module, FusedLinear) for module in model.modules())
