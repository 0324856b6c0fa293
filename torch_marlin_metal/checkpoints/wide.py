"""Decodes weights with one number of 8 bits for each element, which no weight format holds, to floats."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.fp4 import E8M0_ONE, MX_BLOCK
from torch_marlin_metal.checkpoints.layer import FLOATS, Layer, spread
from torch_marlin_metal.checkpoints.settings import Settings

BLOCK = (128, 128)  # of scales, if the settings do not say another size
FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
EXPONENTS = ("U8", "F8_E8M0")
NAN_EXPONENT = 255  # E8M0 of the OCP Microscaling specification
WEIGHT_ORDER = ".weight_format"  # bitsandbytes: 0 is by rows
INPUT_SCALE = "pre_quant_scale"  # ModelOpt: for each column of K
INT8_LARGEST = 127.0  # LLM.int8 stores the largest magnitude of a row instead of its scale


def wide_weight(layer: Layer, weight: str = "weight", scale: str = "", zero: str = "weight_zero_point") -> Tensor:
    """Decodes FP8 or int8 `[N, K]` to fp32: a value times its scale, after its zero point if there is one.

    There is one scale in all, one for each row, for each group of a row, or for each block of rows and columns.

    Args:
        layer: the layer.
        weight: the role of the weight.
        scale: the role of the scales; "" finds it.
        zero: the role of the zero points, which a layer may lack.

    Raises:
        UnsupportedFormat: the layer is of another kind.
    """
    scale = scale or next((role for role in ("weight_scale", "weight_scale_inv", "SCB") if role in layer), "")
    shape, kind = (layer.shape(weight), layer.dtype(weight)) if weight in layer else ((), "")
    if len(shape) != 2 or kind not in (*FP8, "I8") or scale not in layer:
        raise layer.unsupported(f"{layer.refused}; decoded are E4M3, E5M2 and int8 weights beside their scales")
    if WEIGHT_ORDER in layer and layer.scalar(WEIGHT_ORDER) != 0:
        raise layer.unsupported("LLM.int8 weights in the order of a GPU's tiles (weight_format) are not read")
    if "weight_g_idx" in layer and not _is_in_order(layer.read("weight_g_idx"), layer.shape(scale)):
        raise layer.unsupported("8-bit weights with act-order (weight_g_idx) are not read")
    codes = layer.read(weight)
    values = codes.view(FP8[kind]).float() if kind in FP8 else codes.float()
    if zero in layer:
        values -= _spread(layer, zero, layer.read(zero).float(), shape)
    values *= _spread(layer, scale, _scales(layer, scale), shape)
    if INPUT_SCALE in layer:
        layer.expect(INPUT_SCALE, FLOATS, shape[1])
        values *= layer.read(INPUT_SCALE).float()
    return values


def _is_in_order(groups: Tensor, shape: Sequence[int]) -> bool:
    """Returns whether the groups of the rows of K say no more than their number: none, or one after the other."""
    K, count = groups.numel(), shape[-1] if len(shape) == 2 else 1
    in_order = torch.arange(K, device=groups.device) // max(K // count, 1)
    return bool((groups < 0).all()) or (K % count == 0 and torch.equal(groups.long(), in_order))


def _scales(layer: Layer, role: str) -> Tensor:
    dtype = layer.dtype(role)
    if dtype not in (*FLOATS, *EXPONENTS):
        raise layer.error(role, f"expected floats or exponents, got {dtype}")
    stored = layer.read(role)
    if dtype in EXPONENTS:
        return exponents(stored)
    return stored.float() / INT8_LARGEST if role == "SCB" else stored.float()


def exponents(stored: Tensor) -> Tensor:
    """Returns fp32 powers of two of E8M0 codes, of which 255 is NaN."""
    codes = stored.view(torch.uint8)
    return torch.exp2(codes.float() - E8M0_ONE).masked_fill_(codes == NAN_EXPONENT, torch.nan)


def _spread(layer: Layer, role: str, given: Tensor, shape: Sequence[int]) -> Tensor:
    """Expands one value in all, for each row, group or block to `[N, K]`, or to a shape that broadcasts to it."""
    N, K = shape
    if given.dim() == 4 and given.shape[1] == given.shape[3] == 1:  # ModelOpt's blocks
        given = given[:, 0, :, 0]
    if given.dim() < 2:
        given = given.reshape(-1, 1)
    if given.dim() == 2:
        rows, columns = given.shape
        stated = _stated_block(layer.checkpoint.settings)
        per_row = _size(N, rows, (stated or BLOCK)[0])
        widths = [stated[1]] if stated else []
        if rows == N:
            widths += [MX_BLOCK] if layer.dtype(role) in EXPONENTS else []
            widths += [K // columns] if K % columns == 0 else []
        else:
            widths.append(BLOCK[1])
        per_column = next((size for width in widths if (size := _size(K, columns, width))), 0)
        if per_row and per_column:
            given = given if rows in (1, N) else spread(given, N, per_row)
            return given if columns == 1 else spread(given.t(), K, per_column).t()
    raise layer.error(role, f"{list(given.shape)} does not agree with a weight of {list(shape)}")


def _size(length: int, count: int, stated: int) -> int:
    """Returns how many rows or columns have one value, or 0 if the count of values does not fit."""
    if count in (1, length):
        return length // count
    return stated if stated > 0 and -(-length // stated) == count else 0


def _stated_block(settings: Settings) -> tuple[int, int] | None:
    groups = settings.section("config_groups")
    weights = [groups.section(name).section("weights") for name in groups]
    found: list[Any] = [settings.get("weight_block_size"), *(own.get("block_structure") for own in weights)]
    found += [[1, own.get("group_size")] for own in weights]
    for size in found:
        if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
            return size[0], size[1]
    return None
