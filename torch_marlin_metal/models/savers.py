"""Lets models of transformers, diffusers and sentence-transformers save packed layers, and lets peft add adapters.

Packed layers in diffusers models also round weights like diffusers' own layers.

The code for each library is a module in `integrations`. If a model is quantized in memory or filled by
`load_quantized`, nothing else imports the library's module, so the functions here import it by its name. Apart from
these imports, `models` does not depend on `integrations`.
"""

import importlib
import warnings

from torch import nn

from torch_marlin_metal.layers.linear import MarlinLinear

# Base class of a library's models -> the library, and the module to import for it.
SAVERS = {
    "PreTrainedModel": ("transformers", "torch_marlin_metal.integrations.transformers"),
    "ModelMixin": ("diffusers", "torch_marlin_metal.integrations.diffusers"),
    "Module": ("sentence_transformers", "torch_marlin_metal.integrations.sentence_transformers"),
}


def let_it_save(op: str, model: nn.Module) -> None:
    """Lets `save_pretrained` of a model or of its submodels write packed layers, and lets peft find the layers."""
    importlib.import_module("torch_marlin_metal.integrations.with_peft").start()
    for name, (library, integration) in SAVERS.items():
        if any(_is_of(module, name, library) for module in model.modules()):
            try:
                importlib.import_module(integration)
            except ImportError as error:
                warnings.warn(f"{op}: what this model's save_pretrained writes cannot be loaded: {error}", stacklevel=3)


def round_as_diffusers(model: nn.Module) -> None:
    """Lets packed layers in diffusers models round weights like diffusers' layers, unless `rounds_weights` was set."""
    for module in model.modules():
        if _is_of(module, "ModelMixin", "diffusers"):
            for layer in module.modules():
                if isinstance(layer, MarlinLinear) and "rounds_weights" not in layer.__dict__:
                    layer.rounds_weights = True


def _is_of(module: nn.Module, name: str, library: str) -> bool:
    return any(base.__name__ == name and base.__module__.split(".")[0] == library for base in type(module).__mro__)
