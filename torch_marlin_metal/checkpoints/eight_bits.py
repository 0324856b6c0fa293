"""Reads 8-bit weights of several checkpoint formats: E4M3 or int8 elements `[N, K]` and their scales."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.block_scales import MX_BLOCK, mx
from torch_marlin_metal.checkpoints.float_rows import FloatRows
from torch_marlin_metal.checkpoints.grouped import SIGN, constant, decoded, packed, spread, unsigned, words_of_codes
from torch_marlin_metal.checkpoints.layer_tensors import FLOATS, Layer
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.packed_weight import SCALE_BLOCK, PackedWeight

BLOCK = (SCALE_BLOCK, SCALE_BLOCK)  # rows and columns that share a scale, if the settings state no block size
E4M3, E5M2, INT8 = "F8_E4M3", "F8_E5M2", "I8"
EXPONENTS = ("U8", "F8_E8M0")
NAN_EXPONENT = 255  # E8M0 of the OCP Microscaling specification
INPUT_SCALE = "pre_quant_scale"  # ModelOpt: one factor for each column of K
SCALES_INPUT = f"it scales its input ({INPUT_SCALE}), which the operators do not"


def read_bytes(
    layer: Layer,
    source: str,
    weight: str = "weight",
    scale: str = "weight_scale",
    zero: str = "weight_zero_point",
    *,
    scales: Tensor | None = None,
) -> PackedWeight:
    """Reads the weight `(q - zero_point) * scale`; the zero point is optional.

    A scale applies to the tensor, a row, a group of a row, or a block of rows and columns. If N is a multiple
    of 128, a block of 128 x 128 E4M3 elements keeps its single scale. The scale of any other block is repeated for each
    row of the block.

    Args:
        layer: a layer whose elements have 8 bits.
        source: see `PackedWeight.source`.
        weight: the role of the elements' tensor.
        scale: the role of the scales' tensor.
        zero: the role of the zero points' tensor, which may be absent.
        scales: scales to use in place of those in the file.

    Raises:
        UnsupportedFormat: the layer is of another kind, or the operators cannot represent it.
    """
    kind, shape = layer.dtype(weight), layer.shape(weight)
    if kind not in (E4M3, E5M2, INT8) or len(shape) != 2:
        raise layer.unsupported(f"weights of {kind} {list(shape)} are not read; known: E4M3, int8")
    N, K = layer.expect(weight, (kind,), None, None)
    if "weight_g_idx" in layer and not _is_in_order(layer.read("weight_g_idx"), layer.shape(scale)):
        raise layer.unsupported("8-bit weights with act-order (weight_g_idx) are not read")
    dtype = layer.dtype(scale) if scale in layer else "F32"
    if dtype not in (*FLOATS, *EXPONENTS):
        raise layer.error(scale, f"expected floats or exponents, got {dtype}")
    per_row, group_size, stored = _blocks(layer, scale, layer.read(scale) if scales is None else scales, (N, K))
    columns = input_scale(layer, K)
    keeps_blocks = kind == E4M3 and (per_row, group_size) == BLOCK and N % SCALE_BLOCK == K % 8 == 0 and columns is None
    stored = (stored if keeps_blocks else spread(stored, N, per_row)).t()
    factors = exponents(stored) if dtype in EXPONENTS else stored
    codes, points, weight_format = layer.read(weight).view(torch.uint8), None, "float8_e4m3"
    if kind == INT8:
        codes, weight_format = codes ^ SIGN[8], "uint8b128"
        if zero in layer and not constant(zeros := layer.read(zero), 0):
            points, weight_format = _zero_points(layer, zero, zeros, group_size, (N, K)), "uint8"

    def rows(which: slice) -> Tensor:
        own, scale = codes[which], factors[:, which]
        if kind == E5M2:
            values = own.view(torch.float8_e5m2).float() * spread(scale.float(), K, group_size).t()
        else:
            zeros = None if points is None else points[:, which]
            values = decoded(words_of_codes(own, 8), weight_format, K, group_size, scale, zeros)
        return values if columns is None else values * columns

    floats = partial(FloatRows, N, K, rows)
    if kind == E5M2:
        raise layer.unsupported("E5M2 weights, which have no weight format", floats)
    if columns is not None:
        raise layer.unsupported(SCALES_INPUT, floats)
    words = words_of_codes(codes, 8)
    if dtype in EXPONENTS and group_size == MX_BLOCK and kind == E4M3 and K % 8 == 0:
        return mx(words, stored.view(torch.uint8), "mxfp8", layer.bias(N), source)
    return packed(layer, words, weight_format, group_size, factors, points, source=source, K=K)


def input_scale(layer: Layer, K: int) -> Tensor | None:
    """Returns the fp32 factors `[K]` by which the layer multiplies its input, or None."""
    if INPUT_SCALE not in layer:
        return None
    layer.expect(INPUT_SCALE, FLOATS, K)
    return layer.read(INPUT_SCALE).float()


def _is_in_order(groups: Tensor, shape: Sequence[int]) -> bool:
    """Returns True if `g_idx` can be ignored because it is unset or its groups are in order."""
    K, count = groups.numel(), shape[-1] if len(shape) == 2 else 1
    in_order = torch.arange(K, device=groups.device) // max(K // count, 1)
    return bool((groups < 0).all()) or (K % count == 0 and torch.equal(groups.long(), in_order))


def exponents(stored: Tensor) -> Tensor:
    """Decodes E8M0 codes to bf16, which represents all these powers of two. Code 255 becomes NaN."""
    codes = stored.view(torch.uint8)
    return torch.exp2(codes.float() - 127).masked_fill_(codes == NAN_EXPONENT, torch.nan).bfloat16()


def _zero_points(layer: Layer, role: str, stored: Tensor, group_size: int, shape: tuple[int, int]) -> Tensor:
    """Reads zero points of int8 codes and returns those of unsigned codes, `[G, N]`; see `unsigned`."""
    per_row, size, points = _blocks(layer, role, stored, shape)
    if size != group_size:
        raise layer.error(role, f"expected one zero point for each scale, got {list(stored.shape)}")
    return unsigned(spread(points, shape[0], per_row).t(), 8)


def _blocks(layer: Layer, role: str, given: Tensor, shape: tuple[int, int]) -> tuple[int, int, Tensor]:
    """Returns the number of rows of a block, its number of columns, and the matrix with one value for each block.

    `given` has one value for the tensor, or one for each row, group or block.
    """
    N, K = shape
    stored = given
    if given.dim() == 4 and given.shape[1] == given.shape[3] == 1:  # ModelOpt's shape for scales of blocks
        given = given[:, 0, :, 0]
    if given.dim() < 2:
        if given.numel() not in (1, N):  # scales of blocks have two dimensions
            raise layer.error(role, f"{list(stored.shape)} does not agree with a weight of {list(shape)}")
        given = given.reshape(-1, 1)
    elif tuple(given.shape) == (1, N) and N > 1:
        raise layer.error(role, f"{list(stored.shape)}: one scale for each row in one row is not read")
    rows, columns = given.shape if given.dim() == 2 else (0, 0)
    blocks = _stated_blocks(layer.checkpoint.settings)
    if rows == N:
        blocks += [(1, MX_BLOCK)] if role in layer and layer.dtype(role) in EXPONENTS else []
        blocks += [(1, K // columns)] if columns and K % columns == 0 else []
    for block in (*blocks, BLOCK):
        per_row, per_column = _size(N, rows, block[0]), _size(K, columns, block[1])
        if per_row and per_column:
            return per_row, per_column, given
    raise layer.error(role, f"{list(stored.shape)} does not agree with a weight of {list(shape)}")


def _size(length: int, count: int, stated: int) -> int:
    """Returns the number of rows (or columns) that share a value, or 0 if `count` values do not fit `length`."""
    if count in (1, length):
        return length // count
    return stated if stated > 0 and -(-length // stated) == count else 0


def _stated_blocks(settings: Settings) -> list[tuple[int, int]]:
    """Returns the block sizes (rows, columns) in the settings, which may state several."""
    groups = settings.section("config_groups")
    weights = [groups.section(name).section("weights") for name in groups]
    found: list[Any] = [
        settings.get("weight_block_size"),
        settings.get("group_size"),
        *(own.get("block_structure") for own in weights),
    ]
    found += [[1, own.get("group_size")] for own in weights]
    sizes = [size for size in found if isinstance(size, list) and len(size) == 2]
    return [(size[0], size[1]) for size in sizes if all(type(n) is int and n > 0 for n in size)]
