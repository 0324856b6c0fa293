"""embedding decodes rows of a packed table to the same bits as dequantize, and refuses wrong ids."""

import re

import numpy as np
import pytest
import torch

import torch_marlin_metal  # noqa: F401  registers the operators
from tests.support import reference

OPS = torch.ops.torch_marlin_metal


def table(weight_format: str, K: int = 72, N: int = 41, **options) -> reference.Weight:
    options |= {"global_scale_shape": (-1,)} if weight_format == "nvfp4" else {}
    return reference.make_weight(weight_format, K, N, 16, **options)


def look_up(ids: torch.Tensor, weight: reference.Weight, device: str, **options) -> torch.Tensor:
    moved = weight.to(device)
    return OPS.embedding(ids.to(device), moved.b_packed, moved.scales, **{**moved.arguments, **options})


# Each weight format once, and each dtype of rows and scales once. More pairs would need more compiled kernels on the
# software device.
PAIRS = list(zip(reference.FORMATS, 3 * reference.DTYPES, strict=False))


@pytest.mark.parametrize(("weight_format", "dtype"), PAIRS)
def test_rows_are_the_exact_weight_rounded_once(weight_format, dtype, device):
    weight = table(weight_format, scales_dtype=dtype)
    ids = torch.tensor([[0, 40, 7], [7, 1, 39]])
    perm = np.random.default_rng(1).permutation(72).astype(np.int32)
    expected, magnitude = np.empty((72, 41)), np.empty((72, 41))
    expected[perm], magnitude[perm] = weight.exact, weight.magnitude
    got = look_up(ids, weight, device, perm=torch.from_numpy(perm).to(device), dtype=dtype)
    assert (got.shape, got.dtype) == ((2, 3, 72), dtype)
    rows = expected.T[ids.numpy()]
    # embedding rounds at most twice in fp32, after a product and after a sum. It then rounds to the output's dtype.
    bound = 2.0**-23 * magnitude.T[ids.numpy()]
    bound += reference.UNIT_ROUNDOFF[dtype] * np.abs(rows) + reference.TINY[dtype]
    reference.check_gemm(got, rows, bound)
    dense = OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments, perm=torch.from_numpy(perm), dtype=dtype)
    assert torch.equal(got.cpu(), dense.T[ids])


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
@pytest.mark.parametrize("scales_dtype", reference.DTYPES, ids=str)
@pytest.mark.parametrize("weight_format", reference.FORMATS)
def test_rows_have_the_bits_of_dequantize(weight_format, scales_dtype, dtype):
    weight = table(weight_format, scales_dtype=scales_dtype)
    dense = OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments, dtype=dtype)
    assert torch.equal(look_up(torch.arange(41), weight, "cpu", dtype=dtype), dense.T)


@pytest.mark.parametrize("ids", [
    torch.tensor(5), torch.tensor([], dtype=torch.int64), torch.tensor([[1], [2]], dtype=torch.int32),
    torch.arange(40)[::3], torch.arange(24, dtype=torch.int32).reshape(2, 12).t(), torch.zeros(2, 0, 3, dtype=torch.int32),
], ids=["scalar", "empty", "int32", "strided", "transposed", "no rows"])  # fmt: skip
def test_ids_of_any_shape_and_strides(ids, device):
    weight = table("uint4")
    dense = OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments, dtype=torch.float32).T
    got = look_up(ids, weight, device, dtype=torch.float32)
    assert torch.equal(got.cpu(), dense[ids.long()])


@pytest.mark.parametrize("wrong", [-1, 41, 2**32 + 1])
def test_ids_outside_the_table(wrong, device):
    ids = torch.tensor([3, wrong])
    weight = table("uint4b8")
    if device == "cpu":
        message = f"torch_marlin_metal::embedding: ids: expected values in [0, N) with N = 41, got {wrong}"
        with pytest.raises(IndexError, match=re.escape(message)):
            look_up(ids, weight, device)
    else:
        got = look_up(ids, weight, device).cpu()
        assert got[1].isnan().all()
        assert torch.equal(got[:1], look_up(ids[:1], weight, "cpu"))


@pytest.mark.parametrize(("changes", "message"), [
    ({"ids": torch.tensor([1.0])}, "ids: expected int32 or int64 of any shape, got float32 [1]"),
    ({"ids": torch.tensor([True])}, "ids: expected int32 or int64 of any shape, got bool [1]"),
    ({"dtype": torch.float64}, "dtype: expected float16, bfloat16 or float32, got float64"),
    ({"group_size": 48}, "group_size: expected one of 16, 32, 64, 128, 256, or K = 72 for uint4, got 48"),
    ({"zeros": None}, "zeros: expected uint8 codes or float16, bfloat16 or float32 zero points [G, N] for uint4, got None"),
])  # fmt: skip
def test_wrong_arguments_are_named(changes, message, device):
    changes = dict(changes)
    ids = changes.pop("ids", torch.tensor([1]))
    with pytest.raises(ValueError, match=re.escape(f"torch_marlin_metal::embedding: {message}")):
        look_up(ids, table("uint4"), device, **changes)


def test_tensors_on_two_devices_are_refused(mps):
    weight = table("uint4b8")
    with pytest.raises(ValueError, match="embedding: b_packed: expected a tensor on mps"):
        OPS.embedding(torch.tensor([1], device=mps), weight.b_packed, weight.scales, **weight.arguments)


def test_meta_tensors():
    weight = table("nvfp4").to("meta")
    rows = OPS.embedding(torch.empty(2, 5, dtype=torch.int32, device="meta"), weight.b_packed, weight.scales,
                         **weight.arguments, dtype=torch.bfloat16)  # fmt: skip
    assert (rows.shape, rows.dtype, rows.device.type) == ((2, 5, 72), torch.bfloat16, "meta")


def test_more_rows_than_one_thread_takes():
    weight = table("uint4_bias", K=256, N=512)
    ids = torch.randint(512, (3000,), generator=torch.Generator().manual_seed(0))
    dense = OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments, dtype=torch.float16).T
    assert torch.equal(look_up(ids, weight, "cpu"), dense[ids])
