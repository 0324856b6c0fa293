"""4-bit weights multiplied with fp16, bf16 and fp32 activations, as PyTorch operators for Apple GPUs and CPUs."""

from torch_marlin_metal.extension import CpuCapability, cpu_capability
from torch_marlin_metal.formats import GROUP_SIZES, WEIGHT_FORMATS, WeightFormat, weight_format
from torch_marlin_metal.ops import (
    awq_repack,
    awq_unpack_zeros,
    dequantize,
    gemm,
    gptq_repack,
    gptq_unpack_zeros,
)
from torch_marlin_metal.version import __version__

__all__ = [
    "GROUP_SIZES",
    "WEIGHT_FORMATS",
    "CpuCapability",
    "WeightFormat",
    "__version__",
    "awq_repack",
    "awq_unpack_zeros",
    "cpu_capability",
    "dequantize",
    "gemm",
    "gptq_repack",
    "gptq_unpack_zeros",
    "weight_format",
]
