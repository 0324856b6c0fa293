"""PyTorch operators, layers and loaders for Apple GPUs and CPUs. Weights of 4 to 8 bits stay packed in memory."""

import importlib
from typing import TYPE_CHECKING, Any

from torch_marlin_metal import source_tree  # noqa: F401  first, because it may redirect the imports below

# isort: split
from torch_marlin_metal import interrupt  # noqa: F401  before the imports that load torch

# isort: split
from torch_marlin_metal.extension import cpu_capability  # before the modules that use operators

# isort: split
from torch_marlin_metal import convert, extension, ops
from torch_marlin_metal.formats import WEIGHT_FORMATS
from torch_marlin_metal.fuse.layers import fuse_layers
from torch_marlin_metal.layers.embedding import MarlinEmbedding
from torch_marlin_metal.layers.experts import MarlinExperts
from torch_marlin_metal.layers.fuse import fuse_projections
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.load.quantized import load_quantized
from torch_marlin_metal.models.activations import set_activations
from torch_marlin_metal.models.prepare import prepare
from torch_marlin_metal.models.quantize import quantize_model
from torch_marlin_metal.ops.experts import moe_gemm
from torch_marlin_metal.ops.gemm import gemm, gemm_transposed
from torch_marlin_metal.ops.weights import embedding
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.quantize.weight import quantize_weight
from torch_marlin_metal.version import __version__

__all__ = [
    "WEIGHT_FORMATS",
    "MarlinEmbedding",
    "MarlinExperts",
    "MarlinLinear",
    "PackedWeight",
    "__version__",
    "convert",
    "cpu_capability",
    "embedding",
    "fuse_layers",
    "fuse_projections",
    "gemm",
    "gemm_transposed",
    "load_quantized",
    "moe_gemm",
    "ops",
    "prepare",
    "profiling",
    "quantize_model",
    "quantize_weight",
    "set_activations",
    "tuning",
    "xlstm",
]

if TYPE_CHECKING:
    from torch_marlin_metal import profiling, tuning, xlstm


def _read_saved_choices() -> None:
    from torch_marlin_metal.gpu.tuning.table import use_saved_once

    use_saved_once()


# The tuner's table is a file in the user's home. It is read when the planner first chooses a kernel for this machine's
# GPU, never at import.
if extension.refusal is None:
    extension.native.set_tuned_loader(_read_saved_choices)

LAZY = ("profiling", "tuning", "xlstm")  # imported on first use, because few programs need them


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
