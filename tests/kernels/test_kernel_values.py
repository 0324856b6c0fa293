"""Checks single values: every code of every format, NaN and infinity, the result of the decode probe."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from softmetal.device import CompileError
from tests.support import reference
from tests.support.kernels.cases import FLOATS, FORMATS, TENSOR_FORMATS, pairs, problem, sampled
from tests.support.kernels.fused import run_fused
from tests.support.kernels.launch import Buffer, compile_library, launch, number, place, place_output
from tests.support.kernels.problems import Inputs, Problem, check_dequantize, make_inputs, run_dequantize, run_gemv
from tests.support.kernels.tensor import run_tensor
from tests.support.kernels.tiles import run_tiles

RUNS = {
    "gemv": lambda p, **o: run_gemv(p, rows=4, simdgroups=2, **o),
    "gemv_or_form": lambda p, **o: run_gemv(p, rows=4, simdgroups=2, subnormal_codes=False, **o),
    "fused": lambda p, **o: run_fused(p, rows=16, simdgroups=2, **o),
    "fused_or_form": lambda p, **o: run_fused(p, rows=8, simdgroups=1, subnormal_codes=False, **o),
    "tensor": lambda p, **o: run_tensor(p, tile="32x64x32", **o),
    "double_buffered": lambda p, **o: run_tiles("gemm_double_buffered_64x64x32", p, **o),
    "single_stage": lambda p, **o: run_tiles("gemm_single_stage_128x128x16", p, **o),
    "striped": lambda p, **o: run_tiles("gemm_striped_32x128x32", p, **{"parts": 2} | o),
}
kernels = pytest.mark.parametrize("kernel", RUNS)
# The kernels with loads of their own. single_stage has those of double_buffered.
LOADS = ("gemv", "fused", "tensor", "double_buffered", "striped")
PAIRS = [(kernel, name) for kernel in RUNS for name in (TENSOR_FORMATS if kernel == "tensor" else FORMATS)]
each_kernel_and_format = pytest.mark.parametrize(("kernel", "weight_format"), sampled(PAIRS))


def widest(kernel: str) -> torch.dtype:
    """Returns the dtype of activations with the largest range that the kernel multiplies."""
    return torch.bfloat16 if kernel == "tensor" else torch.float32


def every_code(p: Problem, **options: torch.dtype) -> Inputs:
    """Returns the identity as activations, and a weight whose columns all contain the 16 codes in turn."""
    codes = ((np.arange(p.K)[:, None] + np.arange(p.N)[None, :]) % 16).astype(np.uint8)
    weight = reference.make_weight(p.weight_format, p.K, p.N, p.group_size, codes=codes, **options)
    return Inputs(torch.eye(p.K, dtype=p.dtype), weight, None, None)


@each_kernel_and_format
def test_every_code(kernel: str, weight_format: str) -> None:
    """With the identity matrix as activations, the product is the weight, rounded once from its exact value."""
    p = problem(16, 64, 16, weight_format=weight_format, dtype=widest(kernel), group_size=16)
    inputs = every_code(p)
    assert torch.equal(RUNS[kernel](p, inputs=inputs), torch.from_numpy(inputs.weight.exact).float().to(p.dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("weight_format", "zeros_dtype"),
    [*((f, None) for f in FORMATS), *(("uint4", t) for t in FLOATS), *(("uint4_bias", t) for t in FLOATS)],
)
def test_dequantize_every_code(weight_format: str, zeros_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    p = problem(1, 65, 40, weight_format=weight_format, dtype=dtype, group_size=16, zeros_dtype=zeros_dtype)
    inputs = every_code(p, zeros_dtype=p.zeros_dtype)
    got, exact = run_dequantize(p, inputs=inputs), inputs.weight.exact
    # With fp16 scales, at most one fp32 operation rounds: q - z or q s + b, and only if zeros have 24 significant bits.
    rounded = 2.0**-24 * inputs.weight.magnitude if zeros_dtype is torch.float32 or weight_format == "lut4" else 0.0
    rounded = rounded + 2.0**-23 * np.abs(exact)
    bound = reference.UNIT_ROUNDOFF[dtype] * np.abs(exact) + reference.TINY[dtype] + rounded
    assert (np.abs(reference.to_numpy(got) - exact) <= bound).all()


@pytest.mark.parametrize(
    ("weight_format", "N", "has_perm", "scales_dtype"),
    sampled(pairs(weight_format=FORMATS, N=[1, 63, 200], has_perm=[False, True], scales_dtype=FLOATS)),
)
def test_dequantize_shapes(weight_format: str, N: int, has_perm: bool, scales_dtype: torch.dtype) -> None:
    p = problem(
        1, N, 72, weight_format=weight_format, dtype=torch.float32, group_size=32, has_perm=has_perm,
        scales_dtype=scales_dtype, global_scale=(-1,),
    )  # fmt: skip
    check_dequantize(p)


@each_kernel_and_format
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_activation_that_is_not_finite(kernel: str, weight_format: str, value: float) -> None:
    p = problem(3, 72, 72, weight_format=weight_format, dtype=torch.float16, group_size=32)
    inputs = make_inputs(p)
    a = inputs.a.clone()
    a[1, 40] = value
    clean, got = RUNS[kernel](p), RUNS[kernel](p, inputs=replace(inputs, a=a))
    assert not got[1].isfinite().any()
    assert not np.isnan(value) or got[1].isnan().all()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_format", ["uint4b8", "float4_e2m1"])
def test_very_small_activations(weight_format: str, dtype: torch.dtype) -> None:
    """Some activations are so small that fp32 would flush their products with subnormal codes to zero.

    These activations fill a complete row, every second k in a part of a row, or a single k.
    """
    p = problem(5, 40, 328, weight_format=weight_format, dtype=dtype, group_size=64, bias_dtype=None)
    inputs = make_inputs(p)
    for m, columns in ((0, slice(None)), (4, slice(131, None, 2)), (2, slice(0, 1))):
        a = torch.zeros_like(inputs.a)
        a[m, columns] = inputs.a[m, columns] * 2.0**-110
        small = replace(inputs, a=a)
        exact, bound = reference.gemm(a, inputs.weight, None, None, raw_codes=True)
        for rows in (2, 5):
            reference.check_gemm(run_gemv(p, rows=rows, simdgroups=2, inputs=small), exact, bound)


@each_kernel_and_format
def test_scale_that_is_nan(kernel: str, weight_format: str) -> None:
    """A NaN scale, or a NaN scale code, in the last, short group of column 5 makes that column NaN."""
    p = problem(3, 72, 72, weight_format=weight_format, dtype=torch.float16, group_size=32)
    inputs = make_inputs(p)
    values = {"nvfp4": [0x7F, 0xFF], "mxfp4": [0xFF]}.get(weight_format, [np.nan])
    clean = RUNS[kernel](p)
    others = [n for n in range(p.N) if n != 5]
    for value in values:
        scales = inputs.weight.scales.clone()
        scales[-1, 5] = value
        got = RUNS[kernel](p, inputs=replace(inputs, weight=replace(inputs.weight, scales=scales)))
        assert got[:, 5].isnan().all()
        assert torch.equal(got[:, others], clean[:, others])


@kernels
@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4"])
def test_every_scale_code(kernel: str, weight_format: str) -> None:
    """Column n has scale code n, within the range that the operators promise."""
    p = problem(16, 256, 16, weight_format=weight_format, dtype=widest(kernel))
    inputs = every_code(p)
    codes = np.arange(256, dtype=np.uint8)
    if weight_format == "mxfp4":
        codes = codes.clip(16, 240)
    decode = reference.e4m3 if weight_format == "nvfp4" else reference.e8m0
    elements = inputs.weight.exact / decode(inputs.weight.scales.numpy())
    inputs = replace(inputs, weight=replace(inputs.weight, scales=torch.from_numpy(codes.reshape(1, -1))))
    got = RUNS[kernel](p, inputs=inputs)
    expected = torch.from_numpy((elements * decode(codes)).astype(np.float32)).to(p.dtype)
    assert torch.equal(got.nan_to_num(nan=-1.5), expected.nan_to_num(nan=-1.5))


@pytest.mark.parametrize("word", [0, 1])
def test_probe_of_half_subnormals(word: int) -> None:
    """The software device keeps subnormals, so the probe stores 1; for an input word of zero it must store 0."""
    out = place_output((1,), torch.int32)
    buffers = {"Packed": place(torch.tensor([word], dtype=torch.int32)), "Out": out}
    launch("probe_half_subnormals", buffers, group=(1, 1, 1), groups=(1, 1, 1))
    assert out.read((1,), torch.int32).item() == word


@pytest.mark.parametrize("foreign", range(6))
def test_probe_of_tensor_layout(foreign: int) -> None:
    """One of six matrices has another layout: three are of half products, and three of bfloat products."""
    found = probed(f"SOFTMETAL_FOREIGN_TENSORS={1 << foreign}")
    matches, element = number("kTensorMatches"), number("kTensorElement")
    assert found[:foreign] + found[foreign + 1 :] == [matches] * 5
    # In the foreign layout, element 0 of lane 0 has the place of element 1 of lane 5: row 2, column 5.
    assert found[foreign] == element | 2 << 8 | 5


def test_probe_of_tensor_layout_in_every_order() -> None:
    """The known layouts of a GPU match, independent of the seed that shuffles the other layouts."""
    assert probed() == probed(perturb_seed=3) == [number("kTensorMatches")] * number("kTensorProbed")


def test_probe_of_the_elements_of_a_lane() -> None:
    """A lane has 8 elements of the left operand. A probe that expects 16 stores the actual number."""
    compiled = compile_library("gemm/tensor_probe", replaced=("compare<8>(a,", "compare<16>(a,"))
    out = np.zeros(number("kTensorProbed"), np.uint32)
    compiled.kernel("probe_tensor_layout").launch(groups=1, group=32, buffers={number("kSlotOut"): out})
    assert out.tolist() == [number("kTensorCapacity") | 8, *[number("kTensorMatches")] * 2] * 2


def probed(*defines: str, perturb_seed: int = 0) -> list[int]:
    out = place_output((number("kTensorProbed"),), torch.int32)
    launch(
        "probe_tensor_layout", {"Out": out}, group=(32, 1, 1), groups=(1, 1, 1), defines=defines,
        perturb_seed=perturb_seed,
    )  # fmt: skip
    return out.read((number("kTensorProbed"),), torch.int32).tolist()


@pytest.mark.parametrize("library", ["gemm/tensor", "gemm/tensor_probe", "experts/moe_tensor"])
def test_the_abi_before_macos_26_2_is_refused(library: str) -> None:
    with pytest.raises(CompileError, match=r"expected a deployment target of macOS 26\.2 or later, got an older one"):
        compile_library(library, defines=["__TENSOR_OPS_SUPPORT_DEPLOYMENT_TARGET_26_2=0"])


@pytest.mark.parametrize("kernel", LOADS)
def test_row_stride_beyond_32_bits(kernel: str) -> None:
    """Multiplies two rows whose distance in elements needs more than 32 bits."""
    p = problem(3, 64, 32, weight_format="uint4b8", dtype=torch.float16, group_size=32)
    stride = 2**31 + 8
    memory = np.zeros(2 * stride + p.K, np.float16)  # zero pages use no memory; only the rows are written
    for m, row in enumerate(make_inputs(p).a.numpy()):
        memory[m * stride : m * stride + p.K] = row
    result = RUNS[kernel](p, activations=(Buffer(memory), stride), checked=False)
    assert torch.equal(result, RUNS[kernel](p, checked=False))


@pytest.mark.parametrize("kernel", LOADS)
def test_perm_beyond_range(kernel: str) -> None:
    """An index out of range reads nothing, so its products are zero."""
    p = problem(3, 64, 40, weight_format="uint4b8", dtype=widest(kernel), group_size=32, has_perm=True)
    inputs = make_inputs(p)
    perm = inputs.perm.copy()
    dropped = inputs.perm[[3, 39]]
    perm[[3, 39]] = [p.K, -1]
    a = inputs.a.clone()
    a[:, dropped] = 0
    expected = RUNS[kernel](p, inputs=replace(inputs, a=a))
    assert torch.equal(RUNS[kernel](p, inputs=replace(inputs, perm=perm), counted=False), expected)


def test_dequantize_perm_beyond_range() -> None:
    """An index out of range writes nothing."""
    p = problem(1, 64, 40, weight_format="uint4b8", dtype=torch.float32, group_size=32, has_perm=True)
    inputs = make_inputs(p)
    perm = inputs.perm.copy()
    perm[[3, 39]] = [p.K, -1]
    rows = np.delete(inputs.perm, [3, 39])
    got = run_dequantize(p, inputs=replace(inputs, perm=perm))
    assert torch.equal(got[rows], run_dequantize(p)[rows])
    # the kernel wrote nothing to these rows, so they keep the initial NaN
    assert got[inputs.perm[[3, 39]]].isnan().all()
