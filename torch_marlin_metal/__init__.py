"""4-bit weights multiplied with fp16, bf16 and fp32 activations, as PyTorch operators for Apple GPUs and CPUs."""

import importlib
from typing import TYPE_CHECKING, Any

from torch_marlin_metal import source_tree  # noqa: F401  before all others: it may change where they come from

# isort: split
from torch_marlin_metal import interrupt  # noqa: F401  before the imports that load torch

# isort: split
from torch_marlin_metal.extension import CpuCapability, cpu_capability  # before the modules that use operators

# isort: split
from torch_marlin_metal import convert, extension
from torch_marlin_metal.formats import GROUP_SIZES, WEIGHT_FORMATS, WeightFormat, weight_format
from torch_marlin_metal.fuse.layers import FusedLayersReport, fuse_layers
from torch_marlin_metal.gpu.planning import plan
from torch_marlin_metal.layers.embedding import MarlinEmbedding
from torch_marlin_metal.layers.experts import ExpertWeights, MarlinExperts
from torch_marlin_metal.layers.fuse import fuse_projections
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.load.quantized import load_quantized
from torch_marlin_metal.models.prepare import prepare
from torch_marlin_metal.models.quantize import quantize_model, replace_linear_layers
from torch_marlin_metal.ops.decoder import add_rms_norm, gated_activation, rms_norm, rotary, write_cache
from torch_marlin_metal.ops.experts import moe_gemm, moe_gemm_gated
from torch_marlin_metal.ops.gemm import gemm, gemm_transposed
from torch_marlin_metal.ops.mlstm import MLSTMState, mlstm, mlstm_output, mlstm_states, mlstm_step
from torch_marlin_metal.ops.weights import (
    awq_repack,
    awq_unpack_zeros,
    dequantize,
    embedding,
    gptq_repack,
    gptq_unpack_zeros,
    transpose_words,
)
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.quantize.weight import quantize_weight
from torch_marlin_metal.repack import gptq_perm
from torch_marlin_metal.version import __version__
from torch_marlin_metal.xlstm.layer import MLSTMCell, MLSTMLayer

__all__ = [
    "GROUP_SIZES",
    "WEIGHT_FORMATS",
    "CpuCapability",
    "ExpertWeights",
    "FusedLayersReport",
    "MLSTMCell",
    "MLSTMLayer",
    "MLSTMState",
    "MarlinEmbedding",
    "MarlinExperts",
    "MarlinLinear",
    "PackedWeight",
    "WeightFormat",
    "__version__",
    "add_rms_norm",
    "awq_repack",
    "awq_unpack_zeros",
    "convert",
    "cpu_capability",
    "dequantize",
    "embedding",
    "fuse_layers",
    "fuse_projections",
    "gated_activation",
    "gemm",
    "gemm_transposed",
    "gptq_perm",
    "gptq_repack",
    "gptq_unpack_zeros",
    "load_quantized",
    "mlstm",
    "mlstm_output",
    "mlstm_states",
    "mlstm_step",
    "moe_gemm",
    "moe_gemm_gated",
    "plan",
    "prepare",
    "profiling",
    "quantize_model",
    "quantize_weight",
    "replace_linear_layers",
    "rms_norm",
    "rotary",
    "transpose_words",
    "tuning",
    "weight_format",
    "write_cache",
]

if TYPE_CHECKING:
    from torch_marlin_metal import profiling, tuning


def _read_saved_choices() -> None:
    from torch_marlin_metal.gpu.tuning.table import use_saved_once

    use_saved_once()


# The tuner's table is a file in the user's home. It is read when the planner first chooses a kernel for this machine's
# GPU, never at import.
if extension.refusal is None:
    extension.native.set_tuned_loader(_read_saved_choices)

LAZY = ("profiling", "tuning")  # imported on first use, because few programs need them


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
