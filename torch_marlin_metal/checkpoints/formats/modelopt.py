"""NVFP4 layers of NVIDIA ModelOpt.

`weight` is uint8 `[N, K/2]`, `weight_scale` holds E4M3 block scales, and `weight_scale_2` is a global factor.
"""

from torch_marlin_metal.checkpoints import fp4
from torch_marlin_metal.checkpoints.checkpoint import Checkpoint, Settings
from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat, endings
from torch_marlin_metal.checkpoints.layer import Layer, as_words
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.packed_weight import PackedWeight


def _check(checkpoint: Checkpoint, settings: Settings) -> None:
    stated = settings.section("quantization") or settings
    algorithm = stated.text("quant_algo").upper()
    if "NVFP4" not in algorithm and algorithm != "MIXED_PRECISION":
        raise UnsupportedFormat(
            f"{settings.file}: ModelOpt quant_algo {algorithm!r} is not read; known: NVFP4, MIXED_PRECISION"
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


FORMAT = DirectoryFormat(
    name="modelopt",
    title="NVIDIA ModelOpt",
    methods=("modelopt", "modelopt_fp4"),
    variants=(("NVFP4; the NVFP4 layers of MIXED_PRECISION", "nvfp4"),),
    refused=(
        ("FP8 layers", "8-bit weights; those with a scale for each row or in all dequantized on request"),
        ("NVFP4_AWQ layers with pre_quant_scale", "the layer scales its input"),
        ("W4A16_AWQ, W4A8_AWQ", "its own packing of int4, not read"),
        ("K not a multiple of 8", "a word of the operators holds 8 codes along K"),
    ),
    anchors={".weight_scale_2": "weight_scale_2"},
    roles=endings("weight", "weight_scale", "pre_quant_scale", "bias"),
    fields={"b_packed": "weight", "scales": "weight_scale", "global_scale": "weight_scale_2", "bias": "bias"},
    check=_check,
    read=_read,
    implied=_implied,
    extras=(".input_scale",),
    unread={".weight_scale": "it has weight_scale without weight_scale_2: an 8-bit layer"},
)
