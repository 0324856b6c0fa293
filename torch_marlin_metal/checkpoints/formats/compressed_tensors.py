"""compressed-tensors layers: pack-quantized (int4), nvfp4-pack-quantized, mxfp4-pack-quantized.

llm-compressor writes them. For int4, `weight_packed` is int32 `[N, K/8]` and `weight_zero_point` is packed along N.
Both store signed values plus 8. For FP4, `weight_packed` is uint8 `[N, K/2]` with even k in the low nibble. A weight of
NVFP4 is its code times its block scale, divided by the global scale.
"""

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints import fp4
from torch_marlin_metal.checkpoints.act_order import permutation, read_g_idx
from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat, endings
from torch_marlin_metal.checkpoints.layer import FLOATS, Layer, as_words, constant, fit_groups, in_four_bits, unpack
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.checkpoints.words import permuted
from torch_marlin_metal.packed_weight import PackedWeight

# The weights of "dense" are floats, with quantization parameters beside them. Those of `EIGHT_BIT` become floats.
EIGHT_BIT = ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized")
READ_FORMATS = (
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
    *EIGHT_BIT,
)
OFFSET = 8


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
    if layer.dtype("weight_packed") == "U8":
        return read_fp4(layer, settings, options)
    N, words = layer.expect("weight_packed", ("I32",), None, None)
    K = _columns(layer, N, words)
    bits = _bits(layer, settings, K, words)
    group_size, scales = _scales(layer, settings, N, K)
    zeros = _zeros(layer, N, scales.shape[0], bits)
    g_idx = read_g_idx(layer, "weight_g_idx", K, scales.shape[0], group_size)

    def dequantize() -> Tensor:
        codes = unpack(layer.read("weight_packed").t(), bits, K).float()
        groups = torch.arange(K, device="cpu") // group_size if g_idx is None else g_idx
        offset = float(1 << (bits - 1)) if zeros is None else zeros.float()[groups]
        return ((codes - offset) * scales.float()[groups]).t()

    if bits > 4:
        raise layer.unsupported(f"{bits}-bit weights are not 4 bit wide", dequantize)
    if K % 8:
        raise layer.unsupported(f"K={K} is not a multiple of 8", dequantize)
    fitted = fit_groups(K, group_size, scales, *([] if zeros is None else [zeros]))
    if fitted is None:
        raise layer.unsupported(f"no group size of the operators divides its groups of {group_size}", dequantize)
    perm = permutation(layer, "weight_g_idx", g_idx, group_size)
    stored = layer.read("weight_packed")
    if bits == 4:
        words_of_ours = as_words(stored)
    else:
        middle = (
            0 if zeros is not None else 8 - (1 << bits - 1)
        )  # makes the symmetric zero point that of codes of 4 bits
        words_of_ours = in_four_bits(stored.t(), K, lambda piece: unpack(piece, bits, K) + middle)
    return PackedWeight(
        b_packed=words_of_ours if perm is None else permuted(words_of_ours, perm),
        scales=fitted[1][0].contiguous(),
        weight_format="uint4b8" if zeros is None else "uint4",
        group_size=fitted[0],
        zeros=None if zeros is None else fitted[1][1].contiguous(),
        perm=perm,
        bias=layer.bias(N),
        source="compressed-tensors pack-quantized",
    )


def _columns(layer: Layer, N: int, words: int) -> int:
    """Returns the true K; `weight_packed` may be padded beyond it."""
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
    if layer.dtype("weight_zero_point") == "I8":  # not packed: one per tensor, or an old version
        sizes = (1,) if layer.shape("weight_zero_point") == (1,) else (N, G)
        layer.expect("weight_zero_point", ("I8",), *sizes)
        zeros = (layer.read("weight_zero_point").int() + offset).expand(N, G).t()
    elif len(layer.shape("weight_scale")) == 1:  # one per tensor, in the first code of a word
        layer.expect("weight_zero_point", ("I32",), 1, 1)
        zeros = unpack(layer.read("weight_zero_point"), bits, 1).expand(N, G).t()
    else:
        layer.expect("weight_zero_point", ("I32",), -(-N * bits // 32), G)
        zeros = unpack(layer.read("weight_zero_point"), bits, N).t()
    low, high = (int(bound) for bound in zeros.aminmax())
    if low < 0 or high >= 2 * offset:
        raise layer.error("weight_zero_point", f"expected {bits}-bit zero points, got {low - offset}..{high - offset}")
    return None if constant(zeros, offset) else zeros.to(torch.uint8).contiguous()


def read_fp4(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    """Converts an NVFP4 or MXFP4 layer. The dtype of the scales and the global scale tell the two kinds apart."""
    N, half = layer.expect("weight_packed", ("U8",), None, None)
    K = 2 * half
    two_level = "weight_global_scale" in layer
    block = fp4.NVFP4_BLOCK if two_level else fp4.MX_BLOCK
    dtypes = ("F8_E4M3",) if two_level else ("U8", "F8_E8M0")
    layer.expect("weight_scale", dtypes, N, -(-K // block))
    if K % 8:
        raise layer.unsupported(f"K={K} is not a multiple of 8")
    b_packed, scales = as_words(layer.read("weight_packed")), layer.read("weight_scale").t()
    if not two_level:
        return fp4.mxfp4(b_packed, scales, layer.bias(N), "compressed-tensors mxfp4")
    if layer.shape("weight_global_scale") not in ((), (1,)):
        raise layer.error("weight_global_scale", f"expected one number, got {list(layer.shape('weight_global_scale'))}")
    layer.expect("weight_global_scale", ("F32",), *layer.shape("weight_global_scale"))
    reciprocal = 1 / layer.read("weight_global_scale")
    return fp4.nvfp4(b_packed, scales, reciprocal, layer.bias(N), "compressed-tensors nvfp4")


FORMAT = DirectoryFormat(
    name="compressed-tensors",
    title="compressed-tensors (llm-compressor)",
    methods=("compressed-tensors",),
    variants=(
        ("pack-quantized of 2, 3 and 4 bit, symmetric; per group, channel or tensor; act-order", "uint4b8"),
        ("pack-quantized of 2, 3 and 4 bit, asymmetric; per group, channel or tensor; act-order", "uint4"),
        ("nvfp4-pack-quantized", "nvfp4"),
        ("mxfp4-pack-quantized", "mxfp4"),
        ("mixed-precision: the layers of the kinds above", "each layer its own"),
    ),
    refused=(
        ("pack-quantized of 5, 6, 7 and 8 bit", "codes are not 4 bit wide; dequantized on request"),
        (
            "float-quantized, int-quantized, naive-quantized, mxfp8-quantized; such layers of mixed-precision",
            "8-bit weights; dequantized on request",
        ),
        ("marlin-24 and sparse formats", "2:4 sparsity"),
        ("transform_config", "layers that rotate their input"),
        ("K not a multiple of 8", "a word of the operators holds 8 codes along K; int4 dequantized on request"),
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
        "bias": "bias",
    },
    check=_check,
    read=_read,
    extras=(".input_scale", ".input_global_scale", ".input_zero_point"),
    unread={".weight_scale": "8-bit weights (weight_scale without weight_packed) are not 4 bit wide"},
)
