"""NVFP4 and int4 layers of NVIDIA ModelOpt.

In NVFP4 layers, `weight` is uint8 `[N, K/2]`, `weight_scale` holds E4M3 block scales, and `weight_scale_2` is a global
factor. ModelOpt calls its int4 layers W4A16_AWQ.
"""

from dataclasses import replace

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints import fp4
from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat, endings
from torch_marlin_metal.checkpoints.layer import FLOATS, Layer, as_words, fit_groups, spread, words_of_codes
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.packed_weight import PackedWeight

INT4_ALGORITHM = "W4A16_AWQ"
EIGHT_BIT = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8")  # their layers become floats
SIGN = 8  # codes are stored as two's complement


def _check(checkpoint: Checkpoint, settings: Settings) -> None:
    stated = settings.section("quantization") or settings
    algorithm = stated.text("quant_algo").upper()
    known = ("NVFP4", "MIXED_PRECISION", INT4_ALGORITHM, *EIGHT_BIT)
    if "NVFP4" not in algorithm and algorithm not in known:
        raise UnsupportedFormat(
            f"{settings.file}: ModelOpt quant_algo {algorithm!r} is not read; known: {', '.join(known)}"
        )


def _implied(checkpoint: Checkpoint) -> bool:
    return checkpoint.settings.section("producer").text("name") == "modelopt"


def _read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    N, half = layer.expect("weight", ("U8",), None, None)
    K = 2 * half
    layer.expect("weight_scale", ("F8_E4M3",), N, -(-K // fp4.NVFP4_BLOCK))
    if "pre_quant_scale" in layer:
        raise layer.unsupported("it scales its input (pre_quant_scale), which the operators do not")
    if K % 8:
        raise layer.unsupported(f"K={K} is not a multiple of 8")
    if layer.shape("weight_scale_2") not in ((), (1,)) or layer.dtype("weight_scale_2") != "F32":
        raise layer.error("weight_scale_2", f"expected one F32 number, got {list(layer.shape('weight_scale_2'))}")
    b_packed, scales = as_words(layer.read("weight")), layer.read("weight_scale").t()
    return fp4.nvfp4(b_packed, scales, layer.read("weight_scale_2"), layer.bias(N), "modelopt nvfp4")


def _read_int4(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    """Reads a layer of W4A16_AWQ: bytes `[N/2, K]` of signed codes. The low nibble belongs to the even row of a pair.

    Source: pack_int4_in_uint8 of modelopt/torch/export/quant_utils.py (0.47). `weight_scale` is `[N, G]`.
    """
    pairs, K = layer.expect("weight", ("U8",), None, None)
    N = 2 * pairs
    _, groups = layer.expect("weight_scale", FLOATS, N, None)
    group_size = (settings.section("quantization") or settings).integer("group_size", default=-(-K // groups)) or K
    layer.expect("weight_scale", FLOATS, N, -(-K // group_size))
    stored, scales = layer.read("weight"), layer.read("weight_scale").t()
    codes = torch.stack((stored & 15, stored >> 4), dim=1).reshape(N, K) ^ SIGN

    def dequantize() -> Tensor:
        weight = (codes.float() - SIGN).t() * spread(scales.float(), K, group_size)
        if "pre_quant_scale" in layer:
            layer.expect("pre_quant_scale", FLOATS, K)
            weight = weight * layer.read("pre_quant_scale").float().unsqueeze(1)
        return weight.t()

    if "pre_quant_scale" in layer:
        raise layer.unsupported("it scales its input (pre_quant_scale), which the operators do not", dequantize)
    if K % 8:
        raise layer.unsupported(f"K={K} is not a multiple of 8", dequantize)
    fitted = fit_groups(K, group_size, scales)
    if fitted is None:
        raise layer.unsupported(f"no group size of the operators divides its groups of {group_size}", dequantize)
    return PackedWeight(
        b_packed=words_of_codes(codes),
        scales=fitted[1][0].contiguous(),
        weight_format="uint4b8",
        group_size=fitted[0],
        bias=layer.bias(N),
        source="modelopt int4",
    )


def _of_algorithm(settings: Settings) -> DirectoryFormat:
    stated = settings.section("quantization") or settings
    return INT4 if stated.text("quant_algo").upper() == INT4_ALGORITHM else NVFP4


NVFP4 = DirectoryFormat(
    name="modelopt",
    title="NVIDIA ModelOpt",
    methods=("modelopt", "modelopt_fp4"),
    variants=(("NVFP4; the NVFP4 layers of MIXED_PRECISION", "nvfp4"), ("W4A16_AWQ", "uint4b8")),
    refused=(
        ("FP8, FP8_PB_WO, FP8_PER_CHANNEL_PER_TOKEN, MXFP8; such layers", "8-bit weights; dequantized on request"),
        ("NVFP4_AWQ layers with pre_quant_scale", "the layer scales its input"),
        ("W4A16_AWQ layers with pre_quant_scale", "the layer scales its input; dequantized on request"),
        ("W4A16_AWQ layers of MIXED_PRECISION", "only whole checkpoints of W4A16_AWQ are read"),
        ("W4A8_AWQ", "its activations have 8 bits"),
        ("K not a multiple of 8", "a word of the operators holds 8 codes along K"),
    ),
    anchors={".weight_scale_2": "weight_scale_2"},
    roles=endings("weight", "weight_scale", "pre_quant_scale", "bias"),
    fields={"b_packed": "weight", "scales": "weight_scale", "global_scale": "weight_scale_2", "bias": "bias"},
    check=_check,
    read=_read,
    implied=_implied,
    extras=(".input_scale",),
    unread={
        ".weight_scale": "8-bit weights (weight_scale without weight_scale_2; the int4 of W4A16_AWQ is read only if "
        "quant_algo is W4A16_AWQ) are not 4 bit wide"
    },
)
INT4 = replace(
    NVFP4,
    anchors={".weight_scale": "weight_scale"},
    fields={"b_packed": "weight", "scales": "weight_scale", "bias": "bias"},
    roles=endings("weight", "pre_quant_scale", "bias"),
    read=_read_int4,
    unread={},
)
FORMAT = replace(NVFP4, delegate=_of_algorithm)
