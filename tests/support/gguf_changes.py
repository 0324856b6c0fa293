"""Changes that llama.cpp's converters make to a model's tensors in addition to renaming them."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")
TILED = ("qwen35", "qwen35moe")
MLA = ("deepseek2", "mistral4", "glm-dsa")
MAMBA_2 = ("mamba2", "granitehybrid", "nemotron_h", "falcon-h1")
TRANSPOSED_EXPERTS = ("gpt-oss", "llama4")


def value_heads_in_tiles(config: Any, index: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Returns an array in llama.cpp's order of linear attention: the n-th value heads of all key heads are adjacent."""
    keys = config.linear_num_key_heads
    index = np.moveaxis(index, axis, 0)
    heads = index.reshape(keys, config.linear_num_value_heads // keys, size, *index.shape[1:])
    return np.moveaxis(heads.swapaxes(0, 1).reshape(index.shape), 0, axis)


def linear_attention(config: Any, name: str, index: np.ndarray) -> np.ndarray:
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
    """Yields the gate, up and down tensors of all experts.

    The tensors of gpt-oss and llama4 are `[E, K, N]`. In gpt-oss, gate and up alternate. Gemma 4 keeps gate and up in
    one tensor.
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


def several(architecture: str, config: Any, name: str, index: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors into which llama.cpp's converter splits one tensor of a block."""
    if "shared_mlp.input_linear" in name:
        ending = "_shexp" if config.num_local_experts else ""
        gate, up = np.split(index, 2)
        yield from ((f"ffn_gate{ending}.weight", gate), (f"ffn_up{ending}.weight", up))
    if "shared_mlp.output_linear" in name and not config.num_local_experts:
        yield "ffn_down.weight", index
    if "in_proj_qkvz" in name:
        keys, size = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_value_head_dim * config.linear_num_value_heads // keys
        q, k, v, z = np.split(index.reshape(keys, -1, index.shape[1]), np.cumsum([size, size, values]), axis=1)
        yield "attn_qkv.weight", np.concatenate([part.reshape(-1, index.shape[1]) for part in (q, k, v)])
        yield "attn_gate.weight", z.reshape(-1, index.shape[1])
    if "kv_b_proj" in name and architecture in MLA:
        heads = index.reshape(config.num_attention_heads, -1, index.shape[1])
        yield "attn_k_b.weight", heads[:, : config.qk_nope_head_dim].swapaxes(1, 2)
        yield "attn_v_b.weight", heads[:, config.qk_nope_head_dim :]


def reordered(architecture: str, config: Any, name: str, index: np.ndarray) -> np.ndarray:
    if architecture in TILED and "linear_attn" in name:
        index = linear_attention(config, name, index)
    if "query_key_value" in name and architecture != "falcon":
        index = index.reshape(config.num_attention_heads, 3, -1, *index.shape[1:]).swapaxes(0, 1).reshape(index.shape)
    if "query_key_value" in name and architecture == "falcon":
        size = config.hidden_size // config.num_attention_heads
        keys = index.shape[0] // size - config.num_attention_heads
        groups = index.reshape(keys // 2, -1, size, *index.shape[1:])
        parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
        index = np.concatenate([part.reshape(-1, *index.shape[1:]) for part in parts])
    if architecture == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name):
        index = index.T
    if "conv.conv" in name or "conv1d.weight" in name:
        index = index.squeeze()
    if "shared_expert_gate" in name:
        index = index.squeeze()
    if architecture in MAMBA_2 and re.search(r"\.(A_log|D)$", name):
        index = index.reshape(-1, 1)
    if architecture in MAMBA_2 and name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        index = index.reshape(2, -1)  # two groups in all of these models
    return index


def changed(architecture: str, name: str, values: np.ndarray) -> np.ndarray:
    """Returns the values that llama.cpp's converter stores for a tensor with this name in transformers."""
    if architecture in NORMS_PLUS_ONE and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return values + 1
    return -np.exp(values) if name.endswith("A_log") else values


def factor(architecture: str, config: Any, name: str) -> np.ndarray:
    """Returns the factor by which llama.cpp's converter multiplies a tensor. It is 1 except in Falcon-H1."""
    if architecture != "falcon-h1":
        return np.float32(1)
    if "in_proj" in name:
        inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = (inner, inner, states, states, config.mamba_n_heads)
        rows = np.repeat(np.array(config.ssm_multipliers, dtype=np.float32), sizes) * config.ssm_in_multiplier
        return rows[:, None]
    attention = config.attention_in_multiplier
    by = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * attention,
        "q_proj": attention,
        "v_proj": attention,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return np.float32(next((value for part, value in by.items() if f".{part}." in f".{name}"), 1))
