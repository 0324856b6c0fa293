"""Small mixtures of transformers, saved in 4 bit in the layouts of other programs, and a decoder in NumPy."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.support.reference import E2M1, e8m0, to_numpy
from torch_marlin_metal import PackedWeight, convert, quantize_weight

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}

FAMILY = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
FAMILY |= {"intermediate_size": 96, "num_experts_per_tok": 2, "tie_word_embeddings": False, "pad_token_id": None}
ROUTED = {"moe_intermediate_size": 40, "n_routed_experts": 8, "first_k_dense_replace": 1, "num_hidden_layers": 2}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
LINEAR_ATTENTION = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR_ATTENTION |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
# For each family of mixtures: a model class, its config class, and further arguments of the config.
FAMILIES = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "num_hidden_layers": 1}),
    "qwen3": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"moe_intermediate_size": 40, "num_experts": 5, "num_hidden_layers": 1, "head_dim": 32},
    ),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 4, "num_hidden_layers": 1, "eos_token_id": 1}),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {"num_local_experts": 4, "num_hidden_layers": 1, "head_dim": 32, "layer_types": ["full_attention"]},
    ),
    "qwen3-next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {
            **LINEAR_ATTENTION,
            "num_experts": 4,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 64,
            "head_dim": 32,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {**ROUTED, **LATENT, "n_group": 2, "topk_group": 1}),
    "glm4": (Glm4MoeForCausalLM, Glm4MoeConfig, {**ROUTED, "n_group": 1, "topk_group": 1, "head_dim": 32}),
}


def family(name: str) -> PreTrainedModel:
    """Returns a small mixture of a family of `FAMILIES` in fp32, with random values in every parameter."""
    model_class, config_class, more = FAMILIES[name]
    torch.manual_seed(0)
    model = model_class(config_class(**FAMILY, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # transformers initializes biases to zero
            parameter.normal_(std=0.05)
    return model


def quantized(weight: torch.Tensor, name: str, weight_format: str) -> PackedWeight:
    packed = quantize_weight(weight, weight_format, 32)
    packed.name = name
    return packed


def split_experts(path: Path) -> MixtralForCausalLM:
    """Saves Mixtral in the layout of GPTQ programs, with a Linear for each part of each expert.

    Returns the model with the weights that the saved codes decode to.
    """
    torch.manual_seed(0)
    model, layers = MixtralForCausalLM(MixtralConfig(**SIZES)).eval(), []
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            experts = layer.mlp.experts
            for expert in range(4):
                both = experts.gate_up_proj[expert]
                parts = {"w1": both[:96], "w3": both[96:], "w2": experts.down_proj[expert]}
                for part, weight in parts.items():
                    name = f"model.layers.{index}.block_sparse_moe.experts.{expert}.{part}"
                    layers.append(quantized(weight, name, "uint4"))
                    weight.copy_(layers[-1].dequantize().T)
    others = [(k.replace(".mlp.", ".block_sparse_moe."), v) for k, v in state.items() if ".experts." not in k]
    config = json.loads(model.config.to_json_string())
    convert.export_checkpoint(layers, path, "gptq", other_tensors=others, config=config, version=2)
    return model


def stacked_experts(path: Path) -> GptOssForCausalLM:
    """Saves gpt-oss with `*_blocks` and `*_scales` for all experts. Returns the decoded model."""
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**SIZES, layer_types=["full_attention"] * 2)).eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, stack in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                packed = [quantized(weight.T, "", "mxfp4") for weight in stack]
                stack.copy_(torch.stack([weight.dequantize() for weight in packed]))
                words = torch.stack([weight.b_packed.T.contiguous() for weight in packed])
                state[f"{name}_blocks"] = words.view(torch.uint8).reshape(4, stack.shape[2], -1, 16)
                state[f"{name}_scales"] = torch.stack([weight.scales.T.contiguous() for weight in packed])
                del state[name]
            elif name.endswith("_proj_bias"):
                stack.copy_(torch.randn_like(stack))
                state[name] = stack.clone()
    path.mkdir()
    save_file(state, path / "model.safetensors", {"format": "pt"})
    config = json.loads(model.config.to_json_string()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(config))
    return model


def qwen_experts(path: Path, target: str = "awq") -> Qwen3MoeForCausalLM:
    """Saves Qwen3-MoE with a Linear for each part of each expert. Returns the decoded model."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES | {"num_experts": 4, "moe_intermediate_size": 96})
    model, layers = Qwen3MoeForCausalLM(config).eval(), []
    for name, experts in list(model.named_modules()):
        if name.endswith(".experts"):
            for index in range(4):
                gate_up, down = experts.gate_up_proj.data[index], experts.down_proj.data[index]
                for part, weight in (("gate_proj", gate_up[:96]), ("up_proj", gate_up[96:]), ("down_proj", down)):
                    packed = quantize_weight(weight, "uint4" if target == "awq" else "uint4b8", 32)
                    packed.name = f"{name}.{index}.{part}"
                    layers.append(packed)
                    weight.copy_(torch.from_numpy(decoded(packed)))
    others = [(name, tensor) for name, tensor in model.state_dict().items() if ".experts." not in name]
    settings = json.loads(model.config.to_json_string())
    convert.export_checkpoint(layers, path, target, other_tensors=others, config=settings)
    return model


def decoded(weight: PackedWeight) -> np.ndarray:
    """Decodes a weight of uint4, uint4b8 or mxfp4 with NumPy, to fp64 `[N, K]`."""
    words, shifts = weight.b_packed.numpy().view(np.uint32), np.arange(0, 32, 4, dtype=np.uint32)
    codes = ((words[:, None] >> shifts[None, :, None]) & 15).reshape(weight.K, weight.N)
    group = np.arange(weight.K) // weight.group_size
    if weight.weight_format == "mxfp4":
        return (E2M1[codes] * e8m0(weight.scales.numpy())[group]).T
    zeros = 8.0 if weight.zeros is None else to_numpy(weight.zeros)[group].astype(np.float64)
    return ((codes - zeros) * to_numpy(weight.scales)[group]).T


def rewritten(path: Path, change) -> None:
    files = sorted(path.glob("*.safetensors"))
    state = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for file in (*files, *path.glob("*.index.json")):
        file.unlink()
    save_file(change(state), path / "model.safetensors", {"format": "pt"})


def llama4() -> Llama4ForCausalLM:
    """Returns a Llama 4. transformers passes every token to each expert, with zeros for the tokens of other experts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128}
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0))
    for parameter in model.model.layers[0].feed_forward.experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.eval()
