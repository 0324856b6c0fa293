"""Makes `save_pretrained` work for every model with packed layers, both loaded models and models quantized in memory.

A model from `from_pretrained` has a quantizer, and transformers saves the tensors that the quantizer returns. Without a
quantizer, for example after `quantize_model`, transformers would write tensors that no loader can read. The wrapper of
`save_pretrained` therefore first attaches a quantizer to such a model. After saving, the wrapper writes the README.
"""

import functools
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from torch_marlin_metal.checkpoints.card import write_card
from torch_marlin_metal.integrations.transformers.config import MarlinConfig
from torch_marlin_metal.integrations.transformers.names import rearranges
from torch_marlin_metal.integrations.transformers.quantizer import MarlinQuantizer
from torch_marlin_metal.integrations.transformers.stored import packed_layers
from torch_marlin_metal.replace.detect import is_packed_linear


def install() -> None:
    """Wraps `PreTrainedModel.save_pretrained`. A second call does nothing."""
    original = PreTrainedModel.save_pretrained
    if getattr(original, "saves_packed_layers", False):
        return

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        attach(self)
        if rearranges(self, [name for name, _ in packed_layers(self, copy=False)]):
            kwargs["save_original_format"] = False
        result = original(self, save_directory, *args, **kwargs)
        if isinstance(getattr(self, "hf_quantizer", None), MarlinQuantizer) and Path(save_directory).is_dir():
            write_card(Path(save_directory))
        return result

    save_pretrained.saves_packed_layers = True  # type: ignore[attr-defined]
    PreTrainedModel.save_pretrained = save_pretrained


def attach(model: Any) -> None:
    """Attaches the quantizer that saves packed layers to a model. Removes it from a model without packed layers.

    Raises:
        ValueError: the model also has packed layers of another package, and no format can store both.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, MarlinQuantizer):
        quantizer.forget_floats(model)
        return
    if next(packed_layers(model, copy=False), None) is None:
        return
    theirs = [name for name, module in model.named_modules() if is_packed_linear(module)]
    if theirs:
        raise ValueError(
            f"save_pretrained: {theirs[0]!r} and {len(theirs) - 1} more layers are packed layers of another package, "
            "others are MarlinLinear, and no checkpoint holds both. Replace them too (replace_linear_layers reports "
            "why it left them), or load the checkpoint with torch_marlin_metal.integrations.transformers imported"
        )
    model.hf_quantizer = MarlinQuantizer(MarlinConfig(), pre_quantized=True)
