"""Settings that no key of a GGUF file states. They follow from its tensors or are fixed in llama.cpp's code."""

from collections.abc import Iterator
from typing import Any

from torch_marlin_metal.checkpoints.formats.gguf_keys import FileSettings
from torch_marlin_metal.models.gguf_rope import LATENT

# Settings for which an architecture has no key -> their values in llama.cpp's code.
FIXED: dict[str, dict[str, Any]] = {
    "bitnet": {"hidden_act": "silu"},
    "minicpm3": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    "afmoe": {"mup_enabled": True},
}
# Multipliers that llama.cpp's converter has multiplied into the weights. The config must have these neutral values.
FOLDED: dict[str, dict[str, Any]] = {
    "falcon-h1": {
        **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier", "key_multiplier"), 1.0),
        **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
        **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }
}
# Keys that llama.cpp's converter omits for `LATENT` -> the setting and the value that the omission means.
LEFT_OUT = {
    "attention.q_lora_rank": ("q_lora_rank", None),
    "expert_weights_scale": ("routed_scaling_factor", 1.0),
    "expert_weights_norm": ("norm_topk_prob", False),
    "expert_group_count": ("n_group", 1),
    "expert_group_used_count": ("topk_group", 1),
}
ATTENTION = (".attn_q.weight", ".attn_qkv.weight", ".attn_q_a.weight")


def model_type(architecture: str, kind: str, file: FileSettings) -> str:
    """Returns transformers' model type for a file whose architecture has several.

    Args:
        architecture: the architecture of the file.
        kind: the model type of most files with the architecture.
        file: the keys and tensors of the file, which distinguish the model types.
    """
    if architecture == "llama" and file.values.get("expert_count"):
        return "mixtral"
    if architecture == "deepseek2" and file.values.get("expert_gating_func", 1) == 1:
        return "deepseek_v2"
    if architecture == "mamba" and file.values.get("ssm.dt_b_c_rms"):
        return "falcon_mamba"
    return kind


def of_tensors(config: Any, file: FileSettings) -> Iterator[tuple[str, str, Any]]:
    """Yields (source, setting, value) for settings that follow from the names and shapes of the tensors."""
    count = int(file.number("block_count") or 0) - int(file.number("nextn_predict_layers") or 0)
    attends = [any(f"blk.{n}{name}" in file.tensors for name in ATTENTION) for n in range(count)]
    routes = [f"blk.{n}.ffn_gate_inp.weight" in file.tensors for n in range(count)]
    states = [f"blk.{n}.ssm_in.weight" in file.tensors for n in range(count)]
    kind = config.model_type
    if kind == "granitemoehybrid":
        yield "*.ssm_in.weight", "layer_types", ["linear_attention" if each else "full_attention" for each in states]
    if kind == "nemotron_h":
        kinds = ("linear_attention", "full_attention", "moe")
        types = [
            next((name for name, is_one in zip(kinds, each, strict=True) if is_one), "mlp")
            for each in zip(states, attends, routes, strict=True)
        ]
        yield "*.ssm_in.weight", "layers_block_type", types
    if kind == "jamba":
        for name, marks in (("attn_layer", attends), ("expert_layer", routes)):
            found = [number for number, mark in enumerate(marks) if mark] or [count]
            yield "*.attn_q.weight", f"{name}_offset", found[0]
            yield "*.attn_q.weight", f"{name}_period", found[1] - found[0] if len(found) > 1 else count + 1
    if kind in ("glm_moe_dsa", "exaone_moe"):
        yield "*.ffn_gate_inp.weight", "mlp_layer_types", ["sparse" if each else "dense" for each in routes]
    if kind == "ernie4_5_moe" and any(routes):
        yield "*.ffn_gate_inp.weight", "moe_layer_start_index", routes.index(True)
        yield "*.ffn_gate_inp.weight", "moe_layer_end_index", count - 1 - routes[::-1].index(True)
    yield from _of_shapes(config, file)


def _of_shapes(config: Any, file: FileSettings) -> Iterator[tuple[str, str, Any]]:
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    kind, width = config.model_type, shapes.get("blk.0.ffn_up.weight", (0, 0))
    if positions := shapes.get("position_embd.weight"):
        yield "position_embd.weight", "max_position_embeddings", positions[0]
    if types := shapes.get("token_types.weight"):
        yield "token_types.weight", "type_vocab_size", types[0]
    if kind == "t5":
        heads = int(file.number("attention.head_count") or 0)
        if heads and (query := shapes.get("enc.blk.0.attn_q.weight")):
            yield "enc.blk.0.attn_q.weight", "d_kv", query[0] // heads
        if up := shapes.get("enc.blk.0.ffn_up.weight"):
            yield "enc.blk.0.ffn_up.weight", "d_ff", up[0]
        is_gated = "enc.blk.0.ffn_gate.weight" in shapes
        yield "enc.blk.0.ffn_gate.weight", "feed_forward_proj", "gated-gelu" if is_gated else "relu"
    if kind in ("gpt2", "gpt_bigcode"):
        yield "blk.0.ffn_up.weight", "n_inner", width[0]
    if kind == "mpt":
        yield "blk.0.ffn_up.weight", "expansion_ratio", width[0] // max(width[1], 1)
    if kind == "falcon":
        yield "blk.0.ffn_up.weight", "ffn_hidden_size", width[0]
        is_new = "blk.0.attn_norm_2.weight" in shapes
        yield "blk.0.attn_norm_2.weight", "new_decoder_architecture", is_new
        yield (
            "falcon.attention.head_count_kv",
            "multi_query",
            not is_new and file.values.get("attention.head_count_kv", 1) == 1,
        )
    if kind == "falcon_h1":
        yield "blk.0.ssm_norm.weight", "mamba_rms_norm", "blk.0.ssm_norm.weight" in shapes
    if kind == "gemma3n_text" and (rank := shapes.get("blk.0.laurel_l.weight")):
        yield "blk.0.laurel_l.weight", "laurel_rank", rank[0]
    if kind == "phimoe":
        yield "output.bias", "lm_head_bias", "output.bias" in shapes
    if kind == "gpt_neox":
        yield "blk.0.attn_qkv.bias", "attention_bias", "blk.0.attn_qkv.bias" in shapes


def of_llama_cpp(config: Any, file: FileSettings, complete: bool) -> Iterator[tuple[str, str, Any]]:
    """Yields (source, setting, value) for settings that are fixed in llama.cpp's code or in its converter."""
    for setting, value in FOLDED.get(file.architecture, {}).items():
        yield "general.architecture", setting, value
    if not complete:
        return
    for setting, value in FIXED.get(file.architecture, {}).items():
        yield "general.architecture", setting, value
    if file.architecture in LATENT:
        for key, (setting, value) in LEFT_OUT.items():
            if key not in file.values:
                yield file.full(key), setting, value
    if config.model_type == "deepseek_v2":
        grouped = int(file.number("expert_group_count") or 1) > 1
        yield file.full("expert_group_count"), "topk_method", "group_limited_greedy" if grouped else "greedy"
