"""AWQ layers in the three layouts of AutoAWQ: gemm, gemv and gemv_fast.

- gemm packs int32 words along N with an interleave. AutoRound and GPTQModel also write it.
- gemv packs along K, transposed.
- gemv_fast (llm-awq) packs int16 words of four codes along K in tiles, and stores fp16 -(s * z) instead of the zero
  points z.
"""

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat, endings
from torch_marlin_metal.checkpoints.layer import FLOATS, Layer, as_words, constant, fit_groups, spread, words_of_codes
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.checkpoints.words import awq_words, awq_zeros
from torch_marlin_metal.formats import weight_format as find_format
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
SYMMETRIC_ZERO = 8


def _layout_of(settings: Settings) -> str:
    version = settings.text("version", "format", "checkpoint_format").lower()
    if version not in LAYOUTS:
        raise UnsupportedFormat(f"{settings.file}: AWQ version {version!r} is not read; known: gemm, gemv, gemv_fast")
    return LAYOUTS[version]


def _implied(checkpoint: Checkpoint) -> bool:
    """Recognises old AutoAWQ files, whose quant_config.json names no method."""
    return "w_bit" in checkpoint.settings and "q_group_size" in checkpoint.settings


def _check(checkpoint: Checkpoint, settings: Settings) -> None:
    _layout_of(settings)
    bits = settings.integer("bits", "w_bit", default=4)
    if bits != 4:
        raise UnsupportedFormat(f"{settings.file}: {bits}-bit AWQ weights are not 4 bit wide")


def _read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    layout = _layout_of(settings)
    return {"gemm": _read_gemm, "gemv": _read_gemv, "gemv_fast": _read_gemv_fast}[layout](layer, settings)


def _group_size(settings: Settings, K: int) -> int:
    stated = settings.integer("group_size", "q_group_size", default=128) or -1
    return K if stated < 1 else min(stated, K)


def _packed(
    layer: Layer, b_packed: Tensor, group_size: int, scales: Tensor, zeros: Tensor | None, weight_format: str = "uint4"
) -> PackedWeight:
    """Makes the weight from its parts; `scales` and `zeros` are `[G, N]` at the producer's group size."""
    K, N = 8 * b_packed.shape[0], b_packed.shape[1]
    if zeros is not None and find_format(weight_format).zeros_role == "zero_point" and constant(zeros, SYMMETRIC_ZERO):
        zeros = None
    fitted = fit_groups(K, group_size, scales, *([] if zeros is None else [zeros]))
    weight = PackedWeight(
        b_packed=b_packed,
        scales=scales,
        weight_format="uint4b8" if zeros is None else weight_format,
        group_size=group_size,
        zeros=zeros,
        bias=layer.bias(N),
        source="awq",
    )
    if fitted is None:
        raise layer.unsupported(
            f"no group size of the operators divides its groups of {group_size}", lambda: _dequantize(weight)
        )
    weight.group_size, grouped = fitted
    weight.scales = grouped[0].contiguous()
    weight.zeros = None if zeros is None else grouped[1].contiguous()
    return weight


def _dequantize(weight: PackedWeight) -> Tensor:
    shifts = torch.arange(0, 32, 4, device="cpu").view(1, 8, 1)
    codes = ((weight.b_packed.unsqueeze(1) >> shifts) & 15).reshape(weight.K, weight.N).float()
    scales = spread(weight.scales.float(), weight.K, weight.group_size)
    if weight.zeros is None:
        return ((codes - SYMMETRIC_ZERO) * scales).t()
    zeros = spread(weight.zeros.float(), weight.K, weight.group_size)
    has_bias = find_format(weight.weight_format).zeros_role == "bias"
    return (codes * scales + zeros if has_bias else (codes - zeros) * scales).t()


def _read_gemm(layer: Layer, settings: Settings) -> PackedWeight:
    K, words = layer.expect("qweight", ("I32",), None, None)
    N = 8 * words
    group_size = _group_size(settings, K)
    G, _ = layer.expect("scales", FLOATS, -(-K // group_size), N)
    zeros = None
    if "qzeros" in layer:
        layer.expect("qzeros", ("I32",), G, words)
        zeros = awq_zeros(layer.read("qzeros"))
    if K % 8:
        raise layer.unsupported(f"K={K} is not a multiple of 8")
    b_packed = awq_words(layer.read("qweight"))
    return _packed(layer, b_packed, group_size, layer.read("scales"), zeros)


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
        shifts = torch.arange(0, 32, 4, device="cpu")
        codes = (layer.read("qzeros").unsqueeze(2) >> shifts) & 15
        zeros = codes.reshape(N, -1)[:, :G].t().to(torch.uint8).contiguous()
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
        return _packed(layer, b_packed, group_size, scales, biases, "uint4_bias")
    return _packed(layer, b_packed, group_size, scales, zeros)


def _unpack_gemv_fast(qweight: Tensor) -> Tensor:
    """Converts int16 `[N/4, K]` to int32 `[K/8, N]`.

    The source's layout has tiles of 4 rows of the weight and 64 k. The 64 words of a tile hold its four rows, one after
    the other. Within a row, each run of 32 k is stored in the order 0, 8, 16, 24, 1, 9, ..., 31, four codes to a word.
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
        ("gemv", "uint4; uint4b8 without zero points"),
        ("gemv_fast, llm-awq", "uint4; uint4_bias if the stored fp16 products have no integer zero points"),
    ),
    refused=(
        ("marlin", "layout made for one GPU kernel; export the original AWQ checkpoint"),
        ("bits other than 4", "codes are not 4 bit wide"),
        ("K not a multiple of 8", "a word of the operators holds 8 codes along K"),
        ("groups of 8 or less", "no group size of the operators divides them; dequantized on request"),
    ),
    anchors={".qweight": "qweight"},
    roles=endings("scales", "bias") | {"qzeros": (".qzeros", ".scaled_zeros")},  # GPTQModel says scaled_zeros
    fields={"b_packed": "qweight", "scales": "scales", "zeros": "qzeros", "bias": "bias"},
    check=_check,
    read=_read,
    implied=_implied,
)
