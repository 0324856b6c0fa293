"""Tiny models with settings that differ from the defaults of their classes."""

import numpy as np
import torch

from tests.support import gguf_converters as converters
from tests.support import gguf_metadata as metadata
from tests.support.gguf_models import model_of, outputs, write

LENGTH = 96  # of the inputs, longer than the context before rope scaling
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
# name -> (architecture, family, settings that differ from the class's defaults, keys that the converter writes)
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
        metadata.of_head,
    ),
    "phi2": (
        "phi2",
        "phi",
        rope("default", partial_rotary_factor=0.25) | {"layer_norm_eps": 1e-3, "num_key_value_heads": 2},
        metadata.of_phi2,
    ),
    "smollm3": ("smollm3", "smollm3", rope("default") | {"num_hidden_layers": 5}, metadata.of_head),
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


V3 = rope("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0)
MULTIPLIERS = {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0}
MULTIPLIERS |= {"logits_scaling": 4.0}
H1 = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7, "attention_in_multiplier": 1.5}
H1 |= {"attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6}
H1 |= {"mlp_multipliers": [0.9, 1.1], "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9]}
TYPED = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
}
PLAIN = rope("default")
CASES |= {
    "DeepSeek V3": ("deepseek2", "deepseek2", V3 | {"n_group": 2, "topk_group": 1} | EXPERTS, converters.of_latent),
    "DeepSeek V2": ("deepseek2", "deepseek_v2", PLAIN | EXPERTS, converters.of_latent),
    "DeepSeek V2 of 2024": ("deepseek2", "deepseek_v2", PLAIN | EXPERTS, converters.of_latent_2024),
    "Mistral 4": (
        "mistral4",
        "mistral4",
        rope("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3) | EXPERTS,
        converters.of_latent,
    ),
    "glm-dsa": ("glm-dsa", "glm-dsa", PLAIN | {"index_topk": 6} | EXPERTS, converters.of_glm_dsa),
    "minicpm3": ("minicpm3", "minicpm3", PLAIN, converters.of_minicpm3),
    "qwen3next": (
        "qwen3next",
        "qwen3next",
        rope("default", partial_rotary_factor=0.25) | EXPERTS,
        converters.of_qwen3next,
    ),
    **{name: (name, name, PLAIN, converters.of_vision) for name in ("qwen2vl", "qwen3vl")},
    "qwen3vlmoe": ("qwen3vlmoe", "qwen3vlmoe", PLAIN | {"norm_topk_prob": True} | EXPERTS, converters.of_vision),
    "ernie4_5-moe": (
        "ernie4_5-moe",
        "ernie4_5-moe",
        PLAIN | {"moe_k": 3, "num_hidden_layers": 3},
        converters.of_ernie_moe,
    ),
    "lfm2moe": ("lfm2moe", "lfm2moe", PLAIN | {"norm_eps": 1e-3, "conv_L_cache": 4} | EXPERTS, converters.of_lfm2moe),
    "hybrid Granite": ("granitehybrid", "granitehybrid", MULTIPLIERS | EXPERTS, converters.of_states),
    "hybrid Granite with positions": (
        "granitehybrid",
        "granitehybrid dense",
        PLAIN | MULTIPLIERS | {"position_embedding_type": "rope"},
        converters.of_states,
    ),
    "nemotron_h": ("nemotron_h", "nemotron_h", {"layer_norm_epsilon": 1e-3}, converters.of_states),
    "mistral3": (
        "mistral3",
        "mistral3",
        rope("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3),
        converters.of_mistral3,
    ),
    "gemma3n": (
        "gemma3n",
        "gemma3n",
        {"rope_parameters": TYPED, "final_logit_softcapping": 0.3},
        converters.of_gemma3n,
    ),
    "phimoe": ("phimoe", "phimoe", PLAIN | EXPERTS, converters.of_phimoe),
    "afmoe": (
        "afmoe",
        "afmoe",
        PLAIN | {"mup_enabled": True, "route_scale": 2.0, "num_hidden_layers": 4, "layer_types": None} | EXPERTS,
        converters.of_afmoe,
    ),
    "exaone-moe": (
        "exaone-moe",
        "exaone-moe",
        PLAIN | {"mlp_layer_types": ["dense", "sparse"]} | EXPERTS,
        converters.of_exaone_moe,
    ),
    "hunyuan-moe": ("hunyuan-moe", "hunyuan-moe", PLAIN | {"moe_topk": 3}, converters.of_hunyuan_moe),
    "folded multipliers": ("falcon-h1", "falcon-h1", PLAIN | H1, converters.of_states),
    "gpt2": ("gpt2", "gpt2", {"layer_norm_epsilon": 1e-3, "n_positions": 128, "n_inner": 96}, converters.of_gpt),
    "gptneox": (
        "gptneox",
        "gptneox",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
        | {"use_parallel_residual": False},
        converters.of_gpt,
    ),
    "falcon": ("falcon", "falcon", {"layer_norm_epsilon": 1e-3}, converters.of_gpt),
    "falcon of one head of keys": ("falcon", "falcon multi query", {}, converters.of_gpt),
    "bloom": ("bloom", "bloom", {"layer_norm_epsilon": 1e-3}, converters.of_gpt),
    "mpt": ("mpt", "mpt", {"attn_config": {"clip_qkv": 0.5, "alibi_bias_max": 4}}, converters.of_gpt),
    "starcoder": ("starcoder", "starcoder", {"n_positions": 128, "n_inner": 96}, converters.of_gpt),
    "mamba": ("mamba", "mamba", {"conv_kernel": 3, "layer_norm_epsilon": 1e-3}, converters.of_states),
    "falcon_mamba": ("mamba", "falcon_mamba", {}, converters.of_states),
    "mamba2": ("mamba2", "mamba2", {"conv_kernel": 3}, converters.of_states),
    "jamba": ("jamba", "jamba", {"mamba_d_conv": 3, "num_hidden_layers": 4} | EXPERTS, converters.of_states),
    "apertus": ("apertus", "apertus", PLAIN, converters.of_head),
    "bitnet": ("bitnet", "bitnet", PLAIN | {"hidden_act": "silu"}, converters.of_head),
    "chatglm": ("chatglm", "chatglm fused", rope("default", partial_rotary_factor=0.5), converters.of_chatglm),
    "jais2": ("jais2", "jais2", PLAIN | {"layer_norm_eps": 1e-3}, converters.of_jais2),
    "bert": ("bert", "bert", {"layer_norm_eps": 1e-3}, converters.of_encoder),
    "nomic-bert": ("nomic-bert", "nomic-bert", PLAIN, converters.of_encoder),
    "modern-bert": (
        "modern-bert",
        "modern-bert",
        {"rope_parameters": TYPED, "num_hidden_layers": 4, "layer_types": None},
        converters.of_encoder,
    ),
    "eurobert": ("eurobert", "eurobert", PLAIN, converters.of_encoder),
    "t5encoder": ("t5encoder", "t5encoder", {"layer_norm_epsilon": 1e-3}, converters.of_t5),
}
# The files of these cases state no multipliers, because the weights contain them. The values replace the multipliers in
# a model for such a file.
NEUTRAL = {
    "folded multipliers": {name: [1.0] * len(value) if isinstance(value, list) else 1.0 for name, value in H1.items()}
}


def kinds(name):
    return "F16" if "token_embd" in name else "Q4_0"


def reference(case: str, path) -> tuple[torch.nn.Module, torch.Tensor]:
    """Writes a file. Returns the model with the decoded weights, and its logits in fp64."""
    architecture, family, settings, states = CASES[case]
    model = model_of(family, **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.rand_like(parameter))
            elif parameter.dim() > 1:  # larger weights, so that the attention depends on positions
                parameter.mul_(6)
    write(path, architecture, model, kinds, lambda writer: states(writer, model.config))
    model.set_experts_implementation("eager")  # the other implementations do not support fp64
    with torch.no_grad():
        logits = outputs(model.double(), IDS)
    return model.float(), logits


def distance(model: torch.nn.Module, logits: torch.Tensor) -> float:
    return float((outputs(model, IDS) - logits).norm() / logits.norm())
