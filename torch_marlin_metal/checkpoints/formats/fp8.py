"""Fine-grained FP8 of DeepSeek, Qwen and transformers: `weight` E4M3 `[N, K]` and `weight_scale_inv` for each block.

No weight format holds 8 bits, so every layer becomes floats.
"""

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat, endings
from torch_marlin_metal.checkpoints.layer import Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.packed_weight import PackedWeight


def _check(checkpoint: Checkpoint, settings: Settings) -> None:
    """Accepts every checkpoint, because each layer is checked by itself."""


def _read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    raise layer.unsupported("8-bit weights are not 4 bit wide")


FORMAT = DirectoryFormat(
    name="fp8",
    title="Fine-grained FP8 (DeepSeek, Qwen, transformers)",
    methods=("fp8",),
    variants=(),
    refused=(("all layers", "8-bit weights; dequantized on request"),),
    anchors={},
    roles=endings("weight", "bias"),
    fields={},
    check=_check,
    read=_read,
    extras=(".input_scale", ".activation_scale"),
    unread={".weight_scale_inv": "8-bit weights are not 4 bit wide"},
)
