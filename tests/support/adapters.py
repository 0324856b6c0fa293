"""Makes a small packed Llama and fills its peft adapters, for the tests of peft."""

import torch
from peft import LoraConfig
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from torch_marlin_metal import quantize_model
from torch_marlin_metal.integrations.peft import MarlinLoraLinear

TARGETS = ["q_proj", "v_proj", "down_proj"]
IDS = torch.tensor([[5, 17, 99, 42, 7, 63, 110, 23], [8, 77, 31, 56, 2, 64, 9, 100]])


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
    quantize_model(model, weight_format, group_size=group_size, vocabulary_format="none", progress=False)
    return model


def fill(model: nn.Module, size: float = 0.1) -> None:
    """Gives every adapter weight random values that depend only on the shapes and the order of the weights."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
            elif "magnitude" in name:
                parameter.mul_(1 + size * torch.rand(parameter.shape, generator=generator))


def layers_of(model: nn.Module) -> list[MarlinLoraLinear]:
    return [module for module in model.modules() if isinstance(module, MarlinLoraLinear)]


def same_bits(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    after = model.state_dict()
    return after.keys() == before.keys() and all(
        torch.equal(after[name].nan_to_num(), before[name].nan_to_num()) for name in before
    )
