"""Decodes layers of checkpoint directories in NumPy, by the definitions of their formats."""

from collections.abc import Mapping

import numpy as np
import torch

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def decoded(tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Returns the weight `[N, K]` in fp64 of a layer with E4M3 codes, NVFP4 codes, or GPTQ's integers of 4 or 8 bits."""
    if "qweight" in tensors:
        return _gptq(tensors)
    if "weight_packed" in tensors:
        pairs = tensors["weight_packed"].numpy()
        codes = np.stack((pairs & 15, pairs >> 4), 2).reshape(len(pairs), -1)
        values = np.where(codes & 8, -1, 1) * E2M1[codes & 7]
        return values * _wide(tensors["weight_scale"]).repeat(16, 1) / float(tensors["weight_global_scale"])
    codes = _wide(tensors["weight"])
    scales = _wide(tensors.get("weight_scale_inv", tensors.get("weight_scale")))
    for axis, size in enumerate(codes.shape):
        scales = scales.repeat(-(-size // scales.shape[axis]), axis)
    return codes * scales


def _gptq(tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Decodes GPTQ's version 1, which stores each zero point minus one."""
    words, groups = tensors["qweight"].numpy(), tensors["g_idx"].numpy()
    bits = 32 * len(words) // len(groups)
    codes = _fields(words, bits, 0).reshape(len(groups), -1)
    zeros = _fields(tensors["qzeros"].numpy(), bits, 1).reshape(-1, codes.shape[1]) + 1
    return ((codes - zeros[groups]) * _wide(tensors["scales"])[groups]).T


def _fields(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Unpacks the fields of words along an axis. The lowest bits of a word are the first field."""
    parts = [(words.astype(np.int64) >> shift) & ((1 << bits) - 1) for shift in range(0, 32, bits)]
    return np.stack(parts, axis + 1)


def _wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()
