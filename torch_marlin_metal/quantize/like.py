"""The types of layers in llama.cpp's recipes, for example Q4_K_M.

The rules are those of `llama_tensor_get_type_impl` in llama.cpp's src/llama-quant.cpp (in 2026). They include the
fallback for rows that are not a multiple of 256, but not the exceptions for Falcon and for files with an importance
matrix.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch_marlin_metal.quantize.recipe import LayerFormat

# Type -> the weight format of this package with the same structure.
FORMATS: dict[str, LayerFormat] = {
    "Q4_K": ("q4_k", 32),
    "Q5_K": ("q5_k", 32),
    "Q6_K": ("q6_k", 16),
    "Q8_0": ("uint8b128", 32),
    "Q5_0": ("uint5b16", 32),
    "Q5_1": ("uint5_bias", 32),
}
# Recipe -> the type of most layers.
RECIPES = {"Q4_K_S": "Q4_K", "Q4_K_M": "Q4_K", "Q5_K_S": "Q5_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K", "Q8_0": "Q8_0"}
UNEVEN = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # for rows that are not a multiple of 256
BLOCK = 256
# Role in the rules -> last name parts of the layers with this role, in transformers' models.
ROLES = {
    "v": ("v_proj", "value", "kv_b_proj"),
    "k": ("k_proj", "key"),
    "o": ("o_proj", "out_proj", "attn.c_proj", "self_attention.dense"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "Wqkv"),
    "down": ("down_proj", "w2", "fc2", "mlp.c_proj", "dense_4h_to_h"),
}


@dataclass(frozen=True)
class Described:
    """A layer to quantize: name, K, and flags for the output layer (or a tied embedding) and for other embeddings."""

    name: str
    K: int
    is_output: bool = False
    is_table: bool = False


def formats_like(op: str, like: str, layers: Iterable[Described], experts: int = 0) -> dict[str, LayerFormat]:
    """Returns the format of each layer, by name. The arguments and errors are those of `types_like`."""
    return {name: FORMATS[kind] for name, kind in types_like(op, like, layers, experts).items()}


def types_like(op: str, like: str, layers: Iterable[Described], experts: int = 0) -> dict[str, str]:
    """Returns the llama.cpp type of each layer, by name.

    Args:
        op: the caller's name for the error message.
        like: a key of `RECIPES`.
        layers: the layers to quantize.
        experts: the number of experts per layer of a mixture, or 0.

    Raises:
        ValueError: the recipe is unknown.
    """
    if like not in RECIPES:
        raise ValueError(f"{op}: like: expected one of {', '.join(RECIPES)}, got {like!r}")
    described = list(layers)
    blocks: dict[str, list[int]] = {}  # role -> the numbers of the blocks with a layer of this role
    for layer in described:
        blocks.setdefault(_role(layer.name), []).append(_block(layer.name))
    places = {role: {number: at for at, number in enumerate(sorted(set(found)))} for role, found in blocks.items()}
    depth = len({_block(layer.name) for layer in described} - {-1})
    found = {}
    for layer in described:
        role = _role(layer.name)
        place = places[role][_block(layer.name)], len(places[role])
        kind = _output_type(like) if layer.is_output else RECIPES[like]
        if not (layer.is_output or layer.is_table):
            kind = _type(like, role, *place, depth, experts)
        found[layer.name] = UNEVEN.get(kind, kind) if layer.K % BLOCK else kind
    return found


def _output_type(like: str) -> str:
    return "Q8_0" if like == "Q8_0" else "Q6_K"


def _type(like: str, role: str, index: int, count: int, depth: int, experts: int) -> str:
    """Returns the type of layer number `index` of the `count` layers with the same role."""
    kind = RECIPES[like]
    is_medium, more = like in ("Q4_K_M", "Q5_K_M"), _takes_more(index, count)
    if role == "v":
        if is_medium and more:
            kind = "Q6_K"
        elif like == "Q4_K_S" and index < 4:
            kind = "Q5_K"
        if depth == 80 and kind == "Q4_K":  # models of 70B, in which eight query heads share one v
            kind = "Q5_K"
        return "Q8_0" if experts == 8 else kind
    if role == "k":
        return "Q8_0" if experts == 8 else kind
    if role == "o":
        return "Q5_K" if experts == 8 and like in ("Q4_K_S", "Q4_K_M") else kind
    if role == "qkv":
        return {"Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"}.get(like, kind)
    if role == "down":
        if is_medium and more:
            return "Q6_K"
        return "Q5_K" if like == "Q4_K_S" and index < count // 8 else kind
    return kind


def _takes_more(index: int, count: int) -> bool:
    """Returns True for layers with more bits: the first and last eighth, and every third layer between them."""
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2


def _role(name: str) -> str:
    plain = re.sub(r"\.\d+$", "", name)  # remove the number of an expert in a stack
    return next(
        (role for role, ends in ROLES.items() if any(plain == end or plain.endswith(f".{end}") for end in ends)), ""
    )


def _block(name: str) -> int:
    """Returns the number of the block that contains a layer, or -1."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else -1
