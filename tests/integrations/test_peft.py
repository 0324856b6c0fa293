"""LoRA adapters of peft on packed layers, compared with peft's own layers on the same weights in fp32."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import torch_marlin_metal as tmm
import torch_marlin_metal.integrations.transformers
from tests.support.adapters import IDS, TARGETS, config, fill, layers_of, packed_model
from torch_marlin_metal import MarlinLinear
from torch_marlin_metal.integrations import peft as integration
from torch_marlin_metal.integrations.peft import prepare_for_training

KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True, "r": 3},
    "dora": {"use_dora": True},
    "all-linear": {"target_modules": "all-linear"},
    "bias": {"lora_bias": True},
}


def dense_twin(model: nn.Module) -> nn.Module:
    """Returns a copy whose packed layers are replaced by nn.Linear layers with the decoded weights, in fp32."""
    twin = copy.deepcopy(model)
    for name, layer in list(twin.named_modules()):
        if isinstance(layer, MarlinLinear):
            linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            linear.weight.data = layer.dequantize().contiguous()
            if layer.bias is not None:
                linear.bias = layer.bias
            twin.set_submodule(name, linear)
    return twin


def pair(**options) -> tuple[PeftModel, PeftModel]:
    """Returns a packed model with an adapter, and peft's own adapter with the same values on fp32 weights."""
    base = packed_model()
    models = get_peft_model(base, config(**options)), get_peft_model(dense_twin(packed_model()), config(**options))
    for model in models:
        fill(model)
        model.eval()
    return models


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
    plain = packed_model()
    with torch.no_grad():
        assert (got - expected).norm() < 0.5 * (plain(IDS).logits - expected).norm()


def test_restore_takes_the_layer_out_of_peft():
    integration.restore()
    try:
        with pytest.raises(ValueError, match=r"MarlinLinear.* is not supported"):
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
    """Trains with gradient checkpointing and accumulation. The packed weights do not change."""
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


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_compiled_step_has_the_gradients_of_the_eager_one(use_dora):
    layer = nn.Sequential(MarlinLinear.from_linear(nn.Linear(64, 24)))
    adapted = get_peft_model(layer, LoraConfig(target_modules=["0"], r=2, use_dora=use_dora))
    fill(adapted)
    x = torch.randn(3, 64, requires_grad=True)
    parameters = [x, *(p for p in adapted.parameters() if p.requires_grad)]
    torch._dynamo.reset()
    compiled = torch.compile(adapted, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        expected = torch.autograd.grad(adapted(x).square().sum(), parameters)
        got = torch.autograd.grad(compiled(x).square().sum(), parameters)
        torch.testing.assert_close(got, expected)
        layers_of(adapted)[0].get_base_layer().scales.mul_(2)


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
    with pytest.raises(ValueError, match="expected packed layers, got Linear without any"):
        prepare_for_training(nn.Linear(8, 8))
    layer = nn.Sequential(MarlinLinear.from_packed(tmm.quantize_weight(torch.randn(24, 64), "uint4", 64)))
    with pytest.raises(ValueError, match="gradient_checkpointing: expected False for Sequential"):
        prepare_for_training(layer)


def test_a_config_without_targets_takes_the_default_of_the_model_family():
    adapted = get_peft_model(packed_model(), LoraConfig(task_type="CAUSAL_LM"))
    assert {name.split(".")[-1] for name in adapted.base_model.targeted_module_names} == {"q_proj", "v_proj"}
    assert len(layers_of(adapted)) == 4


@pytest.mark.parametrize("change", ["load", "assign", "scales"])
def test_dora_follows_a_weight_that_was_written_or_replaced(change):
    """The layer caches the norms of the decoded weight, and must compute them again after the weight changes."""
    dora = config(use_dora=True)
    adapted = get_peft_model(packed_model(), dora)
    adapted(IDS)
    other = packed_model()
    for layer in other.modules():
        if isinstance(layer, MarlinLinear):
            layer.scales.mul_(3)
    state = {f"base_model.model.{name}": tensor for name, tensor in other.state_dict().items()}
    state = {
        name.replace(f"{t}.", f"{t}.base_layer."): v for name, v in state.items() for t in TARGETS if f"{t}." in name
    }
    if change == "scales":
        for layer in layers_of(adapted):
            layer.get_base_layer().scales.mul_(3)
    else:
        adapted.load_state_dict(state, strict=False, assign=change == "assign")
    layer = layers_of(adapted)[0]
    base = layer.get_base_layer()
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    got = layer.lora_magnitude_vector["default"].norm(base, A, B, layer.scaling["default"])
    torch.testing.assert_close(got, (base.dequantize() + layer.get_delta_weight("default")).norm(dim=1))
    assert copy.deepcopy(adapted)(IDS).logits.shape == (2, 8, 128)
    pickle.dumps(layer)


def test_dora_that_is_not_trained_changes_nothing_in_any_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer = nn.Sequential(MarlinLinear.from_linear(nn.Linear(64, 24)))
        x = torch.randn(3, 64).to(dtype)
        adapted = get_peft_model(layer, LoraConfig(target_modules=["0"], r=2, use_dora=True)).to(dtype)
        with adapted.disable_adapter():
            expected = adapted(x)
        assert torch.equal(adapted(x), expected), dtype


def test_autocast_does_not_round_the_norms_of_dora(device):
    layer = MarlinLinear.from_linear(nn.Linear(64, 24))
    adapted = get_peft_model(nn.Sequential(layer), LoraConfig(target_modules=["0"], r=2, use_dora=True))
    fill(adapted, 0.5)
    lora = layers_of(adapted.to(device))[0]
    arguments = lora.get_base_layer(), lora.lora_A["default"].weight, lora.lora_B["default"].weight, 1.0
    norms = lora.lora_magnitude_vector["default"].norm
    expected = norms(*arguments)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(norms(*arguments).cpu(), expected.cpu())
