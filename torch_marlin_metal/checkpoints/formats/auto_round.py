"""AutoRound's own format: a wrapper around the layouts of GPTQ, AWQ, compressed-tensors and MLX.

`packing_format` names the layout. "auto_round:auto_gptq" is GPTQ's layout with zero points minus one. "auto_round",
which AutoRound writes for asymmetric weights, is the same layout with unchanged zero points.
"""

from dataclasses import replace

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat
from torch_marlin_metal.checkpoints.formats import awq, compressed_tensors, fp8, gptq, mlx
from torch_marlin_metal.checkpoints.layer_tensors import Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.packed_weight import PackedWeight

FP8_PACKINGS = ("auto_round:fp8", "auto_round:fp8_static")
# AutoRound names scales of rows or tensors weight_scale, and scales of blocks weight_scale_inv.
FP8 = replace(fp8.FORMAT, scaled={".weight_scale": "weight_scale_inv", **fp8.FORMAT.scaled})
GPTQ_VERSION = {"auto_round:auto_gptq": 1, "auto_round:gptq": 1, "auto_round": 2, "auto_round:gptqmodel": 2}


def _check(checkpoint: Checkpoint, settings: Settings) -> None:
    if (checkpoint.path / "rotation_config.json").exists() or settings.get("rotation_config"):
        raise UnsupportedFormat(f"{settings.file}: rotation_config: layers that rotate their input are not read")


def _delegate(settings: Settings) -> DirectoryFormat:
    floats = settings.text("data_type").startswith("fp") and settings.integer("bits") == 8
    packing = settings.text("packing_format", default=FP8_PACKINGS[0] if floats else "auto_round:auto_gptq")
    if packing in GPTQ_VERSION:

        def read_gptq(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
            version = options.gptq_version or GPTQ_VERSION[packing]
            return gptq.read(layer, settings, replace(options, gptq_version=version))

        chosen = replace(gptq.FORMAT, read=read_gptq)
    elif packing in ("auto_round:auto_awq", "auto_round:awq"):
        chosen = awq.FORMAT
    elif packing == "auto_round:llm_compressor":
        chosen = replace(compressed_tensors.FORMAT, read=compressed_tensors.read_without_scheme)
    elif packing == "mlx":
        chosen = mlx.FORMAT
    elif packing in FP8_PACKINGS:
        chosen = FP8
    else:
        known = ", ".join((*GPTQ_VERSION, "auto_round:auto_awq", "auto_round:llm_compressor", *FP8_PACKINGS, "mlx"))
        raise UnsupportedFormat(f"{settings.file}: AutoRound packing_format {packing!r} is not read; known: {known}")
    return replace(chosen, name=f"auto-round ({chosen.name})", check=_check)


FORMAT = replace(
    gptq.FORMAT,
    name="auto-round",
    title="AutoRound's own format",
    methods=("auto-round", "auto_round", "intel/auto-round"),
    variants=(
        ("packing_format auto_round:auto_gptq, auto_round (as GPTQ)", "uint4b8, uint4"),
        ("packing_format auto_round:auto_awq (as AWQ gemm)", "uint4, uint4b8"),
        ("packing_format auto_round:llm_compressor (NVFP4, MXFP4 as compressed-tensors)", "nvfp4, mxfp4"),
        ("packing_format auto_round:fp8_static, auto_round:fp8 or none with 8-bit floats", "float8_e4m3"),
        ("packing_format mlx", "uint4_bias"),
    ),
    refused=(
        ("other packing formats (NVFP4 with E5M3 scales, MXINT4, fake)", "no weight format has such scales or codes"),
        ("rotation_config", "layers that rotate their input"),
    ),
    delegate=_delegate,
)
