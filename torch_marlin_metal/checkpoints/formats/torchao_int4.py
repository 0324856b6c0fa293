"""Reads torchao's packed int4 classes: Int4Tensor, Int4TilePackedTo4dTensor and Int4PlainInt32Tensor.

The layouts are those of torchao 0.18 and PyTorch 2.13. `pack_int4` of FBGEMM and MSLK writes Int4Tensor.
`_convert_weight_to_int4pack` writes the other two: Int4TilePackedTo4dTensor on CUDA
(aten/src/ATen/native/cuda/int4mm.cu), Int4PlainInt32Tensor on XPU.
"""

import re
import warnings
from functools import partial

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.float_rows import FloatRows
from torch_marlin_metal.checkpoints.grouped import (
    BIAS,
    SIGN,
    SYMMETRIC,
    ZERO_POINT,
    as_words,
    constant,
    decoded,
    packed,
    spread,
    words_of_codes,
)
from torch_marlin_metal.checkpoints.layer_tensors import FLOATS, Layer
from torch_marlin_metal.packed_weight import PackedWeight

FLIP_SIGNS = -0x77777778  # 0x88888888: adds 8 to each signed nibble of a word
INNER = 8  # a tile of Int4TilePackedTo4dTensor has 8 runs of 16 columns k; its qdata is [N/8, K/128, 32, 4]
# NIBBLES[i] is the nibble of a word that contains code i, the i-th k of a lane.
NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def read_plain(layer: Layer, attributes: dict[str, str]) -> PackedWeight:
    """Reads Int4Tensor: signed codes with even k in the low nibble; w = q * scale + zero_point."""
    N, half = layer.expect("qdata", ("I8", "U8"), None, None)
    group_size = _group_size(layer, attributes, 2 * half)
    if half % 4:
        raise layer.unsupported(f"K={2 * half} is not a multiple of 8")
    groups = -(-2 * half // group_size)
    layer.expect("scale", FLOATS, groups, N)
    layer.expect("zero_point", FLOATS, groups, N)
    words = as_words(layer.read("qdata").view(torch.uint8)) ^ FLIP_SIGNS
    return _centred(layer, words, group_size, layer.read("scale"), layer.read("zero_point"), "Int4Tensor")


def read_tiles(layer: Layer, attributes: dict[str, str]) -> PackedWeight:
    """Reads Int4TilePackedTo4dTensor in CUDA's layout: w = (q - 8) * scale + zero. N and K are padded.

    ROCm writes tensors of the same shape in another layout, and the file does not say which GPU wrote it. A warning
    therefore says that NVIDIA's layout is assumed.
    """
    warnings.warn(
        "Int4TilePackedTo4dTensor is read as an NVIDIA GPU writes it. An AMD GPU writes other weights into the same "
        "shape: if one wrote this checkpoint, quantize the model again, to Int4Tensor",
        stacklevel=2,
    )
    row_tiles, k_tiles, _, _ = layer.expect("qdata", ("I32",), None, None, 32, INNER // 2)
    N, K = _sizes(layer, attributes, "shape")
    if not (8 * (row_tiles - 1) < N <= 8 * row_tiles and 0 < K <= 128 * k_tiles):
        raise layer.error("qdata", f"expected tiles for a weight of [{N}, {K}], got {list(layer.shape('qdata'))}")
    group_size = _group_size(layer, attributes, 128 * k_tiles)
    if K % 8:
        raise layer.unsupported(f"K={K} is not a multiple of 8")
    layer.expect("scale_and_zero", FLOATS, -(-128 * k_tiles // group_size), 8 * row_tiles, 2)
    nibbles = (layer.read("qdata").unsqueeze(4) >> torch.arange(0, 32, 4, dtype=torch.int32, device="cpu")) & 15
    # Dimensions: tile of rows, tile of k, row, pair of k, word; in a word: run of k, half of the run, k of the pair.
    codes = nibbles[..., NIBBLES].to(torch.uint8).reshape(row_tiles, k_tiles, 8, 4, 4, 2, 2, 2)
    codes = codes.permute(0, 2, 1, 4, 5, 6, 3, 7).reshape(8 * row_tiles, 128 * k_tiles)[:N, :K]
    scales, zeros = layer.read("scale_and_zero")[: -(-K // group_size), :N].unbind(2)
    words = words_of_codes(codes.contiguous())
    return _centred(layer, words, min(group_size, K), scales, zeros, "Int4TilePackedTo4dTensor")


def read_words(layer: Layer, attributes: dict[str, str]) -> PackedWeight:
    """Reads Int4PlainInt32Tensor in XPU's layout: words of eight k; w = (q - zero_point) * scale."""
    N, words = layer.expect("qdata", ("I32",), None, None)
    K = 8 * words
    group_size = _group_size(layer, attributes, K)
    groups = -(-K // group_size)
    layer.expect("scale", FLOATS, groups, N)
    if "zero_point" in layer and layer.dtype("zero_point") in FLOATS:
        raise layer.unsupported("its zero points are floating, as only an Ascend processor writes them")
    layer.expect("zero_point", ("I8",), groups, N)
    zeros = layer.read("zero_point")
    low, high = (int(bound) for bound in zeros.aminmax())
    if low < 0 or high > 15:
        raise layer.error("zero_point", f"expected zero points in 0..15, got a range of {low} to {high}")
    symmetric = constant(zeros, SIGN[4])
    return packed(
        layer,
        as_words(layer.read("qdata")),
        (SYMMETRIC if symmetric else ZERO_POINT)[4],
        group_size,
        layer.read("scale"),
        None if symmetric else zeros.to(torch.uint8),
        source="torchao Int4PlainInt32Tensor",
    )


def _centred(layer: Layer, words: Tensor, group_size: int, scales: Tensor, zeros: Tensor, kind: str) -> PackedWeight:
    """Makes a weight with values (q - 8) * scale + zero, stored as q * scale + b with b = zero - 8 * scale in fp32."""
    if constant(zeros, 0):
        return packed(layer, words, SYMMETRIC[4], group_size, scales, source=f"torchao {kind}")
    exact = zeros.double() - SIGN[4] * scales.double()
    biases = exact.float()
    if not torch.equal(biases.double(), exact):
        K = 8 * words.shape[0]

        def rows(which: slice) -> Tensor:
            values = decoded(words[:, which], SYMMETRIC[4], K, group_size, scales[:, which])
            return values + spread(zeros[:, which].float(), K, group_size).t()

        reason = "a zero point minus eight scales is no fp32 number"
        raise layer.unsupported(reason, partial(FloatRows, words.shape[1], K, rows))
    return packed(layer, words, BIAS[4], group_size, scales, biases, source=f"torchao {kind}")


def _group_size(layer: Layer, attributes: dict[str, str], K: int) -> int:
    one, size = _sizes(layer, attributes, "block_size")
    if one != 1 or size < 1:
        raise layer.unsupported(f"block_size {attributes['block_size']}; read is (1, group size)")
    return min(size, K)


def _sizes(layer: Layer, attributes: dict[str, str], name: str) -> tuple[int, int]:
    """Returns the two numbers in an attribute's text."""
    found = [int(size) for size in re.findall(r"\d{1,9}", attributes.get(name, ""))]
    if len(found) != 2:
        raise layer.unsupported(f"its {name} is {attributes.get(name, 'not stated')}; expected two numbers")
    return found[0], found[1]
