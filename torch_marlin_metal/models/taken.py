"""Lists the Linear layers of transformers (5.23) that cannot be packed, because their parent reads `layer.weight`."""

from torch import nn

# Class of the parent -> its children whose weight it multiplies or rearranges in its own forward.
TAKEN = {
    "DisentangledSelfAttention": ("in_proj",),
    "FalconMambaMixer": ("dt_proj",),
    "JambaMambaMixer": ("dt_proj",),
    "LSHSelfAttention": ("query_key", "value"),
    "LayoutLMv2Encoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"),
    "LayoutLMv3Encoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"),
    "LongcatFlashTopkRouter": ("classifier",),
    "MambaMixer": ("dt_proj",),
    "MobileBertLMPredictionHead": ("decoder", "dense"),
    "RwkvFeedForward": ("value",),  # the model divides it by powers of two for inference
    "RwkvSelfAttention": ("output",),
    "WavLMAttention": ("k_proj", "out_proj", "q_proj", "v_proj"),
}


def taken_weights(model: nn.Module) -> dict[int, str]:
    """Returns `{id(layer): reason}` for layers that cannot be packed because their parent uses their weight."""
    return {
        id(child): f"{type(parent).__name__} computes with its weight, instead of calling it"
        for parent in model.modules()
        for name in TAKEN.get(type(parent).__name__, ())
        if (child := getattr(parent, name, None)) is not None
    }
