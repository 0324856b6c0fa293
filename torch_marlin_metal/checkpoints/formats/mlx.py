"""MLX layers: `weight` uint32 `[N, K * bits / 32]`, first k in the low bits; affine scales and biases, or block scales.

mlx-lm writes these layers. transformers' Metal quantizer writes them too, but calls the biases `qbiases`. The settings
of the checkpoint may contain other settings for single modules, keyed by the module's name.
"""

from functools import partial

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints import block_scales
from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.float_rows import FloatRows
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat
from torch_marlin_metal.checkpoints.formats.mlx_names import KEYS, VALUES, hf_name, hf_values, latent
from torch_marlin_metal.checkpoints.grouped import BIAS, as_words, packed, repacked, spread, unpack, width_of
from torch_marlin_metal.checkpoints.layer_tensors import FLOATS, Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.formats import weight_format
from torch_marlin_metal.packed_weight import PackedWeight

# Model types of mlx-lm whose files are refused, and the reasons.
REFUSED = {
    "falcon_h1": "mlx-lm has multiplied weights of falcon_h1 with the multipliers of its config, which is not undone",
    "kimi_linear": "mlx-lm keeps the convolution of kimi_linear in three parts, which transformers joins",
    "longcat_flash": "transformers has weights for the experts of longcat_flash that compute nothing, mlx-lm has none",
    "nemotron_h": "the experts of nemotron_h have no gate, and the loader packs only experts with one",
}
# Mode -> code widths in bits whose layout is known. Modes with block scales have the names of weight formats.
BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "nvfp4": (4,), "mxfp8": (8,)}


def _check(checkpoint: Checkpoint, settings: Settings) -> None:
    """Refuses models whose weights mlx-lm changed. `_read` checks the settings of each module."""
    if (reason := REFUSED.get(str(checkpoint.config.get("model_type")))) is not None:
        raise UnsupportedFormat(f"{settings.file}: {reason}; quantize the original model with quantize_model")


def _implied(checkpoint: Checkpoint) -> bool:
    settings = checkpoint.settings
    return checkpoint.metadata.get("format") == "mlx" or ("bits" in settings and "mode" in settings)


def _own_settings(layer: Layer, settings: Settings, role: str = "scales") -> Settings:
    """Returns the module's own settings, or the common settings if the module has none.

    AutoRound stores the settings of a module only under "quantization".
    """
    module = layer.roles[role].removesuffix(".scales")
    table = layer.checkpoint.config.get("quantization")
    for values in (settings, table if isinstance(table, dict) else {}):
        if isinstance(values.get(module), dict):
            return Settings(settings.file, values[module])
    return settings


def _read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    if "second scales" in layer:
        raise layer.unsupported(f"{KEYS[1:]} and {VALUES[1:]} are one matrix", partial(_latent, layer, settings))
    own = _own_settings(layer, settings)
    mode, bits = own.text("mode", default="affine"), own.integer("bits", default=4)
    group_size = own.integer("group_size", default=64) or 0
    N, words = layer.expect("weight", ("U32",), None, None)
    if mode not in BITS or bits not in BITS[mode]:
        raise layer.unsupported(f"MLX mode {mode!r} of {bits} bits is not read; known: {', '.join(BITS)}")
    K, rest = divmod(32 * words, bits)
    if rest or group_size < 1 or K % group_size:
        raise layer.error("weight", f"{words} words of {bits} bits are not rows of whole groups of {group_size}")
    if mode == "affine":
        return _read_affine(layer, N, K, bits, group_size)
    fmt = weight_format(mode)
    if group_size != fmt.fixed_group_size:
        raise layer.unsupported(f"{mode} with groups of {group_size} instead of {fmt.fixed_group_size}")
    layer.expect("scales", ("U8",), N, K // group_size)
    b_packed, scales = as_words(layer.read("weight")), layer.read("scales").t()
    if fmt.has_global_scale:
        return block_scales.nvfp4(b_packed, scales, _multiplier(layer), layer.bias(N), "mlx nvfp4")
    return block_scales.mx(b_packed, scales, mode, layer.bias(N), f"mlx {mode}")


def _latent(layer: Layer, settings: Settings) -> FloatRows:
    """Decodes `kv_b_proj`, whose heads have rows for keys and rows for values. The file stores keys as columns."""
    keys, values = _heads(layer, settings, ""), _heads(layer, settings, "second ")
    if keys.shape[0] != values.shape[0] or keys.shape[1] != values.shape[2]:
        raise layer.error("weight", f"{list(keys.shape)} does not fit {VALUES[1:]} of {list(values.shape)}")
    return FloatRows.of(torch.cat((keys.mT, values), dim=1).flatten(0, 1))


def _heads(layer: Layer, settings: Settings, prefix: str) -> Tensor:
    """Decodes a stack of matrices to fp32 `[heads, N, K]`."""
    own = _own_settings(layer, settings, f"{prefix}scales")
    mode, bits = own.text("mode", default="affine"), own.integer("bits", default=4)
    group_size = own.integer("group_size", default=64) or 0
    heads, N, words = layer.expect(f"{prefix}weight", ("U32",), None, None, None)
    if mode != "affine" or bits not in BITS[mode]:
        raise layer.unsupported(f"{KEYS[1:]} and {VALUES[1:]} of mode {mode!r} and {bits} bits are not read")
    K, rest = divmod(32 * words, bits)
    if rest or group_size < 1 or K % group_size:
        raise layer.error(f"{prefix}weight", f"{words} words of {bits} bits are no rows of groups of {group_size}")
    grouped = []
    for role in ("scales", "biases"):
        layer.expect(f"{prefix}{role}", FLOATS, heads, N, K // group_size)
        grouped.append(spread(layer.read(f"{prefix}{role}").flatten(0, 1).float().t(), K, group_size))
    stored = layer.read(f"{prefix}weight").flatten(0, 1).view(torch.int32).t()
    return (unpack(stored, bits, K).float() * grouped[0] + grouped[1]).t().reshape(heads, N, K)


def _multiplier(layer: Layer) -> Tensor | None:
    """Returns the factor for NVFP4's block scales, or None if the layer has no `global_scale`.

    MLX stores the largest magnitude of the weight as `global_scale`. The factor is this magnitude divided by the
    product of the largest scale and the largest code (mlx 0.32.4, mlx/backend/metal/kernels/fp_quantized.h).
    """
    if "global_scale" not in layer:
        return None
    if layer.dtype("global_scale") != "F32" or layer.shape("global_scale") not in ((), (1,)):
        raise layer.error(
            "global_scale",
            f"expected one F32 number, got {layer.dtype('global_scale')} {list(layer.shape('global_scale'))}",
        )
    return layer.read("global_scale") / block_scales.NVFP4_LARGEST


def _read_affine(layer: Layer, N: int, K: int, bits: int, group_size: int) -> PackedWeight:
    layer.expect("scales", FLOATS, N, K // group_size)
    layer.expect("biases", FLOATS, N, K // group_size)
    stored = layer.read("weight")
    words, high = (as_words(stored), None) if bits in (4, 8) else repacked(stored.t(), bits, K)
    scales, biases = layer.read("scales").t(), layer.read("biases").t()
    return packed(layer, words, BIAS[width_of(bits)], group_size, scales, biases, high=high, source="mlx affine")


FORMAT = DirectoryFormat(
    name="mlx",
    title="MLX (mlx-lm, transformers' Metal quantizer)",
    methods=("metal", "mlx"),
    variants=(
        ("affine, 2, 3 and 4 bit", "uint4_bias"),
        ("affine, 5, 6 and 8 bit", "uint5_bias, uint6_bias, uint8_bias"),
        ("mxfp4", "mxfp4"),
        ("mxfp8", "mxfp8"),
        ("nvfp4, with or without a global scale", "nvfp4"),
    ),
    refused=(("models whose weights mlx-lm multiplied (Falcon-H1)", "the multipliers are not undone"),),
    anchors={".scales": "scales"},
    roles={
        "weight": (".weight",),
        "biases": (".biases", ".qbiases"),
        "global_scale": (".global_scale",),
        "bias": (".bias",),
    },
    fields={"b_packed": "weight", "zeros": "biases"},
    check=_check,
    read=_read,
    implied=_implied,
    stacked_rank=3,
    hf_name=hf_name,
    hf_values=hf_values,
    joins=latent,
)
