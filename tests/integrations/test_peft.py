"""LoRA adapters of peft on packed layers, beside peft's own layers on the same weights in fp32."""

import copy
import warnings

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import torch_marlin_metal as tmm
import torch_marlin_metal.integrations.transformers
from tests.support.models import tensors
from torch_marlin_metal import MarlinLinear, quantize_model
from torch_marlin_metal.integrations import peft as integration
from torch_marlin_metal.integrations.peft import MarlinLoraLinear, prepare_for_training

TARGETS = ["q_proj", "v_proj", "down_proj"]
IDS = torch.tensor([[5, 17, 99, 42, 7, 63, 110, 23], [8, 77, 31, 56, 2, 64, 9, 100]])
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True, "r": 3},
    "dora": {"use_dora": True},
    "all-linear": {"target_modules": "all-linear"},
    "bias": {"lora_bias": True},
}


def config(**options) -> LoraConfig:
    return LoraConfig(**{"target_modules": TARGETS, "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **options})


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True)
    )


def packed_model(weight_format: str = "uint4", group_size: int | None = None) -> LlamaForCausalLM:
    model = llama()
    quantize_model(model, weight_format, group_size=group_size)
    return model


def dense_twin(model: nn.Module) -> nn.Module:
    """Returns a copy whose packed layers are nn.Linear layers with the decoded weight, in fp32."""
    twin = copy.deepcopy(model)
    for name, layer in list(twin.named_modules()):
        if isinstance(layer, MarlinLinear):
            linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            linear.weight.data = layer.dequantize().contiguous()
            if layer.bias is not None:
                linear.bias = layer.bias
            twin.set_submodule(name, linear)
    return twin


def fill(model: nn.Module, size: float = 0.1) -> None:
    """Gives every adapter weight a random value, the same for the same shapes and order."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
            elif "magnitude" in name:
                parameter.mul_(1 + size * torch.rand(parameter.shape, generator=generator))


def pair(**options) -> tuple[PeftModel, PeftModel]:
    """Returns a packed model with an adapter, and peft's own adapter with the same values on the weights in fp32."""
    base = packed_model()
    models = get_peft_model(base, config(**options)), get_peft_model(dense_twin(packed_model()), config(**options))
    for model in models:
        fill(model)
        model.eval()
    return models


def layers_of(model: nn.Module) -> list[MarlinLoraLinear]:
    return [module for module in model.modules() if isinstance(module, MarlinLoraLinear)]


def same_bits(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    after = model.state_dict()
    return after.keys() == before.keys() and all(
        torch.equal(after[name].nan_to_num(), before[name].nan_to_num()) for name in before
    )


@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_peft_on_the_decoded_weights(kind):
    packed, dense = pair(**KINDS[kind])
    count = 14 if kind == "all-linear" else 6
    assert len(layers_of(packed)) == count and not layers_of(dense)
    results = []
    for model in (packed, dense):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        results.append((loss.detach(), grads))
    (loss, grads), (expected, expected_grads) = results
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert grads.keys() == expected_grads.keys() and all("lora_" in name for name in grads)
    for name, grad in grads.items():
        assert expected_grads[name].abs().max() > 0
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_dora", [False, True])
def test_dropout_drops_the_input_of_the_adapter_alone(use_dora):
    packed, dense = pair(lora_dropout=0.5, use_dora=use_dora)
    losses = []
    for model in (packed.train(), dense.train()):
        torch.manual_seed(1)
        losses.append(model(IDS, labels=IDS).loss)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(losses[0], packed.eval()(IDS, labels=IDS).loss)


def test_a_batch_may_mix_adapters():
    model = get_peft_model(packed_model(), config())
    model.add_adapter("other", config(r=2, use_rslora=True))
    fill(model)
    model.eval()
    with torch.no_grad():
        mixed = model(IDS, adapter_names=["other", "__base__"]).logits
        model.set_adapter("other")
        torch.testing.assert_close(mixed[:1], model(IDS[:1]).logits, rtol=1e-4, atol=1e-4)
        with model.disable_adapter():
            torch.testing.assert_close(mixed[1:], model(IDS[1:]).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(mixed[:1], mixed[1:])


@pytest.mark.parametrize("weight_format", tmm.WEIGHT_FORMATS)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merging_quantizes_the_sum_and_unmerging_restores_the_bits(weight_format, kind):
    model = get_peft_model(packed_model(weight_format), config(lora_bias=kind == "lora", **KINDS[kind]))
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


def test_an_adapter_is_saved_loaded_and_merged_for_generation(tmp_path):
    base = packed_model()
    model = get_peft_model(copy.deepcopy(base), config(use_dora=True))
    fill(model)
    model.eval().save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    assert len(layers_of(loaded)) == 6
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected = model(IDS).logits
        assert torch.equal(loaded(IDS).logits, expected)
        assert torch.equal(loaded.generate(input_ids=IDS, **options), model.generate(input_ids=IDS, **options))
        merged = loaded.merge_and_unload(safe_merge=True)
        assert not layers_of(merged) and isinstance(merged.model.layers[0].self_attn.q_proj, MarlinLinear)
        got = merged(IDS).logits
        assert merged.generate(input_ids=IDS, **options).shape == (2, 12)
    plain = llama()
    quantize_model(plain, "uint4")
    with torch.no_grad():
        assert (got - expected).norm() < 0.5 * (plain(IDS).logits - expected).norm()


def refused(model: nn.Module, settings, message: str) -> None:
    before, names = tensors(model), [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match=message):
        get_peft_model(model, settings)
    assert [name for name, _ in model.named_modules()] == names and same_bits(model, before)


def test_what_a_packed_layer_cannot_take_is_named_and_the_model_stays():
    model = packed_model()
    model.model.layers[0].self_attn.q_proj = nn.Linear(64, 64)  # would be changed first
    refused(model, config(init_lora_weights="pissa"), "init_lora_weights: expected True, False or 'gaussian'.*'pissa'")
    refused(model, config(alora_invocation_tokens=[1]), r"alora_invocation_tokens: expected None.*got \[1\]")
    ada = AdaLoraConfig(target_modules=TARGETS, task_type="CAUSAL_LM", total_step=10)
    refused(model, ada, "v_proj': expected peft_type LORA on a packed weight, got ADALORA")
    refused(model, config(modules_to_save=["down_proj"]), "down_proj': expected a float layer for modules_to_save")
    fused = packed_model()
    tmm.fuse_projections(fused)
    refused(fused, config(target_modules=["down_proj", "q_proj"]), "q_proj': expected a MarlinLinear.*fuse=False")
    refused(fused, config(target_modules="all-linear"), "_proj': expected a MarlinLinear.*fuse=False")
    assert len(layers_of(get_peft_model(fused, config(target_modules=["down_proj"])))) == 2
    with pytest.raises(ValueError, match=r"expected no fused projections, got 'model\.layers\.0\.self_attn\.q_proj'"):
        prepare_for_training(tmm.fuse_projections(other := packed_model()) and other)


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


def test_restore_takes_the_layer_out_of_peft():
    integration.restore()
    try:
        with pytest.raises(ValueError, match="is not supported"):
            get_peft_model(packed_model(), config())
    finally:
        integration.install()
        integration.install()
    assert len(layers_of(get_peft_model(packed_model(), config()))) == 6


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) * (index % 2 + 3)) % 128
        return {"input_ids": ids, "labels": ids}


def train(model: nn.Module, folder, **options) -> list[float]:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.05,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_reaches_the_losses_of_training_on_the_decoded_weights(tmp_path):
    """With checkpointing and accumulation; the packed weights stay as they were."""
    packed_model().save_pretrained(tmp_path / "base")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    assert loaded.hf_quantizer.is_trainable
    packed = get_peft_model(prepare_for_training(loaded), config())
    dense = get_peft_model(dense_twin(packed_model()), config())
    dense.load_state_dict(
        {name: tensor for name, tensor in packed.state_dict().items() if "lora_" in name}, strict=False
    )
    before = [layer.get_base_layer().b_packed.clone() for layer in layers_of(packed)]
    losses = train(packed, tmp_path / "packed")
    torch.testing.assert_close(losses, train(dense, tmp_path / "dense"), rtol=1e-3, atol=1e-3)
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.1
    assert all(torch.equal(a, b.get_base_layer().b_packed) for a, b in zip(before, layers_of(packed), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_under_autocast(dtype):
    packed, dense = pair()
    losses = []
    for model in (packed, dense):
        with torch.autocast("cpu", dtype=dtype):
            losses.append(model(IDS, labels=IDS).loss)
        losses[-1].backward()
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        assert all(grad.dtype == torch.float32 and torch.isfinite(grad).all() for grad in grads)
    torch.testing.assert_close(*losses, rtol=0.02, atol=0.02)


def test_a_compiled_step_has_the_gradients_of_the_eager_one():
    layer = nn.Sequential(MarlinLinear.from_linear(nn.Linear(64, 24)))
    adapted = get_peft_model(layer, LoraConfig(target_modules=["0"], r=2))
    fill(adapted)
    x = torch.randn(3, 64, requires_grad=True)
    parameters = [x, *(p for p in adapted.parameters() if p.requires_grad)]
    expected = torch.autograd.grad(adapted(x).square().sum(), parameters)
    torch._dynamo.reset()
    got = torch.autograd.grad(torch.compile(adapted, backend="aot_eager")(x).square().sum(), parameters)
    torch.testing.assert_close(got, expected)


def test_a_step_on_each_device(device):
    layer = nn.Sequential(MarlinLinear.from_linear(nn.Linear(64, 24)))
    adapted = get_peft_model(layer, LoraConfig(target_modules=["0"], r=2, use_dora=True))
    fill(adapted)
    x = torch.randn(3, 64)
    expected = torch.autograd.grad(adapted(x).square().sum(), [p for p in adapted.parameters() if p.requires_grad])
    adapted = adapted.to(device)
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    got = torch.autograd.grad(adapted(x.to(device)).square().sum(), parameters)
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-3, atol=1e-3)


def test_prepare_for_training_freezes_and_refuses():
    model = packed_model()
    assert prepare_for_training(model, norms_in_fp32=True) is model
    assert model.is_gradient_checkpointing and not any(p.requires_grad for p in model.parameters())
    half = packed_model().half()
    prepare_for_training(half, gradient_checkpointing=False, norms_in_fp32=True)
    assert half.model.norm.weight.dtype == torch.float32 and half.model.embed_tokens.weight.dtype == torch.float16
    assert not half.is_gradient_checkpointing
    with pytest.raises(ValueError, match="expected MarlinLinear layers, got Linear without any"):
        prepare_for_training(nn.Linear(8, 8))
    layer = nn.Sequential(MarlinLinear.from_packed(tmm.quantize_weight(torch.randn(24, 64), "uint4", 64)))
    with pytest.raises(ValueError, match="gradient_checkpointing: expected False for Sequential"):
        prepare_for_training(layer)


def test_a_config_without_targets_takes_the_default_of_the_model_family():
    adapted = get_peft_model(packed_model(), LoraConfig(task_type="CAUSAL_LM"))
    assert {name.split(".")[-1] for name in adapted.base_model.targeted_module_names} == {"q_proj", "v_proj"}
    assert len(layers_of(adapted)) == 4


def test_a_merge_keeps_a_group_size_beyond_k():
    """The merged weight must load into the layer's twin, whose packed_format names the group size."""
    layer = MarlinLinear.from_packed(tmm.quantize_weight(torch.randn(32, 64), "uint4", group_size=128))
    model = nn.Sequential(layer, nn.Linear(32, 4))
    before = model.state_dict()["0.packed_format"].clone()
    merged = get_peft_model(model, LoraConfig(target_modules=["0"], r=4)).merge_and_unload()
    assert torch.equal(merged.state_dict()["0.packed_format"], before)
