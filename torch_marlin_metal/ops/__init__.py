"""The operators as Python functions, one module per family: `weights`, `gemm`, `experts`, `decoder`, `mlstm`.

Functions on packed weights have a `PackedWeight` argument. `torch.ops.torch_marlin_metal.*` are the same operators with
the weight's tensors as separate arguments. The C++ extension registers their schemas, checks, fake kernels, autograd
and autocast.
"""

from torch_marlin_metal.ops.decoder import add_rms_norm, gated_activation, rms_norm, rotary, write_cache
from torch_marlin_metal.ops.experts import moe_gemm_gated
from torch_marlin_metal.ops.weights import (
    awq_repack,
    awq_unpack_zeros,
    gptq_repack,
    gptq_unpack_zeros,
    transpose_words,
)
from torch_marlin_metal.repack import gptq_perm

__all__ = [
    "add_rms_norm",
    "awq_repack",
    "awq_unpack_zeros",
    "gated_activation",
    "gptq_perm",
    "gptq_repack",
    "gptq_unpack_zeros",
    "moe_gemm_gated",
    "rms_norm",
    "rotary",
    "transpose_words",
    "write_cache",
]
