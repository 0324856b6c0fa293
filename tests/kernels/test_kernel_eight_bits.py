"""Products with codes of 5, 6 and 8 bits agree with fp64: every code, and a sample of shapes, groups and dtypes."""

import random

import numpy as np
import pytest
import torch

from tests.kernels.test_kernel_products import (
    DIRECT_LAUNCH,
    FUSED_AXES,
    GEMV_AXES,
    STRADDLING_K,
    TENSOR_AXES,
    TENSOR_LAUNCH,
    TILE_AXES,
    TILE_LAUNCH,
    run,
)
from tests.kernels.test_kernel_values import LOADS, RUNS, widest
from tests.support import reference
from tests.support.kernels.cases import problem
from tests.support.kernels.problems import (
    Inputs,
    check,
    check_dequantize,
    make_inputs,
    run_dequantize,
    run_embedding,
)
from tests.support.kernels.tiles import STAGED, STRIPED

# Formats of 5 and 6 bits differ from each other and from formats of 8 bits only in the planes, so a sample is enough.
SAMPLE = (*reference.EIGHT_BITS, "uint5", "uint6_bias")
KERNELS = {
    "gemv": (GEMV_AXES, DIRECT_LAUNCH),
    "fused": (FUSED_AXES, DIRECT_LAUNCH),
    "tensor": (TENSOR_AXES, TENSOR_LAUNCH),
    STAGED[0]: (TILE_AXES, TILE_LAUNCH),
    STRIPED[0]: (TILE_AXES, TILE_LAUNCH),
}
BLOCKS = {"weight_format": "float8_e4m3", "group_size": 128, "block_scales": True}


def every_code(K: int, N: int, weight_format: str) -> np.ndarray:
    """Returns all codes of a format, in turn along each column."""
    codes = (np.arange(K)[:, None] + np.arange(N)[None, :]) % (1 << reference.code_bits(weight_format))
    return codes.astype(np.uint8)


@pytest.mark.parametrize("weight_format", ["uint8b128", "float8_e4m3", "uint5b16", "uint6b32"])
@pytest.mark.parametrize("kernel", RUNS)
def test_every_code(kernel: str, weight_format: str) -> None:
    """With the identity matrix as activations, the product is the weight, rounded once from its exact value."""
    p = problem(256, 4, 256, weight_format=weight_format, dtype=widest(kernel), group_size=16)
    codes = every_code(p.K, p.N, weight_format)
    if weight_format == "float8_e4m3":
        codes[codes & 127 == 127] -= 1  # NaN codes would make every row NaN
    weight = reference.make_weight(weight_format, p.K, p.N, p.group_size, codes=codes)
    inputs = Inputs(torch.eye(p.K, dtype=p.dtype), weight, None, None)
    assert torch.equal(RUNS[kernel](p, inputs=inputs), torch.from_numpy(weight.exact).float().to(p.dtype))


@pytest.mark.parametrize("weight_format", SAMPLE)
@pytest.mark.parametrize("kernel", KERNELS)
def test_shapes_agree_with_fp64(kernel: str, weight_format: str) -> None:
    axes, launch = KERNELS[kernel]
    draw = random.Random(f"{kernel} {weight_format}")
    fields = {name: draw.choice(values) for name, values in (axes | STRADDLING_K).items()}
    fields["weight_format"] = weight_format
    options = {name: fields.pop(name) for name in launch} | {"kernel": kernel}
    check(p := problem(**fields), run(problem=p, **options), raw_codes=kernel == "gemv")


@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [name for name in RUNS if not name.endswith("_or_form")])
def test_scales_of_blocks(kernel: str, scales_dtype: torch.dtype) -> None:
    """The last group is short, and simdgroups begin inside a block of columns."""
    p = problem(5, 384, 328, dtype=widest(kernel), bias_dtype=torch.float16, scales_dtype=scales_dtype, **BLOCKS)
    check(p, RUNS[kernel](p), raw_codes=kernel == "gemv")


def test_rows_and_columns_decode_with_scales_of_blocks() -> None:
    p = problem(1, 384, 328, dtype=torch.float32, scales_dtype=torch.float32, **BLOCKS)
    check_dequantize(p)
    ids = torch.tensor([0, 127, 128, 383])
    error = reference.to_numpy(run_embedding(p, ids)) - make_inputs(p).weight.exact.T[ids]
    assert (np.abs(error) <= 2.0**-23 * make_inputs(p).weight.magnitude.T[ids]).all()


@pytest.mark.parametrize("kernel", LOADS)
def test_nan_codes_reach_their_column_and_no_other(kernel: str) -> None:
    p = problem(5, 40, 72, weight_format="mxfp8", dtype=widest(kernel), group_size=32)
    inputs = make_inputs(p)
    words = inputs.weight.b_packed.clone()
    columns = {7: 0x7F, 12: 0xFF, 21: 0xFF, 30: 0x7F}  # one code for each byte of a word
    for column, code in columns.items():
        words.numpy().view(np.uint8).reshape(p.K // 4, p.N, 4)[column % 18, column, column % 4] = code
    weight = reference.replace(inputs.weight, b_packed=words)
    got = RUNS[kernel](p, inputs=Inputs(inputs.a, weight, None, None))
    assert got.isnan().all(0).nonzero().flatten().tolist() == list(columns)
    assert not got.isnan().any(0)[[n for n in range(p.N) if n not in columns]].any()


def test_dequantize_every_code() -> None:
    for weight_format in ("uint8", "float8_e4m3", "uint5", "uint6_bias"):
        p = problem(1, 65, 256, weight_format=weight_format, dtype=torch.float32, group_size=16)
        codes = every_code(p.K, p.N, weight_format)
        weight = reference.make_weight(weight_format, p.K, p.N, p.group_size, codes=codes)
        got = reference.to_numpy(run_dequantize(p, inputs=Inputs(torch.empty(0), weight, None, None)))
        assert np.array_equal(np.isnan(got), np.isnan(weight.exact))
        known = ~np.isnan(weight.exact)
        assert (np.abs(got - weight.exact)[known] <= 2.0**-23 * weight.magnitude[known]).all()
