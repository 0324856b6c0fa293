"""Importing this module lets peft add LoRA adapters to `MarlinLinear` layers and to `MarlinExperts`.

    import torch_marlin_metal.integrations.peft
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))

peft has no registry for the layers of other packages, but each `LoraConfig` can register custom layers. The import
therefore wraps methods of `BaseTuner`, which peft calls for each adapter. The wrappers register `MarlinLoraLinear` in
the config, check all targets before peft changes the model, add adapters to packed experts, and compute all merged
weights before peft merges a layer.
"""

from torch_marlin_metal.integrations.versions import require

require(__name__, "peft", (0, 21))

from torch_marlin_metal.integrations.peft.experts import MarlinLoraExperts  # noqa: E402
from torch_marlin_metal.integrations.peft.hooks import install, restore  # noqa: E402
from torch_marlin_metal.integrations.peft.layer import MarlinLoraLinear  # noqa: E402
from torch_marlin_metal.integrations.training import prepare_for_training  # noqa: E402

__all__ = ["MarlinLoraExperts", "MarlinLoraLinear", "install", "prepare_for_training", "restore"]

install()
