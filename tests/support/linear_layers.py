"""Layers with random weights for the tests of MarlinLinear."""

import numpy as np
import torch

from tests.support.reference import make_weight
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.packed_weight import PackedWeight

K, N = 136, 72


def packed_of(
    weight_format: str, *, perm: bool = False, bias: bool = True, device: str = "cpu", K: int = K, N: int = N, **kw
):
    """Returns a random weight in two forms: as a reference.Weight, and as a PackedWeight."""
    if weight_format == "nvfp4":
        kw.setdefault("global_scale_shape", (1,))
    weight = make_weight(weight_format, K, N, 64, **kw)
    rng = np.random.default_rng(7)
    order = torch.from_numpy(rng.permutation(K).astype(np.int32)) if perm else None
    offset = torch.from_numpy(rng.standard_normal(N)).float() if bias else None
    packed = PackedWeight(b_packed=weight.b_packed, scales=weight.scales, perm=order, bias=offset, **weight.arguments)
    return weight, packed.to(device)


def layer_of(weight_format: str = "uint4", device: str = "cpu", **kw) -> MarlinLinear:
    return MarlinLinear.from_packed(packed_of(weight_format, device=device, **kw)[1])


def activations(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal(shape)).to(dtype).to(device)
