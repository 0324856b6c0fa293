"""Metadata that llama.cpp's converters write in addition to those of `gguf_metadata`, by architecture."""

from statistics import NormalDist

from gguf import ExpertGatingFuncType, GGUFWriter, RopeScalingType

from tests.support.gguf_changes import MLA
from tests.support.gguf_metadata import lengths, routed, shape
from tests.support.gguf_models import ENCODERS


def base(writer: GGUFWriter, config, eps: str = "layer_norm_rms_eps", context: int = 2048) -> None:
    """Writes the keys that the converter's base class of text models writes."""
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    shape(writer, config, eps, context)
    if full.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if "rope_theta" in full:
        writer.add_rope_freq_base(full["rope_theta"])
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if writer.arch in ENCODERS:
        writer.add_causal_attention(False)


def set_once(writer: GGUFWriter, key: str, value) -> None:
    """Writes a key, and replaces a value that was written before."""
    writer.kv_data[0].pop(f"{writer.arch}.{key}", None)
    add = writer.add_array if isinstance(value, list) else writer.add_uint32
    add(f"{writer.arch}.{key}", value)


def of_latent(writer: GGUFWriter, config) -> None:
    """Writes DeepSeek's keys. In llama.cpp, DeepSeek's attention has one key head."""
    base(writer, config)
    writer.add_leading_dense_block_count(getattr(config, "first_k_dense_replace", 0))
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if writer.arch in MLA:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
    else:
        writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if hasattr(config, "n_routed_experts"):
        routed(writer, config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        if config.norm_topk_prob:
            writer.add_expert_weights_norm(True)
        if config.n_group:
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)
    if config.model_type in ("deepseek_v3", "glm_moe_dsa"):
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if (multiplier := config.rope_parameters.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * multiplier)
    if (beta := config.rope_parameters.get("llama_4_scaling_beta")) is not None:
        writer.add_attn_temperature_scale(beta)


def of_latent_2024(writer: GGUFWriter, config) -> None:
    """Writes the keys that DeepSeek's converter wrote in 2024, when llama.cpp did not use a single key head yet."""
    of_latent(writer, config)
    for key in ("attention.key_length_mla", "attention.value_length_mla"):
        del writer.kv_data[0][f"{writer.arch}.{key}"]
    for key, value in (("key", config.qk_nope_head_dim + config.qk_rope_head_dim), ("value", config.v_head_dim)):
        set_once(writer, f"attention.{key}_length", value)
    set_once(writer, "attention.head_count_kv", config.num_attention_heads)


def of_glm_dsa(writer: GGUFWriter, config) -> None:
    of_latent(writer, config)
    writer.add_indexer_head_count(config.index_n_heads)
    writer.add_indexer_key_length(config.index_head_dim)
    writer.add_indexer_top_k(config.index_topk)


def of_qwen3next(writer: GGUFWriter, config) -> None:
    base(writer, config)
    lengths(writer, config.head_dim)
    writer.add_rope_dimension_count(config.head_dim // 4)
    writer.add_full_attention_interval(2)
    routed(writer, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def of_vision(writer: GGUFWriter, config) -> None:
    base(writer, config)
    lengths(writer, config.head_dim) if hasattr(config, "head_dim") else None
    writer.add_rope_dimension_sections([8, 4, 4, 0])
    if writer.arch != "qwen2vl":
        writer.add_num_deepstack_layers(3)
    if writer.arch == "qwen3vlmoe":
        routed(writer, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)


def of_ernie_moe(writer: GGUFWriter, config) -> None:
    base(writer, config)
    routed(writer, config.moe_num_experts, config.moe_k, config.moe_intermediate_size)
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_shared_count(config.moe_num_shared_experts)
    lengths(writer, config.head_dim)


def of_lfm2moe(writer: GGUFWriter, config) -> None:
    base(writer, config)
    kv_heads = config.num_key_value_heads
    set_once(
        writer,
        "attention.head_count_kv",
        [kv_heads if kind == "full_attention" else 0 for kind in config.layer_types],
    )
    routed(writer, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_shortconv_l_cache(config.conv_L_cache)


def of_states(writer: GGUFWriter, config) -> None:
    """Writes the sizes of Mamba's state, and the other keys of hybrid models."""
    kind = config.model_type
    base(writer, config)
    own = {"granitemoehybrid": "mamba_", "falcon_h1": "mamba_", "nemotron_h": "mamba_", "jamba": "mamba_"}.get(kind, "")

    def size(*names: str):
        return next(getattr(config, name) for name in names if hasattr(config, name))

    writer.add_ssm_conv_kernel(size("mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(size("mamba_d_state", "ssm_state_size", "state_size"))
    if kind in ("mamba", "falcon_mamba", "jamba"):
        expand = size("mamba_expand", "expand")
        writer.add_ssm_inner_size(expand * config.hidden_size)
        writer.add_ssm_time_step_rank(size("mamba_dt_rank", "time_step_rank"))
    else:
        heads = size(f"{own}n_heads", f"{own}num_heads")
        writer.add_ssm_group_count(size("mamba_n_groups", "n_groups"))
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * size(f"{own}d_head", f"{own}head_dim"))
    if kind in ("mamba", "falcon_mamba", "mamba2"):
        writer.kv_data[0].pop(f"{writer.arch}.feed_forward_length", None)
        writer.add_feed_forward_length(0)
    if kind in ("mamba", "falcon_mamba"):
        writer.add_ssm_dt_b_c_rms(kind == "falcon_mamba")
    if kind in ("granitemoehybrid", "nemotron_h", "jamba"):
        types = getattr(config, "layers_block_type", None) or config.layer_types
        if kind == "jamba":
            types = ["attention" if n % 2 else "mamba" for n in range(config.num_hidden_layers)]
        kv_heads = config.num_key_value_heads
        counts = [kv_heads if each in ("attention", "full_attention") else 0 for each in types]
        set_once(writer, "attention.head_count_kv", counts)
    if kind == "jamba":
        routed(writer, config.num_experts, config.num_experts_per_tok)
    if kind == "nemotron_h":
        lengths(writer, config.head_dim)
        set_once(
            writer,
            "feed_forward_length",
            [config.intermediate_size if each == "mlp" else 0 for each in config.layers_block_type],
        )
    if kind == "falcon_h1":
        lengths(writer, config.head_dim)
    if kind == "granitemoehybrid":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        routed(writer, config.num_local_experts, config.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def of_mistral3(writer: GGUFWriter, config) -> None:
    base(writer, config)
    lengths(writer, config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
    writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])


def of_gemma3n(writer: GGUFWriter, config) -> None:
    base(writer, config)
    writer.add_feed_forward_length(config.intermediate_size)
    lengths(writer, config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    quantiles = [
        NormalDist().inv_cdf(share) if share else float("-inf") for share in config.activation_sparsity_pattern
    ]
    writer.add_activation_sparsity_scale(quantiles)


def of_phimoe(writer: GGUFWriter, config) -> None:
    base(writer, config)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_sliding_window(0)
    routed(writer, config.num_local_experts, config.num_experts_per_tok)


def of_afmoe(writer: GGUFWriter, config) -> None:
    base(writer, config)
    lengths(writer, config.head_dim)
    routed(writer, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
    writer.add_expert_shared_count(config.num_shared_experts)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config.route_scale)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_sliding_window(config.sliding_window)


def of_exaone_moe(writer: GGUFWriter, config) -> None:
    base(writer, config)
    lengths(writer, config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    routed(writer, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
    writer.add_expert_shared_count(config.num_shared_experts)
    writer.add_expert_shared_feed_forward_length(config.moe_intermediate_size * config.num_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def of_hunyuan_moe(writer: GGUFWriter, config) -> None:
    base(writer, config)
    lengths(writer, config.head_dim)
    routed(writer, config.num_experts, config.moe_topk, config.intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_count(1)


def of_gpt(writer: GGUFWriter, config) -> None:
    """Writes the few keys of the first converters, such as GPT-2's."""
    base(writer, config, "layer_norm_eps")
    writer.kv_data[0].pop(f"{writer.arch}.feed_forward_length", None)
    writer.add_feed_forward_length(4 * config.hidden_size)
    if config.model_type == "gpt_neox":
        set_once(writer, "feed_forward_length", config.intermediate_size)
        share = config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(share * config.hidden_size // config.num_attention_heads))
        writer.add_parallel_residual(config.use_parallel_residual)
    if config.model_type == "falcon":
        writer.add_tensor_data_layout("jploski")
    if config.model_type == "mpt":
        writer.add_clamp_kqv(config.attn_config.clip_qkv)
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)


def of_minicpm3(writer: GGUFWriter, config) -> None:
    of_latent(writer, config)
    writer.kv_data[0].pop("minicpm3.leading_dense_block_count")


def of_head(writer: GGUFWriter, config) -> None:
    base(writer, config)
    if hasattr(config, "head_dim"):
        lengths(writer, config.head_dim)


def of_chatglm(writer: GGUFWriter, config) -> None:
    base(writer, config)
    writer.add_rope_dimension_count(config.head_dim // 2)


def of_jais2(writer: GGUFWriter, config) -> None:
    base(writer, config, "layer_norm_eps")
    lengths(writer, config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)


def of_t5(writer: GGUFWriter, config) -> None:
    shape(writer, config, context=512)
    writer.add_feed_forward_length(config.d_ff)
    lengths(writer, config.d_kv)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)


def of_encoder(writer: GGUFWriter, config) -> None:
    base(writer, config, "layer_norm_rms_eps" if writer.arch == "eurobert" else "layer_norm_eps", 128)
    writer.add_token_type_count(2)
    if writer.arch == "modern-bert":
        writer.add_sliding_window(config.local_attention)
        writer.add_sliding_window_pattern(3)
