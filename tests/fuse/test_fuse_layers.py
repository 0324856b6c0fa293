"""fuse_layers replaces what it has proved, keeps a model's results, names and training, and can be undone."""

import copy

import pytest
import torch
from torch import nn

import torch_marlin_metal as tmm
from tests.journeys.token_operations import model_of, of_one_layer
from torch_marlin_metal.fuse import gated, norms, rotary

# The most operations of one more layer in one token.
BARS = {"llama": 12, "phi3": 12, "qwen3": 14, "gemma3_text": 16, "glm4": 16, "mistral": 12, "qwen3_moe": 20}
IDS = torch.arange(5, 13)[None]


@pytest.fixture
def model():
    return model_of("llama", 2)


def results(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("family", BARS)
def test_a_layer_stays_below_its_bar(family):
    counts, report = of_one_layer(family, fuse=True)
    assert counts.total() <= BARS[family], counts
    assert report.left == []
    assert report.difference < 1e-5


@pytest.mark.parametrize("family", ["cohere", "gpt2"])
def test_what_is_not_proved_stays(family):
    model = model_of(family, 2)
    before = results(model)
    report = tmm.fuse_layers(model)
    torch.testing.assert_close(results(model), before, rtol=1e-4, atol=1e-5)
    fused = {name for name, _ in report.fused}
    for name, module in model.named_modules():
        assert ("forward" in vars(module)) == (name in fused)
    if family == "gpt2":
        assert report.fused == []


def test_generates_the_same_tokens_and_can_be_undone(model):
    names, before = list(model.state_dict()), results(model)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS, **options)
    report = tmm.fuse_layers(model)
    assert {kind for _, kind in report.fused} == {"rms_norm", "rotary", "gated_activation", "add_rms_norm"}
    assert "add_rms_norm" in str(report)
    assert list(model.state_dict()) == names
    assert torch.equal(model.generate(IDS, **options), expected)
    assert torch.equal(
        model.generate(IDS.repeat(2, 1), cache_implementation="static", **options), expected.repeat(2, 1)
    )
    copied = copy.deepcopy(model)
    report.undo()
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(results(model), before)
    torch.testing.assert_close(results(copied), before, rtol=1e-4, atol=1e-5)
    assert all(vars(m)["forward"].__self__ is m for m in copied.modules() if "forward" in vars(m))


def test_gradients_with_checkpointing_are_those_of_the_original(model):
    def gradient() -> torch.Tensor:
        inputs = model.get_input_embeddings()(IDS).detach().requires_grad_()
        model(inputs_embeds=inputs, use_cache=False).logits.square().sum().backward()
        return inputs.grad

    expected = gradient()
    tmm.fuse_layers(model)
    model.train()
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradient(), expected, rtol=1e-3, atol=1e-4)


def test_compiles(model):
    before = results(model)
    tmm.fuse_layers(model)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(results(compiled), before, rtol=1e-4, atol=1e-5)


def test_autocast_and_16_bits():
    model = model_of("qwen3", 1)
    tmm.fuse_layers(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert results(model).isfinite().all()
    model = model_of("gemma3_text", 1).bfloat16()
    assert tmm.fuse_layers(model).left == []


def test_experts_of_a_mixture():
    model = model_of("gpt_oss", 1)
    before = results(model)
    (mixture,) = (module for module in model.modules() if isinstance(module, tmm.MarlinExperts))
    activation = mixture._activation
    x = 20 * torch.randn(3, 2, 2 * 64)
    expected = activation[0](x)
    report = tmm.fuse_layers(model)
    assert ("model.layers.0.mlp.experts", "gated_activation") in report.fused
    assert mixture._activation != activation
    torch.testing.assert_close(mixture._activation[0](x), expected)
    torch.testing.assert_close(results(model), before, rtol=1e-4, atol=1e-5)
    report.undo()
    assert mixture._activation == activation
    mixture._activation = (lambda both: 1.01 * activation[0](both),)
    report = tmm.fuse_layers(model)
    assert [name for name, _ in report.left] == ["model.layers.0.mlp.experts"]


def test_on_mps(mps):
    model = model_of("gemma3_text", 1).to(mps)
    tokens = IDS.to(mps)
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        report = tmm.fuse_layers(model)
        torch.testing.assert_close(model(input_ids=tokens).logits, before, rtol=1e-4, atol=1e-5)
    assert {kind for _, kind in report.fused} == {"rms_norm", "rotary", "gated_activation", "add_rms_norm"}
    assert report.left == []


class Norm(nn.Module):
    """An RMS norm, or something close to one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps, self.kind = 1e-6, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "mean":
            x = x - x.mean(-1, keepdim=True)
        eps = 1e-5 if self.kind == "eps" else self.eps
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x * (1 + self.weight if self.kind == "offset" else self.weight)


def test_only_rms_norms_are_taken_for_one():
    found = {kind: norms.settings_of(Norm(kind)) for kind in ("plain", "offset", "mean", "eps")}
    assert found == {"plain": (1e-6, 0.0), "offset": (1e-6, 1.0), "mean": None, "eps": None}


class Block(nn.Module):
    """A gated block, or something close to one."""

    def __init__(self, is_gated: bool) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act, self.is_gated = nn.SiLU(), is_gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, three = self.act(self.three(x)), self.one(x)
        return self.two(one * three if self.is_gated else one + three)


def test_only_gated_blocks_are_taken_for_one():
    x = torch.randn(2, 3, 8)
    block = Block(is_gated=True)
    fused = gated.fused_block(block)
    assert fused is not None
    torch.testing.assert_close(fused(block, x), block(x))
    assert gated.fused_block(Block(is_gated=False)) is None


def test_a_rotation_of_another_kind_is_refused():
    def scaled(q, k, cos, sin):
        q, k = tmm.rotary(q, k, cos, sin)
        return q, 1.01 * k

    assert rotary.variant_of(tmm.rotary) == (False, False, False)
    assert rotary.variant_of(scaled) is None
