"""Single files of diffusion models: E4M3 or int8 `weight` `[N, K]` with a tensor `scale_weight` or `weight_scale`.

In NVFP4 layers, `weight` is uint8 `[N, K/2]` with the even k in the high four bits. `weight_scale` stores E4M3 block
scales in tiles, and `weight_scale_2` is a global scale. MXFP8 layers have tiles of E8M0 scales.

Such a file has no configuration. It is recognized by a tensor `scaled_fp8`, by tensors `comfy_quant` next to the
weights, by the file's metadata, or by matrices of 8-bit floats. `comfy_quant` and the metadata describe in JSON how
each layer is quantized. In files without scales, the weights are rounded to 8-bit floats.
"""

from pathlib import Path
from typing import Any

import torch

from torch_marlin_metal.checkpoints import block_scales
from torch_marlin_metal.checkpoints.eight_bits import EXPONENTS, read_bytes
from torch_marlin_metal.checkpoints.files.safetensors import parse_json
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat
from torch_marlin_metal.checkpoints.grouped import as_words, swap_nibbles
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

NVFP4, MXFP8 = "nvfp4", "mxfp8"
KINDS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "int8_blockwise", NVFP4, MXFP8)
# Settings that a layer may have beside its kind. Any other, such as a rotation, could change the meaning of the codes.
KNOWN = ("format", "group_size", "full_precision_matrix_mult", "orig_dtype", "orig_shape", "per_row")
MAX_TEXT = 65536


def _stated(layer: Layer) -> dict[str, Any]:
    """Parses a layer's settings, which the file stores as JSON."""
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
    stored = list(layer.shape("weight"))
    shape = [*stored[:-1], stored[-1] * (2 if kind == NVFP4 else 1)]
    if stated.get("orig_shape", shape) != shape:
        raise layer.unsupported(f"its matrix {stated['orig_shape']} is padded to {shape}, which is not read")
    if kind == NVFP4:
        return _read_nvfp4(layer)
    if kind == MXFP8:
        N, K = layer.expect("weight", ("F8_E4M3",), None, None)
        scales: torch.Tensor | None = _untiled(layer, EXPONENTS, N, -(-K // block_scales.MX_BLOCK)).t()
    else:
        scales = None if "weight_scale" in layer else torch.ones(1, device="cpu")
    return read_bytes(layer, "comfyui", scale="weight_scale", scales=scales)


def _read_nvfp4(layer: Layer) -> PackedWeight:
    N, half = layer.expect("weight", ("U8",), None, None)
    if half % 4:
        raise layer.unsupported(f"K={2 * half} is not a multiple of 8")
    scales = _untiled(layer, ("F8_E4M3",), N, -(-2 * half // block_scales.NVFP4_BLOCK))
    if layer.shape("weight_scale_2") not in ((), (1,)) or layer.dtype("weight_scale_2") != "F32":
        raise layer.error("weight_scale_2", f"expected one F32 number, got {list(layer.shape('weight_scale_2'))}")
    words = as_words(swap_nibbles(layer.read("weight")))
    return block_scales.nvfp4(words, scales, layer.read("weight_scale_2"), layer.bias(N), "comfyui nvfp4")


def _untiled(layer: Layer, dtypes: tuple[str, ...], N: int, blocks: int) -> torch.Tensor:
    layer.expect("weight_scale", dtypes, -(-N // 128) * 128, -(-blocks // 4) * 4)
    return block_scales.untiled(layer.read("weight_scale"), N, blocks)


FORMAT = DirectoryFormat(
    name="comfyui",
    title="Files of one diffusion model (FP8 and int8 of ComfyUI and others)",
    containers=("a `.safetensors` file", "a directory with one such file"),
    methods=(COMFY_METHOD,),
    variants=(
        ("scaled_fp8; comfy_quant float8_e4m3fn; E4M3 with `weight_scale`, or without scales", "float8_e4m3"),
        ("comfy_quant int8_tensorwise, int8_blockwise with blocks of 128 x 128", "uint8b128"),
        ("comfy_quant nvfp4", "nvfp4"),
        ("comfy_quant mxfp8", "mxfp8"),
    ),
    refused=(
        ("float8_e5m2", "no weight format has E5M2; dequantized on request"),
        ("rotated int8 (convrot), svdquant", "the layer computes something else with its input"),
        ("K not a multiple of 8", "the operators take 8 codes along K at a time; dequantized on request"),
    ),
    anchors={},
    roles={"weight": (".weight",), COMFY_TENSOR: (f".{COMFY_TENSOR}",), "weight_scale_2": (".weight_scale_2",)}
    | {"bias": (".bias",)},
    fields={"b_packed": "weight", "scales": "weight_scale", "global_scale": "weight_scale_2"},
    read=_read,
    extras=(".scale_input", ".input_scale"),
    marks=(COMFY_MARK,),
    unscaled=("F8_E4M3", "F8_E5M2"),
    scaled={".scale_weight": "weight_scale", ".weight_scale": "weight_scale"},
)
