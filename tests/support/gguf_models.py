"""Tiny models of transformers of each architecture of GGUF files, and their files, by the rules of llama.cpp."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from torch_marlin_metal.checkpoints.formats.gguf_names import ARCHITECTURES

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
SIZES |= {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SIZES |= {"shared_expert_intermediate_size": 96, "use_qk_norm": False}
SIZES |= {"intermediate_size_mlp": 96, "moe_layers": [1], "bos_token_id": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 32, "full_attention_interval": 2}
SLIDING = ["sliding_attention", "full_attention"]
# Sizes of a family that has sizes of its own.
OWN_SIZES = {
    "qwen35": LINEAR,
    "qwen35moe": LINEAR,
    "exaone4": {"sliding_window": 8, "layer_types": SLIDING},
    "cohere2": {"sliding_window": 8, "layer_types": SLIDING},
    "glm4moe": {"first_k_dense_replace": 1, "n_shared_experts": 1, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    "dots1": {"first_k_dense_replace": 1, "n_shared_experts": 1, "n_routed_experts": 4, "routed_scaling_factor": 2.5},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    # Two layers share keys and values, and have the double width, as in Gemma 4 E2B.
    "gemma4": {"global_head_dim": 64, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 64}
    | {"num_hidden_layers": 4, "layer_types": SLIDING * 2, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    | {"sliding_window": 8},
    # Keys are values in layers without a window, as in Gemma 4 26B.
    "gemma4 mixture": {"global_head_dim": 64, "hidden_size_per_layer_input": 0, "layer_types": SLIDING}
    | {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": True}
    | {"top_k_experts": 2, "sliding_window": 8},
}
# (architecture in files, name of a family of models)
FAMILIES = [(name, name) for name in ARCHITECTURES] + [("llama", "mixtral"), ("gemma4", "gemma4 mixture")]
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
REORDERED = ("llama", "granite", "granitemoe", "smollm3", "arcee", "olmo")
NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe")
LINEAR_ATTENTION = ("qwen35", "qwen35moe")
TRANSPOSED_EXPERTS = ("gpt-oss", "llama4")
IDS = torch.tensor([[3, 9, 27, 41, 5]])
# Parameters that llama.cpp's converters rename before they ask gguf's table.
RENAMED = {"linear_attn.dt_bias": "linear_attn.dt_proj.bias", "self_attn.sinks": "self_attn.sinks.weight"}
RENAMED |= {"layer_scalar": "layer_scalar.weight"}
RENAMED |= {"e_score_correction_bias": "e_score_correction.bias"}
RENAMED |= {"mlp.e_score_correction_bias": "block_sparse_moe.e_score_correction.bias"}
RENAMED |= {"block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight"}
SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
PLAIN = ("F32", "F16", "BF16")


def model_of(family: str, **settings: Any) -> nn.Module:
    """Returns a model of a family with random weights, the same at each call."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(TYPES.get(family, family), **SIZES | OWN_SIZES.get(family, {}) | settings)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name or name.endswith(("scale", "layer_scalar")):
                tensor.add_(torch.rand_like(tensor) * (0.2 if name.endswith("layer_scalar") else 1))
            if name.endswith(("A_log", "dt_bias", "e_score_correction_bias")):
                tensor.copy_(torch.randn_like(tensor))
    return model


def value_heads_in_tiles(config: Any, index: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Returns an array with the n-th value head of all key heads side by side, as llama.cpp stores linear attention."""
    keys = config.linear_num_key_heads
    index = np.moveaxis(index, axis, 0)
    heads = index.reshape(keys, config.linear_num_value_heads // keys, size, *index.shape[1:])
    return np.moveaxis(heads.swapaxes(0, 1).reshape(index.shape), 0, axis)


def linear_attention(config: Any, name: str, index: np.ndarray) -> np.ndarray:
    """Returns the elements of a tensor of linear attention in llama.cpp's order."""
    size = config.linear_value_head_dim
    if "conv1d" in name:
        index = index.squeeze()
    if "in_proj_qkv" in name or "conv1d" in name:
        others = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return np.concatenate((index[:others], value_heads_in_tiles(config, index[others:], 0, size)))
    if "in_proj_z" in name:
        return value_heads_in_tiles(config, index, 0, size)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return value_heads_in_tiles(config, index, 0, 1)
    return value_heads_in_tiles(config, index, 1, size) if "out_proj" in name else index


def experts(architecture: str, name: str, index: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of gate, up and down of all experts.

    Those of gpt-oss and llama4 are `[E, K, N]`. In gpt-oss, gate and up alternate. Gemma 4 keeps gate and up together.
    """
    block, alternates = re.search(r"\.(\d+)\.", name)[1], architecture == "gpt-oss"
    parts = ("gate", "up") if "gate_up" in name else ("down",)
    if architecture == "gemma4" and len(parts) == 2:
        parts = ("gate_up",)
    bias = name.endswith("_bias")
    if architecture in TRANSPOSED_EXPERTS and not bias:
        index = index.swapaxes(1, 2)
    for number, part in enumerate(parts):
        rows = index[:, number :: len(parts)] if alternates else np.split(index, len(parts), 1)[number]
        yield f"blk.{block}.ffn_{part}_exps.{'bias' if bias else 'weight'}", rows


def tensors(architecture: str, config: Any, name: str, index: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields what llama.cpp's converter stores for a tensor: its names in the file, and its elements in their order.

    Args:
        architecture: the architecture of the file.
        config: the model's config.
        name: the name of a tensor of transformers.
        index: the numbers of the tensor's elements, in the tensor's shape.
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
    moved = r"[qk]_proj\.weight" if architecture == "olmo" else r"[qk]_proj\."
    if architecture in REORDERED and re.search(moved, name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        index = index.reshape(heads, 2, -1, *index.shape[1:]).swapaxes(1, 2).reshape(index.shape)
    if architecture in LINEAR_ATTENTION and "linear_attn" in name:
        index = linear_attention(config, name, index)
    if "conv.conv" in name:
        index = index.squeeze(1)
    if "shared_expert_gate" in name:
        index = index.squeeze()
    for ending in sorted((each for each in RENAMED if name.endswith(f".{each}")), key=len)[-1:]:
        name = name.removesuffix(ending) + RENAMED[ending]
    yield names.get_name(name, try_suffixes=(".weight", ".bias")), index


def changed(architecture: str, name: str, values: np.ndarray) -> np.ndarray:
    """Returns the values that llama.cpp's converter stores for a tensor of transformers with this name."""
    if architecture in NORMS_PLUS_ONE and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return values + 1
    return -np.exp(values) if name.endswith("A_log") else values


def write(
    path: Path,
    architecture: str,
    model: Any,
    kinds: Callable[[str], str] = lambda name: "Q4_0",
    states: Callable[[GGUFWriter], Any] = lambda writer: None,
) -> Path:
    """Writes a model under the names of gguf's own table, and gives the model the decoded values.

    Args:
        path: the file to write.
        architecture: the name of the architecture in the file.
        model: a model in fp32.
        kinds: returns the type in which to store a tensor, by its name in the file.
        states: adds metadata and further tensors; called before the model's tensors are added.
    """
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_head_count(config.num_attention_heads)
    if architecture in LINEAR_ATTENTION:
        state_sizes(writer, config)
    if architecture == "gemma4":
        writer.add_block_count(config.num_hidden_layers)
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    states(writer)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        flat = tensor.view(-1).numpy()  # shares the memory of the model
        for target, index in tensors(architecture, config, name, np.arange(flat.size).reshape(tensor.shape)):
            values = np.ascontiguousarray(flat[index])
            if (
                values.ndim == 1
                or "ffn_gate_inp" in target
                or "conv" in target.rpartition(".")[0].rpartition(".")[2]
                or target.endswith(".bias")
            ):
                writer.add_tensor(target, changed(architecture, name, values))  # llama.cpp keeps these in fp32
                continue
            kind = GGMLQuantizationType[kinds(target)]
            stored = quantize(values, kind)
            writer.add_tensor(target, stored, raw_dtype=kind)
            flat[index] = dequantize(stored, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def state_sizes(writer: GGUFWriter, config: Any) -> None:
    """Writes the sizes of linear attention."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
