"""Compares the results of some kernels compiled by Apple and by us.

`python -m softmetal.proof` compares all kernels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from softmetal.proof import references, tensors, torch_products, vectors
from softmetal.proof.__main__ import all_cases, prove, table
from softmetal.proof.air.compiler import load
from softmetal.proof.case import Case, compare, run
from softmetal.proof.libraries import mlx_library, wheels
from softmetal.proof.mistakes import MISTAKES, Mistake
from softmetal.proof.quantized import Format

# Kernels of every family and type. Together they run quickly.
SHORT = (
    "affine_qmv_fast_float_gs_64_b_4_batch_0_pr_0_hgs_0_r_4",
    "affine_qmv_float16_t_gs_64_b_4_batch_0_pr_0_hgs_0_r_4",
    "affine_qmm_t_bfloat16_t_gs_64_b_4_alN_false_batch_0",
    "affine_qvm_float_gs_64_b_4_batch_0",
    "affine_qmm_n_float16_t_gs_64_b_4_batch_0",
    "affine_quantize_float16_t_gs_64_b_3",
    "nvfp4_qmv_fast_float16_t_gs_16_b_4_batch_0_pr_0_hgs_0_r_4",
    "mxfp4_qmm_t_float_gs_32_b_4_alN_true_batch_0",
    "mxfp4_dequantize_bfloat16_t_gs_32_b_4_hgs_false",
    "steel_gemm_fused_tn_float16_float16_bm64_bn64_bk16_wm2_wn2",
    "gemv_bfloat16_bm4_bn1_sm1_sn32_tm4_tn4_nc0_axpby0",
    "gemv_t_float32_bm1_bn2_sm8_sn4_tm4_tn4_nc0_axpby0",
    "sdpa_vector_float16_t_64_64",
    "block_softmax_precise_float16",
    "contig_scan_reverse_exclusive_logaddexp_float16_float16",
    "carg_block_sort_bfloat16_uint32_bn32_tn4",
    "all_reduce_sumbfloat16",
    "col_reduce_looped_1_32_32_reduce_prodfloat16",
    "vn_Sigmoidfloat16float16",
    "vvn_LogAddExpbfloat16",
    "vn_copyfloat32bfloat16",
    "vn_copyfloat16uint8",
    "mxfp4_gather_qmm_t_float16_t_gs_32_b_4_alN_false",
    "sdpa_vector_2pass_1_float16_t_128_128",
    "steel_segmented_mm_nt_float16_float16_bm32_bn32_bk16_wm2_wn2",
)
# Their results are also compared with fp64, because an error of the executor would change both forms alike.
FP64 = {
    "affine_qmm_t_bfloat16_t_gs_64_b_4_alN_false_batch_0": partial(
        tensors._verify, tensors._product, Format("affine", 64, 4), "bfloat16", True
    ),
    "mxfp4_qmm_t_float_gs_32_b_4_alN_true_batch_0": partial(
        tensors._verify, tensors._product, Format("mxfp4", 32, 4), "float32", True
    ),
    "steel_gemm_fused_tn_float16_float16_bm64_bn64_bk16_wm2_wn2": partial(
        tensors._verify, tensors._dense_product, "float16", "tn", True
    ),
}
SHORT_REFERENCES = ("int4pack_mm_64_half", "naive_bmm_bfloat", "layer_norm_single_row_float")
NEWEST_REFERENCES = ("grouped_mm_rows_half_bm16_u32", "grouped_mm_few_rows_float_u32", "int_mm_char")
PAGE = Path(__file__).parents[1] / "docs" / "device.md"
CASES = {c.kernel: c for c in all_cases()}


def need_wheel(name: str) -> None:
    """Skips the test if the wheel is not cached. Only `python -m softmetal.proof` downloads the large wheels."""
    if not wheels.is_cached(name):
        pytest.skip(f"{wheels.WHEELS[name].filename} is not in .cache/wheels; `python -m softmetal.proof` fetches it")


@pytest.mark.parametrize("kernel", SHORT)
def test_both_compiles_leave_the_same_bits(kernel: str) -> None:
    need_wheel("mlx-metal")
    case: Case = replace(CASES[kernel], verify=FP64.get(kernel))
    outcome = compare(case, (case.instance,))
    assert outcome.error == ""
    assert [str(d) for d in outcome.differences] == []
    assert outcome.elements > 0
    assert outcome.is_right or (kernel not in FP64 and not outcome.wrong)


@pytest.mark.parametrize(
    "kernel",
    [
        "affine_qmm_t_nax_float16_t_gs_64_b_4_bm32_bn64_bk64_wm2_wn2_alN_false_batch_0",
        "mxfp4_gather_qmm_t_nax_bfloat16_t_gs_32_b_4_bm64_bn64_bk64_wm2_wn2_alN_true",
        "affine_gather_qmm_rhs_nax_nt_float16_t_gs_64_b_4_bm_64_bn_64_bk_64_wm_2_wn_2",
        "steel_gemm_fused_nax_nn_float16_float16_bm64_bn128_bk64_wm2_wn4",
    ],
)
def test_both_compiles_for_tensor_units_leave_the_same_bits(kernel: str) -> None:
    need_wheel("mlx-metal-macos-26")
    outcome = compare(CASES[kernel], (CASES[kernel].instance,))
    assert (outcome.error, outcome.differences, outcome.wrong) == ("", [], [])
    assert outcome.elements > 0
    assert outcome.is_right


# One kernel of each format and kind of product. Only Apple's compiled form runs, which is quick.
TENSOR_SAMPLE = (
    "affine_qmm_n_nax_float_gs_64_b_4_bm64_bn64_bk64_wm2_wn2_batch_0",
    "affine_qmm_t_nax_bfloat16_t_gs_64_b_3_bm64_bn64_bk64_wm2_wn2_alN_true_batch_0",
    "nvfp4_gather_qmm_t_nax_float16_t_gs_16_b_4_bm64_bn64_bk64_wm2_wn2_alN_true",
    "mxfp8_qmm_t_nax_float16_t_gs_32_b_8_bm32_bn64_bk64_wm2_wn2_alN_false_batch_0",
    "nvfp4_gather_qmm_rhs_nax_nn_bfloat16_t_gs_16_b_4_bm_32_bn_64_bk_64_wm_2_wn_2",
    "steel_gemm_fused_nax_tn_float32_float32_bm64_bn128_bk64_wm2_wn4",
)


@pytest.mark.parametrize("kernel", TENSOR_SAMPLE)
def test_results_of_tensor_units_are_compared_with_fp64(kernel: str) -> None:
    """The comparison must notice a result whose columns are in the wrong order."""
    need_wheel("mlx-metal-macos-26")
    case = CASES[kernel]
    apples = load(mlx_library(case.wheel), kernel, constants=dict(case.constants))
    (launch,) = case.launches(np.random.default_rng(0))
    results = run(apples, kernel, launch)
    assert case.verify is not None
    assert case.verify(launch, results) == ""
    slot = next(i for i, b in enumerate(launch.buffers) if isinstance(b, np.ndarray) and (b != results[i]).any())
    results[slot] = results[slot][..., ::-1]
    assert "expected" in case.verify(launch, results)


@pytest.mark.parametrize("family", ["dot", "fft"])
def test_vectors_contract_as_apples_compiler_contracts_them(family: str) -> None:
    need_wheel("mlx-metal")
    case = next(c for c in vectors.cases() if c.family == family)
    outcome = compare(case, (case.instance,))
    assert (outcome.error, outcome.differences) == ("", [])
    assert outcome.elements > 0


@pytest.mark.parametrize("kernel", SHORT_REFERENCES)
def test_pytorchs_kernels_are_right(kernel: str) -> None:
    need_wheel("torch-macos")
    (reference,) = (r for r in references.references() if r.kernel == kernel)
    assert references.check(reference) == []


@pytest.mark.parametrize("kernel", NEWEST_REFERENCES)
def test_kernels_of_the_newest_pytorch_are_right(kernel: str) -> None:
    need_wheel("torch-macos-2.15.0")
    (reference,) = (r for r in torch_products.references() if r.kernel == kernel)
    assert references.check(reference) == []


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text()


@pytest.mark.parametrize("mistake", MISTAKES[:3], ids=lambda m: m.name)
def test_a_mistake_in_the_device_changes_the_results(mistake: Mistake) -> None:
    need_wheel("mlx-metal")
    outcome = prove(mistake)
    assert outcome.error == ""
    assert outcome.differences
