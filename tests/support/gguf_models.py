"""Tiny models of transformers for each architecture of GGUF files, and their files, written by llama.cpp's rules."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTextEncoding,
)

from tests.support.gguf_changes import MLA, changed, experts, factor, reordered, several
from torch_marlin_metal.checkpoints.formats.gguf_names import ARCHITECTURES

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
SIZES |= {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SIZES |= {"shared_expert_intermediate_size": 96, "use_qk_norm": False}
SIZES |= {"intermediate_size_mlp": 96, "moe_layers": [1], "bos_token_id": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 32, "full_attention_interval": 2}
SLIDING = ["sliding_attention", "full_attention"]
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
LATENT |= {"num_key_value_heads": 2, "head_dim": 16}
ROUTED = {"first_k_dense_replace": 1, "n_shared_experts": 1, "n_routed_experts": 4, "routed_scaling_factor": 2.5}
ROUTED |= {"n_group": 1, "topk_group": 1}
ENCODER = {"pad_token_id": 0, "max_position_embeddings": 128, "num_key_value_heads": 2}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2}
# Sizes of families that do not use the default sizes.
OWN_SIZES = {
    "deepseek2": LATENT | ROUTED,
    "deepseek_v2": LATENT | ROUTED | {"q_lora_rank": None},
    "qwen3next": LINEAR | {"layer_types": ["linear_attention", "full_attention"]},
    "ernie4_5-moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "lfm2moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "granitehybrid": MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 96},
    "granitehybrid dense": MAMBA
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 96, "num_local_experts": 0},
    "nemotron_h": NEMOTRON | {"layers_block_type": ["mamba", "attention", "mlp"]},
    "mistral4": LATENT | ROUTED | {"first_k_dense_replace": 0, "head_dim": 48},
    "gemma3n": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": SLIDING * 2, "laurel_rank": 32}
    | {"activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0], "hidden_size_per_layer_input": 32}
    | {"vocab_size_per_layer_input": 64, "sliding_window": 8, "intermediate_size": [96] * 4},
    "phimoe": {"lm_head_bias": False},
    "afmoe": {"num_dense_layers": 1, "num_shared_experts": 1, "layer_types": SLIDING, "sliding_window": 8},
    "exaone-moe": ROUTED | {"layer_types": SLIDING, "sliding_window": 8, "num_shared_experts": 1},
    "hunyuan-moe": {"moe_topk": 2},
    "falcon-h1": MAMBA | {"mamba_d_ssm": 128, "mamba_rms_norm": True},
    "gptneox": {"num_key_value_heads": 2},
    "falcon": {"new_decoder_architecture": True, "num_attention_heads": 4, "num_kv_heads": 2} | {"ffn_hidden_size": 96},
    "falcon multi query": {"multi_query": True, "new_decoder_architecture": False, "ffn_hidden_size": 96},
    "mamba": {"state_size": 16, "time_step_rank": 32, "intermediate_size": 128, "expand": 2},
    "falcon_mamba": {"state_size": 16, "time_step_rank": 32, "intermediate_size": 128, "expand": 2},
    "mamba2": {"state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 2, "expand": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    | {"mamba_d_state": 16, "mamba_dt_rank": 32, "use_mamba_kernels": False},
    "minicpm3": LATENT,
    "jais2": {"num_key_value_heads": 2},
    "glm-dsa": LATENT
    | ROUTED
    | {"mlp_layer_types": ["dense", "sparse"], "index_n_heads": 2, "index_head_dim": 32, "index_topk": 4},
    "bitnet": {"tie_word_embeddings": True},
    "bert": ENCODER,
    "nomic-bert": ENCODER,
    "modern-bert": ENCODER | {"local_attention": 8, "layer_types": SLIDING[::-1]},
    "eurobert": ENCODER,
    "t5encoder": {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2}
    | {"feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 8},
    "t5encoder of version 1.0": {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2},
    "qwen35": LINEAR,
    "qwen35moe": LINEAR,
    "exaone4": {"sliding_window": 8, "layer_types": SLIDING},
    "cohere2": {"sliding_window": 8, "layer_types": SLIDING},
    "glm4moe": {"first_k_dense_replace": 1, "n_shared_experts": 1, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    "dots1": {"first_k_dense_replace": 1, "n_shared_experts": 1, "n_routed_experts": 4, "routed_scaling_factor": 2.5},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    # As in Gemma 4 E2B, two layers share keys and values, and have double width.
    "gemma4": {"global_head_dim": 64, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 64}
    | {"num_hidden_layers": 4, "layer_types": SLIDING * 2, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    | {"sliding_window": 8},
    # As in Gemma 4 26B, the keys are also the values in layers without a window.
    "gemma4 mixture": {"global_head_dim": 64, "hidden_size_per_layer_input": 0, "layer_types": SLIDING}
    | {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": True}
    | {"top_k_experts": 2, "sliding_window": 8},
}
# (architecture in files, name of a family of models)
FAMILIES = [(name, name) for name in ARCHITECTURES]
FAMILIES += [("llama", "mixtral"), ("gemma4", "gemma4 mixture"), ("deepseek2", "deepseek_v2")]
FAMILIES += [
    ("mamba", "falcon_mamba"),
    ("granitehybrid", "granitehybrid dense"),
    ("falcon", "falcon multi query"),
    ("chatglm", "chatglm fused"),
    ("t5encoder", "t5encoder of version 1.0"),
]
TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4 mixture": "gemma4_text",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "gpt-oss": "gpt_oss",
    "llama4": "llama4_text",
}
TYPES |= {"phi2": "phi", "command-r": "cohere", "glm4moe": "glm4_moe"}
TYPES |= {"minimax-m2": "minimax_m2", "hunyuan-dense": "hunyuan_v1_dense"}
TYPES |= {"deepseek2": "deepseek_v3", "qwen3next": "qwen3_next", "qwen2vl": "qwen2", "qwen3vl": "qwen3"}
TYPES |= {"qwen3vlmoe": "qwen3_moe", "ernie4_5-moe": "ernie4_5_moe", "lfm2moe": "lfm2_moe"}
TYPES |= dict.fromkeys(("granitehybrid", "granitehybrid dense"), "granitemoehybrid")
TYPES |= {"mistral3": "ministral3", "gemma3n": "gemma3n_text"}
TYPES |= {"exaone-moe": "exaone_moe", "hunyuan-moe": "hunyuan_v1_moe", "falcon-h1": "falcon_h1", "gptneox": "gpt_neox"}
TYPES |= {"falcon multi query": "falcon", "starcoder": "gpt_bigcode", "chatglm": "glm", "chatglm fused": "glm"}
TYPES |= dict.fromkeys(("t5encoder", "t5encoder of version 1.0"), "t5")
TYPES |= {"glm-dsa": "glm_moe_dsa", "nomic-bert": "nomic_bert", "modern-bert": "modernbert"}
ARGUMENTS = {"bert": {"add_pooling_layer": False}}  # arguments of model classes: GGUF files have no pooler
ENCODERS = ("bert", "nomic-bert", "modern-bert", "eurobert", "t5encoder")
REORDERED = ("llama", "granite", "granitemoe", "smollm3", "arcee", "olmo", "mistral3", "granitehybrid")
LINEAR_ATTENTION = ("qwen35", "qwen35moe", "qwen3next")
# The converter keeps a tensor in fp32 if its name contains one of these parts.
FP32 = re.compile(
    r"ffn_gate_inp|conv[^.]*\.(weight|bias)|\.bias$|ssm_(a|d)$|_norm\.|position_embd|token_types|altup_\w*coef"
)
IDS = torch.tensor([[3, 9, 27, 41, 5]])
# llama.cpp's converters first rename these parameters, and then look them up in gguf's table.
RENAMED = {"linear_attn.dt_bias": "linear_attn.dt_proj.bias", "self_attn.sinks": "self_attn.sinks.weight"}
RENAMED |= {"mixer.dt_bias": "mixer.dt_proj.bias", "mamba.dt_bias": "mamba.dt_proj.bias"}
RENAMED |= {"layer_scalar": "layer_scalar.weight", "correct_output_scale": "correct_output_scale.weight"}
RENAMED |= {"e_score_correction_bias": "e_score_correction.bias", "expert_bias": "expert_bias.bias"}
RENAMED |= {"mlp.e_score_correction_bias": "block_sparse_moe.e_score_correction.bias"}
RENAMED |= {"gate.moe_statics.e_score_correction_bias": "moe_statics.e_score_correction.bias"}
RENAMED |= {"block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight"}
RENAMED |= {"attn_sub_norm.weight": "inner_attn_ln.weight", "ffn_sub_norm.weight": "ffn_layernorm.weight"}
NOMIC = {"self_attn.o_proj": "attn.out_proj", "mlp.up_proj": "mlp.fc11", "mlp.gate_proj": "mlp.fc12"}
NOMIC |= {"mlp.down_proj": "mlp.fc2", "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2"}
NOMIC |= {"embeddings.LayerNorm": "emb_ln", "layers": "encoder.layers"}
FUSED = ("nomic-bert", "chatglm fused")  # checkpoints store q, k and v in one tensor, which transformers splits
# Parts of tensor names that differ between transformers and checkpoints.
PARTS = {
    "nemotron_h": {"model": "backbone"},
    "bloom": {"transformer.": ""},
    "nomic-bert": NOMIC,
}
SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
PLAIN = ("F32", "F16", "BF16")


def model_of(family: str, **settings: Any) -> nn.Module:
    """Returns a model of a family with random weights, which are the same at each call."""
    torch.manual_seed(0)
    own = OWN_SIZES.get(family, {})
    # T5's config uses other names for all sizes.
    sizes = ({"vocab_size": 64} if family.startswith("t5") else SIZES) | own | settings
    if family.startswith("falcon") and family != "falcon-h1":
        del sizes["head_dim"]  # the class has no setting for it
    config = AutoConfig.for_model(TYPES.get(family, family), **sizes)
    model = auto_class(family).from_config(config, **ARGUMENTS.get(family, {}))
    model = model.float().eval()
    model.fuses_qkv = family in FUSED
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name or name.endswith(("scale", "layer_scalar")):
                tensor.add_(torch.rand_like(tensor) * (0.2 if name.endswith("layer_scalar") else 1))
            if name.endswith(("A_log", "dt_bias", "e_score_correction_bias", "expert_bias", "mixer.D", "mamba.D")):
                tensor.copy_(torch.randn_like(tensor))
    return model


def auto_class(family: str) -> Any:
    """Returns transformers' auto class for a family."""
    if family.startswith("t5"):
        return AutoModelForTextEncoding
    if family in ENCODERS:
        return AutoModel
    return AutoModelForImageTextToText if family == "mistral4" else AutoModelForCausalLM


def outputs(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Returns the logits of a model, or the last states of an encoder."""
    with torch.no_grad():
        found = model(ids)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def tensors(architecture: str, config: Any, name: str, index: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors that llama.cpp's converter stores for one tensor of a model.

    `index` has the shape of the model's tensor, and its entries number the elements. A result is a tensor's name in the
    file and an array in the file's order, whose entries are the numbers of the elements stored there.
    """
    arch = next(arch for arch, own in MODEL_ARCH_NAMES.items() if own == architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    if re.search(r"\.experts\.\w+$", name):
        yield from experts(architecture, name, index)
        return
    for ending, target in SCALES.items():
        if name.endswith(f".{ending}"):
            yield f"blk.{name.split('.')[2]}.{target}", index
            return
    block = re.search(r"\.(\d+)\.", name)
    if ".act_fn." in name:
        return  # `write` stores this tensor
    parts = list(several(architecture, config, name, index))
    if parts:
        yield from ((f"blk.{block[1]}.{part}", rows) for part, rows in parts)
        return
    moved = r"[qk]_proj\.weight" if architecture == "olmo" else r"[qk]_proj\."
    if architecture in REORDERED and re.search(moved, name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        index = index.reshape(heads, 2, -1, *index.shape[1:]).swapaxes(1, 2).reshape(index.shape)
    index = reordered(architecture, config, name, index)
    for ending in sorted((each for each in RENAMED if name.endswith(f".{each}")), key=len)[-1:]:
        name = name.removesuffix(ending) + RENAMED[ending]
    for own, part in PARTS.get(architecture, {}).items():
        name = re.sub(rf"(?<![a-z_]){re.escape(own)}", part, name, count=1)
    name = re.sub(r"(altup_\w*projections)\.\d+", r"\1", name)
    yield names.get_name(name, try_suffixes=(".weight", ".bias")), index


def write(
    path: Path,
    architecture: str,
    model: Any,
    kinds: Callable[[str], str] = lambda name: "Q4_0",
    states: Callable[[GGUFWriter], Any] = lambda writer: None,
) -> Path:
    """Writes a model under the names of gguf's own table, and sets the model's weights to the decoded values.

    Args:
        path: the file to write.
        architecture: the name of the architecture in the file.
        model: a model in fp32.
        kinds: returns the type of a stored tensor, by its name in the file.
        states: adds metadata and further tensors; called before the model's tensors are added.
    """
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_head_count(0 if architecture in ("mamba", "mamba2") else config.num_attention_heads)
    if architecture in LINEAR_ATTENTION:
        state_sizes(writer, config)
    if architecture in ("gemma4", "gemma3n"):
        writer.add_block_count(config.num_hidden_layers)
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
    if architecture != "gemma4":
        writer.add_head_count_kv(key_value_heads(architecture, config))
    if architecture == "apertus":
        writer.add_block_count(config.num_hidden_layers)
        for name in ("alpha_p", "alpha_n", "beta", "eps"):
            values = [float(getattr(layer.mlp.act_fn, name)) for layer in model.model.layers]
            getattr(writer, f"add_xielu_{name}")(values)
    states(writer)
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    stored: dict[str, list[tuple[np.ndarray, np.ndarray, str]]] = {}
    for name, tensor in model.state_dict().items():
        if (name == "lm_head.weight" and tied) or name == "encoder.embed_tokens.weight":
            continue  # shares its values with another tensor
        flat = tensor.view(-1).numpy()  # shares the memory of the model
        index = np.arange(flat.size).reshape(tensor.shape)
        fused = re.search(r"\.(\d+)\.self_attn\.[qkv]_proj\.(weight|bias)", name) if model.fuses_qkv else None
        if fused:
            stored.setdefault(f"blk.{fused[1]}.attn_qkv.{fused[2]}", []).append((flat, index, name))
            continue
        for target, elements in tensors(architecture, config, name, index):
            stored.setdefault(target, []).append((flat, elements, name))
    for target, parts in stored.items():
        join = np.stack if "altup" in target and len(parts) > 1 else np.concatenate
        factors = [factor(architecture, config, name) for _, _, name in parts]
        changes = [changed(architecture, name, flat[index]) for flat, index, name in parts]
        values = join([one * by for one, by in zip(changes, factors, strict=True)])
        if values.ndim == 1 or FP32.search(target):
            writer.add_tensor(target, np.ascontiguousarray(values))
            continue
        kind = GGMLQuantizationType["F16" if values.shape[-1] % 32 else kinds(target)]
        packed = quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(target, packed, raw_dtype=kind)
        decoded, start = dequantize(packed, kind), 0
        for number, (flat, index, _) in enumerate(parts):
            own = decoded[number] if join is np.stack else decoded[start : start + len(index)]
            flat[index] = own / factors[number]
            start += len(index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def key_value_heads(architecture: str, config: Any) -> Any:
    """Returns the number of key heads that the converter writes."""
    heads = getattr(config, "num_attention_heads", 0)
    if architecture in MLA:
        return 1
    if architecture == "falcon":
        return config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1
    if architecture in ("mamba", "mamba2"):
        return 0
    if architecture == "starcoder":
        return 1
    return config.num_key_value_heads if "num_key_value_heads" in type(config).__dataclass_fields__ else heads


def state_sizes(writer: GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
