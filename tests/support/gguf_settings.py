"""Tiny models with settings that are not their class's defaults, and what llama.cpp's converter writes for them."""

import numpy as np
import torch
from gguf import GGUFWriter, RopeScalingType

from tests.support.gguf_models import SLIDING, model_of, write

LENGTH = 96  # of the inputs: longer than the contexts before scaling
IDS = torch.arange(LENGTH)[None] * 37 % 61 + 3
RMS, PLAIN = "layer_norm_rms_eps", "layer_norm_eps"


def shape(writer: GGUFWriter, config, eps: str = RMS, context: int = 2048) -> None:
    """Writes the keys that llama.cpp's converter writes for every model."""
    writer.add_context_length(context)
    writer.add_embedding_length(config.hidden_size)
    writer.kv_data[0].pop(f"{writer.arch}.block_count", None)
    writer.add_block_count(config.num_hidden_layers)
    if hasattr(config, "intermediate_size"):
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


def of_qwen35(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    head(writer, config.head_dim, config.head_dim // 2)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
    writer.add_full_attention_interval(2)
    # The block that predicts a second token is one more, and transformers' models lack it.
    del writer.kv_data[0][f"{writer.arch}.block_count"]
    writer.add_block_count(config.num_hidden_layers + 1)
    writer.add_nextn_predict_layers(1)
    for name in ("nextn.eh_proj.weight", "attn_k.weight", "nextn.enorm.weight"):
        writer.add_tensor(f"blk.{config.num_hidden_layers}.{name}", np.ones((64, 64), dtype=np.float32))
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])  # transformers counts them


def of_qwen35moe(writer: GGUFWriter, config) -> None:
    of_qwen35(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def of_gemma4(writer: GGUFWriter, config) -> None:
    """Writes what the converter writes for Gemma 4, and the factors that turn only the first pairs of a head."""
    shape(writer, config)
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    small, large = (config.per_layer_config[config.layer_types.index(kind)] for kind in SLIDING)
    for add, size in ((writer.add_key_length, large), (writer.add_value_length, large)):
        add(size.head_dim)
    for add, size in ((writer.add_key_length_swa, small), (writer.add_value_length_swa, small)):
        add(size.head_dim)
    writer.add_rope_dimension_count(large.head_dim)
    writer.add_rope_dimension_count_swa(small.head_dim)
    full, short = (config.rope_parameters[kind] for kind in reversed(SLIDING))
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_freq_base_swa(short["rope_theta"])
    turned = int(large.head_dim * full["partial_rotary_factor"] / 2)
    factors = [1.0] * turned + [1e30] * (large.head_dim // 2 - turned)
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(sliding)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    for layer in range(config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers):
        for name in ("attn_k", "attn_v", "attn_k_norm"):  # checkpoints have them, but they are not used
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones((64, 64), dtype=np.float32))
    kv_heads = [(small if each else large).num_key_value_heads for each in sliding]
    writer.add_head_count_kv(kv_heads if len(set(kv_heads)) > 1 else kv_heads[0])
    if config.use_double_wide_mlp:
        first = config.num_hidden_layers - config.num_kv_shared_layers
        del writer.kv_data[0]["gemma4.feed_forward_length"]
        writer.add_feed_forward_length(
            [config.intermediate_size * (1 + (layer >= first)) for layer in range(config.num_hidden_layers)]
        )
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


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
    "linear attention": ("qwen35", "qwen35", MROPE | {"rms_norm_eps": 1e-3}, of_qwen35),
    "linear attention, experts": ("qwen35moe", "qwen35moe", MROPE | EXPERTS, of_qwen35moe),
    "Gemma 4": ("gemma4", "gemma4", GEMMA4, of_gemma4),
    "Gemma 4, experts": ("gemma4", "gemma4 mixture", GEMMA4 | {"top_k_experts": 3}, of_gemma4),
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
