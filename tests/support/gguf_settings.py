"""Tiny models with settings that are not their class's defaults, and what llama.cpp's converter writes for them."""

import numpy as np
import torch
from gguf import GGUFWriter, RopeScalingType

from tests.support.gguf_models import model_of, write

LENGTH = 96  # of the inputs: longer than the contexts before scaling
IDS = torch.arange(LENGTH)[None] * 37 % 61 + 3
RMS, PLAIN = "layer_norm_rms_eps", "layer_norm_eps"


def shape(writer: GGUFWriter, config, eps: str = RMS, context: int = 2048) -> None:
    """Writes the keys that llama.cpp's converter writes for every model."""
    writer.add_context_length(context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_pad_token_id(0)
    names = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon")
    value = next(getattr(config, name) for name in names if hasattr(config, name))
    getattr(writer, f"add_{eps}")(value)


def head(writer: GGUFWriter, size: int, rotated: int | None = None) -> None:
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(rotated or size)


def llama3(writer: GGUFWriter, config) -> None:
    """Writes rope_freqs.weight as llama.cpp's converter computes it."""
    rope, size = config.rope_parameters, config.head_dim
    base, factor, length = rope["rope_theta"], rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for pair in range(size // 2):
        wave = 2 * np.pi * base ** (2 * pair / size)
        smooth = (length / wave - low) / (high - low)
        mixed = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if wave < length / high else factor if wave > length / low else mixed)
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))


def of_llama3(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    head(writer, config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    llama3(writer, config)


def of_linear(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    head(writer, config.head_dim)
    writer.add_rope_freq_base(20000.0)
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def of_linear_2023(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    writer.add_float32("llama.rope.scale_linear", 4.0)


def of_yarn(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def of_yarn_with_betas(writer: GGUFWriter, config) -> None:
    of_yarn(writer, config)
    head(writer, config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_scaling_attn_factors(rope["attention_factor"] / (0.1 * np.log(rope["factor"]) + 1))


def of_phi3(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    rope = config.rope_parameters
    writer.add_rope_dimension_count(2 * len(rope["long_factor"]))
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    writer.add_sliding_window(0)
    for name in ("long", "short"):
        factors = np.array(rope[f"{name}_factor"], dtype=np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", factors)


def of_stablelm(writer: GGUFWriter, config) -> None:
    shape(writer, config, PLAIN)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(20000.0)
    writer.add_parallel_residual(True)  # the converter writes this also where it is not so


def of_starcoder2(writer: GGUFWriter, config) -> None:
    shape(writer, config, PLAIN)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def of_nemotron(writer: GGUFWriter, config) -> None:
    shape(writer, config, PLAIN)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(20000.0)
    writer.add_rope_scaling_type(RopeScalingType.NONE)


def of_gemma2(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def of_gemma3(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)
    writer.add_sliding_window(config.sliding_window)


def of_qwen3(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    head(writer, config.head_dim)
    writer.add_rope_freq_base(10000.0)


def of_qwen3moe(writer: GGUFWriter, config) -> None:
    of_qwen3(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def of_qwen3moe_without_norm(writer: GGUFWriter, config) -> None:
    of_qwen3moe(writer, config)
    del writer.kv_data[0]["qwen3moe.expert_weights_norm"]


def of_qwen2moe(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def of_gpt_oss(writer: GGUFWriter, config) -> None:
    of_yarn(writer, config)
    head(writer, config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def of_biases(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    head(writer, config.head_dim)


def of_granite(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def of_command_r(writer: GGUFWriter, config) -> None:
    shape(writer, config, PLAIN)
    writer.add_logit_scale(config.logit_scale)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def of_olmoe(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    writer.add_clamp_kqv(config.clip_qkv)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def of_base(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    head(writer, config.head_dim)
    writer.add_rope_freq_base(20000.0)


def of_phi2(writer: GGUFWriter, config) -> None:
    shape(writer, config, PLAIN)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(20000.0)


def of_olmo2(writer: GGUFWriter, config) -> None:
    of_yarn(writer, config)
    writer.add_rope_scaling_attn_factors(config.rope_parameters["attention_factor"])


def of_mixtral(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def rope(kind: str, **values) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 20000.0} | values}


NARROW = {"head_dim": 32}
EXPERTS = {"num_experts_per_tok": 3}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
FACTORS = np.linspace(1, 3, 16).astype(np.float32).tolist()
HALF = {"long_factor": FACTORS[:8], "short_factor": FACTORS[8:]}
LONGROPE = {"long_factor": FACTORS, "short_factor": FACTORS[::-1]}
# name -> (architecture, family, settings that are not the class's defaults, what the converter writes)
CASES = {
    "llama3": (
        "llama",
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
        of_llama3,
    ),
    "llama3 of other numbers": (
        "llama",
        "llama",
        rope("llama3", factor=3.0, low_freq_factor=2.0, high_freq_factor=10.0, original_max_position_embeddings=500),
        of_llama3,
    ),
    "llama3 of two pairs": (
        "llama",
        "llama",
        rope("llama3", factor=3.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_position_embeddings=10)
        | {"head_dim": 4, "num_attention_heads": 16, "num_key_value_heads": 8},
        of_llama3,
    ),
    "linear": ("llama", "llama", rope("linear", factor=4.0), of_linear),
    "linear of 2023": ("llama", "llama", rope("linear", factor=4.0, rope_theta=10000.0), of_linear_2023),
    "yarn": ("qwen2", "qwen2", rope("yarn", **YARN), of_yarn),
    "yarn with all": (
        "qwen3",
        "qwen3",
        rope("yarn", **YARN, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5),
        of_yarn_with_betas,
    ),
    "longrope": (
        "phi3",
        "phi3",
        rope("longrope", rope_theta=10000.0, **LONGROPE, attention_factor=1.3)
        | {"original_max_position_embeddings": 64},
        of_phi3,
    ),
    "longrope of short inputs": (
        "phi3",
        "phi3",
        rope("longrope", rope_theta=10000.0, **LONGROPE, attention_factor=1.3)
        | {"original_max_position_embeddings": 128},
        of_phi3,
    ),
    "partial longrope": (
        "phi3",
        "phi3",
        rope("longrope", rope_theta=10000.0, **HALF, attention_factor=1.3, partial_rotary_factor=0.5)
        | {"original_max_position_embeddings": 64},
        of_phi3,
    ),
    "partial": (
        "stablelm",
        "stablelm",
        rope("default", partial_rotary_factor=0.5) | {"layer_norm_eps": 1e-3},
        of_stablelm,
    ),
    "base": (
        "starcoder2",
        "starcoder2",
        rope("default", rope_theta=900000.0) | {"norm_epsilon": 1e-3},
        of_starcoder2,
    ),
    "eps": ("nemotron", "nemotron", rope("default", partial_rotary_factor=0.25) | {"norm_eps": 1e-3}, of_nemotron),
    "caps": (
        "gemma2",
        "gemma2",
        {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3, "sliding_window": 8}
        | {"query_pre_attn_scalar": 32},
        of_gemma2,
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
        of_gemma3,
    ),
    "head": ("qwen3", "qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2}, of_qwen3),
    "experts": ("qwen3moe", "qwen3_moe", {"moe_intermediate_size": 96, "norm_topk_prob": True} | EXPERTS, of_qwen3moe),
    "experts without a key": ("qwen3moe", "qwen3_moe", {"norm_topk_prob": True} | EXPERTS, of_qwen3moe_without_norm),
    "experts, not normalized": ("qwen3moe", "qwen3_moe", {"norm_topk_prob": False} | EXPERTS, of_qwen3moe),
    "shared expert": (
        "qwen2moe",
        "qwen2_moe",
        {"moe_intermediate_size": 96, "norm_topk_prob": True} | EXPERTS,
        of_qwen2moe,
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        rope("yarn", **YARN, truncate=False)
        | {"sliding_window": 8, "intermediate_size": 64, "tie_word_embeddings": True},
        of_gpt_oss,
    ),
    "biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, of_biases),
    "gemma": (
        "gemma",
        "gemma",
        rope("default") | {"rms_norm_eps": 1e-3, "hidden_act": "gelu_pytorch_tanh"},
        of_base,
    ),
    "phi2": (
        "phi2",
        "phi",
        rope("default", partial_rotary_factor=0.25) | {"layer_norm_eps": 1e-3, "num_key_value_heads": 2},
        of_phi2,
    ),
    "smollm3": ("smollm3", "smollm3", rope("default") | {"num_hidden_layers": 5}, of_base),
    "yarn of OLMo": ("olmo2", "olmo2", rope("yarn", **YARN, attention_factor=1.4), of_olmo2),
    "multipliers": (
        "granite",
        "granite",
        {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 4.0},
        of_granite,
    ),
    "logits": ("command-r", "command-r", rope("default") | {"logit_scale": 0.3}, of_command_r),
    "clip": ("olmoe", "olmoe", {"clip_qkv": 0.1} | EXPERTS, of_olmoe),
    "mixtral": ("llama", "mixtral", rope("default") | EXPERTS, of_mixtral),
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
