"""Layers in compressed-tensors' formats, as llm-compressor writes them: integers, E4M3, NVFP4 and the MX formats.

For "pack-quantized", `weight_packed` is int32 `[N, K * bits / 32]` and `weight_zero_point` is packed along N. Both
store signed values plus the middle of the code range. For FP4, `weight_packed` is uint8 `[N, K/2]` with even k in the
low nibble. An NVFP4 weight is its code times its block scale, divided by the global scale. 8-bit weights that are not
packed are int8 or E4M3 `weight` `[N, K]`. The kind of a layer follows from its tensors, so a checkpoint may mix kinds.
"""

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints import block_scales
from torch_marlin_metal.checkpoints.act_order import read_permutation
from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.eight_bits import read_bytes
from torch_marlin_metal.checkpoints.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat, endings
from torch_marlin_metal.checkpoints.grouped import (
    SYMMETRIC,
    ZERO_POINT,
    as_words,
    centre,
    constant,
    packed,
    repacked,
    unpack,
    width_of,
)
from torch_marlin_metal.checkpoints.layer_tensors import FLOATS, Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.checkpoints.words import permuted
from torch_marlin_metal.packed_weight import PackedWeight

# The weights of "dense" are floats with unused quantization parameters.
READ_FORMATS = (
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "mxfp8-quantized",
)


def _check(checkpoint: Checkpoint, settings: Settings) -> None:
    stated = settings.text("format", default="pack-quantized")
    if stated not in READ_FORMATS:
        raise UnsupportedFormat(
            f"{settings.file}: compressed-tensors format {stated!r} is not read; known: {', '.join(READ_FORMATS)}"
        )
    sparsity = settings.section("sparsity_config").text("format", default="dense")
    if sparsity != "dense":
        raise UnsupportedFormat(f"{settings.file}: compressed-tensors sparsity format {sparsity!r} is not read")
    if settings.section("transform_config").section("config_groups"):
        raise UnsupportedFormat(f"{settings.file}: transform_config: layers that rotate their input are not read")
    if not _schemes(settings):
        raise CheckpointError(f"{settings.file}: config_groups: expected at least one group with weights, got none")


def _schemes(settings: Settings) -> list[Settings]:
    groups = settings.section("config_groups")
    return [scheme for name in groups if (scheme := groups.section(name).section("weights"))]


def _read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    if "weight_packed" not in layer or layer.dtype("weight_packed") == "U8":
        return read_without_scheme(layer, settings, options)
    N, words = layer.expect("weight_packed", ("I32",), None, None)
    K = _columns(layer, N, words)
    bits = _bits(layer, settings, K, words)
    group_size, scales = _scales(layer, settings, N, K)
    zeros = _zeros(layer, N, scales.shape[0], bits)
    perm = read_permutation(layer, "weight_g_idx", K, scales.shape[0], group_size)
    stored, high = layer.read("weight_packed"), None
    if bits in (4, 8):
        ours = as_words(stored) if perm is None else permuted(as_words(stored), perm, bits)
    else:
        ours, high = repacked(stored.t(), bits, K, offset=centre(bits) if zeros is None else 0, perm=perm)
    return packed(
        layer,
        ours,
        (SYMMETRIC if zeros is None else ZERO_POINT)[width_of(bits)],
        group_size,
        scales,
        zeros,
        K=K,
        high=high,
        perm=perm,
        source="compressed-tensors pack-quantized",
    )


def _columns(layer: Layer, N: int, words: int) -> int:
    """Returns the K of the layer. The rows of `weight_packed` may have padding after K codes."""
    if "weight_shape" not in layer:
        return 8 * words
    layer.expect("weight_shape", ("I64", "I32"), 2)
    rows, K = (int(size) for size in layer.read("weight_shape"))
    if rows != N or not 0 < K <= 32 * words:
        raise layer.error("weight_shape", f"[{rows}, {K}] does not agree with weight_packed [{N}, {words}]")
    return K


def _bits(layer: Layer, settings: Settings, K: int, words: int) -> int:
    stated = {scheme.integer("num_bits", default=4) or 4 for scheme in _schemes(settings)}
    found = sorted(bits for bits in stated if words == -(-K * bits // 32))
    if len(found) != 1:
        raise layer.error("weight_packed", f"{words} words for K={K} do not agree with num_bits {sorted(stated)}")
    return found[0]


def _scales(layer: Layer, settings: Settings, N: int, K: int) -> tuple[int, Tensor]:
    """Returns the group size along k and the scales `[G, N]`."""
    if len(layer.shape("weight_scale")) == 1:
        layer.expect("weight_scale", FLOATS, 1)
        return K, layer.read("weight_scale").expand(N).reshape(1, N)
    _, G = layer.expect("weight_scale", FLOATS, N, None)
    stated = {scheme.integer("group_size", default=-1) or -1 for scheme in _schemes(settings)}
    sizes = sorted(K if size < 1 else min(size, K) for size in stated)
    group_size = next((size for size in sizes if -(-K // size) == G), None)
    if group_size is None:
        raise layer.error("weight_scale", f"{G} groups for K={K} do not agree with group sizes {sizes}")
    return group_size, layer.read("weight_scale").t().contiguous()


def _zeros(layer: Layer, N: int, G: int, bits: int) -> Tensor | None:
    """Returns uint8 zero points `[G, N]`, or None if all equal the symmetric zero point."""
    if "weight_zero_point" not in layer:
        return None
    offset = 1 << (bits - 1)
    if layer.dtype("weight_zero_point") == "I8":  # not packed: one per tensor, or written by an old version
        sizes = (1,) if layer.shape("weight_zero_point") == (1,) else (N, G)
        layer.expect("weight_zero_point", ("I8",), *sizes)
        zeros = (layer.read("weight_zero_point").int() + offset).expand(N, G).t()
    elif len(layer.shape("weight_scale")) == 1:  # one zero point per tensor, stored in the first code of a word
        layer.expect("weight_zero_point", ("I32",), 1, 1)
        zeros = unpack(layer.read("weight_zero_point"), bits, 1).expand(N, G).t()
    else:
        layer.expect("weight_zero_point", ("I32",), -(-N * bits // 32), G)
        zeros = unpack(layer.read("weight_zero_point"), bits, N).t()
    low, high = (int(bound) for bound in zeros.aminmax())
    if low < 0 or high >= 2 * offset:
        raise layer.error("weight_zero_point", f"expected {bits}-bit zero points, got {low - offset}..{high - offset}")
    return None if constant(zeros, offset) else zeros.to(torch.uint8).contiguous()


def read_without_scheme(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    """Converts a layer whose kind follows from its tensors: E4M3, int8, NVFP4 or an MX format."""
    if "weight_packed" not in layer:
        return read_bytes(layer, "compressed-tensors")
    N, half = layer.expect("weight_packed", ("U8",), None, None)
    K = 2 * half
    two_level = "weight_global_scale" in layer
    block = block_scales.NVFP4_BLOCK if two_level else block_scales.MX_BLOCK
    dtypes = ("F8_E4M3",) if two_level else ("U8", "F8_E8M0")
    layer.expect("weight_scale", dtypes, N, -(-K // block))
    if K % 8:
        raise layer.unsupported(f"K={K} is not a multiple of 8")
    b_packed, scales = as_words(layer.read("weight_packed")), layer.read("weight_scale").t()
    if not two_level:
        return block_scales.mx(b_packed, scales, "mxfp4", layer.bias(N), "compressed-tensors mxfp4")
    if layer.shape("weight_global_scale") not in ((), (1,)):
        raise layer.error("weight_global_scale", f"expected one number, got {list(layer.shape('weight_global_scale'))}")
    layer.expect("weight_global_scale", ("F32",), *layer.shape("weight_global_scale"))
    reciprocal = 1 / layer.read("weight_global_scale")
    return block_scales.nvfp4(b_packed, scales, reciprocal, layer.bias(N), "compressed-tensors nvfp4")


FORMAT = DirectoryFormat(
    name="compressed-tensors",
    title="compressed-tensors (llm-compressor)",
    methods=("compressed-tensors",),
    variants=(
        ("pack-quantized of 2, 3 and 4 bit, symmetric; per group, channel or tensor; act-order", "uint4b8"),
        ("pack-quantized of 2, 3 and 4 bit, asymmetric; per group, channel or tensor; act-order", "uint4"),
        ("pack-quantized of 5 bit; per group, channel or tensor; act-order", "uint5b16, uint5"),
        ("pack-quantized of 6 bit; per group, channel or tensor; act-order", "uint6b32, uint6"),
        ("pack-quantized of 7 and 8 bit; per group, channel or tensor; act-order", "uint8b128, uint8"),
        ("int-quantized and naive-quantized of 8 bit; per group, channel or tensor", "uint8b128, uint8"),
        ("float-quantized and naive-quantized; per group, channel, tensor or block", "float8_e4m3"),
        ("mxfp8-quantized", "mxfp8"),
        ("nvfp4-pack-quantized", "nvfp4"),
        ("mxfp4-pack-quantized", "mxfp4"),
        ("mixed-precision: the layers of the kinds above", "each layer its own"),
    ),
    refused=(
        ("marlin-24 and sparse formats", "2:4 sparsity"),
        ("transform_config", "layers that rotate their input"),
        ("int-quantized with act-order", "the order of the rows of such files is not known"),
        ("K not a multiple of 8", "the operators take 8 codes along K at a time; dequantized on request, but for FP4"),
    ),
    anchors={".weight_packed": "weight_packed"},
    roles=endings(
        "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale", "bias"
    ),
    fields={
        "b_packed": "weight_packed",
        "scales": "weight_scale",
        "zeros": "weight_zero_point",
        "global_scale": "weight_global_scale",
        "perm": "weight_g_idx",
    },
    check=_check,
    read=_read,
    extras=(".input_scale", ".input_global_scale", ".input_zero_point"),
    scaled={".weight_scale": "weight_scale"},
)
