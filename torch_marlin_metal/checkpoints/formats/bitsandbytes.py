"""bitsandbytes layers: NF4 and FP4, with a scale per block of the flattened weight, and LLM.int8, with a scale per row.

A 4-bit code is an index into a table of 16 values. `weight` stores two codes per byte, the even one in the high nibble.
The weight is flattened row by row, so a block may continue in the next row. With double quantization, the block scales
are 8-bit codes into a table of 256 values.
"""

from functools import partial
from math import gcd
from pathlib import Path

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.eight_bits import read_bytes
from torch_marlin_metal.checkpoints.files.safetensors import parse_json
from torch_marlin_metal.checkpoints.float_rows import FloatRows
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat
from torch_marlin_metal.checkpoints.grouped import as_words, fit_groups, swap_nibbles
from torch_marlin_metal.checkpoints.layer_tensors import FLOATS, Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.packed_weight import PackedWeight

STORAGE = ("U8", "I8", "F16", "BF16", "F32")
MAX_STATE = 65536
MAX_OFFSET = 2.0**100
WEIGHT_ORDER = ".weight_format"  # of LLM.int8; 0 means row by row
INT8_LARGEST = 127.0


def _state(layer: Layer) -> Settings:
    (length,) = layer.expect("quant_state", ("U8",), None)
    if length > MAX_STATE:
        raise layer.error("quant_state", f"expected a short JSON text, got {length} bytes")
    where = Path(f"{layer.file}: tensor {layer.roles['quant_state']!r}")
    state = parse_json(where, layer.read("quant_state").numpy().tobytes())
    if not isinstance(state, dict):
        raise layer.error("quant_state", f"expected a JSON object, got {type(state).__name__}")
    return Settings(where, state)


def _read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    return _read_int8(layer) if "quant_state" not in layer else _read_4bit(layer)


def _read_int8(layer: Layer) -> PackedWeight:
    """Reads an LLM.int8 layer, which stores the largest magnitude of each row instead of its scale."""
    if WEIGHT_ORDER in layer and layer.scalar(WEIGHT_ORDER) != 0:
        raise layer.unsupported("LLM.int8 weights in the order of a GPU's tiles (weight_format) are not read")
    N, _ = layer.expect("weight", ("I8",), None, None)
    layer.expect("SCB", FLOATS, N)
    return read_bytes(layer, "bitsandbytes int8", scale="SCB", scales=layer.read("SCB").float() / INT8_LARGEST)


def _read_4bit(layer: Layer) -> PackedWeight:
    state = _state(layer)
    shape, blocksize = state.get("shape"), state.integer("blocksize", default=64) or 0
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in shape):
        raise layer.error("quant_state", f"expected shape to be [N, K], got {shape!r}")
    N, K = shape
    if not 1 <= blocksize <= 1 << 20:
        raise layer.error("quant_state", f"expected a blocksize of 1 to 2^20, got {blocksize}")
    nbytes, dtype = layer.nbytes("weight"), layer.dtype("weight")
    if dtype not in STORAGE or 2 * nbytes != N * K + N * K % 2:
        raise layer.error("weight", f"{nbytes} bytes of {dtype} do not hold [{N}, {K}] codes")
    layer.expect("quant_map", ("F32",), 16)
    absmax = _absmax(layer, state, -(-N * K // blocksize))
    lut = layer.read("quant_map")

    stored = layer.read("weight").reshape(-1).view(torch.uint8)

    def rows(which: slice) -> Tensor:
        first, last, _ = which.indices(N)
        first, last = first * K, last * K
        pairs = stored[first // 2 : -(-last // 2)]
        codes = torch.stack((pairs >> 4, pairs & 15), dim=1).reshape(-1)[first % 2 :][: last - first]
        return (lut[codes.long()] * absmax[torch.arange(first, last, device="cpu") // blocksize]).reshape(-1, K)

    dequantize = partial(FloatRows, N, K, rows)

    if K % 8:
        raise layer.unsupported(f"K={K} is not a multiple of 8", dequantize)
    part = gcd(K, blocksize)  # the longest run of k that never crosses the end of a block or of a row
    scales = absmax[torch.arange(N * K // part, device="cpu") * part // blocksize].reshape(N, K // part).t()
    fitted = fit_groups(K, part, scales)
    if fitted is None:
        reason = f"blocks of {blocksize} over rows of K={K} change the scale every {part} weights"
        raise layer.unsupported(f"{reason}, which no group size of the operators divides", dequantize)
    return PackedWeight(
        b_packed=as_words(swap_nibbles(stored.reshape(N, K // 2))),
        scales=fitted[1][0].contiguous(),
        weight_format="lut4",
        group_size=fitted[0],
        lut=lut,
        bias=layer.bias(N),
        source=f"bitsandbytes {state.text('quant_type')}",
    )


def _absmax(layer: Layer, state: Settings, blocks: int) -> Tensor:
    """Returns the block scales in fp32. Decodes them if they are quantized (double quantization)."""
    if "nested_absmax" not in layer:
        layer.expect("absmax", FLOATS, blocks)  # bf16 if the layer ran on a CPU with AVX-512 BF16 before it was saved
        return layer.read("absmax").float()
    layer.expect("absmax", ("U8",), blocks)
    layer.expect("nested_quant_map", ("F32",), 256)
    size, offset = state.integer("nested_blocksize", default=256) or 0, state.get("nested_offset")
    if not 1 <= size <= 1 << 20 or not isinstance(offset, (int, float)) or not abs(offset) <= MAX_OFFSET:
        raise layer.error("quant_state", f"expected nested_blocksize and nested_offset, got {size} and {offset!r}")
    layer.expect("nested_absmax", ("F32",), -(-blocks // size))
    codes, scales = layer.read("absmax").long(), layer.read("nested_absmax").repeat_interleave(size)[:blocks]
    return layer.read("nested_quant_map")[codes] * scales + float(offset)


FORMAT = DirectoryFormat(
    name="bitsandbytes",
    title="bitsandbytes (transformers' load_in_4bit and load_in_8bit)",
    methods=("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"),
    variants=(
        ("NF4, with and without double quantization (scales become fp32: 4.5 bits a weight)", "lut4"),
        ("FP4 (its own table, not E2M1), with and without double quantization", "lut4"),
        ("load_in_8bit (LLM.int8)", "uint8b128"),
    ),
    refused=(
        ("LLM.int8 whose weight_format is not 0", "its codes are in the order of a GPU's tiles"),
        ("rows and blocks that no common group size divides", "dequantized on request"),
    ),
    anchors={
        ".weight.quant_state.bitsandbytes__nf4": "quant_state",
        ".weight.quant_state.bitsandbytes__fp4": "quant_state",
    },
    roles={role: (f".weight.{role}",) for role in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")}
    | {"weight": (".weight",), "bias": (".bias",)},
    fields={"b_packed": "weight", "scales": "absmax", "lut": "quant_map"},
    read=_read,
    extras=(WEIGHT_ORDER,),
    scaled={".SCB": "SCB"},
)
