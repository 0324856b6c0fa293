"""LoRA adapters of peft on the packed experts of a mixture, compared with peft's own on the same experts in fp32."""

import copy

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM

import torch_marlin_metal as tmm
from tests.support.adapters import IDS, fill, same_bits
from tests.support.mixtures import SIZES
from tests.support.models import tensors
from torch_marlin_metal.integrations.peft import MarlinLoraExperts
from torch_marlin_metal.layers.experts import ExpertWeights, MarlinExperts, silu_gate
from torch_marlin_metal.layers.mixed_experts import FloatExpertWeights
from torch_marlin_metal.parallel.styles import MarlinExpertParallel

STACKS = ["experts.gate_up_proj", "experts.down_proj"]
FAMILIES = {"mixtral": (MixtralConfig, MixtralForCausalLM), "gpt_oss": (GptOssConfig, GptOssForCausalLM)}


def settings(**options) -> LoraConfig:
    return LoraConfig(**{"target_modules": ["q_proj"], "target_parameters": STACKS, "r": 3, "lora_alpha": 6, **options})


def mixture(family: str = "mixtral", weight_format: str = "uint4") -> nn.Module:
    torch.manual_seed(0)
    config, kind = FAMILIES[family]
    model = kind(config(**SIZES)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj_bias"):
                parameter.normal_()
    tmm.quantize_model(model, weight_format, None if weight_format == "nvfp4" else 32, progress=False)
    return model


def dense_twin(model: nn.Module) -> nn.Module:
    """Returns a copy in which the model's own experts have the decoded weights."""
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        layer.mlp.experts = layer.mlp.experts.to_floats(torch.float32)
    return twin


def with_down_in_floats(model: nn.Module) -> None:
    for layer in model.model.layers:
        down = layer.mlp.experts.down
        bias = None if down.bias is None else down.bias.detach()
        layer.mlp.experts.down = FloatExpertWeights(down.dequantize(torch.float32), bias, down.sizes)


def test_a_stack_in_floats_is_refused_as_a_target():
    base = mixture()
    with_down_in_floats(base)
    with pytest.raises(ValueError, match="down_proj: expected one packed stack for an adapter, got FloatExpertWeights"):
        get_peft_model(base, settings())


def test_experts_with_a_stack_in_floats_are_not_split():
    base = mixture()
    with_down_in_floats(base)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match="expected packed experts, got experts with a stack in floats"):
            MarlinExpertParallel()._apply(base.model.layers[0].mlp.experts, init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


def wrappers_of(model: nn.Module) -> list[MarlinLoraExperts]:
    return [module for module in model.modules() if isinstance(module, MarlinLoraExperts)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True, "rank_pattern": {"down_proj": 5}}, {"target_parameters": STACKS[:1]}],
    ids=["lora", "ranks", "beside floats"],
)
def test_results_and_gradients_are_those_of_peft_on_the_decoded_experts(family, options):
    base, stacks = mixture(family), len(options.get("target_parameters", STACKS))
    if stacks == 1:
        with_down_in_floats(base)
    dense = get_peft_model(dense_twin(base), settings(**options))
    packed = get_peft_model(base, settings(**options))
    assert len(wrappers_of(packed)) == 2 * stacks and not wrappers_of(dense)
    results = []
    for model in (packed, dense):
        fill(model)
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}))
    (loss, grads), (expected, expected_grads) = results
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert grads.keys() == expected_grads.keys() and len(grads) == 4 * (1 + stacks)
    for name, grad in grads.items():
        assert expected_grads[name].abs().max() > 0
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-4, atol=1e-5)


def test_an_adapter_of_experts_in_floats_loads_onto_packed_ones_and_back(tmp_path):
    base = mixture()
    dense = get_peft_model(dense_twin(base), settings()).eval()
    fill(dense)
    dense.save_pretrained(tmp_path / "dense")
    for low_cpu_mem_usage in (False, True):
        packed = PeftModel.from_pretrained(
            copy.deepcopy(base), tmp_path / "dense", low_cpu_mem_usage=low_cpu_mem_usage
        ).eval()
        with torch.no_grad():
            torch.testing.assert_close(packed(IDS).logits, dense(IDS).logits, rtol=1e-4, atol=1e-4)
    packed.save_pretrained(tmp_path / "packed")
    again = PeftModel.from_pretrained(dense_twin(base), tmp_path / "packed")
    assert same_bits(again, tensors(dense))


def test_several_adapters_are_switched_and_taken_off():
    base = mixture()
    before = [name for name, _ in base.named_modules()]
    with torch.no_grad():
        plain = base(IDS).logits
    model = get_peft_model(base, settings())
    model.add_adapter("other", settings(r=2))
    assert len(wrappers_of(model)) == 4
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".other." in name)
    fill(model)
    with torch.no_grad():
        first = model(IDS).logits
        model.set_adapter("other")
        second = model(IDS).logits
        model.base_model.set_adapter(["default", "other"])
        both = model(IDS).logits
        assert len({round(t.norm().item(), 4) for t in (plain, first, second, both)}) == 4
        with model.disable_adapter():
            assert torch.equal(model(IDS).logits, plain)
        model.delete_adapter("other")
        model.set_adapter("default")
        torch.testing.assert_close(model(IDS).logits, first)
        model.eval()
        with pytest.raises(ValueError, match="does not support mixed adapter batches"):
            model(IDS, adapter_names=["default", "__base__"])
        unloaded = model.unload()
        assert [name for name, _ in unloaded.named_modules()] == before
        assert torch.equal(unloaded(IDS).logits, plain)


@pytest.mark.parametrize("weight_format", tmm.WEIGHT_FORMATS)
def test_merging_quantizes_the_sum_and_unmerging_restores_the_bits(weight_format):
    model = get_peft_model(mixture("gpt_oss", weight_format), settings())
    fill(model, 0.2)
    before = tensors(model)
    layer = wrappers_of(model)[1]
    assert layer.parameter_name == "gate_up_proj"
    experts = layer.get_base_layer()
    old, bias = experts.gate_up.dequantize(), experts.gate_up.bias.clone()
    expected = old + layer.get_delta_weight("default").detach()
    with torch.no_grad():
        unmerged = model(IDS).logits
    model.merge_adapter()
    new = experts.gate_up.dequantize()
    assert (new - expected).norm() < 0.2 * expected.norm() < 0.5 * (old - expected).norm()
    assert torch.equal(experts.gate_up.bias, bias)
    assert {name: t.shape for name, t in model.state_dict().items()} == {name: t.shape for name, t in before.items()}
    with torch.no_grad():
        merged = model(IDS).logits
    model.unmerge_adapter()
    assert same_bits(model, before)
    if weight_format == "uint4":
        unloaded = model.merge_and_unload()
        assert not wrappers_of(unloaded) and isinstance(unloaded.model.layers[0].mlp.experts, MarlinExperts)
        plain = mixture("gpt_oss", weight_format)
        with torch.no_grad():
            assert torch.equal(unloaded(IDS).logits, merged)
            assert (merged - unmerged).norm() < 0.5 * (plain(IDS).logits - unmerged).norm()


def test_a_merge_that_fails_names_the_expert_and_changes_nothing():
    model = get_peft_model(mixture(), settings())
    fill(model)
    layer = wrappers_of(model)[-1]
    with torch.no_grad():
        layer.lora_B["default"].weight[0, layer.num_experts - 1] = 1e35
    before, modules = tensors(model), list(model.named_modules())
    for way in ("merge_adapter", "merge_and_unload"):
        with pytest.raises(ValueError, match=r"^merge: layer 'model.layers.1.mlp.experts.base_layer': .*\(expert 3\)"):
            getattr(model, way)()
        assert list(model.named_modules()) == modules and same_bits(model, before)


def make_experts() -> MarlinExperts:
    torch.manual_seed(1)
    gate_up, down = (
        ExpertWeights.from_packed([[tmm.quantize_weight(torch.randn(rows, 32), "uint4", 32)] for _ in range(3)])
        for rows in (64, 24)
    )
    return MarlinExperts(gate_up, down, silu_gate)


def test_a_step_on_each_device_where_some_ids_name_no_expert(device):
    """Ids outside [0, E) contribute nothing, and neither do the adapters of experts that a token does not use."""
    model = get_peft_model(
        nn.Sequential(make_experts()), settings(target_modules=[], target_parameters=["0.down_proj"])
    )
    assert [layer.parameter_name for layer in wrappers_of(model)] == ["down_proj"]
    fill(model, 0.3)
    layer = wrappers_of(model)[0]
    x, ids = torch.randn(4, 32), torch.tensor([[0, 1], [2, -1], [3, 0], [7, 99]])
    weights = torch.rand(4, 2)
    experts = layer.get_base_layer()
    gate_up = experts.gate_up.dequantize()
    down = experts.down.dequantize() + layer.get_delta_weight("default").detach()
    expected = torch.zeros(4, 24)
    for t in range(4):
        for slot in range(2):
            if 0 <= (e := ids[t, slot]) < 3:
                expected[t] += weights[t, slot] * (down[e] @ silu_gate(gate_up[e] @ x[t]))
    model.to(device)
    x = x.to(device).requires_grad_()
    got = layer(x, ids.to(device), weights.to(device))
    torch.testing.assert_close(got.detach().cpu(), expected, rtol=1e-4, atol=1e-4)
    got.sum().backward()
    assert not layer.lora_A["default"].weight.grad.isnan().any() and (x.grad[3] == 0).all()
    with torch.no_grad():
        layer.lora_A["default"].weight[2 * 3 :] = torch.inf  # only the second token uses expert 2
        got = layer(x, ids.to(device), weights.to(device)).cpu()
    torch.testing.assert_close(got[[0, 2, 3]], expected[[0, 2, 3]], rtol=1e-4, atol=1e-4)
