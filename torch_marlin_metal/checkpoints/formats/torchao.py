"""Reads torchao's layers of the classes NVFP4Tensor, MXTensor, IntxUnpackedToInt8Tensor, Float8Tensor and Int8Tensor.

The inner tensors of a layer are named `<layer>.weight.<field>`, or `<layer>._weight_<field>` if torchao's own
safetensors support wrote them. The classes' attributes that are not tensors are in config.json under
`tensor_attributes`, or in the file's metadata.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints import block_scales
from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.eight_bits import EXPONENTS, read_bytes
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.files.safetensors import parse_json
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat
from torch_marlin_metal.checkpoints.formats import torchao_int4
from torch_marlin_metal.checkpoints.grouped import (
    SIGN,
    SYMMETRIC,
    ZERO_POINT,
    as_words,
    constant,
    packed,
    planes_of_codes,
    unsigned,
    width_of,
)
from torch_marlin_metal.checkpoints.layer_tensors import FLOATS, Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.packed_weight import PackedWeight

INTEGERS = {f"int{bits}": bits for bits in range(1, 9)}  # target dtype -> bits
FIELDS = ("qdata", "scale", "zero_point", "per_tensor_scale", "scale_and_zero", "act_pre_scale")


def _check(checkpoint: Checkpoint, settings: Settings) -> None:
    attributes = checkpoint.config.get("tensor_attributes")
    if attributes is not None and not isinstance(attributes, dict):
        raise CheckpointError(f"{settings.file}: tensor_attributes: expected an object, got {attributes!r}")


def _implied(checkpoint: Checkpoint) -> bool:
    return "tensor_names" in checkpoint.metadata and "Tensor" in checkpoint.metadata["tensor_names"]


def _attributes(layer: Layer) -> dict[str, str]:
    """Returns the attributes of the weight as text. The key "class" is the weight's class."""
    stored = layer.checkpoint.metadata.get(f"{layer.name}.weight")
    if stored is None:
        values = layer.checkpoint.config.get("tensor_attributes", {})
        return {key: str(value) for key, value in values.items()}
    entry = parse_json(Path(layer.file), stored.encode("utf-8", "replace"))
    data = entry.get("_data") if isinstance(entry, dict) else None
    if not isinstance(data, dict):
        raise CheckpointError(f"{layer.file}: metadata of {layer.name}.weight: no _type and _data in {stored[:80]!r}")
    return {"class": str(entry.get("_type")), **{key: _plain(value) for key, value in data.items()}}


def _plain(value: Any) -> str:
    """Converts a value to text. torchao writes a dtype or an enumeration as {"_type": ..., "_data": ...}."""
    if isinstance(value, dict) and "_data" in value:
        return f"{value.get('_type')}:{value['_data']}"
    return str(value) if isinstance(value, (bool, int, str)) or value is None else json.dumps(value)


def _read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    attributes = _attributes(layer)
    kind = attributes.get("class", "")
    readers = {
        "NVFP4Tensor": _read_nvfp4,
        "MXTensor": _read_mx,
        "IntxUnpackedToInt8Tensor": _read_intx,
        "Int4Tensor": torchao_int4.read_plain,
        "Int4TilePackedTo4dTensor": torchao_int4.read_tiles,
        "Int4PlainInt32Tensor": torchao_int4.read_words,
    }
    if "act_pre_scale" in layer:
        raise layer.unsupported("it scales its input (act_pre_scale), which the operators do not")
    if kind in EIGHT_BIT:
        return read_bytes(layer, f"torchao {kind}", "qdata", "scale", "zero_point")
    if kind not in readers:
        reason = REFUSED_CLASSES.get(kind, f"read are {', '.join(readers)}")
        raise layer.unsupported(f"torchao's {kind or 'unnamed class'}: {reason}")
    return readers[kind](layer, attributes)


def _block_scales(layer: Layer, N: int, blocks: int, dtypes: tuple[str, ...]) -> Tensor:
    """Returns the scale codes `[blocks, N]`. The file may store them in tiles."""
    rows, columns = -(-N // 128) * 32, -(-blocks // 4) * 16
    if layer.shape("scale") != (rows, columns):
        layer.expect("scale", dtypes, N, blocks)
        return layer.read("scale").t()
    layer.expect("scale", dtypes, rows, columns)
    return block_scales.untiled(layer.read("scale"), N, blocks)


def _packed_rows(layer: Layer) -> tuple[int, int]:
    N, half = layer.expect("qdata", ("U8", "F4"), None, None)
    if half % 4:
        raise layer.unsupported(f"K={2 * half} is not a multiple of 8")
    return N, 2 * half


def _read_nvfp4(layer: Layer, attributes: dict[str, str]) -> PackedWeight:
    N, K = _packed_rows(layer)
    scales = _block_scales(layer, N, -(-K // block_scales.NVFP4_BLOCK), ("U8", "F8_E4M3"))
    multiplier = None
    if "per_tensor_scale" in layer:
        if layer.dtype("per_tensor_scale") != "F32" or layer.shape("per_tensor_scale") not in ((), (1,), (1, 1)):
            raise layer.error("per_tensor_scale", f"expected one F32 number, got {layer.shape('per_tensor_scale')}")
        multiplier = layer.read("per_tensor_scale")
    return block_scales.nvfp4(as_words(layer.read("qdata")), scales, multiplier, layer.bias(N), "torchao NVFP4Tensor")


def _read_mx(layer: Layer, attributes: dict[str, str]) -> PackedWeight:
    element, block = attributes.get("elem_dtype", ""), attributes.get("block_size", "32")
    if layer.dtype("qdata").startswith("F8"):
        N, K = layer.expect("qdata", (layer.dtype("qdata"),), None, None)
        scales = _block_scales(layer, N, -(-K // block_scales.MX_BLOCK), EXPONENTS)
        return read_bytes(layer, "torchao MXTensor", "qdata", "scale", scales=scales.t())
    if "float4_e2m1fn" not in element or block != str(block_scales.MX_BLOCK):
        known = "read are float4_e2m1, float8_e4m3 and float8_e5m2 in blocks of 32"
        advice = "quantize the original model with quantize_model"
        raise layer.unsupported(f"MXTensor of {element} in blocks of {block}; {known}; {advice}")
    N, K = _packed_rows(layer)
    scales = _block_scales(layer, N, -(-K // block_scales.MX_BLOCK), EXPONENTS)
    return block_scales.mx(as_words(layer.read("qdata")), scales, "mxfp4", layer.bias(N), "torchao MXTensor")


def _read_intx(layer: Layer, attributes: dict[str, str]) -> PackedWeight:
    N, K = layer.expect("qdata", ("I8",), None, None)
    block = [int(size) for size in re.findall(r"\d{1,9}", attributes.get("block_size", ""))]
    if len(block) != 2 or block[0] != 1 or block[1] < 1:
        raise layer.unsupported(f"block_size {attributes.get('block_size')}; read is (1, group size)")
    group_size = min(block[1], K)
    _, G = layer.expect("scale", FLOATS, N, -(-K // group_size))
    target = re.split("[.:]", attributes.get("target_dtype", ""))[-1]
    if target not in INTEGERS:
        raise layer.unsupported(f"weights of {attributes.get('target_dtype')}, not of int1 to int8")
    codes, width = layer.read("qdata"), width_of(INTEGERS[target])
    (low, high), end = (int(bound) for bound in codes.aminmax()), 1 << INTEGERS[target] - 1
    if low < -end or high >= end:
        raise layer.error("qdata", f"expected {target} codes in {-end}..{end - 1}, got a range of {low} to {high}")
    zeros = None
    if "zero_point" in layer:
        layer.expect("zero_point", ("I8", "I32", *FLOATS), N, G)
        points = unsigned(layer.read("zero_point").t(), width)
        zeros = None if constant(points, SIGN[width]) else points
    b_packed, b_high = planes_of_codes((codes.int() + SIGN[width]).to(torch.uint8), width)
    return packed(
        layer,
        b_packed,
        (SYMMETRIC if zeros is None else ZERO_POINT)[width],
        group_size,
        layer.read("scale").t(),
        zeros,
        K=K,
        high=b_high,
        source="torchao IntxUnpackedToInt8Tensor",
    )


REFUSED_CLASSES = {
    "Int4OpaqueTensor": "its codes are in a layout that depends on the processor that wrote them",
    "Int4PreshuffledTensor": "its codes are in a layout made for one GPU kernel",
}
EIGHT_BIT = ("Float8Tensor", "Int8Tensor")

FORMAT = DirectoryFormat(
    name="torchao",
    title="torchao",
    methods=("torchao",),
    variants=(
        ("NVFP4Tensor, scales swizzled or not", "nvfp4"),
        ("MXTensor of float4_e2m1, blocks of 32", "mxfp4"),
        ("MXTensor of float8_e4m3, blocks of 32", "mxfp8"),
        ("IntxUnpackedToInt8Tensor of int1 to int4", "uint4b8, uint4"),
        ("IntxUnpackedToInt8Tensor of int5 and int6", "uint5b16, uint5, uint6b32, uint6"),
        ("IntxUnpackedToInt8Tensor of int7 and int8", "uint8b128, uint8"),
        ("Int8Tensor", "uint8b128, uint8"),
        ("Float8Tensor of E4M3; one scale for each row, block or tensor", "float8_e4m3"),
        ("Int4Tensor; Int4TilePackedTo4dTensor of an NVIDIA GPU", "uint4_bias; uint4b8 if every zero point is 0"),
        ("Int4PlainInt32Tensor of an Intel GPU", "uint4; uint4b8 if every zero point is 8"),
    ),
    refused=(
        *REFUSED_CLASSES.items(),
        ("Int4PlainInt32Tensor with floating zero points (Ascend)", "its packing is not documented"),
        ("Float8Tensor and MXTensor of E5M2", "no weight format has E5M2; dequantized on request"),
        ("MXTensor of FP6 elements", "no weight format has FP6"),
    ),
    anchors={".weight.qdata": "qdata", "._weight_qdata": "qdata"},
    roles={field: (f".weight.{field}", f"._weight_{field}") for field in FIELDS} | {"bias": (".bias",)},
    fields={"b_packed": "qdata", "scales": "scale", "zeros": "zero_point", "global_scale": "per_tensor_scale"},
    check=_check,
    read=_read,
    implied=_implied,
)
