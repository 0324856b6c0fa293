"""fuse_layers replaces modules by operators, preserves a model's results, names and training, and can be undone."""

import copy
import io
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.gpt_oss import modeling_gpt_oss

import torch_marlin_metal as tmm
import torch_marlin_metal.integrations.peft
from lab.token.operations import Operations
from tests.journeys.architectures import class_of, shrunken
from tests.journeys.token_operations import model_of, of_one_layer, pair_of
from torch_marlin_metal.fuse import gated, norms, rotary, sinks
from torch_marlin_metal.fuse.layers import FusedLayersReport, _fuse_norms

# The largest number of operations that one more layer may add per token.
BARS = {
    "llama": 12,
    "phi3": 12,
    "qwen3": 14,
    "gemma3_text": 16,
    "glm4": 16,
    "mistral": 12,
    "qwen3_moe": 20,
    "gpt_oss": 20,
}
KINDS = {"rms_norm", "rotary", "gated_activation", "add_rms_norm", "mask", "write_cache"}
IDS = torch.arange(5, 13)[None]


@pytest.fixture
def model():
    return model_of("llama", 2)


def results(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


# The calls: a token after a prompt, a prompt after another prompt, a token with a static cache, and a batch of prompts
# with a static cache.
CALLS = [{}, {"tokens": 4}, {"is_static": True}, {"is_static": True, "batch": 2, "tokens": 4}]


def documented() -> dict[str, list[int]]:
    """Reads each family's operations in docs/use/fused-layers.md: before fusing, and after it for each of `CALLS`."""
    page = (Path(__file__).parents[2] / "docs/use/fused-layers.md").read_text()
    rows = re.findall(r"^\| (\w+) ((?:\| \d+ ){5})\|$", page, flags=re.MULTILINE)
    return {family: [int(number) for number in re.findall(r"\d+", numbers)] for family, numbers in rows}


@pytest.mark.parametrize("family", BARS)
def test_a_layer_has_the_documented_operations_and_stays_below_its_bar(family):
    models, report = pair_of(family, fuse=True)
    assert report.left == []
    assert report.difference < 1e-5
    before, _ = pair_of(family, fuse=False)
    counts = [of_one_layer(models, **options).total() for options in CALLS]
    assert documented()[family] == [of_one_layer(before).total(), *counts]
    assert of_one_layer(models, batch=3).total() == counts[0]
    assert 0 < max(counts) <= BARS[family]


def of_floats(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return class_of("qwen3")._from_config(shrunken("qwen3")).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_error_is_no_larger_than_that_of_the_original_order(dtype):
    """Compares with the same model in fp64. The errors of all logits are summed, so that no single rounding decides."""
    model = of_floats(dtype)
    exact = results(copy.deepcopy(model).double())
    before = (results(model).double() - exact).norm()
    report = tmm.fuse_layers(model)
    assert len(report.fused) == 9 + 2 + 2 + 2 + 2 + 2
    assert 0 < (results(model).double() - exact).norm() <= 1.1 * before


def test_inputs_that_no_operator_takes_go_to_the_original():
    model = of_floats(torch.float32)
    report = tmm.fuse_layers(model)
    model.double()
    got = results(model)
    report.undo()
    assert torch.equal(got, results(model))


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
    assert {kind for _, kind in report.fused} == KINDS
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


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_a_pickled_model_comes_back_unfused_and_can_be_fused_again(family):
    model = model_of(family, 2)
    fused = tmm.fuse_layers(model).fused
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    expected = results(model)
    torch.testing.assert_close(results(again), expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(results(again), expected)
    assert tmm.fuse_layers(again).fused == fused
    assert torch.equal(results(again), expected)
    assert torch.equal(results(copy.deepcopy(again)), expected)


def test_a_forward_of_somebody_else_stays(model):
    norm, mlp = model.model.layers[0].input_layernorm, model.model.layers[0].mlp
    replaced = norm.forward = lambda x: 2 * x
    handle = mlp.register_forward_hook(lambda *_: None)
    left = dict(tmm.fuse_layers(model).left)
    assert norm.forward is replaced and "forward" not in vars(mlp)
    assert "replaced or has hooks" in left["model.layers.0.input_layernorm"]
    assert "replaced or has hooks" in left["model.layers.0.mlp"]
    handle.remove()


def test_a_model_whose_results_change_is_restored(model, monkeypatch):
    before = results(model)
    monkeypatch.setattr(gated, "agrees", lambda got, expected: True)
    monkeypatch.setattr(gated, "agrees_in_training", lambda *_: True)
    monkeypatch.setattr(gated, "gated_activation", lambda gate, up, **_: gate - up)
    with pytest.raises(RuntimeError, match="fuse_layers: model: expected the same results after fusing"):
        tmm.fuse_layers(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(results(model), before)


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
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(results(compiled), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_fused_first", [False, True])
def test_adapters_before_and_after(model, is_fused_first):
    targets = ["q_proj", "gate_proj", "down_proj"]
    settings = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    if is_fused_first:
        report = tmm.fuse_layers(model)
    torch.manual_seed(1)
    adapted = get_peft_model(model, settings).eval()
    if not is_fused_first:
        report = tmm.fuse_layers(model)
    got = results(adapted)
    assert len(report.fused) == 5 + 2 + 2 + 2 + 2 + 2
    report.undo()
    torch.testing.assert_close(got, results(adapted), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, results(model_of("llama", 2)), rtol=1e-2, atol=1e-2)


def test_autocast_and_16_bits():
    model = model_of("qwen3", 1)
    tmm.fuse_layers(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert results(model).isfinite().all()
    model = model_of("gemma3_text", 1).bfloat16()
    assert tmm.fuse_layers(model).left == []


def test_on_mps(mps):
    model = model_of("gemma3_text", 1).to(mps)
    tokens = IDS.to(mps)
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        report = tmm.fuse_layers(model)
        torch.testing.assert_close(model(input_ids=tokens).logits, before, rtol=1e-4, atol=1e-5)
    assert {kind for _, kind in report.fused} == KINDS
    assert report.left == []


class Norm(nn.Module):
    """A norm, or a module that is nearly a norm."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps, self.kind = 1e-6, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind in ("mean", "centred"):
            x = x - x.mean(-1, keepdim=True)
        eps = 1e-5 if self.kind == "eps" else self.eps
        divisor = 15 / 16 if self.kind == "centred" else 1  # the divisor of the unbiased variance
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) / divisor + eps)
        return x * (1 + self.weight if self.kind == "offset" else self.weight)


def test_only_norms_are_taken_for_one():
    found = {kind: norms.settings_of(Norm(kind)) for kind in ("plain", "offset", "mean", "centred", "eps")}
    expected = {"plain": norms.Norm(1e-6), "offset": norms.Norm(1e-6, offset=1.0)}
    assert found == expected | {"mean": norms.Norm(1e-6, has_mean=True), "centred": None, "eps": None}
    assert not norms.is_candidate(nn.LayerNorm(8, bias=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_norm_that_is_written_out_becomes_one_operator(dtype):
    module, x = Norm("mean").to(dtype), torch.randn(2, 3, 16, dtype=dtype)
    module.weight.data += torch.randn(16)
    report = FusedLayersReport()
    _fuse_norms(module, report)
    assert report.fused == [("", "layer_norm")]
    with torch.no_grad(), Operations() as seen:
        got = module(x)
    assert list(seen.counts) == ["aten.native_layer_norm.default"]
    wide = x.double() - x.double().mean(-1, keepdim=True)
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight.double()
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).dtype == dtype


class Block(nn.Module):
    """A gated block, or a module that is nearly a gated block."""

    def __init__(self, is_gated: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act, self.is_gated, self.dropout = nn.SiLU(), is_gated, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, three = self.act(self.three(x)), self.one(x)
        product = one * three if self.is_gated else one + three
        return self.two(nn.functional.dropout(product, self.dropout, self.training))


def test_only_gated_blocks_are_taken_for_one():
    x = torch.randn(2, 3, 8)
    block = Block(is_gated=True)
    fused = gated.fused_block(block)
    assert fused is not None
    torch.testing.assert_close(fused(block, x), block(x))
    assert gated.fused_block(Block(is_gated=False)) is None


def test_dropout_without_a_module_of_its_own_is_not_lost(model, monkeypatch):
    block = Block(is_gated=True, dropout=0.1).eval()
    state = torch.get_rng_state()
    assert gated.fused_block(block) is None and not block.training

    def forward(self, hidden_states, **kwargs):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + nn.functional.dropout(attended, 0.1, self.training)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    monkeypatch.setattr(type(model.model.layers[0]), "forward", forward)
    model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.1
    assert {reason for _, reason in tmm.fuse_layers(model).left} == {
        "residual additions: its results differ in training mode"
    }
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_rotation_of_another_kind_is_refused():
    def scaled(q, k, cos, sin):
        q, k = tmm.ops.rotary(q, k, cos, sin)
        return q, 1.01 * k

    assert rotary.variant_of(tmm.ops.rotary) == (False, False, False)
    assert rotary.variant_of(scaled) is None


class Attention(nn.Module):
    """A module with the attributes that transformers' attention functions read."""

    num_key_value_groups = 2

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(4))


def test_attention_with_sinks():
    module = Attention().eval()
    exact = modeling_gpt_oss.eager_attention_forward
    assert sinks.is_proved(module, exact)
    ours = sinks.fused_attention(exact)
    query, key, value = torch.randn(3, 4, 1, 8), torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8)
    for mask in (None, torch.randn(3, 1, 1, 5), torch.randn(1, 1, 1, 5)):
        arguments = module, query, key, value, mask, 0.3
        for got, expected in zip(ours(*arguments), exact(*arguments), strict=True):
            torch.testing.assert_close(got, expected)
    wide = torch.randn(3, 4, 2, 8)  # two queries: the original forward runs
    assert torch.equal(ours(module, wide, key, value, None, 0.3)[0], exact(module, wide, key, value, None, 0.3)[0])


def test_attention_of_another_kind_is_refused():
    def other(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        out, weights = modeling_gpt_oss.eager_attention_forward(module, query, key, value, attention_mask, scaling)
        return out, 0.99 * weights

    assert not sinks.is_proved(Attention().eval(), other)
