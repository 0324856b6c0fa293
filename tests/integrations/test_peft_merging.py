"""Merging adapters of peft into packed layers quantizes the sum again; unmerging restores the old bits."""

import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import torch_marlin_metal as tmm
import torch_marlin_metal.integrations.transformers
from tests.support.adapters import IDS, config, fill, layers_of, packed_model, same_bits
from tests.support.models import SIZES, tensors
from torch_marlin_metal import MarlinLinear


@pytest.mark.parametrize("weight_format", tmm.WEIGHT_FORMATS)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merging_quantizes_the_sum_and_unmerging_restores_the_bits(weight_format, kind):
    model = get_peft_model(packed_model(weight_format), config(lora_bias=kind == "lora", use_dora=kind == "dora"))
    fill(model, 0.2)
    before = tensors(model)
    layer = layers_of(model)[0]
    base = layer.get_base_layer()
    old, old_bias = base.dequantize(), base.bias.clone()
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    expected = old + delta
    if kind == "dora":
        magnitude = layer.lora_magnitude_vector["default"].weight
        expected = expected * (magnitude / expected.norm(dim=1)).unsqueeze(1)
    model.merge_adapter()
    assert layer.merged
    new = base.dequantize()
    assert (new - expected).norm() < 0.2 * expected.norm() < 0.5 * (old - expected).norm()
    if kind == "lora":
        torch.testing.assert_close(base.bias, old_bias + layer.lora_B["default"].bias * layer.scaling["default"])
    with torch.no_grad():
        x = torch.randn(3, base.in_features)
        assert torch.equal(layer(x), base(x))
    model.unmerge_adapter()
    assert not layer.merged and same_bits(model, before)
    with pytest.warns(UserWarning, match="Already unmerged"):
        layer.unmerge()


def test_merging_in_two_calls_is_merging_in_one():
    model = get_peft_model(packed_model("uint4b8", 16), config())
    model.add_adapter("other", config(r=2))
    fill(model)
    layer = layers_of(model)[0]
    layer.merge(adapter_names=["default", "other"])
    together = layer.get_base_layer().dequantize()
    layer.unmerge()
    layer.merge(adapter_names=["default"])
    assert not torch.equal(together, layer.get_base_layer().dequantize())
    layer.merge(safe_merge=True, adapter_names=["other"])
    assert torch.equal(together, layer.get_base_layer().dequantize())
    assert layer.merged_adapters == ["default", "other"]


@pytest.mark.parametrize("kinds", [("bias", "dora"), ("dora", "bias"), ("dora", "dora"), ("lora", "dora")])
def test_several_merged_adapters_give_the_sum_of_the_forward_pass(kinds):
    """DoRA scales the contributions of earlier adapters, to the weight and to the bias."""
    torch.manual_seed(0)
    model = nn.Sequential(MarlinLinear.from_linear(nn.Linear(64, 24), "uint4", 16))
    adapted = None
    for name, kind in zip("ab", kinds, strict=True):
        options = {"target_modules": ["0"], "r": 4, "use_dora": kind == "dora", "lora_bias": kind == "bias"}
        if adapted is None:
            adapted = get_peft_model(model, LoraConfig(**options), adapter_name=name)
        else:
            adapted.add_adapter(name, LoraConfig(**options))
    adapted.base_model.set_adapter(["a", "b"])
    fill(adapted.eval(), 0.3)
    layer = layers_of(adapted)[0]
    with torch.no_grad():
        bias = layer(torch.zeros(1, 64))
        weight = layer(torch.eye(64)) - bias
        layer.merge()
        torch.testing.assert_close(layer(torch.zeros(1, 64)), bias)
        new = layer.get_base_layer().dequantize()
        assert (new.T - weight).norm() < 0.1 * weight.norm()


def test_merging_keeps_act_order():
    torch.manual_seed(0)
    weight = tmm.quantize_weight(torch.randn(24, 64), "uint4b8", 16)
    weight.perm = torch.randperm(64).to(torch.int32)
    weight.bias = torch.zeros(24)
    model = nn.Sequential(MarlinLinear.from_packed(weight))
    old = model[0].dequantize()
    adapted = get_peft_model(model, LoraConfig(target_modules=["0"], r=2, lora_alpha=4))
    fill(adapted, 0.5)
    layer = layers_of(adapted)[0]
    expected = old + layer.get_delta_weight("default")
    merged = adapted.merge_and_unload()
    assert isinstance(merged[0], MarlinLinear) and torch.equal(merged[0].perm, weight.perm)
    assert (merged[0].dequantize() - expected).norm() < 0.2 * (old - expected).norm()


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_sum_that_the_format_cannot_hold_is_named_and_the_layer_stays(value):
    model = get_peft_model(packed_model("uint4b8"), config())
    model.add_adapter("broken", config())
    fill(model)
    layer = layers_of(model)[0]
    layer.merge(adapter_names=["default"])
    with torch.no_grad():
        layer.lora_A["broken"].weight.fill_(1.0)
        layer.lora_B["broken"].weight.fill_(value)
    before = tensors(model)
    message = "adapter broken seems to be broken" if value != value else r"\['default', 'broken'\]: uint4b8 cannot hold"
    with pytest.raises(ValueError, match=message):
        layer.merge(adapter_names=["broken"])
    assert layer.merged_adapters == ["default"] and same_bits(model, before)


def test_a_bias_cannot_be_merged_where_there_is_none():
    model = nn.Sequential(MarlinLinear.from_packed(tmm.quantize_weight(torch.randn(24, 64))), nn.LayerNorm(24))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(target_modules=["0"], r=2, lora_bias=True))
    with pytest.raises(ValueError, match="adapter 'default': expected a base layer with a bias"):
        adapted.merge_adapter()


def test_a_merge_keeps_a_group_size_beyond_k():
    """The merged weight must load into a layer of the same group size, which packed_format states."""
    layer = MarlinLinear.from_packed(tmm.quantize_weight(torch.randn(32, 64), "uint4", group_size=128))
    model = nn.Sequential(layer, nn.Linear(32, 4))
    before = model.state_dict()["0.packed_format"].clone()
    merged = get_peft_model(model, LoraConfig(target_modules=["0"], r=4)).merge_and_unload()
    assert torch.equal(merged.state_dict()["0.packed_format"], before)


def fill_last_badly(model: nn.Module, value: float) -> str:
    """Makes the last layer's adapter unmergeable, and returns the layer's name in peft's model."""
    layer = layers_of(model)[-1]
    with torch.no_grad():
        layer.lora_A["default"].weight.fill_(1.0)
        layer.lora_B["default"].weight.fill_(value)
    return next(name for name, module in model.base_model.model.named_modules() if module is layer)


@pytest.mark.parametrize("way", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_merge_that_fails_names_the_layer_and_changes_no_layer(way, value):
    model = get_peft_model(packed_model("uint4b8"), config())
    model.add_adapter("first", config())
    fill(model)
    model.merge_adapter(["first"])
    name = fill_last_badly(model, value)
    assert name == "model.layers.1.mlp.down_proj"
    before, modules = tensors(model), list(model.named_modules())
    with pytest.raises(ValueError, match=f"^merge: layer '{name}': .*(NaNs detected|cannot hold the sum)"):
        getattr(model, way)(adapter_names=["first", "default"])
    assert list(model.named_modules()) == modules and same_bits(model, before)
    assert all(layer.merged_adapters == ["first"] for layer in layers_of(model))
    with torch.no_grad():
        layers_of(model)[-1].lora_B["default"].weight.zero_()
    merged = model.merge_and_unload(adapter_names=["first", "default"])
    assert not layers_of(merged) and merged(IDS).logits.isfinite().all()


def test_a_whole_merge_is_the_merge_of_each_layer():
    one, other = (get_peft_model(packed_model(), config()) for _ in range(2))
    fill(one), fill(other)
    one.merge_adapter()
    for layer in layers_of(other):
        layer.merge()
    assert same_bits(one, tensors(other))
    with pytest.warns(UserWarning, match="All adapters are already merged") as caught:
        one.merge_adapter()
    assert len(caught) == len(layers_of(one))


def test_a_decoded_model_merges_without_rounding(tmp_path):
    base = packed_model()
    base.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, config(use_dora=True)).eval()
    fill(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    decoded = LlamaForCausalLM.from_pretrained(tmp_path / "base").dequantize()
    merged = PeftModel.from_pretrained(decoded, tmp_path / "adapter").merge_and_unload()
    assert isinstance(merged.model.layers[0].self_attn.q_proj, nn.Linear)
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, adapted(IDS).logits, rtol=1e-5, atol=1e-5)


def test_tying_keeps_a_head_into_which_an_adapter_was_merged(tmp_path):
    """The head shares the embedding's words. After a merge it has its own words, which tie_weights must not replace."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)).eval()
    tmm.quantize_model(model, "uint4", 32, vocabulary_format="uint4", progress=False)
    table = model.model.embed_tokens
    assert model.lm_head.b_packed is table.b_packed
    words, ids = table.b_packed.clone(), torch.tensor([[3, 9, 27]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns that the layer is tied
        adapted = get_peft_model(model, LoraConfig(target_modules=["lm_head"], r=4, lora_alpha=8))
        fill(adapted, 0.3)
        merged = adapted.merge_and_unload()
    assert torch.equal(table.b_packed, words) and not torch.equal(merged.lm_head.b_packed, words)
    with torch.no_grad():
        expected = merged(ids).logits
    message = "tie_weights: 'lm_head' and 'model.embed_tokens' have different packed weights"
    merged.save_pretrained(tmp_path)
    for one in (merged, LlamaForCausalLM.from_pretrained(tmp_path)):
        with pytest.warns(UserWarning, match=message):
            one.tie_weights()
        with torch.no_grad():
            assert torch.equal(one(ids).logits, expected)
    head = merged.lm_head
    head.b_packed, head.scales, head.zeros = (t.clone() for t in (table.b_packed, table.scales, table.zeros))
    merged.tie_weights()  # equal weights are shared again
    assert head.b_packed is table.b_packed
