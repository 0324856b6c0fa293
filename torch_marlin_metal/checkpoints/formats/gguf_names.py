"""Maps the tensor names of GGUF files to the names in transformers.

llama.cpp's converter renames tensors. It stores the experts of a layer as three stacked tensors: gate, up and down
projections. In some files, gate and up are one tensor.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_marlin_metal.checkpoints.formats.gguf_table import COMMON, TABLE

EXPERTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "gate_up": "gate_up_proj"}


@dataclass(frozen=True)
class Join:
    """A tensor that transformers joins with another tensor of the file into one layer.

    Attributes:
        second: the tensor's name in a block.
        way: how to join the rows of the two tensors, see `gguf_orders.joined`.
    """

    second: str
    way: str


@dataclass(frozen=True)
class Architecture:
    """The names of an architecture's tensors in transformers, and the changes that llama.cpp's converter made.

    Attributes:
        model_type: the model type of transformers.
        blocks: the name of the transformers module that contains the blocks.
        names: transformers' names, in the form of `gguf_table`.
        reorders: True if the converter reorders the rows of the q and k projections. In the file, the two rows of a
            rotary pair are adjacent. In transformers, one row is in the first half of a head and the other in the
            second half.
        reorders_bias: True if the converter also reorders the biases of these projections.
        norm_offset: the number that the converter added to the weights of norms.
        plain_norms: norms whose weights the converter did not change.
        joins: pairs of tensors that are one layer in transformers, keyed by the first tensor's name in a block.
        splits: tensors that are several layers in transformers: name in a block -> names of the layers.
        qkv: transformers' row order for a projection that contains q, k and v, see `gguf_orders`. "" means llama.cpp's
            order: all rows of q, then k, then v.
        transposed: float matrices that transformers stores as `[K, N]`.
        numbers: block parameters that the file stores as metadata: key -> name in a block.
        without: tensors whose name in transformers depends on a second tensor: name in a block -> (the second tensor,
            the name in transformers if the file lacks the second tensor).
        tiles_values: True if the converter reorders the value heads of linear attention, see `gguf_orders`.
    """

    model_type: str
    blocks: str
    names: Mapping[str, str]
    reorders: bool = False
    reorders_bias: bool = True
    norm_offset: float = 0.0
    plain_norms: tuple[str, ...] = ()
    joins: Mapping[str, Join] = field(default_factory=dict)
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    qkv: str = ""
    transposed: tuple[str, ...] = ()
    numbers: Mapping[str, str] = field(default_factory=dict)
    without: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    tiles_values: bool = False


LINEAR_ATTENTION = {"norm_offset": 1.0, "plain_norms": ("ssm_norm",)}
LATENT = {"joins": {".attn_k_b": Join(".attn_v_b", "latent")}}
SPLIT_QKV = {"splits": {".attn_qkv": (".attn_q", ".attn_k", ".attn_v")}}
# The converters' changes. "llama4" is not listed under "reorders": in its transformers model, the two rows of a rotary
# pair are adjacent too.
RULES: dict[str, dict[str, Any]] = {
    **{name: {"reorders": True} for name in ("llama", "granite", "granitemoe", "smollm3", "arcee", "mistral3")},
    "olmo": {"reorders": True, "reorders_bias": False},
    **{name: {"norm_offset": 1.0} for name in ("gemma", "gemma2", "gemma3", "nemotron")},
    **dict.fromkeys(("qwen35", "qwen35moe"), LINEAR_ATTENTION | {"tiles_values": True}),
    "qwen3next": LINEAR_ATTENTION | {"joins": {".attn_qkv": Join(".attn_gate", "key heads")}},
    "gpt-oss": {"joins": {".ffn_gate_exps": Join(".ffn_up_exps", "interleaved")}},
    "granitehybrid": {
        "reorders": True,
        "joins": {f".ffn_gate{part}": Join(f".ffn_up{part}", "behind") for part in ("_shexp", "")},
    },
    **dict.fromkeys(("deepseek2", "mistral4", "glm-dsa"), LATENT),
    **dict.fromkeys(("chatglm", "nomic-bert"), SPLIT_QKV),
    **{name: {"qkv": "heads"} for name in ("gptneox", "bloom")},
    # T5 1.0 has no gate, and its up layer has another name than in T5 1.1.
    "t5encoder": {"without": {".ffn_up": (".ffn_gate", ".layer.1.DenseReluDense.wi")}},
    # Falcon 7B has one norm in a block. Falcon 40B has one norm for the attention and one for the MLP.
    "falcon": {"qkv": "groups", "without": {".attn_norm": (".attn_norm_2", ".input_layernorm")}},
    "gpt2": {"transposed": (".attn_qkv", ".attn_output", ".ffn_up", ".ffn_down")},
    "apertus": {"numbers": {f"xielu.{name}": f".mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}},
}


def _architectures() -> dict[str, Architecture]:
    common = _pairs(COMMON.split())
    found = {}
    for line in TABLE.replace("\n  ", " ").splitlines():
        name, kind, *own = line.split()
        model_type, _, blocks = kind.partition("@")
        found[name] = Architecture(model_type, blocks or "model.layers", common | _pairs(own), **RULES.get(name, {}))
    return found


def _pairs(entries: list[str]) -> dict[str, str]:
    return {name: module for name, _, module in (entry.partition("=") for entry in entries)}


ARCHITECTURES = _architectures()
BLOCK_NAME = re.compile(r"(?:enc\.)?blk\.(\d{1,6})(\..+)")  # tensors of T5's encoder start with "enc."
EXPERT_TENSOR = re.compile(r"\.ffn_(gate|up|down|gate_up)_exps\.(?:weight|bias)")


def hf_name(name: str, architecture: str) -> str | None:
    """Returns transformers' name for a tensor of one of `ARCHITECTURES`, or None if transformers has no such tensor."""
    block, known = BLOCK_NAME.fullmatch(name), ARCHITECTURES[architecture]
    names, blocks = known.names, known.blocks
    number, inner = (block[1], block[2]) if block is not None else ("", name)
    module, ending = names.get(inner), ""
    if module is None and inner.endswith((".weight", ".bias")):
        inner, _, ending = inner.rpartition(".")
        module, ending = names.get(inner), f".{ending}"
    if module is None:
        return None
    return f"{blocks}.{number}{module}{ending}" if module[0] == "." else module + ending


def is_own_scale(name: str, architecture: str) -> bool:
    """Returns True if a tensor `<name>.scale` is a parameter of transformers' model, False if it scales NVFP4 codes."""
    block = BLOCK_NAME.fullmatch(name)
    return block is not None and block[2] in ARCHITECTURES[architecture].names


def expert_name(name: str, architecture: str, expert: int, *, fused: bool) -> str | None:
    """Returns transformers' name for one expert's layer, or None if the tensor does not store layers of experts.

    Args:
        name: the tensor's name in the file.
        architecture: one of `ARCHITECTURES`.
        expert: the number of the expert.
        fused: True if the file stores gate and up of this block in one tensor.
    """
    block, known = BLOCK_NAME.fullmatch(name), ARCHITECTURES[architecture]
    inner = EXPERT_TENSOR.fullmatch(block[2]) if block is not None else None
    if inner is None:
        return None
    part, down = EXPERTS[inner[1]], hf_name(f"blk.{block[1]}.ffn_down_exps", architecture)  # type: ignore[index]
    experts = str(down).removesuffix(".down_proj")
    if fused or ".ffn_gate_exps" in known.joins:
        return f"{experts}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}.{expert}"
    return f"{experts}.{expert}.{part}"


def partner(name: str, architecture: str) -> tuple[str, str] | None:
    """Returns the tensor that transformers joins with `name` and the way of joining, or None."""
    block, inner, ending = _parts(name)
    join = ARCHITECTURES[architecture].joins.get(inner)
    return None if join is None or ending != ".weight" else (f"{block}{join.second}{ending}", join.way)


def split_names(name: str, architecture: str) -> list[str]:
    """Returns the names of the transformers layers into which a tensor is split, or []."""
    block, inner, ending = _parts(name)
    parts = ARCHITECTURES[architecture].splits.get(inner, ()) if ending == ".weight" else ()
    return [str(hf_name(f"{block}{part}", architecture)) for part in parts]


def _parts(name: str) -> tuple[str, str, str]:
    """Returns the prefix of a tensor's block, the name in the block and the ending."""
    block = BLOCK_NAME.fullmatch(name)
    if block is None:
        return "", name, ""
    inner, _, ending = block[2].rpartition(".")
    return f"blk.{block[1]}", inner, f".{ending}"


def has_place(name: str, architecture: str, metadata: Mapping[str, Any]) -> bool:
    """Returns True if transformers' model has the module to which a tensor belongs.

    transformers has no blocks for multi-token prediction, and no keys and values in layers that reuse those of another
    layer.
    """
    block = BLOCK_NAME.fullmatch(name)
    count = metadata.get(f"{architecture}.block_count")
    if block is None or type(count) is not int:
        return True
    count -= _number(metadata, f"{architecture}.nextn_predict_layers")
    shared = count - _number(metadata, f"{architecture}.attention.shared_kv_layers")
    keys = block[2].startswith((".attn_k.", ".attn_v.", ".attn_k_norm."))
    return int(block[1]) < (shared if keys else count)


def _number(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key, 0)
    return value if type(value) is int else 0
