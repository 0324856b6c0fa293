"""Fine-grained FP8 of DeepSeek, Qwen and transformers: E4M3 `weight` `[N, K]` with `weight_scale_inv` for each block.

Despite its name, `weight_scale_inv` multiplies the weight. A stack of experts has the names `<layer>` and
`<layer>_scale_inv`. Experts may be MXFP4 instead: int8 bytes of two codes each, with even k in the low nibble.
"""

import torch

from torch_marlin_metal.checkpoints import block_scales
from torch_marlin_metal.checkpoints.eight_bits import EXPONENTS, read_bytes
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat
from torch_marlin_metal.checkpoints.grouped import as_words
from torch_marlin_metal.checkpoints.layer_tensors import Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.packed_weight import PackedWeight


def _read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    if layer.dtype("weight") not in ("I8", "F4"):
        return read_bytes(layer, "fp8", scale="weight_scale_inv")
    N, half = layer.expect("weight", ("I8", "F4"), None, None)
    layer.expect("weight_scale_inv", EXPONENTS, N, -(-2 * half // block_scales.MX_BLOCK))
    if half % 4:
        raise layer.unsupported(f"K={2 * half} is not a multiple of 8")
    scales = layer.read("weight_scale_inv").view(torch.uint8).t()
    return block_scales.mx(as_words(layer.read("weight")), scales, "mxfp4", layer.bias(N), "fp8 mxfp4")


FORMAT = DirectoryFormat(
    name="fp8",
    title="Fine-grained FP8 (DeepSeek, Qwen, transformers)",
    methods=("fp8",),
    variants=(
        ("one scale for each block, row or tensor; stacks of experts", "float8_e4m3"),
        ("experts in MXFP4", "mxfp4"),
    ),
    refused=(("K not a multiple of 8", "the operators take 8 codes along K at a time; dequantized on request"),),
    anchors={},
    roles={"weight": (".weight", ""), "bias": (".bias", "_bias")},
    fields={"b_packed": "weight", "scales": "weight_scale_inv"},
    read=_read,
    extras=(".input_scale", ".activation_scale", "_activation_scale"),
    scaled={".weight_scale_inv": "weight_scale_inv", "_scale_inv": "weight_scale_inv"},
    stacked_rank=3,
)
