"""Restores the values and the row order that llama.cpp's converter changed.

For the architecture "llama" and related ones, the converter reorders the rows of the q and k projections. In models
with linear attention (Qwen 3.5), several value heads share a key head. transformers stores the value heads of a key
head next to each other. llama.cpp stores the first value head of every key head, then the second of every key head.

In a GGUF file, a fused projection has all rows of q, then k, then v. In some transformers models, the rows of each head
are adjacent ("heads"). In others, the rows of all heads that share a key head are adjacent ("groups").
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.formats.gguf_names import ARCHITECTURES, BLOCK_NAME
from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.packed_weight import SUPER_BLOCK, PackedWeight
from torch_marlin_metal.repack import pack_planes, unpack_planes

HEADS = {".attn_q": "attention.head_count", ".attn_k": "attention.head_count_kv"}
# Tensors whose rows follow the order of the value heads: one row per head, or several rows per head.
ONE_ROW, ALL_ROWS = (".ssm_a", ".ssm_dt", ".ssm_alpha", ".ssm_beta"), (".attn_gate", ".attn_qkv", ".ssm_conv1d")
COLUMNS = ".ssm_out"


class _Numbers:
    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        self._architecture, self._metadata = architecture, metadata

    def get(self, key: str, block: int = 0) -> int:
        value = self._metadata.get(f"{self._architecture}.{key}")
        if isinstance(value, memoryview):
            value = value[block] if block < len(value) else 0
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{self._architecture}.{key}: expected a positive whole number, got {value!r}")
        return value


def row_order(name: str, architecture: str, metadata: Mapping[str, Any], rows: int) -> Tensor | None:
    """Returns the row order `[rows]`, int64, that restores transformers' order, or None if no row moved.

    Row r of transformers' tensor is row `order[r]` of the file's tensor.

    Raises:
        CheckpointError: the number of rows does not fit the heads in the metadata.
    """
    block, known = BLOCK_NAME.fullmatch(name), ARCHITECTURES[architecture]
    base = block[2].rpartition(".")[0] or block[2] if block is not None else ""
    numbers = _Numbers(architecture, metadata)
    reorders = known.reorders and (known.reorders_bias or not name.endswith(".bias"))
    if reorders and base in HEADS and block is not None:
        key = HEADS[base]
        heads = numbers.get(key if f"{architecture}.{key}" in metadata else HEADS[".attn_q"], int(block[1]))
        _check(rows, heads, 2 * heads)
        return rotary_order(rows, heads)
    if known.qkv and base == ".attn_qkv":
        return _qkv_order(known.qkv, rows, numbers)
    if not known.tiles_values or base not in (*ONE_ROW, *ALL_ROWS):
        return None
    keys, values = numbers.get("ssm.group_count"), numbers.get("ssm.time_step_rank")
    size = 1 if base in ONE_ROW else numbers.get("ssm.inner_size") // values
    others = 0 if base in (*ONE_ROW, ".attn_gate") else 2 * keys * numbers.get("ssm.state_size")
    if rows != others + values * size:
        raise CheckpointError(f"{rows} rows, but {values} value heads need {others + values * size}")
    return torch.cat((torch.arange(others, device="cpu"), others + value_order(keys, values, size)))


def _qkv_order(kind: str, rows: int, numbers: _Numbers) -> Tensor:
    heads = numbers.get("attention.head_count")
    keys = heads if kind == "heads" else numbers.get("attention.head_count_kv")
    _check(rows, heads + 2 * keys, heads + 2 * keys)
    size = rows // (heads + 2 * keys)
    return _side_by_side([heads * size, keys * size, keys * size], keys)


def _side_by_side(sizes: list[int], groups: int) -> Tensor:
    """Returns the order that makes the rows of each group adjacent. `sizes` are the numbers of rows of q, k and v."""
    parts = torch.split(torch.arange(sum(sizes), device="cpu"), sizes)
    return torch.cat([part.reshape(groups, -1) for part in parts], dim=1).reshape(-1)


def split_rows(part: int, rows: int, architecture: str, metadata: Mapping[str, Any]) -> slice:
    """Returns the rows of q (`part` 0), k (1) or v (2) in a projection that contains all three."""
    numbers = _Numbers(architecture, metadata)
    heads, keys = numbers.get("attention.head_count"), numbers.get("attention.head_count_kv")
    _check(rows, heads + 2 * keys, heads + 2 * keys)
    bounds = [size * (rows // (heads + 2 * keys)) for size in (0, heads, heads + keys, heads + 2 * keys)]
    return slice(bounds[part], bounds[part + 1])


def joined(way: str, first: Tensor, second: Tensor, architecture: str, metadata: Mapping[str, Any]) -> Tensor:
    """Joins the rows of two tensors into the rows of one transformers layer.

    Args:
        way: the order of the rows in the layer:

            - "behind": all rows of the first tensor, then all of the second.
            - "interleaved": a row of the first tensor, a row of the second, and so on.
            - "key heads": for each key head, its rows of q, k and v in the first tensor, then those of z in the second.
            - "latent": for each head, n rows of the first tensor, then m rows of the second.
        first: `[rows, ...]`; for "latent" `[heads, K, n]`.
        second: `[rows, ...]`; for "latent" `[heads, m, K]`.
        architecture: one of `ARCHITECTURES`.
        metadata: the file's metadata, which has the numbers of heads.
    """
    if way == "latent":
        return torch.cat((first.transpose(1, 2), second), dim=1).flatten(0, 1)
    if way == "interleaved":
        return torch.stack((first, second), dim=1).flatten(0, 1)
    both = torch.cat((first, second))
    if way == "behind":
        return both
    numbers = _Numbers(architecture, metadata)
    keys, inner = numbers.get("ssm.group_count"), numbers.get("ssm.inner_size")
    sizes = [keys * numbers.get("ssm.state_size")] * 2 + [inner] * 2
    if sum(sizes) != len(both) or inner % keys:
        raise CheckpointError(f"{len(both)} rows, but {keys} key heads need {sum(sizes)}")
    return both[_side_by_side(sizes, keys)]


def column_order(name: str, architecture: str, metadata: Mapping[str, Any], columns: int) -> Tensor | None:
    """Returns the order of the columns, int64 `[columns]`, of a matrix with one or more columns per value head.

    Like the result of `row_order`, the order restores transformers' order. None means that no column moved.
    """
    block, numbers = BLOCK_NAME.fullmatch(name), _Numbers(architecture, metadata)
    if block is None or block[2] != f"{COLUMNS}.weight" or not ARCHITECTURES[architecture].tiles_values:
        return None
    keys, values = numbers.get("ssm.group_count"), numbers.get("ssm.time_step_rank")
    _check(columns, values, values)
    return value_order(keys, values, columns // values)


def _check(rows: int, heads: int, divisor: int) -> None:
    if rows % divisor:
        raise CheckpointError(f"{rows} rows do not hold {heads} heads")


def rotary_order(rows: int, heads: int) -> Tensor:
    """Returns the order `[rows]`, int64, that moves adjacent rotary pairs to the two halves of each head."""
    return torch.arange(rows, device="cpu").reshape(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def value_order(keys: int, values: int, size: int) -> Tensor:
    """Returns the order `[values * size]`, int64, that makes the value heads of each key head adjacent."""
    if values % keys:
        raise CheckpointError(f"{values} value heads do not belong to {keys} key heads")
    return torch.arange(values * size, device="cpu").reshape(values // keys, keys, size).transpose(0, 1).reshape(-1)


def permute_columns(weight: PackedWeight, order: Tensor) -> PackedWeight | None:
    """Permutes a weight along K. Returns None if the order would split a group."""
    size = weight.group_size if weight.group_size > 0 else weight.K
    if not (_keeps(order, 8) and _keeps(order, size)):
        return None
    if not _keeps(order, SUPER_BLOCK):
        weight = weight.one_level()
    units = {
        "b_packed": weight.K // len(weight.b_packed),
        "scales": size,
        "zeros": size,
        "super_scales": SUPER_BLOCK,
        "super_zeros": SUPER_BLOCK,
    }
    moved: dict[str, Any] = {
        name: tensor[order[:: units[name]] // units[name]] for name, tensor in weight.tensors().items() if name in units
    }
    if weight.b_high is not None:
        bits = find_format(weight.weight_format).code_bits
        codes = unpack_planes(weight.b_packed, weight.b_high, bits)[order]
        moved["b_packed"], moved["b_high"] = pack_planes(codes, bits)
    return replace(weight, **moved)


def _keeps(order: Tensor, unit: int) -> bool:
    """Returns True if an order moves only complete runs of `unit` elements."""
    if len(order) % unit or bool((order[::unit] % unit).any()):
        return False
    return torch.equal(order, (order[::unit, None] + torch.arange(unit, device="cpu")).flatten())


def restored(name: str, architecture: str, values: Tensor) -> Tensor:
    """Converts a float tensor to the values and the shape of transformers."""
    block, known = BLOCK_NAME.fullmatch(name), ARCHITECTURES[architecture]
    base = block[2] if block is not None else f".{name}"
    if (
        known.norm_offset
        and base.endswith("_norm.weight")
        and base[1:].removesuffix(".weight") not in known.plain_norms
    ):
        return values - known.norm_offset
    if base == ".ssm_a":
        values = torch.log(-values)
    if base in (".ssm_a", ".ssm_d"):  # Mamba 2: `[heads, 1]` in the file
        return values.flatten() if values.shape[-1] == 1 else values
    if base == ".ssm_norm.weight":
        return values.flatten()  # llama.cpp stores a row for each group
    if base == ".exp_probs_b.bias" and architecture == "ernie4_5-moe":
        return values.reshape(1, -1)
    if base.removesuffix(".weight") in known.transposed:
        return values.T.contiguous()
    if base in (".ssm_conv1d.weight", ".shortconv.conv.weight"):
        return values.unsqueeze(1)  # llama.cpp omits the channel dimension, which is 1
    if base == ".ffn_gate_inp_shexp.weight":
        return values.reshape(1, -1)  # llama.cpp omits the row dimension, which is 1
    return values
