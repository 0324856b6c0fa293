"""Importing this package does not change peft's results for float models: every adapter, its gradients and its file."""

from dataclasses import fields

import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file

from tests.support.adapters import IDS, llama
from torch_marlin_metal.integrations import peft as integration

# These adapters need further inputs, a second model, other adapters, or other modules.
LEFT = {"XLORA", "MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT", "HIRA", "POLY", "SHADOW", "TRAINABLE_TOKENS"}
KINDS = [kind for kind in PEFT_TYPE_TO_CONFIG_MAPPING if kind.value not in LEFT]


def settings_of(kind):
    options = {
        "target_modules": ["k_proj", "o_proj"],
        "feedforward_modules": [],
        "total_step": 10,
        "task_type": "CAUSAL_LM",
        "num_virtual_tokens": 2,
        "block_size": 8,
        "group_size": 8,
        "vector_length": 8,
        "n_frequency": 8,
    }
    if kind.value == "SHIRA":
        options["r"] = 4
    known = {field.name for field in fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])}
    return PEFT_TYPE_TO_CONFIG_MAPPING[kind](**{name: value for name, value in options.items() if name in known})


def result(settings, path) -> dict[str, torch.Tensor]:
    """Trains one step, saves the adapter and loads it. Returns the logits, the gradients and the adapter's file."""
    torch.manual_seed(1)
    model = get_peft_model(llama().eval(), settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    out = model(input_ids=IDS).logits
    out.square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {"logits": out.detach()}
    model.save_pretrained(path)
    torch.manual_seed(1)
    again = PeftModel.from_pretrained(llama().eval(), path)
    with torch.no_grad():
        found["again"] = again(input_ids=IDS).logits
    return found | load_file(path / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_an_adapter_of_floats_is_the_same(kind, tmp_path) -> None:
    integration.restore()
    try:
        without = result(settings_of(kind), tmp_path / "without")
    finally:
        integration.install()
    found = result(settings_of(kind), tmp_path / "with")
    assert found.keys() == without.keys()
    for name, tensor in without.items():
        assert torch.equal(found[name], tensor), name
