"""Small cases for each file of `kernels/`. The cases of a file run on each mutant of the file."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import test_kernel_decoder as decoder
import test_kernel_eight_bits as eight_bits
import test_kernel_embedding as embedding
import test_kernel_experts as experts
import test_kernel_mlstm
import test_kernel_repack as repack
import test_kernel_values as values
import torch

from tests.support.kernels import mlstm_problems as mlstm
from tests.support.kernels.cases import problem
from tests.support.kernels.fused import run_fused
from tests.support.kernels.problems import Problem, check, check_dequantize, run_gemv
from tests.support.kernels.tensor import run_tensor
from tests.support.kernels.tiles import run_staged, run_striped

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
Case = tuple[str, Callable[[], object]]


def _gemv(p: Problem, **options: int) -> Case:
    return f"gemv {p.weight_format} {p.M}x{p.N}x{p.K}", lambda: check(p, run_gemv(p, **options), raw_codes=True)


def _fused(p: Problem, **options: int) -> Case:
    return f"fused {p.weight_format} {p.M}x{p.N}x{p.K}", lambda: check(p, run_fused(p, **options), raw_codes=False)


def _staged(kernel: str, p: Problem, **options: int) -> Case:
    name = f"{kernel} {p.weight_format} {p.M}x{p.N}x{p.K}"
    return name, lambda: check(p, run_staged(f"gemm_{kernel}", p, **options), raw_codes=False)


def _striped(tile: str, p: Problem, **options: int) -> Case:
    name = f"striped {p.weight_format} {p.M}x{p.N}x{p.K}"
    return name, lambda: check(p, run_striped(f"gemm_striped_{tile}", p, **options), raw_codes=False)


def _tensor(p: Problem, **options: int | str) -> Case:
    return f"tensor {p.weight_format} {p.M}x{p.N}x{p.K}", lambda: check(p, run_tensor(p, **options), raw_codes=False)


def _dequantize(p: Problem) -> Case:
    return f"dequantize {p.weight_format} {p.N}x{p.K}", lambda: check_dequantize(p)


def _repack() -> Iterator[Case]:
    yield "gptq_repack perm beyond range", repack.test_gptq_repack_perm_beyond_range
    yield "gptq_repack", partial(repack.test_gptq_repack, 40, 63, False)
    yield "gptq_repack perm", partial(repack.test_gptq_repack, 32, 65, True)
    yield "gptq_repack 64x4", partial(repack.test_gptq_repack, 32, 64, False)
    yield "awq_repack", partial(repack.test_awq_repack, 40, 504)
    yield "awq_repack 64x4", partial(repack.test_awq_repack, 32, 512)
    for rule in ("word", "awq"):
        yield f"unpack_zeros {rule}", partial(repack.test_unpack_zeros, 5, 520, rule)
        yield f"unpack_zeros 64x4 {rule}", partial(repack.test_unpack_zeros, 4, 512, rule)


def _dequantize_cases() -> Iterator[Case]:
    for weight_format, N, K in (("uint4", 63, 40), ("uint4", 64, 32), ("nvfp4", 65, 72), ("mxfp4", 7, 40)):
        yield _dequantize(problem(1, N, K, weight_format=weight_format, dtype=FLOAT, group_size=16, has_perm=N < 64))
    yield "dequantize perm", values.test_dequantize_perm_beyond_range


def _embedding_cases() -> Iterator[Case]:
    yield from _each("embedding", embedding.test_embedding, embedding.TABLES)
    for N in (7, 64):
        yield f"embedding ids {N}", partial(embedding.test_an_unknown_id_gives_a_row_of_nan, N)
    yield "embedding perm", embedding.test_a_perm_out_of_range_writes_nothing


def _decode_cases() -> Iterator[Case]:
    """Adds every code of 5, 6 and 8 bits, because most of the kernels' own cases have codes of 4 bits."""
    for kernel in ("gemv", "gemv_or_form", "fused", "tensor", "double_buffered"):
        for weight_format in ("uint8b128", "float8_e4m3", "uint5b16", "uint6b32"):
            yield f"every code {kernel} {weight_format}", partial(eight_bits.test_every_code, kernel, weight_format)
    yield "NaN codes", partial(eight_bits.test_nan_codes_reach_their_column_and_no_other, "gemv")
    for of_kernel in (_gemv_cases, _fused_cases, _tensor_cases, _staged_cases):
        yield from of_kernel()


def _gemv_cases() -> Iterator[Case]:
    yield _gemv(problem(3, 7, 72, weight_format="uint4", dtype=HALF, group_size=16), rows=2, simdgroups=2)
    yield _gemv(problem(1, 128, 64, weight_format="uint4b8", dtype=HALF, group_size=32), rows=2, simdgroups=2)
    yield _gemv(
        problem(2, 132, 136, weight_format="lut4", dtype=BFLOAT, bias_dtype=HALF, has_perm=True),
        rows=2, simdgroups=4, splits=2,
    )  # fmt: skip
    yield _gemv(problem(1, 40, 24, weight_format="uint4_bias", dtype=FLOAT, a_offset=1), rows=1, simdgroups=4)
    yield _gemv(problem(1, 8, 520, weight_format="mxfp4", dtype=FLOAT), rows=1, simdgroups=1)
    yield _gemv(problem(2, 7, 32, weight_format="nvfp4", dtype=HALF, global_scale=(-1,)), rows=2, simdgroups=1)
    yield _gemv(problem(2, 40, 520, weight_format="uint4_bias", dtype=HALF, **TWO_LEVELS), rows=2, simdgroups=2)
    for rows in (2, 8):
        yield _gemv(problem(rows, 8, 72, weight_format="uint5", dtype=HALF, group_size=16), rows=rows, simdgroups=1)
    long_sums = {"weight_format": "uint4_bias", "dtype": FLOAT, "group_size": "K", "all_positive": True}
    yield _gemv(problem(4, 8, 16384, **long_sums), rows=4, simdgroups=1)


# Scales and biases of two levels.
TWO_LEVELS = {"group_size": 32, "zeros_dtype": torch.uint8, "super_dtype": HALF}


def _fused_cases() -> Iterator[Case]:
    yield _fused(problem(9, 7, 72, weight_format="uint4", dtype=HALF, group_size=16), rows=16, simdgroups=2)
    yield _fused(problem(8, 64, 192, weight_format="uint4b8", dtype=HALF, group_size=128), rows=8, simdgroups=2)
    yield _fused(
        problem(33, 68, 136, weight_format="lut4", dtype=BFLOAT, bias_dtype=HALF, has_perm=True, group_size=32),
        rows=24, simdgroups=3, splits=2,
    )  # fmt: skip
    yield _fused(problem(5, 40, 24, weight_format="uint4_bias", dtype=FLOAT, a_offset=1), rows=8, simdgroups=1)
    yield _fused(problem(20, 32, 520, weight_format="nvfp4", dtype=FLOAT), rows=32, simdgroups=2)
    for zeros_dtype in (FLOAT, torch.uint8):
        floats = {"dtype": FLOAT, "scales_dtype": FLOAT, "zeros_dtype": zeros_dtype, "group_size": 16}
        yield _fused(problem(3, 32, 64, weight_format="uint4", **floats), rows=8, simdgroups=1)
    yield _fused(problem(9, 33, 520, weight_format="uint4_bias", dtype=HALF, **TWO_LEVELS), rows=16, simdgroups=2)
    yield _fused(problem(8, 32, 136, weight_format="uint6", dtype=HALF, group_size=16), rows=8, simdgroups=1)
    long_sums = {"weight_format": "uint4_bias", "dtype": FLOAT, "group_size": "K", "all_positive": True}
    yield _fused(problem(8, 32, 16384, **long_sums), rows=8, simdgroups=1)


def _tensor_cases() -> Iterator[Case]:
    yield _tensor(problem(33, 7, 72, weight_format="uint4", dtype=HALF, group_size=16), tile="64x64x32")
    yield _tensor(problem(32, 64, 192, weight_format="uint4b8", dtype=HALF, group_size=128), tile="64x64x32")
    yield _tensor(
        problem(9, 40, 72, weight_format="uint4", dtype=HALF, zeros_dtype=FLOAT, group_size=32), tile="32x64x32"
    )
    yield _tensor(
        problem(70, 68, 136, weight_format="mxfp4", dtype=BFLOAT, bias_dtype=HALF, has_perm=True, group_size=32),
        tile="64x128x32", splits=2,
    )  # fmt: skip
    yield _tensor(
        problem(5, 40, 24, weight_format="uint4_bias", dtype=BFLOAT, a_offset=1), tile="32x128x32", perturb_seed=1
    )
    yield _tensor(
        problem(20, 40, 520, weight_format="nvfp4", dtype=HALF, global_scale=(-1,)), tile="32x64x32", splits=3
    )
    yield _tensor(problem(32, 32, 64, weight_format="uint4_bias", dtype=BFLOAT, group_size=16), tile="32x64x32")
    yield _tensor(problem(32, 32, 72, weight_format="uint5", dtype=BFLOAT, group_size=16), tile="32x64x32")
    long_sums = {"weight_format": "uint4_bias", "dtype": HALF, "group_size": "K", "all_positive": True}
    yield _tensor(problem(8, 32, 16384, bias_cancels=True, **long_sums), tile="32x64x32")


def _tensor_probe_cases() -> Iterator[Case]:
    yield "probe, known layouts", values.test_probe_of_tensor_layout_in_every_order
    yield "probe, elements", values.test_probe_of_the_elements_of_a_lane
    for foreign in range(6):
        yield f"probe, foreign {foreign}", partial(values.test_probe_of_tensor_layout, foreign)


def _tensor_layout_cases() -> Iterator[Case]:
    yield from _tensor_cases()
    yield from _tensor_probe_cases()
    yield "old ABI", partial(values.test_the_abi_before_macos_26_2_is_refused, "gemm/tensor_probe")


def _staged_cases() -> Iterator[Case]:
    for kernel in ("double_buffered_64x64x32", "single_stage_64x64x32"):
        yield _staged(kernel, problem(65, 65, 72, weight_format="uint4", dtype=HALF, group_size=16), slices=2)
        yield _staged(kernel, problem(64, 64, 96, weight_format="lut4", dtype=BFLOAT, group_size=64))
        yield _staged(
            kernel,
            problem(9, 7, 136, weight_format="uint4_bias", dtype=FLOAT, bias_dtype=FLOAT, has_perm=True, group_size=32),
        )
        yield _staged(kernel, problem(64, 128, 528, weight_format="nvfp4", dtype=HALF))
        yield _staged(kernel, problem(8, 8, 24, weight_format="uint4b8", dtype=HALF, group_size="K"))
        long_sums = {"weight_format": "uint4_bias", "dtype": FLOAT, "group_size": "K", "all_positive": True}
        yield _staged(kernel, problem(8, 8, 16384, **long_sums))

    for kernel in ("double_buffered_32x128x32", "double_buffered_128x64x16", "single_stage_128x128x16"):
        yield _staged(kernel, problem(129, 130, 72, weight_format="lut4", dtype=HALF, group_size=16), slices=2)
        yield _staged(kernel, problem(32, 64, 64, weight_format="uint4_bias", dtype=FLOAT, group_size=16))


def _striped_cases() -> Iterator[Case]:
    shape = {"weight_format": "uint4", "dtype": HALF, "group_size": 32, "bias_dtype": FLOAT}
    for stripes in (1, 2, 3, 5, 6, 13, 60):
        yield _striped("64x64x32", problem(130, 130, 200, **shape), k_per_slice=64, stripes=stripes)
    yield _striped("32x128x32", problem(33, 129, 136, **shape), k_per_slice=32, stripes=5)
    yield _striped("32x128x32", problem(32, 256, 128, **shape), k_per_slice=64, stripes=4)


def _reduce_cases() -> Iterator[Case]:
    yield from _gemv_cases()
    yield from _striped_cases()


def _each(name: str, test: Callable[..., object], arguments: Sequence[tuple]) -> Iterator[Case]:
    for case in arguments:
        yield f"{name} {case}", partial(test, *case)


def _moe_cases(*kernels: str) -> Iterator[Case]:
    for kernel, options in experts.KERNELS:
        for case in experts.PRODUCTS:
            if kernel in kernels:
                yield f"{kernel} {case.__name__}", partial(experts.test_products, case, kernel, options)


def _moe_loop_cases(kernel: str) -> Iterator[Case]:
    yield from _moe_cases(kernel)
    for turn in range(len(experts.MOST_ROWS[kernel])):
        yield f"{kernel} rows {turn}", partial(experts.case_of_rows, kernel, turn, HALF)


def _shared_body_cases(dense: Callable[[], Iterator[Case]], kernel: str) -> Iterator[Case]:
    """Yields the cases of a dense kernel, and of the kernel for experts with the same body and loops for fewer rows."""
    yield from dense()
    yield from _moe_loop_cases(kernel)


def _moe_tensor_cases() -> Iterator[Case]:
    yield from _moe_cases("moe_tensor")
    for turn in (1, 3, 4):
        yield f"moe_tensor {turn}", partial(experts.case_of_skewed_rows, turn, (HALF, BFLOAT)[turn % 2])


def _moe_rows_cases() -> Iterator[Case]:
    yield from _moe_loop_cases("moe_gemv_blocks")
    yield from _moe_cases("moe_fused")
    yield from _moe_tensor_cases()


def _moe_all() -> Iterator[Case]:
    yield from _moe_sort_cases()
    yield from _moe_cases("moe_gemv", "moe_gemv_blocks", "moe_fused", "moe_tensor")
    yield from _moe_gemv_reduce_cases()


_moe_sort_cases = partial(_each, "moe_sort", experts.test_sort, experts.SORTS)
_moe_gemv_reduce_cases = partial(_each, "moe_gemv_reduce", experts.case_of_summed_slots, [(3,), (1,), (4,)])
_moe_gemv_gated_cases = partial(_each, "moe_gemv_gated", experts.case_of_a_gate, [(0,), (3,), (1,)])
_activation_cases = partial(_each, "activation", decoder.test_activation, [(one,) for one in decoder.ACTIVATIONS])


def _perm_cases() -> Iterator[Case]:
    for kernel in ("gemv", "fused", "single_stage"):
        yield f"{kernel} perm", partial(values.test_perm_beyond_range, kernel)


def _mlstm(p: mlstm.Sequence, **options: int) -> Case:
    name = f"mlstm {p.regime} {p.S} by {p.chunk_size} {p.DK}x{p.DV}"
    return name, lambda: mlstm.check_close(p, mlstm.run(p, **options), mlstm.reference(mlstm.make_inputs(p)))


def _many_chunks() -> None:
    """Runs only the gates, with as many chunks as a simdgroup has lanes, and with more."""
    for S in (528, 512):
        p = mlstm.Sequence(S=S, DK=1, DV=1, chunk_size=16, H=1, m0=1.0)
        got, exact = mlstm.Run(p, mlstm.make_inputs(p), {}), mlstm.reference(mlstm.make_inputs(p))
        got.gates(simdgroups=3)
        assert abs(got.read("OutM") - exact.M).max() < 2e-5
        assert abs(got.read("StatesM") - exact.m[:, :, ::16]).max() < 2e-5


def _mlstm_cases() -> Iterator[Case]:
    # First tails in all dimensions with scalar loads, then with vector loads, then no tails.
    yield _mlstm(mlstm.Sequence(S=77, DK=33, DV=38, chunk_size=64, offset=1), simdgroups=1, segment=1)
    yield _mlstm(mlstm.Sequence(S=84, DK=72, DV=96, chunk_size=32, m0=2.0), simdgroups=4, gate_simdgroups=3, segment=2)
    yield _mlstm(mlstm.Sequence(S=128, DK=32, DV=64, chunk_size=64, regime="strong"))
    yield _mlstm(mlstm.Sequence(S=128, DK=8, DV=8, chunk_size=128, regime="remembering"), simdgroups=1)
    yield _mlstm(mlstm.Sequence(S=96, DK=8, DV=8, chunk_size=64), simdgroups=1)
    yield _mlstm(mlstm.Sequence(S=35, DK=8, DV=8, chunk_size=16, regime="kept"), simdgroups=1)
    yield "mlstm work", test_kernel_mlstm.test_no_work_is_done_twice
    yield (
        "mlstm values",
        partial(test_kernel_mlstm.test_a_value_that_is_not_finite_stays_in_its_tokens_and_columns, "v", float("nan")),
    )
    yield "mlstm infinities", partial(test_kernel_mlstm.test_each_token_with_a_value_that_is_not_finite, FLOAT)


def _mlstm_gates_cases() -> Iterator[Case]:
    yield from list(_mlstm_cases())[:2]
    yield "mlstm gates of many chunks", _many_chunks


def _mlstm_step_cases() -> Iterator[Case]:
    for DK, DV, offset, simdgroups in ((33, 130, 1, 4), (32, 128, 0, 4), (8, 260, 0, 1)):
        name = f"mlstm step {DK}x{DV}"
        yield name, partial(test_kernel_mlstm.test_a_step_agrees_with_the_recurrence, FLOAT, DK, DV, offset, simdgroups)


def _mlstm_all() -> Iterator[Case]:
    yield from _mlstm_cases()
    yield from _mlstm_step_cases()


def cases_of(file: str) -> Iterator[Case]:
    """Returns the cases of a file. A file that is not in the table is part of several kernels and has all cases."""
    own = {
        "weights/repack.metal": _repack,
        "weights/dequantize.metal": _dequantize_cases,
        "weights/embedding.metal": _embedding_cases,
        "gemm/decode.h": _decode_cases,
        "gemm/gemv.h": partial(_shared_body_cases, _gemv_cases, "moe_gemv_blocks"),
        "gemm/gemv.metal": _gemv_cases,
        "gemm/fused.h": partial(_shared_body_cases, _fused_cases, "moe_fused"),
        "gemm/fused.metal": _fused_cases,
        "gemm/weight_fragment.h": _fused_cases,
        "gemm/tensor.h": _tensor_cases,
        "gemm/tensor.metal": _tensor_cases,
        "gemm/tensor_layout.h": _tensor_layout_cases,
        "gemm/tensor_probe.metal": _tensor_probe_cases,
        "gemm/reduce.metal": _reduce_cases,
        "gemm/tiles/striped.metal": _striped_cases,
        "gemm/tiles/staged.metal": _staged_cases,
        "gemm/tiles/tile_product.h": _staged_cases,
        "gemm/tiles/tile.h": _staged_cases,
        "gemm/fragment.h": _staged_cases,
        "gemm/activations.h": _perm_cases,
        "experts/experts.h": _moe_all,
        "experts/moe_sort.metal": _moe_sort_cases,
        "experts/moe_gemv.metal": partial(_moe_cases, "moe_gemv"),
        "experts/moe_gemv_blocks.metal": partial(_moe_loop_cases, "moe_gemv_blocks"),
        "experts/moe_fused.metal": partial(_moe_loop_cases, "moe_fused"),
        "experts/moe_gemv_reduce.metal": _moe_gemv_reduce_cases,
        "experts/moe_gemv_gated.metal": _moe_gemv_gated_cases,
        "experts/moe_tensor.metal": _moe_tensor_cases,
        "experts/rows.h": _moe_rows_cases,
        "experts/moe_reduce.metal": partial(_moe_cases, "moe_gemv"),
        "decoder/norm.metal": partial(_each, "norm", decoder.test_norm, decoder.NORMS),
        "decoder/rotary.metal": partial(_each, "rotary", decoder.test_rotary, decoder.ROTATIONS),
        "decoder/activation.metal": _activation_cases,
        "decoder/gated.h": _activation_cases,
        "decoder/cache.metal": partial(_each, "cache", decoder.test_write_cache, decoder.CACHES),
        "mlstm/mlstm.h": _mlstm_all,
        "mlstm/gates.metal": _mlstm_gates_cases,
        "mlstm/states.metal": _mlstm_cases,
        "mlstm/output.metal": _mlstm_cases,
        "mlstm/step.metal": _mlstm_step_cases,
    }
    for make in [own[file]] if file in own else dict.fromkeys(own.values()):
        yield from make()
