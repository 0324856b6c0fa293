"""Maps the tensors of GGUF files to the names that they have in transformers.

llama.cpp's converter renames tensors. Of the experts, it stores all gate projections as one tensor, all up projections
as another, and all down projections as a third; some files have gate and up in one tensor.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_marlin_metal.checkpoints.formats.gguf_table import COMMON, TABLE

EXPERTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "gate_up": "gate_up_proj"}


@dataclass(frozen=True)
class Architecture:
    """What a model of transformers has for the tensors of an architecture, and what llama.cpp's converter changed.

    Attributes:
        model_type: the model type of transformers.
        names: names of transformers, as `gguf_table` has them.
        reorders: whether the converter reorders the rows of the q and k projections, so that the two rows of a rotary
            pair come to lie side by side. In transformers one is in the first half of a head and the other in the
            second.
        reorders_bias: whether it reorders the biases of these projections, too.
        norm_offset: what the converter added to the weights of norms.
        plain_norms: norms to which it added nothing.
        alternates: whether transformers has gate and up of the experts in one layer, in which their rows alternate.
        tiles_values: whether the converter reorders the value heads of linear attention, see `gguf_orders`.
    """

    model_type: str
    names: Mapping[str, str]
    reorders: bool = False
    reorders_bias: bool = True
    norm_offset: float = 0.0
    plain_norms: tuple[str, ...] = ()
    alternates: bool = False
    tiles_values: bool = False


LINEAR_ATTENTION = {"norm_offset": 1.0, "plain_norms": ("ssm_norm",), "tiles_values": True}
# What the converters do. In Llama 4 of transformers, the two rows of a rotary pair lie side by side, too.
RULES: dict[str, dict[str, Any]] = {
    **{name: {"reorders": True} for name in ("llama", "granite", "granitemoe", "smollm3", "arcee")},
    "olmo": {"reorders": True, "reorders_bias": False},
    **{name: {"norm_offset": 1.0} for name in ("gemma", "gemma2", "gemma3", "nemotron")},
    **dict.fromkeys(("qwen35", "qwen35moe"), LINEAR_ATTENTION),
    "gpt-oss": {"alternates": True},
}


def _architectures() -> dict[str, Architecture]:
    common = _pairs(COMMON.split())
    found = {}
    for line in TABLE.replace("\n  ", " ").splitlines():
        name, model_type, *own = line.split()
        found[name] = Architecture(model_type, common | _pairs(own), **RULES.get(name, {}))
    return found


def _pairs(entries: list[str]) -> dict[str, str]:
    return {name: module for name, _, module in (entry.partition("=") for entry in entries)}


ARCHITECTURES = _architectures()
BLOCK_NAME = re.compile(r"blk\.(\d{1,6})(\..+)")
EXPERT_TENSOR = re.compile(r"\.ffn_(gate|up|down|gate_up)_exps\.(?:weight|bias)")


def hf_name(name: str, architecture: str) -> str | None:
    """Returns transformers' name of a tensor of one of `ARCHITECTURES`, or None if there is none."""
    block, names = BLOCK_NAME.fullmatch(name), ARCHITECTURES[architecture].names
    number, inner = (block[1], block[2]) if block is not None else ("", name)
    module, ending = names.get(inner), ""
    if module is None and inner.endswith((".weight", ".bias")):
        inner, _, ending = inner.rpartition(".")
        module, ending = names.get(inner), f".{ending}"
    if module is None:
        return None
    return f"model.layers.{number}{module}{ending}" if module[0] == "." else module.format(number) + ending


def is_own_scale(name: str, architecture: str) -> bool:
    """Returns whether the tensor `[...].scale` is a parameter of transformers' model, and not a scale of NVFP4."""
    block = BLOCK_NAME.fullmatch(name)
    return block is not None and block[2] in ARCHITECTURES[architecture].names


def expert_name(name: str, architecture: str, expert: int, *, fused: bool) -> str | None:
    """Returns transformers' name of the layer of an expert, or None if the tensor holds no layers of experts.

    Args:
        name: the tensor's name in the file.
        architecture: one of `ARCHITECTURES`.
        expert: the number of the expert.
        fused: whether the file has gate and up of this block in one tensor.
    """
    block, known = BLOCK_NAME.fullmatch(name), ARCHITECTURES[architecture]
    inner = EXPERT_TENSOR.fullmatch(block[2]) if block is not None else None
    if inner is None:
        return None
    part, down = EXPERTS[inner[1]], hf_name(f"blk.{block[1]}.ffn_down_exps", architecture)  # type: ignore[index]
    experts = str(down).removesuffix(".down_proj")
    if known.alternates or fused:
        return f"{experts}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}.{expert}"
    return f"{experts}.{expert}.{part}"


def partner(name: str, architecture: str) -> str | None:
    """Returns the tensor whose rows alternate in transformers' layer with those of `name`, which come first."""
    alternates = ARCHITECTURES[architecture].alternates and ".ffn_gate_exps." in name
    return name.replace(".ffn_gate_exps.", ".ffn_up_exps.") if alternates else None


def has_place(name: str, architecture: str, metadata: Mapping[str, Any]) -> bool:
    """Returns whether transformers' model has the part to which a tensor belongs.

    It has neither the blocks that predict further tokens, nor keys and values in layers that share those of another.
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
