"""gpt-oss experts in MXFP4: `<layer>_blocks` uint8 `[E, N, K/32, 16]` and `<layer>_scales` E8M0 `[E, N, K/32]`.

Each expert becomes a separate layer, `<layer>.<expert>`. The rows of gate_up_proj alternate between gate and up, and
the model expects this order.
"""

from torch_marlin_metal.checkpoints import block_scales
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat
from torch_marlin_metal.checkpoints.grouped import as_words
from torch_marlin_metal.checkpoints.layer_tensors import Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.packed_weight import PackedWeight


def _read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    if layer.expert is None:
        raise layer.error("blocks", f"expected four dimensions, got {list(layer.shape('blocks'))}")
    N, blocks, _ = layer.expect("blocks", ("U8",), None, None, block_scales.MX_BLOCK // 2)
    layer.expect("scales", ("U8", "F8_E8M0"), N, blocks)
    b_packed = as_words(layer.read("blocks").reshape(N, -1))
    return block_scales.mx(b_packed, layer.read("scales").t(), "mxfp4", layer.bias(N), "gpt-oss mxfp4")


FORMAT = DirectoryFormat(
    name="gpt-oss",
    title="gpt-oss (MXFP4 experts)",
    methods=("mxfp4",),
    variants=(("experts in MXFP4, one layer each", "mxfp4"),),
    refused=(),
    anchors={"_blocks": "blocks"},
    roles={"scales": ("_scales",), "bias": ("_bias",)},
    fields={"b_packed": "blocks"},
    read=_read,
    stacked_rank=4,
)
