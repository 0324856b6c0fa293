"""Single files of diffusion models: E4M3 or int8 `weight` `[N, K]`, and `scale_weight` or `weight_scale` beside it.

Such a file has no configuration. A tensor `scaled_fp8`, tensors `comfy_quant` beside the weights, the file's metadata,
or matrices of 8-bit floats tell it from other files. `comfy_quant` and the metadata say in JSON how each layer is
quantized. Files without scales have rounded values.
"""

from pathlib import Path
from typing import Any

import torch

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.eight_bits import read_bytes
from torch_marlin_metal.checkpoints.files.safetensors import parse_json
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat
from torch_marlin_metal.checkpoints.layer_tensors import Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import (
    COMFY_MARK,
    COMFY_METADATA,
    COMFY_METHOD,
    COMFY_TENSOR,
    Settings,
)
from torch_marlin_metal.packed_weight import PackedWeight

KINDS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "int8_blockwise")
# What a layer may state beside its kind; anything else, such as a rotation, could change what its codes mean.
KNOWN = ("format", "group_size", "full_precision_matrix_mult", "orig_dtype", "orig_shape", "per_row")
MAX_TEXT = 65536


def _check(checkpoint: Checkpoint, settings: Settings) -> None:
    """Accepts every checkpoint, because each layer is checked by itself."""


def _stated(layer: Layer) -> dict[str, Any]:
    """Returns what the file says about a layer."""
    where = Path(layer.file)
    if COMFY_TENSOR in layer:
        (length,) = layer.expect(COMFY_TENSOR, ("U8",), None)
        if length > MAX_TEXT:
            raise layer.error(COMFY_TENSOR, f"expected a short JSON text, got {length} bytes")
        stated = parse_json(where, layer.read(COMFY_TENSOR).numpy().tobytes())
    else:
        text = layer.checkpoint.metadata.get(COMFY_METADATA, "{}")
        whole = parse_json(where, text.encode("utf-8", "replace"))
        layers = whole.get("layers") if isinstance(whole, dict) else None
        stated = layers.get(layer.name, {}) if isinstance(layers, dict) else {}
    return stated if isinstance(stated, dict) else {"format": stated}


def _read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    stated = _stated(layer)
    kind = stated.get("format", KINDS[0])
    if kind not in KINDS:
        raise layer.unsupported(f"ComfyUI's {kind!r} is not read; known: {', '.join(KINDS)}")
    if others := sorted(set(stated) - set(KNOWN)):
        raise layer.unsupported(f"it states {', '.join(others)}, which is not known")
    scales = None if "weight_scale" in layer else torch.ones(1, device="cpu")
    return read_bytes(layer, "comfyui", scale="weight_scale", scales=scales)


FORMAT = DirectoryFormat(
    name="comfyui",
    title="Files of one diffusion model (FP8 and int8 of ComfyUI and others)",
    containers=("a `.safetensors` file", "a directory with one such file"),
    methods=(COMFY_METHOD,),
    variants=(
        ("scaled_fp8; comfy_quant float8_e4m3fn; E4M3 with `weight_scale`, or without scales", "float8_e4m3"),
        ("comfy_quant int8_tensorwise, int8_blockwise with blocks of 128 x 128", "uint8b128"),
    ),
    refused=(
        ("float8_e5m2", "no weight format has E5M2; dequantized on request"),
        ("nvfp4, mxfp8, rotated int8 (convrot)", "their scales lie in tiles, or the layer rotates its input"),
        ("K not a multiple of 8", "the operators take 8 codes along K at a time; dequantized on request"),
    ),
    anchors={},
    roles={"weight": (".weight",), COMFY_TENSOR: (f".{COMFY_TENSOR}",), "bias": (".bias",)},
    fields={"b_packed": "weight", "scales": "weight_scale", "bias": "bias"},
    check=_check,
    read=_read,
    extras=(".scale_input", ".input_scale"),
    marks=(COMFY_MARK,),
    unscaled=("F8_E4M3", "F8_E5M2"),
    scaled={".scale_weight": "weight_scale", ".weight_scale": "weight_scale"},
)
