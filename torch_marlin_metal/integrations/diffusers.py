"""`save_pretrained` of a diffusers model with packed layers: refused, because `from_pretrained` could not load it.

diffusers leaves layers that a directory lacks as they were initialized. `quantize_model` imports this module for models
of diffusers.
"""

import functools
from typing import Any

from diffusers import ModelMixin

from torch_marlin_metal.layers.fuse import unfused


def install() -> None:
    """Wraps `ModelMixin.save_pretrained`; a second call does nothing."""
    original = ModelMixin.save_pretrained
    if getattr(original, "refuses_packed_layers", False):
        return

    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (packed := next(unfused(self), None)) is not None:
            raise ValueError(
                f"save_pretrained: {type(self).__name__} has packed 4-bit layers ({packed[0]}, ...), which diffusers "
                "cannot load. Save model.state_dict() with safetensors or torch.save; to load it, build the model in "
                "floats, quantize_model it with the same arguments, and load_state_dict"
            )
        return original(self, *args, **kwargs)

    save_pretrained.refuses_packed_layers = True  # type: ignore[attr-defined]
    ModelMixin.save_pretrained = save_pretrained


install()
