"""HQQ layers of 1 to 8 bits with groups along K (axis 1): W = (q - zero) * scale with floating-point zero points.

The weight is stored as a matrix with one group per row, `[N * K / g, g]`. The rows are split into equal parts, and an
element of `W_q` packs one code of each part, the first part in the high bits. For 3 bits, an int32 word packs ten
codes, and the matrix is padded to a multiple of ten rows.
"""

from functools import partial

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.float_rows import FloatRows
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat, endings
from torch_marlin_metal.checkpoints.grouped import ZERO_POINT, packed, planes_of_codes, width_of
from torch_marlin_metal.checkpoints.layer_tensors import FLOATS, Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.packed_weight import PackedWeight

# Bits of a code -> name of the packing, dtype of the elements of `W_q`, codes in an element.
PACKINGS = {
    1: ("1bit_u8", torch.uint8, 8),
    2: ("2bit_u8", torch.uint8, 4),
    3: ("3bit_32", torch.int32, 10),
    4: ("4bit_u8", torch.uint8, 2),
    **dict.fromkeys((5, 6, 8), ("8bit_u8", torch.uint8, 1)),
}


def _check(checkpoint: Checkpoint, settings: Settings) -> None:
    settings.section("quant_config").section("weight_quant_params").integer("nbits")


def _read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    stated = settings.section("quant_config").section("weight_quant_params")
    bits, axis = _number(layer, "nbits", stated.integer("nbits")), _number(layer, "axis", stated.integer("axis"))
    if bits not in PACKINGS:
        raise layer.unsupported(f"{bits}-bit HQQ weights are not read; known: {', '.join(map(str, PACKINGS))}")
    known, dtype, count = PACKINGS[bits]
    if "packing" in layer and layer.dtype("packing") == "U8" and len(layer.shape("packing")) == 1:
        packing = layer.read("packing").numpy().tobytes()[:40].decode("utf-8", "replace")
        if packing != known:
            raise layer.unsupported(f"HQQ packing {packing!r} is not read; known for {bits} bits: {known}")
    for role in ("quant_scale", "quant_zero"):
        if role in layer and layer.scalar(role):
            raise layer.unsupported(f"its scales or zero points are themselves quantized ({role})")
    layer.expect("shape", ("I64", "I32"), 2)
    N, K = (int(size) for size in layer.read("shape"))
    nbytes = layer.nbytes("W_q")
    scales, zeros = _column(layer, "scale"), _column(layer, "zero")
    groups = scales.numel()
    if N < 1 or K < 1 or zeros.numel() != groups or N * K % groups:
        raise layer.error("scale", f"{groups} scales and {zeros.numel()} zero points do not agree with [{N}, {K}]")
    rows = groups if axis == 1 else N * K // groups  # rows of the stored matrix
    if nbytes != -(-rows // count) * (N * K // rows) * dtype.itemsize:
        raise layer.error("W_q", f"{nbytes} bytes do not hold [{N}, {K}] codes of {bits} bit")
    stored = layer.read("W_q").reshape(-1).view(dtype)
    fields = [stored >> bits * number & (1 << bits) - 1 for number in reversed(range(count))]
    codes = torch.cat([field.to(torch.uint8) for field in fields])[: N * K]

    if axis == 0:

        def rows_axis0(which: slice) -> Tensor:
            first, last, _ = which.indices(N)
            group = torch.arange(first * K, last * K, device="cpu") % groups
            return ((codes[first * K : last * K].float() - zeros.float()[group]) * scales.float()[group]).reshape(-1, K)

        reason = "its groups run along N (axis=0), the operators' along K (axis=1)"
        raise layer.unsupported(reason, partial(FloatRows, N, K, rows_axis0))
    group_size = N * K // groups
    if K % group_size:
        raise layer.error("scale", f"groups of {group_size} do not divide K={K}")

    words, high = planes_of_codes(codes.reshape(N, K), width_of(bits))
    return packed(
        layer,
        words,
        ZERO_POINT[width_of(bits)],
        group_size,
        scales.reshape(N, -1).t(),
        zeros.reshape(N, -1).t(),
        K=K,
        high=high,
        source="hqq",
    )


def _number(layer: Layer, role: str, stated: int | None) -> int:
    """Returns the layer's own value, else the value in the settings, else HQQ's default."""
    if role in layer:
        return int(layer.scalar(role))
    return stated if stated is not None else {"nbits": 4, "axis": 1}[role]


def _column(layer: Layer, role: str) -> Tensor:
    shape = layer.shape(role) if role in layer else ()
    if layer.expect(role, FLOATS, *[None] * len(shape)) and len(shape) > 2:
        raise layer.error(role, f"expected [groups, 1], got {list(shape)}")
    return layer.read(role).reshape(-1)


FORMAT = DirectoryFormat(
    name="hqq",
    title="HQQ",
    methods=("hqq",),
    variants=(
        ("1, 2, 3 and 4 bit, axis=1, floating zero points", "uint4"),
        ("5, 6 and 8 bit, axis=1, floating zero points", "uint5, uint6, uint8"),
    ),
    refused=(
        ("axis=0", "groups run along N; dequantized on request"),
        ("quant_scale, quant_zero", "scales or zero points are themselves quantized"),
        ("groups of 8 or less", "no group size of the operators divides them; dequantized on request"),
    ),
    anchors={".W_q": "W_q"},
    roles=endings("scale", "zero", "shape", "nbits", "axis", "packing", "quant_scale", "quant_zero", "bias"),
    extras=(
        ".channel_wise",
        ".compute_dtype",
        ".encoded_state_dict",
        ".group_size",
        ".offload_meta",
        ".optimize",
        ".round_zero",
        ".stores_quant_config",
        ".unpack_view_dtype",
        ".view_as_float",
    ),
    fields={"b_packed": "W_q", "scales": "scale", "zeros": "zero"},
    check=_check,
    read=_read,
)
