"""If peft requests a feature that packed layers do not support, an error names it and the model does not change."""

from dataclasses import fields

import pytest
import torch
from peft import AdaLoraConfig, LNTuningConfig, LoraConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import torch_marlin_metal as tmm
from tests.support.adapters import IDS, TARGETS, config, layers_of, llama, packed_model, same_bits
from tests.support.mixtures import llama4
from tests.support.models import tensors
from torch_marlin_metal.integrations.peft import prepare_for_training
from torch_marlin_metal.layers.experts import ExpertWeights, MarlinExperts

# peft's adapters that replace layers, except LoRA. XLORA uses LoRA's layers.
OTHERS = [
    kind
    for kind, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items()
    if issubclass(tuner, BaseTuner) and kind.value not in ("LORA", "XLORA")
]


def refused(model: nn.Module, settings, message: str) -> None:
    before, names = tensors(model), [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match=message):
        get_peft_model(model, settings)
    assert [name for name, _ in model.named_modules()] == names and same_bits(model, before)


def test_experts_that_take_each_token_are_named_and_the_model_stays():
    model = llama4()
    tmm.quantize_model(model, "uint4b8", 32, progress=False)
    settings = LoraConfig(target_modules=["q_proj"], target_parameters=["gate_up_proj"])
    refused(model, settings, r"got ExpertsOfEachToken, .* exclude='model.layers.0.feed_forward.experts'")


def test_what_a_packed_layer_cannot_take_is_named_and_the_model_stays():
    model = packed_model()
    # A float layer before the packed layers. peft changes it first, so a late refusal would leave the model changed.
    model.model.layers[0].self_attn.q_proj = nn.Linear(64, 64)
    refused(model, config(init_lora_weights="pissa"), "init_lora_weights: expected True, False or 'gaussian'.*'pissa'")
    refused(model, config(alora_invocation_tokens=[1]), r"alora_invocation_tokens: expected None.*got \[1\]")
    ada = AdaLoraConfig(target_modules=TARGETS, task_type="CAUSAL_LM", total_step=10)
    refused(
        model, ada, r"^AdaLoraModel: layer .*v_proj': expected a float layer for peft_type ADALORA, .* LoRA and DoRA"
    )
    refused(model, config(modules_to_save=["down_proj"]), "down_proj': expected a float layer for modules_to_save")
    fused = packed_model()
    tmm.fuse_projections(fused)
    refused(fused, config(target_modules=["down_proj", "q_proj"]), "q_proj': expected a MarlinLinear.*fuse=False")
    refused(fused, config(target_modules="all-linear"), "_proj': expected a MarlinLinear.*fuse=False")
    assert len(layers_of(get_peft_model(fused, config(target_modules=["down_proj"])))) == 2
    with pytest.raises(ValueError, match=r"expected no fused projections, got 'model\.layers\.0\.self_attn\.q_proj'"):
        prepare_for_training(tmm.fuse_projections(other := packed_model()) and other)


def test_all_linear_is_every_packed_layer_but_those_of_the_vocabulary():
    model = llama()
    tmm.quantize_model(model, "uint4", progress=False)
    adapted = get_peft_model(model, config(target_modules="all-linear"))
    assert len(layers_of(adapted)) == 2 * 7
    assert type(model.model.embed_tokens) is tmm.MarlinEmbedding and type(model.lm_head) is tmm.MarlinLinear


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.value)
def test_every_other_adapter_of_a_packed_layer_is_refused(kind):
    options = {"target_modules": ["k_proj", "o_proj"], "feedforward_modules": [], "total_step": 10}
    known = {field.name for field in fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])}
    settings = PEFT_TYPE_TO_CONFIG_MAPPING[kind](**{name: value for name, value in options.items() if name in known})
    tuner = PEFT_TYPE_TO_TUNER_MAPPING[kind].__name__
    message = rf"^{tuner}: layer '.*k_proj': .*peft_type {kind.value}, got a packed MarlinLinear.*LoRA and DoRA"
    refused(packed_model(), settings, message)


def test_targets_by_parameter_or_token_are_refused_on_packed_layers():
    model = packed_model()
    refused(
        model,
        config(target_modules=["v_proj"], target_parameters=["q_proj.weight"]),
        "q_proj': expected a float layer for target_parameters, got a packed MarlinLinear: name it in target_modules",
    )
    model.model.embed_tokens = tmm.MarlinEmbedding.from_embedding(model.model.embed_tokens, "uint4", 32)
    for tokens in ([1, 2], {"embed_tokens": [1, 2]}):
        refused(
            model,
            config(trainable_token_indices=tokens),
            "layer 'model.embed_tokens': expected a float layer for trainable_token_indices, got a MarlinEmbedding",
        )


def test_other_adapters_of_float_layers_are_added():
    model = get_peft_model(packed_model(), LNTuningConfig(target_modules=["input_layernorm"]))
    model(IDS, labels=IDS).loss.backward()
    assert sum(parameter.grad is not None for parameter in model.parameters()) == 2
    with pytest.raises(ValueError, match=r"^LNTuningModel: layer '.*q_proj'"):
        model.add_adapter("other", LNTuningConfig(target_modules=["q_proj"]))


EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["gate_up"]}, r"experts.gate_up': expected a MarlinLinear, got packed experts"),
        ({"target_modules": r".*\.experts"}, r"experts': expected a MarlinLinear, got packed experts of a mixture"),
        ({**EXPERTS, "lora_dropout": 0.1}, "experts': LoraConfig: lora_dropout: expected 0.0 .* got 0.1"),
        ({**EXPERTS, "use_dora": True}, "experts': LoraConfig: use_dora: expected False with target_parameters"),
        ({**EXPERTS, "lora_bias": True}, "experts': LoraConfig: lora_bias: expected False with target_parameters"),
        ({**EXPERTS, "init_lora_weights": "pissa"}, "init_lora_weights: expected True, False or 'gaussian'"),
        (
            {"target_modules": ["q_proj"], "target_parameters": ["down_proj_bias"]},
            "experts': target_parameters: expected gate_up_proj or down_proj, got down_proj_bias",
        ),
    ],
)
def test_what_packed_experts_cannot_take_is_named(options, message):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes))
    tmm.quantize_model(model, "uint4b8", 32, progress=False)
    refused(model, config(**options), f"layer 'model.layers.0.mlp.{message}" if "init" not in message else message)


def test_split_experts_take_no_adapters():
    class Part(MarlinExperts):
        def forward(self, *args):
            raise NotImplementedError

    stacks = [ExpertWeights.from_packed([[tmm.quantize_weight(torch.randn(n, 32), "uint4", 32)]]) for n in (64, 32)]
    model = nn.Sequential(Part(*stacks, nn.Identity()), nn.Linear(32, 32))
    settings = config(target_modules=["1"], target_parameters=["0.down_proj"], task_type=None)
    refused(model, settings, "layer '0': expected all experts in one process, got Part: add adapters before")
