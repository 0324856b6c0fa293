"""Checkpoints of many shapes that an independent packer wrote decode to the expected fp32 bits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import checkpoint_writers as writers
from tests.support.checkpoint_writers import LAYER
from torch_marlin_metal import convert
from torch_marlin_metal.packed_weight import PackedWeight

EXAMPLES = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
SEEDS = st.integers(0, 2**32 - 1)
K_SIZES = st.sampled_from([8, 64, 72, 200, 256, 384, 896])
N_SIZES = st.sampled_from([8, 24, 48, 200])
GROUPS = st.sampled_from([-1, 16, 32, 64, 96, 128, 256, 512])
DTYPES = st.sampled_from(["fp16", "bf16", "fp32"])


def read_one(path: Path, **options) -> PackedWeight:
    (weight,) = convert.read_layers(path, **options)
    assert isinstance(weight, PackedWeight)
    assert weight.name == LAYER
    return weight


def assert_equal(weight: PackedWeight, expected: np.ndarray) -> None:
    """Compares fp32 bits, except for the sign of zeros."""
    decoded = weight.dequantize().t().numpy()
    assert decoded.shape == expected.shape
    np.testing.assert_array_equal(decoded, expected.astype(np.float32))


@EXAMPLES
@given(seed=SEEDS, K=K_SIZES, N=N_SIZES, group=GROUPS, dtype=DTYPES, version=st.sampled_from([1, 2]), data=st.data())
@pytest.mark.filterwarnings("ignore:.*raw zero points of 15")
def test_gptq(tmp_path, seed, K, N, group, dtype, version, data) -> None:
    sym, act_order = data.draw(st.booleans()), data.draw(st.booleans())
    with_g_idx = act_order or data.draw(st.booleans())
    rng = np.random.default_rng(seed)
    options = {"version": version, "sym": sym, "act_order": act_order, "dtype": dtype, "with_g_idx": with_g_idx}
    expected = writers.write_gptq(tmp_path, rng, K, N, group, **options)
    weight = read_one(tmp_path)
    assert weight.weight_format == ("uint4b8" if sym else "uint4")
    assert weight.scales.dtype == writers.FLOATS[dtype]
    assert_equal(weight, expected)


@EXAMPLES
@given(seed=SEEDS, K=K_SIZES, N=N_SIZES, group=GROUPS, dtype=DTYPES)
def test_awq_gemm(tmp_path, seed, K, N, group, dtype) -> None:
    expected = writers.write_awq(tmp_path, np.random.default_rng(seed), K, N, group, dtype=dtype)
    weight = read_one(tmp_path)
    assert weight.scales.dtype == writers.FLOATS[dtype]
    assert_equal(weight, expected)


@EXAMPLES
@given(
    seed=SEEDS,
    K=st.sampled_from([64, 128, 192, 512, 1024]),
    N=st.sampled_from([4, 12, 48]),
    group=st.sampled_from([32, 64, 128, -1]),
    version=st.sampled_from(["gemv", "gemv_fast"]),
)
def test_awq_gemv(tmp_path, seed, K, N, group, version) -> None:
    expected = writers.write_awq(tmp_path, np.random.default_rng(seed), K, N, group, version=version)
    weight = read_one(tmp_path)
    assert weight.weight_format == "uint4"  # the reader finds integer zero points, although the file may store z * s
    assert_equal(weight, expected)


@EXAMPLES
@given(seed=SEEDS, K=K_SIZES, N=st.sampled_from([1, 8, 20, 200]), group=GROUPS, dtype=DTYPES, data=st.data())
def test_compressed_tensors_int4(tmp_path, seed, K, N, group, dtype, data) -> None:
    sym, act_order = data.draw(st.booleans()), data.draw(st.booleans())
    rng = np.random.default_rng(seed)
    expected = writers.write_compressed_tensors(tmp_path, rng, K, N, group, sym=sym, act_order=act_order, dtype=dtype)
    assert_equal(read_one(tmp_path), expected)


@EXAMPLES
@given(
    seed=SEEDS,
    K=st.sampled_from([16, 48, 64, 320, 896]),
    N=st.sampled_from([1, 16, 48, 130]),
    container=st.sampled_from(["compressed-tensors", "modelopt", "torchao", "torchao-swizzled", "mlx"]),
)
def test_nvfp4(tmp_path, seed, K, N, container) -> None:
    expected = writers.write_nvfp4(tmp_path, np.random.default_rng(seed), K, N, container=container)
    weight = read_one(tmp_path)
    assert weight.weight_format == "nvfp4"
    assert_equal(weight, expected)


@EXAMPLES
@given(
    seed=SEEDS,
    K=st.sampled_from([32, 96, 320, 896]),
    N=st.sampled_from([1, 16, 48, 130]),
    container=st.sampled_from(["compressed-tensors", "torchao", "torchao-swizzled", "mlx"]),
)
def test_mxfp4(tmp_path, seed, K, N, container) -> None:
    expected = writers.write_mxfp4(tmp_path, np.random.default_rng(seed), K, N, container=container)
    weight = read_one(tmp_path)
    assert weight.weight_format == "mxfp4"
    assert_equal(weight, expected)


def test_gpt_oss_experts_are_layers_of_their_own(tmp_path) -> None:
    expected = writers.write_gpt_oss(tmp_path, np.random.default_rng(0), 96, 24, experts=3)
    weights = list(convert.read_layers(tmp_path))
    assert [weight.name for weight in weights] == [f"{LAYER}.{expert}" for expert in range(3)]
    for expert, (weight, reference) in enumerate(zip(weights, expected, strict=True)):
        assert_equal(weight, reference)
        assert torch.equal(weight.bias, torch.arange(24 * expert, 24 * expert + 24).to(torch.bfloat16))


@EXAMPLES
@given(
    seed=SEEDS,
    shape=st.sampled_from([(64, 24, 64), (128, 8, 64), (384, 48, 128), (96, 16, 64), (64, 3, 4096), (256, 4, 1024)]),
    kind=st.sampled_from(["nf4", "fp4"]),
    double_quant=st.booleans(),
)
def test_bitsandbytes(tmp_path, seed, shape, kind, double_quant) -> None:
    """Block sizes divide K, or blocks continue in the next row (K 96 with blocks of 64; K 64 with blocks of 4096)."""
    K, N, blocksize = shape
    rng = np.random.default_rng(seed)
    expected = writers.write_bitsandbytes(tmp_path, rng, K, N, blocksize, kind=kind, double_quant=double_quant)
    weight = read_one(tmp_path)
    assert weight.scales.dtype == torch.float32
    assert_equal(weight, expected)


@EXAMPLES
@given(seed=SEEDS, K=st.sampled_from([64, 192, 384]), N=N_SIZES, group=st.sampled_from([16, 32, 64]), dtype=DTYPES)
def test_hqq(tmp_path, seed, K, N, group, dtype) -> None:
    expected = writers.write_hqq(tmp_path, np.random.default_rng(seed), K, N, group, dtype=dtype)
    weight = read_one(tmp_path)
    assert weight.zeros.dtype == writers.FLOATS[dtype]
    assert_equal(weight, expected)


@EXAMPLES
@given(seed=SEEDS, K=st.sampled_from([128, 384]), N=N_SIZES, group=st.sampled_from([32, 64, 128]), dtype=DTYPES)
def test_mlx_affine(tmp_path, seed, K, N, group, dtype) -> None:
    (expected,) = writers.write_mlx_affine(tmp_path, np.random.default_rng(seed), K, N, group, dtype=dtype)
    assert_equal(read_one(tmp_path), expected)


def test_mlx_stacked_experts(tmp_path) -> None:
    expected = writers.write_mlx_affine(tmp_path, np.random.default_rng(0), 128, 24, 64, experts=2)
    weights = list(convert.read_layers(tmp_path))
    assert [weight.name for weight in weights] == [f"{LAYER}.0", f"{LAYER}.1"]
    for weight, reference in zip(weights, expected, strict=True):
        assert_equal(weight, reference)


@EXAMPLES
@given(seed=SEEDS, K=K_SIZES, N=N_SIZES, group=st.sampled_from([16, 32, 64, 256]), sym=st.booleans(), own=st.booleans())
def test_torchao_intx(tmp_path, seed, K, N, group, sym, own) -> None:
    expected = writers.write_intx(tmp_path, np.random.default_rng(seed), K, N, group, sym=sym, own_names=own)
    weight = read_one(tmp_path)
    assert weight.weight_format == ("uint4b8" if sym else "uint4")
    assert_equal(weight, expected)
