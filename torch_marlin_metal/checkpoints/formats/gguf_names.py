"""Maps the tensors of GGUF files to transformers' names and transformers' order of rows.

llama.cpp's converter renames tensors and, for the architecture "llama", reorders the rows of the q and k projections
so that the two halves of a rotary pair lie side by side; transformers keeps the halves of a head apart.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma has four norms in a block, and from Gemma 2 on llama.cpp calls them so.
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """How the tensors of an architecture map to those of transformers, one to one.

    Attributes:
        reorders: whether llama.cpp reorders the rows of the q and k projections.
        names: names that differ from `IN_BLOCK`.
        norm_offset: llama.cpp adds it to the weights of norms (gguf's Gemma converters).
    """

    reorders: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0


ARCHITECTURES = {
    "llama": Architecture(reorders=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "gemma": Architecture(norm_offset=1.0),
    "gemma2": Architecture(names=FOUR_NORMS, norm_offset=1.0),
    "gemma3": Architecture(names=FOUR_NORMS, norm_offset=1.0),
    "phi3": Architecture(names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
}
BLOCK_NAME = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
TOP_NAME = re.compile(r"(\w+)\.(weight|bias)")
HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


def hf_name(name: str, architecture: str) -> str | None:
    """Returns transformers' name of a tensor of one of `ARCHITECTURES`, or None if there is none."""
    block = BLOCK_NAME.fullmatch(name)
    if block is not None:
        module = ARCHITECTURES[architecture].names.get(block[2]) or IN_BLOCK.get(block[2])
        return None if module is None else f"model.layers.{block[1]}.{module}.{block[3]}"
    top = TOP_NAME.fullmatch(name)
    return f"{TOP[top[1]]}.{top[2]}" if top is not None and top[1] in TOP else None


def norm_offset(name: str, architecture: str) -> float:
    """Returns the number that llama.cpp added to each element of a tensor: 1 for the norms of some architectures."""
    return ARCHITECTURES[architecture].norm_offset if name.endswith("_norm.weight") else 0.0


def heads_to_restore(name: str, architecture: str, metadata: dict[str, Any]) -> Any:
    """Returns the number of heads, from the metadata, if llama.cpp reordered the rows of this tensor; else None."""
    block = BLOCK_NAME.fullmatch(name)
    if block is None or block[2] not in HEADS or not ARCHITECTURES[architecture].reorders:
        return None
    stated = metadata.get(f"{architecture}.{HEADS[block[2]]}", metadata.get(f"{architecture}.attention.head_count"))
    if isinstance(stated, memoryview):
        return stated[int(block[1])] if int(block[1]) < len(stated) else 0
    return stated


def row_order(rows: int, heads: int) -> Tensor:
    """Returns int64 `[rows]`: row r of transformers' tensor is row `order[r]` of the file's."""
    return torch.arange(rows).reshape(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
