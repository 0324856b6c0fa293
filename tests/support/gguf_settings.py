"""Tiny models with settings that are not their class's defaults."""

import numpy as np
import torch

from tests.support import gguf_metadata as metadata
from tests.support.gguf_models import model_of, write

LENGTH = 96  # of the inputs: longer than the contexts before scaling
IDS = torch.arange(LENGTH)[None] * 37 % 61 + 3


def rope(kind: str, **values) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 20000.0} | values}


NARROW = {"head_dim": 32}
EXPERTS = {"num_experts_per_tok": 3}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
FACTORS = np.linspace(1, 3, 16).astype(np.float32).tolist()
HALF = {"long_factor": FACTORS[:8], "short_factor": FACTORS[8:]}
LONGROPE = {"long_factor": FACTORS, "short_factor": FACTORS[::-1]}
MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    }
}
GEMMA4 = {
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    },
    "final_logit_softcapping": 0.3,
}
# name -> (architecture, family, settings that are not the class's defaults, what the converter writes)
CASES = {
    "llama3": (
        "llama",
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
        metadata.of_llama3,
    ),
    "llama3 of other numbers": (
        "llama",
        "llama",
        rope("llama3", factor=3.0, low_freq_factor=2.0, high_freq_factor=10.0, original_max_position_embeddings=500),
        metadata.of_llama3,
    ),
    "llama3 of two pairs": (
        "llama",
        "llama",
        rope("llama3", factor=3.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_position_embeddings=10)
        | {"head_dim": 4, "num_attention_heads": 16, "num_key_value_heads": 8},
        metadata.of_llama3,
    ),
    "linear": ("llama", "llama", rope("linear", factor=4.0), metadata.of_linear),
    "linear of 2023": ("llama", "llama", rope("linear", factor=4.0, rope_theta=10000.0), metadata.of_linear_2023),
    "yarn": ("qwen2", "qwen2", rope("yarn", **YARN), metadata.of_yarn),
    "yarn with all": (
        "qwen3",
        "qwen3",
        rope("yarn", **YARN, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5),
        metadata.of_yarn_with_betas,
    ),
    "longrope": (
        "phi3",
        "phi3",
        rope("longrope", rope_theta=10000.0, **LONGROPE, attention_factor=1.3)
        | {"original_max_position_embeddings": 64},
        metadata.of_phi3,
    ),
    "longrope of short inputs": (
        "phi3",
        "phi3",
        rope("longrope", rope_theta=10000.0, **LONGROPE, attention_factor=1.3)
        | {"original_max_position_embeddings": 128},
        metadata.of_phi3,
    ),
    "partial longrope": (
        "phi3",
        "phi3",
        rope("longrope", rope_theta=10000.0, **HALF, attention_factor=1.3, partial_rotary_factor=0.5)
        | {"original_max_position_embeddings": 64},
        metadata.of_phi3,
    ),
    "partial": (
        "stablelm",
        "stablelm",
        rope("default", partial_rotary_factor=0.5) | {"layer_norm_eps": 1e-3},
        metadata.of_stablelm,
    ),
    "base": (
        "starcoder2",
        "starcoder2",
        rope("default", rope_theta=900000.0) | {"norm_epsilon": 1e-3},
        metadata.of_starcoder2,
    ),
    "eps": (
        "nemotron",
        "nemotron",
        rope("default", partial_rotary_factor=0.25) | {"norm_eps": 1e-3},
        metadata.of_nemotron,
    ),
    "caps": (
        "gemma2",
        "gemma2",
        {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3, "sliding_window": 8}
        | {"query_pre_attn_scalar": 32},
        metadata.of_gemma2,
    ),
    "two ropes": (
        "gemma3",
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "num_hidden_layers": 7,
        },
        metadata.of_gemma3,
    ),
    "head": ("qwen3", "qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2}, metadata.of_qwen3),
    "experts": (
        "qwen3moe",
        "qwen3_moe",
        {"moe_intermediate_size": 96, "norm_topk_prob": True} | EXPERTS,
        metadata.of_qwen3moe,
    ),
    "experts without a key": (
        "qwen3moe",
        "qwen3_moe",
        {"norm_topk_prob": True} | EXPERTS,
        metadata.of_qwen3moe_without_norm,
    ),
    "experts, not normalized": ("qwen3moe", "qwen3_moe", {"norm_topk_prob": False} | EXPERTS, metadata.of_qwen3moe),
    "shared expert": (
        "qwen2moe",
        "qwen2_moe",
        {"moe_intermediate_size": 96, "norm_topk_prob": True} | EXPERTS,
        metadata.of_qwen2moe,
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        rope("yarn", **YARN, truncate=False)
        | {"sliding_window": 8, "intermediate_size": 64, "tie_word_embeddings": True},
        metadata.of_gpt_oss,
    ),
    "biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, metadata.of_biases),
    "gemma": (
        "gemma",
        "gemma",
        rope("default") | {"rms_norm_eps": 1e-3, "hidden_act": "gelu_pytorch_tanh"},
        metadata.of_base,
    ),
    "phi2": (
        "phi2",
        "phi",
        rope("default", partial_rotary_factor=0.25) | {"layer_norm_eps": 1e-3, "num_key_value_heads": 2},
        metadata.of_phi2,
    ),
    "smollm3": ("smollm3", "smollm3", rope("default") | {"num_hidden_layers": 5}, metadata.of_base),
    "yarn of OLMo": ("olmo2", "olmo2", rope("yarn", **YARN, attention_factor=1.4), metadata.of_olmo2),
    "multipliers": (
        "granite",
        "granite",
        {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 4.0},
        metadata.of_granite,
    ),
    "logits": ("command-r", "command-r", rope("default") | {"logit_scale": 0.3}, metadata.of_command_r),
    "clip": ("olmoe", "olmoe", {"clip_qkv": 0.1} | EXPERTS, metadata.of_olmoe),
    "mixtral": ("llama", "mixtral", rope("default") | EXPERTS, metadata.of_mixtral),
    "cohere2": (
        "cohere2",
        "cohere2",
        rope("default") | {"logit_scale": 0.3, "num_hidden_layers": 5, "layer_types": None},
        metadata.of_cohere2,
    ),
    "experts of Granite": (
        "granitemoe",
        "granitemoe",
        {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 4.0}
        | EXPERTS,
        metadata.of_granitemoe,
    ),
    "arcee": ("arcee", "arcee", rope("default") | {"rms_norm_eps": 1e-3}, metadata.of_head),
    "olmo": ("olmo", "olmo", rope("default") | {"clip_qkv": 0.1}, metadata.of_olmo),
    "seed_oss": ("seed_oss", "seed_oss", rope("default") | {"rms_norm_eps": 1e-3}, metadata.of_head),
    "ernie4_5": ("ernie4_5", "ernie4_5", rope("default") | {"use_bias": True}, metadata.of_head),
    "exaone4": ("exaone4", "exaone4", rope("default"), metadata.of_exaone4),
    "exaone4 without windows": (
        "exaone4",
        "exaone4",
        rope("default") | {"sliding_window": None, "layer_types": ["full_attention"] * 5, "num_hidden_layers": 5},
        metadata.of_exaone4,
    ),
    "glm4": ("glm4", "glm4", rope("default", partial_rotary_factor=0.5), metadata.of_glm4),
    "glm4moe": (
        "glm4moe",
        "glm4moe",
        rope("default", partial_rotary_factor=0.5) | {"attention_bias": True} | EXPERTS,
        metadata.of_glm4moe,
    ),
    "dots1": ("dots1", "dots1", rope("default") | {"norm_topk_prob": True} | EXPERTS, metadata.of_dots1),
    "minimax-m2": (
        "minimax-m2",
        "minimax-m2",
        rope("default", partial_rotary_factor=0.5) | {"intermediate_size": 64} | EXPERTS,
        metadata.of_minimax_m2,
    ),
    "hunyuan-dense": ("hunyuan-dense", "hunyuan-dense", rope("default") | {"rms_norm_eps": 1e-3}, metadata.of_head),
    "lfm2": ("lfm2", "lfm2", rope("default") | {"norm_eps": 1e-3, "conv_L_cache": 4}, metadata.of_lfm2),
    "linear attention": ("qwen35", "qwen35", MROPE | {"rms_norm_eps": 1e-3}, metadata.of_qwen35),
    "linear attention, experts": ("qwen35moe", "qwen35moe", MROPE | EXPERTS, metadata.of_qwen35moe),
    "Gemma 4": ("gemma4", "gemma4", GEMMA4, metadata.of_gemma4),
    "Gemma 4, experts": ("gemma4", "gemma4 mixture", GEMMA4 | {"top_k_experts": 3}, metadata.of_gemma4),
}


def kinds(name):
    return "F16" if "token_embd" in name else "Q4_0"


def reference(case: str, path) -> tuple[torch.nn.Module, torch.Tensor]:
    """Writes a file, and returns the model with the decoded weights and its logits in fp64."""
    architecture, family, settings, states = CASES[case]
    model = model_of(family, **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.rand_like(parameter))
            elif parameter.dim() > 1:  # so that the attention depends on positions
                parameter.mul_(6)
    write(path, architecture, model, kinds, lambda writer: states(writer, model.config))
    model.set_experts_implementation("eager")  # the others have no fp64
    with torch.no_grad():
        logits = model.double()(IDS).logits
    return model.float(), logits


def distance(model: torch.nn.Module, logits: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(IDS).logits - logits).norm() / logits.norm())
