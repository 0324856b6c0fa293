"""The alternatives that `bench` measures: PyTorch's dense product, its 4-bit operator, and `two_pass`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.gpu.tuning.chains import (
    COLD_BYTES,
    Chain,
    cold_copies,
    gemm_chain,
    product_chain,
    rotating,
)
from torch_marlin_metal.packed_weight import PackedWeight

OURS = "torch_marlin_metal"
ATEN_GROUP_SIZES = (32, 64, 128, 256)


class NoPeer(Exception):
    """An alternative cannot compute the product on this machine. The message is the reason."""


def rivals(weight: PackedWeight, a: Tensor, cold_bytes: int = COLD_BYTES) -> tuple[dict[str, Chain], dict[str, str]]:
    """Makes a chain of products for this package, and for each alternative that supports the product.

    Alternatives use random weights of the same shape and group size, dense or in their own 4-bit format.

    Args:
        weight: a weight on the device of `a`.
        a: activations `[M, K]` on "mps" or "cpu".
        cold_bytes: total bytes of the weight's clones, which the chain uses in turn.

    Returns:
        The chains by name, with this package first, and the reasons for missing alternatives by name.
    """
    weights = rotating(weight, cold_bytes)
    chains = {OURS: gemm_chain(a, weights)}
    missing = {}
    makers: dict[str, Callable[[PackedWeight, Tensor, int], Chain]] = {
        "torch dense": _dense,
        "two_pass": _two_pass,
        "torch int4": _aten,
    }
    for name, make in makers.items():
        try:
            chains[name] = make(weight, a, cold_bytes)
        except NoPeer as error:
            missing[name] = str(error)
    return chains, missing


def _dense(weight: PackedWeight, a: Tensor, cold_bytes: int) -> Chain:
    copies = cold_copies([torch.randn(weight.N, weight.K, dtype=a.dtype, device=a.device)], cold_bytes)
    return product_chain(a, lambda state, index: torch.nn.functional.linear(state, copies[index % len(copies)][0]))


def _two_pass(weight: PackedWeight, a: Tensor, cold_bytes: int) -> Chain:
    if a.device.type != "mps":
        raise NoPeer("a variant on mps only")
    return gemm_chain(a, rotating(weight, cold_bytes), "two_pass")


def _aten(weight: PackedWeight, a: Tensor, cold_bytes: int) -> Chain:
    if weight.group_size not in ATEN_GROUP_SIZES:
        raise NoPeer(f"group_size {weight.group_size} is none of {ATEN_GROUP_SIZES}")
    aten: Any = torch.ops.aten
    groups = weight.K // weight.group_size
    scales_and_zeros = torch.rand(groups, weight.N, 2, dtype=a.dtype, device=a.device)
    try:
        if a.device.type == "cpu":
            packed = aten._convert_weight_to_int4pack_for_cpu(_random((weight.N, weight.K), 16, torch.int32), 1)
            product = aten._weight_int4pack_mm_for_cpu
        else:
            codes = _random((weight.N, weight.K // 2), 256, torch.uint8).to(a.device)
            packed = aten._convert_weight_to_int4pack(codes, 2)
            product = aten._weight_int4pack_mm
        product(a, packed, weight.group_size, scales_and_zeros)
    except (RuntimeError, NotImplementedError) as error:
        raise NoPeer(str(error).splitlines()[0]) from error
    copies = cold_copies([packed], cold_bytes)
    return product_chain(
        a,
        lambda state, index: product(state, copies[index % len(copies)][0], weight.group_size, scales_and_zeros),
    )


def _random(shape: tuple[int, int], end: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(0, end, shape, dtype=dtype, device="cpu")
