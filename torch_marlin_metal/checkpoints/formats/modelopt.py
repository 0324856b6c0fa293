"""NVFP4, E4M3 and int4 layers of NVIDIA ModelOpt.

In NVFP4 layers, `weight` is uint8 `[N, K/2]`, `weight_scale` has E4M3 block scales, and `weight_scale_2` is a global
factor. In FP8 layers, `weight` is E4M3 `[N, K]`, and there is only `weight_scale`. ModelOpt calls its int4 layers
W4A16_AWQ.
"""

from functools import partial

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints import block_scales
from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.eight_bits import INPUT_SCALE, SCALES_INPUT, input_scale, read_bytes
from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.float_rows import FloatRows
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat, endings
from torch_marlin_metal.checkpoints.grouped import SIGN, SYMMETRIC, as_words, decoded, packed, words_of_codes
from torch_marlin_metal.checkpoints.layer_tensors import FLOATS, Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.packed_weight import PackedWeight

INT4_ALGORITHM = "W4A16_AWQ"
EIGHT_BIT = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8")


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
    if "weight_scale_2" not in layer:
        return _read_int4(layer, settings) if layer.dtype("weight") == "U8" else read_bytes(layer, "modelopt")
    N, half = layer.expect("weight", ("U8",), None, None)
    K = 2 * half
    layer.expect("weight_scale", ("F8_E4M3",), N, -(-K // block_scales.NVFP4_BLOCK))
    if INPUT_SCALE in layer:
        raise layer.unsupported(SCALES_INPUT)
    if K % 8:
        raise layer.unsupported(f"K={K} is not a multiple of 8")
    if layer.shape("weight_scale_2") not in ((), (1,)) or layer.dtype("weight_scale_2") != "F32":
        raise layer.error("weight_scale_2", f"expected one F32 number, got {list(layer.shape('weight_scale_2'))}")
    b_packed, scales = as_words(layer.read("weight")), layer.read("weight_scale").t()
    return block_scales.nvfp4(b_packed, scales, layer.read("weight_scale_2"), layer.bias(N), "modelopt nvfp4")


def _read_int4(layer: Layer, settings: Settings) -> PackedWeight:
    """Reads a W4A16_AWQ layer: bytes `[N/2, K]` of signed codes for pairs of rows, the even row in the low nibble.

    Source: pack_int4_in_uint8 of modelopt/torch/export/quant_utils.py (0.47). `weight_scale` is `[N, G]`.
    """
    pairs, K = layer.expect("weight", ("U8",), None, None)
    N = 2 * pairs
    _, groups = layer.expect("weight_scale", FLOATS, N, None)
    group_size = (settings.section("quantization") or settings).integer("group_size", default=-(-K // groups)) or K
    layer.expect("weight_scale", FLOATS, N, -(-K // group_size))
    stored, scales = layer.read("weight"), layer.read("weight_scale").t()
    codes = torch.stack((stored & 15, stored >> 4), dim=1).reshape(N, K) ^ SIGN[4]  # the codes are two's complement
    words = words_of_codes(codes)

    if (columns := input_scale(layer, K)) is not None:

        def rows(which: slice) -> Tensor:
            return decoded(words[:, which], SYMMETRIC[4], K, group_size, scales[:, which]) * columns

        raise layer.unsupported(SCALES_INPUT, partial(FloatRows, N, K, rows))
    return packed(layer, words, SYMMETRIC[4], group_size, scales, K=K, source="modelopt int4")


FORMAT = DirectoryFormat(
    name="modelopt",
    title="NVIDIA ModelOpt",
    methods=("modelopt", "modelopt_fp4"),
    variants=(
        ("NVFP4; the NVFP4 layers of MIXED_PRECISION", "nvfp4"),
        ("FP8, FP8_PB_WO, FP8_PER_CHANNEL_PER_TOKEN; such layers of MIXED_PRECISION", "float8_e4m3"),
        ("MXFP8", "mxfp8"),
        ("W4A16_AWQ; such layers of MIXED_PRECISION", "uint4b8"),
    ),
    refused=(
        ("NVFP4_AWQ layers with pre_quant_scale", "the layer scales its input"),
        ("W4A16_AWQ and FP8 layers with pre_quant_scale", "the layer scales its input; dequantized on request"),
        ("W4A8_AWQ", "its activations have 8 bits"),
        ("K not a multiple of 8", "the operators decode 8 codes along K at a time"),
    ),
    anchors={".weight_scale_2": "weight_scale_2"},
    roles=endings("weight", "weight_scale", "pre_quant_scale", "bias"),
    fields={"b_packed": "weight", "scales": "weight_scale", "global_scale": "weight_scale_2"},
    check=_check,
    read=_read,
    implied=_implied,
    extras=(".input_scale",),
    scaled={".weight_scale": "weight_scale"},
)
