"""How far the result of a kernel may be from the exact product. `doctor` and the tuner compare results with it."""

import torch
from torch import Tensor

# The largest error, as a part of the largest result, by the dtype of the activations. It leaves room for four roundings
# to the dtype: two_pass rounds the weights, too. Of fp32, most of the error is that of the sums.
LARGEST_ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}


def error(found: Tensor, expected: Tensor) -> float:
    """Returns the largest error of a result, as a part of the largest exact result; NaN if the result has a NaN.

    Args:
        found: the result, on any device.
        expected: the exact result in fp64, on the CPU.
    """
    largest: float = ((found.cpu().double() - expected).abs().max() / expected.abs().max()).item()
    return largest
