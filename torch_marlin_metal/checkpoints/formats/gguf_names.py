"""Maps the tensors of GGUF files to transformers' names and transformers' order of rows.

llama.cpp's converter renames tensors. For the architecture "llama" and its relatives, it also reorders the rows of the
q and k projections: the two rows of a rotary pair come to lie side by side, while in transformers one is in the first
half of a head and the other in the second. Of the experts, it stores all gate projections as one tensor, all up
projections as another, and all down projections as a third.
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
    "attn_sinks": "self_attn.sinks",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
PARAMETERS = ("attn_sinks",)  # transformers keeps them as parameters of their module, without a name of their own
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
# Gemma has four norms in a block, and from Gemma 2 on llama.cpp calls them so.
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PHI2 = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
LLAMA4 = {
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
    "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
    "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
}
GPT_OSS = {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}


@dataclass(frozen=True)
class Architecture:
    """Says which tensor of transformers each tensor of an architecture becomes.

    Attributes:
        reorders: whether llama.cpp reorders the rows of the q and k projections.
        names: names of tensors in a block, for those that `IN_BLOCK` does not have or names differently.
        top: names of tensors outside the blocks, for those that `TOP` does not have or names differently.
        norm_offset: what llama.cpp's converter added to the weights of norms. Its converters of Gemma and Nemotron add
            1.
        has_experts: whether the blocks may have experts.
        experts: the name of the module of experts in a block.
        alternates: whether transformers has gate and up in one layer, in which their rows alternate.
    """

    reorders: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    has_experts: bool = False
    experts: str = "mlp.experts"
    alternates: bool = False


ARCHITECTURES = {
    "llama": Architecture(reorders=True, has_experts=True),
    # The two rows of a rotary pair lie side by side in transformers' Llama 4, too, so the converter leaves them.
    "llama4": Architecture(names=LLAMA4, has_experts=True, experts="feed_forward.experts"),
    "qwen2": Architecture(),
    "qwen2moe": Architecture(has_experts=True),
    "qwen3": Architecture(),
    "qwen3moe": Architecture(has_experts=True),
    "gpt-oss": Architecture(names=GPT_OSS, has_experts=True, alternates=True),
    "gemma": Architecture(norm_offset=1.0),
    "gemma2": Architecture(names=FOUR_NORMS, norm_offset=1.0),
    "gemma3": Architecture(names=FOUR_NORMS, norm_offset=1.0),
    "phi2": Architecture(names=PHI2, top={"output_norm": "model.final_layernorm"}),
    "phi3": Architecture(names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "starcoder2": Architecture(names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "stablelm": Architecture(),
    "olmo2": Architecture(names=NORMS_BEHIND),
    "olmoe": Architecture(has_experts=True),
    "command-r": Architecture(),
    "granite": Architecture(reorders=True),
    "smollm3": Architecture(reorders=True),
    "nemotron": Architecture(norm_offset=1.0),
}
BLOCK_NAME = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
TOP_NAME = re.compile(r"(\w+)\.(weight|bias)")
HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


def hf_name(name: str, architecture: str) -> str | None:
    """Returns transformers' name of a tensor of one of `ARCHITECTURES`, or None if there is none."""
    block, known = BLOCK_NAME.fullmatch(name), ARCHITECTURES[architecture]
    if block is not None:
        module = known.names.get(block[2]) or IN_BLOCK.get(block[2])
        ending = "" if block[2] in PARAMETERS else f".{block[3]}"
        return None if module is None else f"model.layers.{block[1]}.{module}{ending}"
    top, modules = TOP_NAME.fullmatch(name), {**TOP, **known.top}
    return f"{modules[top[1]]}.{top[2]}" if top is not None and top[1] in modules else None


def expert_name(name: str, architecture: str, expert: int) -> str | None:
    """Returns transformers' name of the layer of an expert, or None if the tensor holds no layers of experts."""
    block, known = BLOCK_NAME.fullmatch(name), ARCHITECTURES[architecture]
    if block is None or block[2] not in EXPERTS or not known.has_experts:
        return None
    part, experts = EXPERTS[block[2]], f"model.layers.{block[1]}.{known.experts}"
    if known.alternates:
        return f"{experts}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}.{expert}"
    return f"{experts}.{expert}.{part}"


def partner(name: str, architecture: str) -> str | None:
    """Returns the tensor whose rows alternate in transformers' layer with those of `name`, which come first."""
    alternates = ARCHITECTURES[architecture].alternates and ".ffn_gate_exps." in name
    return name.replace(".ffn_gate_exps.", ".ffn_up_exps.") if alternates else None


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
    return torch.arange(rows, device="cpu").reshape(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
