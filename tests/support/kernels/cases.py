"""Pairwise test cases. Over all cases, each pair of values of any two axes occurs; a sample of the cases runs."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from allpairspy import AllPairs

from tests.support import reference
from tests.support.kernels.problems import Problem
from tests.support.reference import FIXED_GROUP_SIZES
from tests.support.samples import covering

FORMATS = reference.FORMATS
FLOATS = [torch.float16, torch.bfloat16, torch.float32]
# The dtypes and formats that the kernels for tensor units support.
TENSOR_FORMATS = [name for name in FORMATS if name != "lut4"]
TENSOR_FLOATS = [torch.float16, torch.bfloat16]

# The axes that all kernels share. The tests of one kernel add M, N, K and launch options.
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
    if weight_format in ("uint4_bias", "uint8_bias") and zeros_dtype is torch.uint8 and super_dtype is None:
        zeros_dtype = None
    fields |= {"group_size": group_size, "zeros_dtype": zeros_dtype, "super_dtype": super_dtype}
    return Problem(M=M, N=N, K=K, **fields)


def pairwise(axes: Mapping[str, Sequence[Any]], options: Sequence[str]) -> list[Any]:
    """Returns cases for `pytest.mark.parametrize(("problems", "options"), ...)`; `options` names the launch options.

    The sample contains each value of each axis. A case of the sample has three problems, which share one compiled
    kernel. The other cases have one problem and the mark `whole`: only `--everything` runs them.
    """
    names = list(axes)
    rows = [dict(zip(names, case, strict=True)) for case in AllPairs([_distinct(axes[n]) for n in names])]
    sample = covering([set(row.items()) for row in rows])
    cases = []
    for i, row in enumerate(rows):
        case = {name: value for name, (_, value) in row.items()}
        chosen = {n: case.pop(n) for n in options}
        p = problem(seed=i, **case)
        label = f"{p.weight_format}-{str(p.dtype)[6:]}-{p.M}x{p.N}x{p.K}-{i}"
        problems = [p, *_of_the_same_kind(p, axes)] if i in sample else [p]
        marks = () if i in sample else pytest.mark.whole
        cases.append(pytest.param(problems, chosen, id=label, marks=marks))
    return cases


def _of_the_same_kind(p: Problem, axes: Mapping[str, Sequence[Any]]) -> list[Problem]:
    """Returns two problems of other sizes that run the compiled kernel of `p`.

    The kernel's constants tell only whether N and K are multiples of some tile sizes.
    """

    def others(name: str, divisors: tuple[int, ...], least: int = 1, most: int = 1 << 16) -> list[int]:
        own = getattr(p, name)
        kind = [own % divisor == 0 for divisor in divisors]
        values = axes[name]
        around = [*values[values.index(own) + 1 :], *values[: values.index(own) + 1]]
        return [v for v in around if least <= v <= most and [v % divisor == 0 for divisor in divisors] == kind]

    # A group that covers all of K must still cover it, because kernels support no other group below 16. With scales of
    # two levels, a group has at most 256 k.
    one_group = p.group_size == p.K and p.weight_format not in FIXED_GROUP_SIZES
    least, most = (1, 256 if p.super_dtype else 1 << 16) if one_group else (p.group_size, 1 << 16)
    sizes = zip(
        itertools.cycle(others("M", ())), itertools.cycle(others("N", (4, 64, 128))),
        itertools.cycle(others("K", (16, 32, 64), least, most)),
    )  # fmt: skip
    return [
        replace(p, M=M, N=N, K=K, group_size=K if one_group else p.group_size) for M, N, K in itertools.islice(sizes, 2)
    ]


def pairs(**axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns few cases for `pytest.mark.parametrize` that contain each pair of values of any two axes."""
    return [tuple(case) for case in AllPairs(list(axes.values()))]


def sampled(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Marks cases for `pytest.mark.parametrize` as `whole`. The other cases have each value of each argument."""
    sample = covering([set(enumerate(map(str, case))) for case in cases])
    return [pytest.param(*case, marks=() if i in sample else pytest.mark.whole) for i, case in enumerate(cases)]


def _distinct(values: Sequence[Any]) -> list[tuple[int, Any]]:
    # Pairs each value with its index, so that a value that is listed twice is chosen twice as often.
    return list(enumerate(values))


def plain_problems(
    M: int, N: int, K: int, formats: Sequence[str] = FORMATS, dtypes: Sequence[torch.dtype] = FLOATS, **fields: Any
) -> list[Any]:
    """Returns a problem for each format and activation dtype.

    The sample has each dtype once, each with another format. The last dtype has uint4_bias, whose groups can be as
    long as K.
    """
    kinds = list(itertools.product(formats, dtypes))
    sample = set(zip([formats[2], formats[0], formats[4]], reversed(dtypes), strict=False))
    return [
        pytest.param(
            problem(M, N, K, weight_format=weight_format, dtype=dtype, **fields),
            id=f"{weight_format}-{str(dtype)[6:]}",
            marks=() if (weight_format, dtype) in sample else pytest.mark.whole,
        )
        for weight_format, dtype in kinds
    ]
