"""Importing this module lets diffusers load and save packed models, and quantize models with a `MarlinConfig`.

    import torch_marlin_metal.integrations.diffusers
    from torch_marlin_metal.integrations.diffusers import MarlinConfig
    model = FluxTransformer2DModel.from_pretrained(path, quantization_config=MarlinConfig("uint4", 32))

`MarlinConfig` is the same class as for transformers. `from_single_file` keeps the weights of GGUF files and of 8-bit
float files packed. `quantize_model` imports this module for diffusers models, so that their `save_pretrained` writes
this package's format.
"""

from torch_marlin_metal.integrations.diffusers.quantizer import MarlinDiffusersQuantizer
from torch_marlin_metal.integrations.diffusers.take_over import install
from torch_marlin_metal.integrations.transformers.config import MarlinConfig

__all__ = ["MarlinConfig", "MarlinDiffusersQuantizer"]

install()
