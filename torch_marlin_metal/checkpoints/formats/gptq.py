"""GPTQ layers, as AutoGPTQ, GPTQModel, optimum and AutoRound write them.

`qweight` is int32, `[K/8, N]` for 4 bits or `[K/4, N]` for 8 bits, and already has the operators' layout. `qzeros` is
int32, `[G, N/8]` or `[G, N/4]`, packed along N. Version 1 stores z - 1, version 2 stores z. `g_idx` `[K]` is the group
of each row. With act-order, the rows of a group are not contiguous.
"""

import warnings

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.act_order import read_permutation
from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat, endings
from torch_marlin_metal.checkpoints.grouped import (
    SYMMETRIC,
    ZERO_POINT,
    centre,
    constant,
    packed,
    repacked,
    unpack,
    unpack_planes,
    width_of,
)
from torch_marlin_metal.checkpoints.layer_tensors import FLOATS, Layer
from torch_marlin_metal.checkpoints.options import ReadOptions, typed
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.checkpoints.words import gptq_zeros, permuted
from torch_marlin_metal.packed_weight import PackedWeight

PLANAR = "gptq_p"  # GPTQModel's format for codes in planes; codes of 2, 4 and 8 bits have one plane
VERSIONS = {"": 1, "gptq": 1, "gptq_v2": 2, PLANAR: 2}
# Bits of a code -> a word with 1 in each zero point. For these two widths, GPTQModel adds this word to qzeros.
ONES = {2: 0x55555555, 8: 0x01010101}
# Bits of a code -> version -> the word of qzeros in which each zero point is the middle of the code range.
SYMMETRIC_WORDS = {
    4: {1: 0x77777777, 2: 0x88888888 - (1 << 32)},
    8: {1: 0x7F7F7F7F, 2: 0x80808080 - (1 << 32)},
}


def _implied(checkpoint: Checkpoint) -> bool:
    """Returns True for old AutoGPTQ files, whose quantize_config.json names no method."""
    return checkpoint.settings.file.name == "quantize_config.json" and "bits" in checkpoint.settings


def _check(checkpoint: Checkpoint, settings: Settings) -> None:
    layout = "marlin" if settings.flag("is_marlin_format") else settings.text("checkpoint_format", "format").lower()
    if layout not in VERSIONS:
        known = ", ".join(filter(None, VERSIONS))
        raise UnsupportedFormat(f"{settings.file}: GPTQ checkpoint_format {layout!r} is not read; known: {known}")
    pack_dtype = settings.text("pack_dtype", default="int32")
    if pack_dtype != "int32":
        raise UnsupportedFormat(f"{settings.file}: GPTQ pack_dtype {pack_dtype!r} is not read; known: int32")


def read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    """Converts one layer. Code width and group size follow from the shapes and are compared with the settings."""
    rows, N = layer.expect("qweight", ("I32",), None, None)
    G, _ = layer.expect("scales", FLOATS, None, N)
    bits = _bits(layer, settings, rows, N, G)
    K = rows * 32 // bits
    group_size = _group_size(layer, settings, K, G)
    perm = read_permutation(layer, "g_idx", K, G, group_size)
    layout = settings.text("checkpoint_format", "format").lower()
    version = options.gptq_version or VERSIONS[layout]
    zeros = _read_zeros(layer, settings, options, version, bits, G, N)
    words, high = layer.read("qweight"), None
    if bits not in (4, 8):
        codes_of, offset = unpack_planes if layout == PLANAR else unpack, centre(bits) if zeros is None else 0
        words, high = repacked(words, bits, K, offset=offset, codes_of=codes_of, perm=perm)
    elif perm is not None:
        words = permuted(words, perm, bits)
    return packed(
        layer,
        words,
        (SYMMETRIC if zeros is None else ZERO_POINT)[width_of(bits)],
        group_size,
        layer.read("scales"),
        zeros,
        high=high,
        perm=perm,
        source=f"gptq v{version}",
    )


def _bits(layer: Layer, settings: Settings, rows: int, N: int, G: int) -> int:
    """Returns the bits of a code, derived from the shapes. The settings may differ between modules."""
    if "g_idx" in layer:
        (K,) = layer.expect("g_idx", ("I32", "I64"), None)
        bits, rest = divmod(32 * rows, K)
        if rest or not 1 <= bits <= 8:
            raise layer.error("g_idx", f"its {K} rows do not agree with qweight's {rows} words per column")
    elif "qzeros" in layer and N >= 32:
        bits = 32 * layer.expect("qzeros", ("I32",), G, None)[1] // N
    else:
        bits = settings.integer("bits", "wbits", "w_bit", default=4) or 4
    stated = settings.integer("bits", "wbits", "w_bit", default=bits)
    if stated != bits and not _has_overrides(settings):
        raise layer.error("qweight", f"{bits} bits by the shapes do not agree with the settings' {stated}")
    if not 2 <= bits <= 8 or 32 * rows % bits:
        raise layer.error("qweight", f"expected 2 to 8 bits, found {bits} by the shapes")
    return bits


def _group_size(layer: Layer, settings: Settings, K: int, G: int) -> int:
    stated = settings.integer("group_size", "q_group_size")
    if K % G == 0 and (stated is None or _has_overrides(settings)):
        return K // G
    size = K if stated is None or stated < 1 else min(stated, K)
    if -(-K // size) != G:
        raise layer.error("scales", f"expected {-(-K // size)} groups of {size} for K={K}, got {G}")
    return size


def _has_overrides(settings: Settings) -> bool:
    """Returns True if single modules may have other widths and group sizes (GPTQModel, AutoRound)."""
    return bool(settings.section("dynamic") or settings.section("extra_config"))


def _read_zeros(
    layer: Layer, settings: Settings, options: ReadOptions, version: int, bits: int, G: int, N: int
) -> Tensor | None:
    """Returns uint8 zero points `[G, N]`, or None if each is the middle code."""
    if "qzeros" not in layer:
        if settings.flag("sym") is False:
            raise layer.error("qweight", "the settings say sym=false, but there are no qzeros")
        return None
    layer.expect("qzeros", ("I32",), G, -(-N * bits // 32))
    qzeros, middle = layer.read("qzeros"), 1 << bits - 1
    if bits in SYMMETRIC_WORDS and constant(qzeros, SYMMETRIC_WORDS[bits][version]):
        return None
    planar = settings.text("checkpoint_format", "format").lower() == PLANAR
    raw = gptq_zeros(qzeros, 2)[:, :N] if bits == 4 else _other_zeros(qzeros, bits, N, planar)
    if settings.flag("sym"):
        _check_version(layer, raw, version, middle)
    if version == 1 and bool((raw == 2 * middle - 1).any()):
        warnings.warn(
            f"{layer.file}: tensor {layer.roles['qzeros']!r}: raw zero points of {2 * middle - 1} in a version 1 file, "
            f"where writers differ: read by the rule {options.gptq_zeros_rule!r} ({typed('gptq_zeros_rule')})",
            stacklevel=2,
        )
    if version == 2:
        zeros = raw
    elif bits == 4:
        zeros = gptq_zeros(qzeros, version, options.gptq_zeros_rule)[:, :N]
    elif bits in ONES and options.gptq_zeros_rule == "word":
        zeros = _other_zeros(qzeros + ONES[bits], bits, N, planar)
    else:  # zero points of other widths straddle words or are in planes, so GPTQModel adds 1 to each
        zeros = raw.int() + 1 if options.gptq_zeros_rule == "unmasked" else (raw.int() + 1) & (2 * middle - 1)
        zeros = zeros.half() if bits == 8 and int(zeros.max()) > 255 else zeros.to(torch.uint8)
    return None if constant(zeros, middle) else zeros.contiguous()


def _other_zeros(qzeros: Tensor, bits: int, N: int, planar: bool) -> Tensor:
    """Unpacks int32 `[G, N * bits / 32]` to uint8 `[G, N]`."""
    codes_of = unpack_planes if planar else unpack
    return codes_of(qzeros.t().contiguous(), bits, N).t().to(torch.uint8).contiguous()


def _check_version(layer: Layer, raw: Tensor, version: int, middle: int) -> None:
    """Refuses a symmetric file whose zero points show that the stated version is wrong.

    The stored zero points of symmetric 4-bit codes, for example, are 7 in version 1 and 8 in version 2.
    """
    other = 3 - version
    if constant(raw, middle - (other == 1)):
        raise layer.error(
            "qzeros",
            f"the settings say version {version} and sym=true, but the zero points fit version {other}: "
            f"if the settings are wrong, {typed('gptq_version', other)} reads it",
        )


FORMAT = DirectoryFormat(
    name="gptq",
    title="GPTQ (GPTQModel, AutoGPTQ, optimum, AutoRound)",
    methods=("gptq",),
    variants=(
        ("2, 3 and 4 bit, version 1 and 2, symmetric", "uint4b8"),
        ("2, 3 and 4 bit, version 1 and 2, asymmetric", "uint4"),
        ("5 bit, version 1 and 2, symmetric or not", "uint5b16, uint5"),
        ("6 bit, version 1 and 2, symmetric or not", "uint6b32, uint6"),
        ("7 and 8 bit, version 1 and 2, symmetric or not", "uint8b128, uint8"),
        ("gptq_p (codes of 3, 5, 6 or 7 bits in planes)", "as above"),
        ("act-order (desc_act), any group size with a divisor of 16 to 256, or one group", "as above"),
    ),
    refused=(
        ("groups of 8 or less", "no group size of the operators divides them; dequantized on request"),
        ("marlin, bitblas", "layouts made for one GPU kernel; export the original GPTQ checkpoint"),
        ("pack_dtype other than int32", "no producer's default"),
    ),
    anchors={".qweight": "qweight"},
    roles=endings("qzeros", "scales", "g_idx", "bias"),
    fields={"b_packed": "qweight", "zeros": "qzeros", "perm": "g_idx"},
    axes={
        "qweight": ("K/8", "N"),
        "scales": ("G", "N"),
        "qzeros": ("G", "N/8"),
        "g_idx": ("order",),
        "bias": ("N",),
    },
    check=_check,
    read=read,
    implied=_implied,
)
