"""4-bit weights multiplied with fp16, bf16 and fp32 activations, as PyTorch operators for Apple GPUs and CPUs."""

from torch_marlin_metal import convert, profiling, tuning
from torch_marlin_metal.extension import CpuCapability, cpu_capability
from torch_marlin_metal.formats import GROUP_SIZES, WEIGHT_FORMATS, WeightFormat, weight_format
from torch_marlin_metal.fuse import fuse_projections
from torch_marlin_metal.linear import MarlinLinear
from torch_marlin_metal.load import load_quantized
from torch_marlin_metal.mlstm_layer import MLSTMCell, MLSTMLayer
from torch_marlin_metal.mlstm_ops import MLSTMState, mlstm, mlstm_output, mlstm_states, mlstm_step
from torch_marlin_metal.model import quantize_model, replace_linear_layers
from torch_marlin_metal.ops import (
    awq_repack,
    awq_unpack_zeros,
    dequantize,
    gemm,
    gptq_repack,
    gptq_unpack_zeros,
    transpose_words,
)
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.planning import plan
from torch_marlin_metal.quantize import quantize_weight
from torch_marlin_metal.repack import gptq_perm
from torch_marlin_metal.version import __version__

__all__ = [
    "GROUP_SIZES",
    "WEIGHT_FORMATS",
    "CpuCapability",
    "MLSTMCell",
    "MLSTMLayer",
    "MLSTMState",
    "MarlinLinear",
    "PackedWeight",
    "WeightFormat",
    "__version__",
    "awq_repack",
    "awq_unpack_zeros",
    "convert",
    "cpu_capability",
    "dequantize",
    "fuse_projections",
    "gemm",
    "gptq_perm",
    "gptq_repack",
    "gptq_unpack_zeros",
    "load_quantized",
    "mlstm",
    "mlstm_output",
    "mlstm_states",
    "mlstm_step",
    "plan",
    "profiling",
    "quantize_model",
    "quantize_weight",
    "replace_linear_layers",
    "transpose_words",
    "tuning",
    "weight_format",
]

tuning.use_saved()
