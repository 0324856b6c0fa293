"""Layers of optimum-quanto in 8 bits: int8 or E4M3 `weight._data` `[N, K]`, and `weight._scale` with a scale per row.

`quanto_qmap.json` lists the layers. diffusers writes a `quantization_config` instead.
"""

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.eight_bits import read_bytes
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat
from torch_marlin_metal.checkpoints.layer_tensors import Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import QUANTO_MAP, Settings
from torch_marlin_metal.packed_weight import PackedWeight

FEW_BITS = ".weight._data._data"


def _implied(checkpoint: Checkpoint) -> bool:
    return checkpoint.settings.file.name == QUANTO_MAP


def _read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    if "few bits" in layer:
        raise layer.unsupported("quanto's weights of 2 and 4 bits are not read")
    return read_bytes(layer, "quanto", scale="scale")


FORMAT = DirectoryFormat(
    name="quanto",
    title="optimum-quanto",
    methods=("quanto",),
    variants=(("qint8", "uint8b128"), ("qfloat8, qfloat8_e4m3fn", "float8_e4m3")),
    refused=(
        ("qfloat8_e5m2", "no weight format has E5M2; dequantized on request"),
        ("qint2, qint4", "their packing is not read"),
        ("K not a multiple of 8", "the operators take 8 codes along K at a time; dequantized on request"),
    ),
    anchors={FEW_BITS: "few bits", ".weight._data": "weight"},
    roles={"scale": (".weight._scale",), "bias": (".bias",)},
    fields={"b_packed": "weight", "scales": "scale"},
    read=_read,
    implied=_implied,
    extras=(".input_scale", ".output_scale", ".weight._shift"),
)
