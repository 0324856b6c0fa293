"""Pairwise test cases: for any two axes, each pair of their values occurs in at least one case."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from allpairspy import AllPairs

from tests.support.kernels.launch import facts
from tests.support.kernels.problems import Problem

FORMATS = facts()["formats"][:-1]
FLOATS = [torch.float16, torch.bfloat16, torch.float32]
# What the kernels for tensor units multiply.
TENSOR_FORMATS = [name for name in FORMATS if name != "lut4"]
TENSOR_FLOATS = [torch.float16, torch.bfloat16]
FIXED_GROUP_SIZES = {"nvfp4": 16, "mxfp4": 32}

# The axes that all kernels have. The tests of one kernel add M, N, K and launch options.
COMMON: dict[str, Sequence[Any]] = {
    "weight_format": FORMATS,
    "dtype": FLOATS,
    "group_size": [16, 32, 64, 128, 256, "K"],
    "scales_dtype": FLOATS,
    "zeros_dtype": [torch.uint8, *FLOATS],
    "super_dtype": [None, None, *FLOATS],
    "global_scale": [None, (), (1,), (-1,)],
    "bias_dtype": [None, *FLOATS],
    "has_perm": [False, True],
    "a_offset": [0, 1, 4],
    "a_gap": [0, 3, 8],
    "vectors": [True, True, False],
    "all_positive": [False, True],
}


def problem(M: int, N: int, K: int, **fields: Any) -> Problem:
    weight_format, group_size = fields["weight_format"], fields.get("group_size", 64)
    group_size = FIXED_GROUP_SIZES.get(weight_format, K if group_size == "K" else min(group_size, K))
    zeros_dtype, super_dtype = fields.get("zeros_dtype"), fields.get("super_dtype")
    if super_dtype is not None:
        if weight_format in FIXED_GROUP_SIZES or group_size > 256:
            super_dtype = None
        else:
            fields["scales_dtype"] = torch.int8 if super_dtype is torch.float16 else torch.uint8
    if weight_format == "uint4_bias" and zeros_dtype is torch.uint8 and super_dtype is None:
        zeros_dtype = None
    fields |= {"group_size": group_size, "zeros_dtype": zeros_dtype, "super_dtype": super_dtype}
    return Problem(M=M, N=N, K=K, **fields)


def pairwise(axes: Mapping[str, Sequence[Any]], options: Sequence[str]) -> list[Any]:
    """Returns cases for `pytest.mark.parametrize(("problem", "options"), ...)`; `options` names the launch options."""
    names = list(axes)
    cases = []
    for i, values in enumerate(AllPairs([_distinct(axes[n]) for n in names])):
        case = dict(zip(names, (v for _, v in values), strict=True))
        chosen = {n: case.pop(n) for n in options}
        p = problem(seed=i, **case)
        label = f"{p.weight_format}-{str(p.dtype)[6:]}-{p.M}x{p.N}x{p.K}-{i}"
        cases.append(pytest.param(p, chosen, id=label))
    return cases


def pairs(**axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns few cases for `pytest.mark.parametrize`. For any two axes, the cases contain each pair of values."""
    return [tuple(case) for case in AllPairs(list(axes.values()))]


def _distinct(values: Sequence[Any]) -> list[tuple[int, Any]]:
    # Pairs each value with its index, so that equal values stay distinct: a value that is listed twice is then chosen
    # twice as often.
    return list(enumerate(values))


def plain_problems(
    M: int, N: int, K: int, formats: Sequence[str] = FORMATS, dtypes: Sequence[torch.dtype] = FLOATS, **fields: Any
) -> list[Any]:
    """Returns a problem for each format with each activation dtype."""
    return [
        pytest.param(
            problem(M, N, K, weight_format=weight_format, dtype=dtype, **fields),
            id=f"{weight_format}-{str(dtype)[6:]}",
        )
        for weight_format, dtype in itertools.product(formats, dtypes)
    ]
