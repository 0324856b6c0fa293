"""Compares results of kernels with exact products. `doctor` and the tuner use the same bounds."""

from __future__ import annotations

import torch
from torch import Tensor

# The largest allowed error relative to the largest result, by activation dtype. For fp16 and bf16, it is four roundings
# to the dtype, because two_pass also rounds the weights. In fp32, most of the error comes from the sums.
LARGEST_ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}


def check(found: Tensor, expected: Tensor, what: str) -> float:
    """Returns the largest error of a result, relative to the largest exact result.

    Args:
        found: the result, on any device.
        expected: the exact result in fp64, on the CPU.
        what: the name of the product for the error message.

    Raises:
        RuntimeError: the error is not below `LARGEST_ERROR` for the result's dtype.
    """
    bound = LARGEST_ERROR[found.dtype]
    error: float = ((found.cpu().double() - expected).abs().max() / expected.abs().max()).item()
    if not error < bound:  # also true for NaN
        raise RuntimeError(f"{what}: expected an error below {bound} of the largest result, got {error:.4g}")
    return error
