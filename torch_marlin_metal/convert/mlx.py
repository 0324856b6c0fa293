"""MLX layers: `weight` uint32 `[N, K/8]`, first k in the low nibble; affine scales and biases, or FP4 block scales.

mlx-lm writes them, and transformers' Metal quantizer (which calls the biases `qbiases`). Settings of single modules
stand in the same object under the module's name.
"""

from torch_marlin_metal.convert import fp4
from torch_marlin_metal.convert.checkpoint import Checkpoint, Settings
from torch_marlin_metal.convert.layer import FLOATS, Layer, as_words, fit_groups
from torch_marlin_metal.convert.registry import DirectoryFormat, Options
from torch_marlin_metal.packed_weight import PackedWeight


def _check(checkpoint: Checkpoint, settings: Settings) -> None:
    settings.integer("bits"), settings.integer("group_size")


def _implied(checkpoint: Checkpoint) -> bool:
    settings = checkpoint.settings
    return checkpoint.metadata.get("format") == "mlx" or ("bits" in settings and "mode" in settings)


def _own_settings(layer: Layer, settings: Settings) -> Settings:
    """Returns the module's own settings where it has some; AutoRound leaves them under "quantization" alone."""
    module = layer.name if layer.expert is None else layer.name.rpartition(".")[0]
    table = layer.checkpoint.config.get("quantization")
    for values in (settings, table if isinstance(table, dict) else {}):
        if isinstance(values.get(module), dict):
            return Settings(settings.file, values[module])
    return settings


def _read(layer: Layer, settings: Settings, options: Options) -> PackedWeight:
    own = _own_settings(layer, settings)
    mode, bits = own.text("mode", default="affine"), own.integer("bits", default=4) or 4
    group_size = own.integer("group_size", default=64) or 64
    N, words = layer.expect("weight", ("U32",), None, None)
    K = 32 * words // bits if bits > 0 else 0
    if mode not in ("affine", "mxfp4", "nvfp4") or bits != 4:
        raise layer.unsupported(f"MLX mode {mode!r} of {bits} bits; read are affine, mxfp4 and nvfp4 of 4 bits")
    if group_size < 1 or K % group_size:
        raise layer.error("weight", f"K={K} is not a multiple of the group size {group_size}")
    G = K // group_size
    if mode != "affine":
        expected = fp4.MXFP4_BLOCK if mode == "mxfp4" else fp4.NVFP4_BLOCK
        if group_size != expected:
            raise layer.unsupported(f"{mode} with groups of {group_size} instead of {expected}")
        layer.expect("scales", ("U8",), N, G)
        b_packed, scales = as_words(layer.read("weight")), layer.read("scales").t()
        if mode == "mxfp4":
            return fp4.mxfp4(b_packed, scales, layer.bias(N), "mlx mxfp4")
        if "global_scale" in layer:
            raise layer.unsupported("an NVFP4 layer with a global scale, whose convention is not settled")
        return fp4.nvfp4(b_packed, scales, None, layer.bias(N), "mlx nvfp4")
    layer.expect("scales", FLOATS, N, G)
    layer.expect("biases", FLOATS, N, G)
    fitted = fit_groups(K, group_size, layer.read("scales").t(), layer.read("biases").t())
    if fitted is None:
        raise layer.unsupported(f"no group size of the operators divides its groups of {group_size}")
    return PackedWeight(
        b_packed=as_words(layer.read("weight")),
        scales=fitted[1][0].contiguous(),
        weight_format="uint4_bias",
        group_size=fitted[0],
        zeros=fitted[1][1].contiguous(),
        bias=layer.bias(N),
        source="mlx affine",
    )


FORMAT = DirectoryFormat(
    name="mlx",
    title="MLX (mlx-lm, transformers' Metal quantizer)",
    methods=("metal", "mlx"),
    variants=(("affine, 4 bit", "uint4_bias"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4")),
    refused=(
        ("2, 3, 5, 6 and 8 bit layers, mxfp8", "codes are not 4 bit wide"),
        ("NVFP4 with a global scale", "its convention is not settled"),
    ),
    anchors={".scales": "scales"},
    roles={
        "weight": (".weight",),
        "biases": (".biases", ".qbiases"),
        "global_scale": (".global_scale",),
        "bias": (".bias",),
    },
    fields={"b_packed": "weight", "scales": "scales", "zeros": "biases", "bias": "bias"},
    check=_check,
    read=_read,
    implied=_implied,
    stacked_rank=3,
)
