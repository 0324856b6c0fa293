"""The metadata that llama.cpp's converter writes for a model of transformers, by architecture."""

import numpy as np
from gguf import ExpertGatingFuncType, GGUFWriter, RopeScalingType

from tests.support.gguf_models import SLIDING

RMS, PLAIN = "layer_norm_rms_eps", "layer_norm_eps"


def shape(writer: GGUFWriter, config, eps: str = RMS, context: int = 2048) -> None:
    """Writes the keys that llama.cpp's converter writes for every model."""
    writer.add_context_length(context)
    writer.add_embedding_length(config.hidden_size)
    writer.kv_data[0].pop(f"{writer.arch}.block_count", None)
    writer.add_block_count(config.num_hidden_layers)
    if isinstance(getattr(config, "intermediate_size", None), int):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_pad_token_id(0)
    names = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    value = next(getattr(config, name) for name in names if hasattr(config, name))
    getattr(writer, f"add_{eps}")(value)


def lengths(writer: GGUFWriter, size: int) -> None:
    writer.add_key_length(size)
    writer.add_value_length(size)


def head(writer: GGUFWriter, size: int, rotated: int | None = None) -> None:
    lengths(writer, size)
    writer.add_rope_dimension_count(rotated or size)


def routed(writer: GGUFWriter, count: int, used: int, width: int | None = None) -> None:
    writer.add_expert_count(count)
    writer.add_expert_used_count(used)
    if width is not None:
        writer.add_expert_feed_forward_length(width)


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
    writer.add_parallel_residual(True)  # the converter always writes true, also for models without a parallel residual


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
    lengths(writer, config.head_dim)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def of_gemma3(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    lengths(writer, config.head_dim)
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
    routed(writer, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def of_qwen3moe_without_norm(writer: GGUFWriter, config) -> None:
    of_qwen3moe(writer, config)
    del writer.kv_data[0]["qwen3moe.expert_weights_norm"]


def of_qwen2moe(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    writer.add_rope_freq_base(10000.0)
    routed(writer, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def of_gpt_oss(writer: GGUFWriter, config) -> None:
    of_yarn(writer, config)
    head(writer, config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    routed(writer, config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)


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
    routed(writer, config.num_experts, config.num_experts_per_tok)


def of_phi2(writer: GGUFWriter, config) -> None:
    shape(writer, config, PLAIN)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(20000.0)


def of_olmo2(writer: GGUFWriter, config) -> None:
    of_yarn(writer, config)
    writer.add_rope_scaling_attn_factors(config.rope_parameters["attention_factor"])


def of_mixtral(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    routed(writer, config.num_local_experts, config.num_experts_per_tok)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def of_qwen35(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    head(writer, config.head_dim, config.head_dim // 2)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
    writer.add_full_attention_interval(2)
    # The count includes the block that predicts a second token, which transformers' models lack.
    del writer.kv_data[0][f"{writer.arch}.block_count"]
    writer.add_block_count(config.num_hidden_layers + 1)
    writer.add_nextn_predict_layers(1)
    for name in ("nextn.eh_proj.weight", "attn_k.weight", "nextn.enorm.weight"):
        writer.add_tensor(f"blk.{config.num_hidden_layers}.{name}", np.ones((64, 64), dtype=np.float32))
    # transformers derives the vocabulary size from the length of this list
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])


def of_qwen35moe(writer: GGUFWriter, config) -> None:
    of_qwen35(writer, config)
    routed(writer, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def of_gemma4(writer: GGUFWriter, config) -> None:
    """Writes the converter's keys for Gemma 4, and the factors that rotate only the first pairs of a head."""
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
        for name in ("attn_k", "attn_v", "attn_k_norm"):  # checkpoints have these unused tensors
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


def of_head(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    head(writer, config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def of_cohere2(writer: GGUFWriter, config) -> None:
    of_command_r(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_scaling_type(RopeScalingType.NONE)


def of_granitemoe(writer: GGUFWriter, config) -> None:
    of_granite(writer, config)
    writer.add_rope_freq_base(10000.0)
    routed(writer, config.num_local_experts, config.num_experts_per_tok)


def of_olmo(writer: GGUFWriter, config) -> None:
    config.layer_norm_eps = 1e-5  # the class has no setting for it
    shape(writer, config, PLAIN)
    del config.layer_norm_eps
    writer.add_clamp_kqv(config.clip_qkv)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def of_exaone4(writer: GGUFWriter, config) -> None:
    of_head(writer, config)
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def of_glm4(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    head(writer, config.head_dim, config.head_dim // 2)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def of_glm4moe(writer: GGUFWriter, config) -> None:
    of_glm4(writer, config)
    routed(writer, config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def of_dots1(writer: GGUFWriter, config) -> None:
    of_head(writer, config)
    routed(writer, config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def of_minimax_m2(writer: GGUFWriter, config) -> None:
    of_glm4(writer, config)
    routed(writer, config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def of_lfm2(writer: GGUFWriter, config) -> None:
    shape(writer, config)
    del writer.kv_data[0]["lfm2.attention.head_count_kv"]
    kv_heads = config.num_key_value_heads
    writer.add_head_count_kv([kv_heads if kind == "full_attention" else 0 for kind in config.layer_types])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    # transformers derives the vocabulary size from the length of this list
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
