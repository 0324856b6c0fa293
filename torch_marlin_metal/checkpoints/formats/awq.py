"""AWQ layers in the three layouts of AutoAWQ: gemm, gemv and gemv_fast.

- gemm packs int32 words along N: 4-bit codes interleaved, 8-bit codes in order. AutoRound and GPTQModel also write this
  layout. Only GPTQModel writes 8 bits.
- gemv packs the transposed weight along K.
- gemv_fast (llm-awq) packs int16 words of four codes along K in tiles. In place of a zero point z, it stores -(s * z)
  in fp16, where s is the scale.
"""

import warnings

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat, endings
from torch_marlin_metal.checkpoints.grouped import (
    BIAS,
    SIGN,
    SYMMETRIC,
    ZERO_POINT,
    as_words,
    codes_of_words,
    constant,
    packed,
    words_of_codes,
)
from torch_marlin_metal.checkpoints.layer_tensors import FLOATS, Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.checkpoints.words import awq_words, awq_zeros
from torch_marlin_metal.packed_weight import PackedWeight

# version in the settings -> layout
LAYOUTS = {
    "": "gemm",
    "gemm": "gemm",
    "exllama": "gemm",
    "ipex": "gemm",
    "gemv": "gemv",
    "gemv_fast": "gemv_fast",
    "gemvfast": "gemv_fast",
    "llm-awq": "gemv_fast",
}


def _layout_of(settings: Settings) -> str:
    version = settings.text("version", "format", "checkpoint_format").lower()
    if version not in LAYOUTS:
        raise UnsupportedFormat(f"{settings.file}: AWQ version {version!r} is not read; known: gemm, gemv, gemv_fast")
    return LAYOUTS[version]


def _implied(checkpoint: Checkpoint) -> bool:
    """Returns True for old AutoAWQ files, whose quant_config.json names no method."""
    return "w_bit" in checkpoint.settings and "q_group_size" in checkpoint.settings


def _check(checkpoint: Checkpoint, settings: Settings) -> None:
    known = (4, 8) if _layout_of(settings) == "gemm" else (4,)
    if (bits := _bits(settings)) not in known:
        widths = " and ".join(map(str, known))
        advice = "quantize the original model with quantize_model"
        raise UnsupportedFormat(f"{settings.file}: {bits}-bit AWQ weights are not read; known: {widths} bits; {advice}")


def _bits(settings: Settings) -> int:
    return settings.integer("bits", "w_bit", default=4) or 4


def _read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    layout = _layout_of(settings)
    return {"gemm": _read_gemm, "gemv": _read_gemv, "gemv_fast": _read_gemv_fast}[layout](layer, settings)


def _group_size(settings: Settings, K: int) -> int:
    stated = settings.integer("group_size", "q_group_size", default=128) or -1
    return K if stated < 1 else min(stated, K)


def _packed(
    layer: Layer, words: Tensor, group_size: int, scales: Tensor, zeros: Tensor | None, *, K: int = 0, width: int = 4
) -> PackedWeight:
    """Makes a weight from codes and zero points. `scales` and `zeros` are `[G, N]` at the producer's group size."""
    if zeros is not None and constant(zeros, SIGN[width]):
        zeros = None
    weight_format = (SYMMETRIC if zeros is None else ZERO_POINT)[width]
    return packed(layer, words, weight_format, group_size, scales, zeros, source="awq", K=K)


def _read_gemm(layer: Layer, settings: Settings) -> PackedWeight:
    K, columns = layer.expect("qweight", ("I32",), None, None)
    bits = _bits(settings)
    N = columns * 32 // bits
    group_size = _group_size(settings, K)
    G, _ = layer.expect("scales", FLOATS, -(-K // group_size), N)
    zeros = None
    if "qzeros" in layer:
        layer.expect("qzeros", ("I32",), G, columns)
        stored = layer.read("qzeros")
        zeros = awq_zeros(stored) if bits == 4 else codes_of_words(stored.t(), 8)
    if K % 8 and bits == 4:
        raise layer.unsupported(f"K={K} is not a multiple of 8")
    if bits == 8:
        order = "AWQ of 8 bits is read in the order in which GPTQModel packs it; some programs interleave columns"
        warnings.warn(f"{layer.file}: {order} 0, 2, 1, 3, and a file does not say which it has", stacklevel=2)
    stored = layer.read("qweight")
    words = awq_words(stored) if bits == 4 else words_of_codes(codes_of_words(stored.t(), 8).t(), 8)
    return _packed(layer, words, group_size, layer.read("scales"), zeros, K=K, width=bits)


def _read_gemv(layer: Layer, settings: Settings) -> PackedWeight:
    N, words = layer.expect("qweight", ("I32",), None, None)
    K = 8 * words
    group_size = _group_size(settings, K)
    G = -(-K // group_size)
    _, padded = layer.expect("scales", FLOATS, N, None)
    if padded < G:
        raise layer.error("scales", f"expected at least {G} groups of {group_size} for K={K}, got {padded}")
    zeros = None
    if "qzeros" in layer:
        _, zero_words = layer.expect("qzeros", ("I32",), N, None)
        if 8 * zero_words < G:
            raise layer.error("qzeros", f"expected at least {G} zero points per row, got {8 * zero_words}")
        zeros = codes_of_words(layer.read("qzeros").t(), 4)[:, :G].t().contiguous()
    scales = layer.read("scales")[:, :G].t().contiguous()
    return _packed(layer, as_words(layer.read("qweight")), group_size, scales, zeros)


def _read_gemv_fast(layer: Layer, settings: Settings) -> PackedWeight:
    quarter, K = layer.expect("qweight", ("I16",), None, None)
    N = 4 * quarter
    if K % 64:
        raise layer.error("qweight", f"expected K to be a multiple of 64, the layout's tile, got {K}")
    group_size = _group_size(settings, K)
    G = -(-K // group_size)
    padded, _ = layer.expect("scales", FLOATS, None, N)
    if padded < G:
        raise layer.error("scales", f"expected at least {G} groups of {group_size} for K={K}, got {padded}")
    layer.expect("qzeros", FLOATS, padded, N)
    scales, biases = layer.read("scales")[:G].contiguous(), layer.read("qzeros")[:G].contiguous()
    b_packed = _unpack_gemv_fast(layer.read("qweight"))
    zeros = _integer_zeros(scales, biases)
    if zeros is None:
        return packed(layer, b_packed, BIAS[4], group_size, scales, biases, source="awq")
    return _packed(layer, b_packed, group_size, scales, zeros)


def _unpack_gemv_fast(qweight: Tensor) -> Tensor:
    """Converts int16 `[N/4, K]` to int32 `[K/8, N]`.

    The source stores tiles of 4 rows and 64 columns of the weight. The 64 words of a tile contain its four rows, one
    after the other. In a row, each run of 32 columns is stored in the order 0, 8, 16, 24, 1, 9, ..., 31, four codes to
    a word.
    """
    quarter, K = qweight.shape
    codes = (qweight.unsqueeze(2) >> torch.arange(0, 16, 4, device="cpu")) & 15
    rows = codes.to(torch.uint8).reshape(quarter, K // 64, 4, 2, 8, 4)  # tile, row, run, k % 8, k // 8
    rows = rows.permute(0, 2, 1, 3, 5, 4).reshape(4 * quarter, K)
    return words_of_codes(rows)


def _integer_zeros(scales: Tensor, biases: Tensor) -> Tensor | None:
    """Recovers uint8 zero points from fp16 -(s * z). Returns None if they do not reproduce every stored value."""
    zeros = torch.where(scales == 0, 0, -biases.float() / scales.float()).round()
    exact = torch.equal(-(scales.float() * zeros).to(biases.dtype), biases)
    return zeros.to(torch.uint8) if exact and bool(((zeros >= 0) & (zeros <= 15)).all()) else None


FORMAT = DirectoryFormat(
    name="awq",
    title="AWQ (AutoAWQ, llm-awq, GPTQModel, AutoRound)",
    methods=("awq",),
    variants=(
        ("gemm (also called exllama, ipex)", "uint4; uint4b8 without zero points"),
        ("gemm of 8 bit, as GPTQModel packs it", "uint8; uint8b128 without zero points"),
        ("gemv", "uint4; uint4b8 without zero points"),
        ("gemv_fast, llm-awq", "uint4; uint4_bias if the stored fp16 products have no integer zero points"),
    ),
    refused=(
        ("marlin", "layout made for one GPU kernel; export the original AWQ checkpoint"),
        ("other widths; 8 bit in gemv and gemv_fast", "AutoAWQ, GPTQModel and AutoRound write none"),
        ("K not a multiple of 8", "the operators decode 8 codes along K at a time"),
        ("groups of 8 or less", "no group size of the operators divides them; dequantized on request"),
    ),
    anchors={".qweight": "qweight"},
    roles=endings("scales", "bias") | {"qzeros": (".qzeros", ".scaled_zeros")},  # GPTQModel writes scaled_zeros
    fields={"b_packed": "qweight", "zeros": "qzeros"},
    check=_check,
    read=_read,
    implied=_implied,
)
