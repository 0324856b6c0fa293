"""Every entry point applies the same rule for group sizes and raises the operators' error."""

from dataclasses import replace

import pytest
import torch

import torch_marlin_metal as tmm
from torch_marlin_metal.formats import WEIGHT_FORMATS, resolve_group_size

OPS = torch.ops.torch_marlin_metal

K, N = 64, 8


def entry_points(weight_format: str, group_size: int) -> dict:
    good = tmm.quantize_weight(torch.ones(N, K), weight_format)
    floats = torch.ones(1, K)
    return {
        "operator": lambda: OPS.gemm(
            floats, good.b_packed, good.scales, weight_format=weight_format, group_size=group_size
        ),
        "gemm": lambda: tmm.gemm(floats, replace(good, group_size=group_size)),
        "quantize_weight": lambda: tmm.quantize_weight(torch.ones(N, K), weight_format, group_size),
        "MarlinLinear": lambda: tmm.MarlinLinear(K, N, weight_format=weight_format, group_size=group_size),
        "PackedWeight": lambda: replace(good, group_size=group_size).validate(),
        "plan": lambda: tmm.profiling.plan(1, N, K, weight_format=weight_format, group_size=group_size, gpu="M1"),
    }


@pytest.mark.parametrize(
    ("weight_format", "group_size", "rule"),
    [
        ("uint4b8", 48, "group_size: expected one of 16, 32, 64, 128, 256, or K = 64 for uint4b8, got 48"),
        ("uint4b8", 0, "group_size: expected one of 16, 32, 64, 128, 256, or K = 64 for uint4b8, got 0"),
        ("nvfp4", 32, "group_size: expected 16 for nvfp4, got 32"),
    ],
)
def test_every_entry_point_refuses_a_group_size_in_the_same_words(weight_format, group_size, rule) -> None:
    for name, call in entry_points(weight_format, group_size).items():
        with pytest.raises(ValueError, match="group_size") as caught:
            call()
        assert rule in str(caught.value), name


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_none_is_the_formats_own_size_or_128_and_minus_one_is_k(weight_format) -> None:
    fmt = WEIGHT_FORMATS[weight_format]
    assert resolve_group_size("test", fmt, None, 512) == (fmt.fixed_group_size or 128)
    if fmt.fixed_group_size is None:
        assert resolve_group_size("test", fmt, -1, 72) == 72
        assert tmm.profiling.plan(1, N, 72, weight_format=weight_format, group_size=-1, gpu="M1").group_size == 72
    else:
        with pytest.raises(ValueError, match=f"expected {fmt.fixed_group_size} for {weight_format}, got 72"):
            resolve_group_size("test", fmt, -1, 72)
