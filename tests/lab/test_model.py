"""The model predicts the same seconds as the planner's former C++ model, and lists the planner's tilings."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_marlin_metal as tmm
from lab import model
from lab.model import counts, geometry, tilings
from tests.support.pages import blocks
from torch_marlin_metal.extension import native
from torch_marlin_metal.profiling import AppleSiliconGPU

# Predictions of an independent C++ model, with its counts (cpp_counts.csv).
ROWS = list(csv.DictReader((Path(__file__).parent / "cpp_model.csv").open(newline="")))
M1, M5 = AppleSiliconGPU.from_name("M1"), AppleSiliconGPU.from_name("M5")
# Products of the planner: (chip, cores, M, N, K, format, group size, activations).
PRODUCTS = [
    (*gpu, M, N, K, fmt, size, dtype)
    for gpu in (("M1", 8), ("M2 Ultra", 60), ("M4 Max", 40), ("M5", 10))
    for M in (1, 3, 9, 33, 512)
    for N, K, fmt, size, dtype in (
        (4096, 4096, "uint4b8", 128, "float16"),
        (1000, 2880, "mxfp4", 32, "bfloat16"),
        (63, 16384, "lut4", 16, "float32"),
    )
]


def problem_of(row: dict[str, str]) -> model.Problem | model.ExpertsProblem:
    number = {name: int(row[name] or 0) for name in ("M", "N", "K", "group_size", "experts", "top_k")}
    weight: dict[str, Any] = {name: row[name] for name in ("weight_format", "activations")}
    weight["group_size"] = number["group_size"]
    if number["experts"]:
        return model.ExpertsProblem.of_tokens(
            number["M"], number["top_k"], number["experts"], number["N"], number["K"],
            reduce=row["reduce"] == "1", rows_by_slot=row["rows_by_slot"] == "1", **weight,
        )  # fmt: skip
    return model.Problem(
        number["M"], number["N"], number["K"], scales=row["scales"], zeros=row["zeros"],
        has_perm=row["has_perm"] == "1", **weight,
    )  # fmt: skip


def tiling_of(row: dict[str, str]) -> model.Tiling:
    names = ("stages", "simdgroups", "k_per_slice", "splits", "rest_rows", "stripes")
    M, N, K = map(int, row["tile"].split("x"))
    return model.Tiling(
        row["variant"], row["kernel"], (M, N, K), stripes_share_tiles=row["stripes_share_tiles"] == "1",
        **{name: int(row[name]) for name in names},
    )  # fmt: skip


@pytest.fixture
def counts_of_the_cpp_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(counts, "TABLE", Path(__file__).parent / "cpp_counts.csv")
    tables = (counts.rows, counts._find)
    for table in tables:
        table.cache_clear()
    yield
    for table in tables:
        table.cache_clear()


def test_every_row_of_the_cpp_model_is_predicted(counts_of_the_cpp_model: None) -> None:
    kernels, formats, bounds = set(), set(), set()
    for row in ROWS:
        gpu = AppleSiliconGPU.from_name(row["chip"], int(row["cores"]))
        found = model.costs(problem_of(row), tiling_of(row), gpu)
        assert found.seconds == pytest.approx(float(row["seconds"]), rel=1e-9), row
        assert found.dispatches[0].bound == row["bound"], row
        kernels.add(row["kernel"]), formats.add(row["weight_format"]), bounds.add(row["bound"])
    assert len(ROWS) > 190
    assert formats == {name for name, row in tmm.WEIGHT_FORMATS.items() if row.code_bits == 4}
    assert {row["chip"] for row in ROWS} == set(AppleSiliconGPU.names())
    assert bounds == {"launch", "dram", "issue", "matrix", "occupancy"}
    assert kernels >= {
        "gemv", "gemm_fused", "gemm_tensor", "dequantize", "moe_gemv", "moe_gemv_blocks", "moe_gemv_reduce",
        "moe_fused", "gemm_striped_64x64x32", "gemm_double_buffered_128x128x16", "gemm_single_stage_32x128x32",
    }  # fmt: skip


def test_the_tilings_of_the_cpp_model_are_candidates() -> None:
    """For K below 512, the C++ model cut K of fused into fewer than four slices. Now four is the minimum."""
    for row in ROWS:
        if row["variant"] == "fused" and int(row["K"]) < 512:
            continue
        gpu = AppleSiliconGPU.from_name(row["chip"], int(row["cores"]))
        assert tiling_of(row) in model.candidates(problem_of(row), gpu), row


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_the_planners_tilings_are_candidates(product: tuple[Any, ...]) -> None:
    """Compares threads, threadgroup memory, slices of K and grid of every plan with those of a candidate."""
    chip, cores, M, N, K, fmt, size, dtype = product
    rows, chosen, _ = native.gemm_plans(
        chip=chip, cores=cores, half_subnormals=True, M=M, N=N, K=K, weight_format=fmt, group_size=size,
        activations=dtype, scales="uint8" if tmm.WEIGHT_FORMATS[fmt].has_coded_scales else dtype, zeros="uint8",
        has_perm=False, has_global_scale=False, has_bias=False, variant="auto", tuned=False, own_system=False,
    )  # fmt: skip
    gpu, problem = AppleSiliconGPU.from_name(chip, cores), model.Problem(M, N, K, fmt, size, dtype)
    listed = {_launches(tiling, problem) for tiling in model.candidates(problem, gpu)}
    assert len(rows) > 8
    for name, variant, _, _, dispatches in rows:
        own = [d for d in dispatches if not d["kernel"].startswith(("reduce", "torch", "dequantize"))]
        if variant != "two_pass":
            assert (name, *map(_launch, own)) in listed, (name, own)
    on_units = gpu.has_tensor_units and problem.has_tensor_kernel and M > 8
    assert rows[chosen][1] in (("tensor",) if on_units else ("gemv", "fused"))


def _launch(dispatch: dict[str, Any]) -> tuple[int, int, int, int]:
    """Returns threadgroups, threads, threadgroup memory and the length of a slice."""
    k_per_slice = re.search(r"k_per_slice=(\d+)", dispatch["text"])
    assert k_per_slice is not None
    x, y, z = dispatch["grid"]
    return x * y * z, dispatch["threads"][0], dispatch["threadgroup_bytes"], int(k_per_slice[1])


def _launches(tiling: model.Tiling, problem: model.Problem) -> tuple[Any, ...]:
    if tiling.variant == "two_pass":
        return (tiling.name,)
    launches = []
    for _, rows, count in tiling.row_blocks(problem.M):
        columns = -(-problem.N // tiling.tile[1])
        threadgroups = tiling.stripes or count * columns * tiling.splits
        memory = tiling.threadgroup_bytes(problem, rows)
        launches.append((threadgroups, tiling.simdgroups * 32, memory, tiling.k_per_slice))
    return (tiling.name, *launches)


def test_many_tilings_at_once_have_the_times_of_each() -> None:
    experts = model.ExpertsProblem.of_tokens(40, 4, 32, 2880, 2880, reduce=True, weight_format="mxfp4", group_size=32)
    for problem in (model.Problem(17, 4096, 14336), experts):
        for group in model.families(problem, M5):
            together = np.broadcast_to(model.predict(problem, group, M5), len(group))
            alone = [float(model.predict(problem, group.at(index), M5)) for index in range(len(group))]
            assert together == pytest.approx(alone, rel=1e-12)


def test_the_best_is_the_cheapest_but_for_equal_times() -> None:
    for problem in (model.Problem(1, 4096, 4096), model.Problem(200, 4096, 4096, "nvfp4", 16)):
        tiling, seconds = model.best(problem, M1)
        least = min(model.predict(problem, other, M1) for other in model.candidates(problem, M1, "auto"))
        assert seconds == pytest.approx(model.predict(problem, tiling, M1)) and least <= seconds <= 1.02 * least
    # 4 schedulers in each of 8 cores need 18 clocks for 512 multiply-adds; memory reads 60.06 GB/s.
    compute = 200 * 4096**2 / (512 / 18 * 4 * 8 * 1.278e9)
    assert compute < seconds < 2 * compute
    one = model.best(model.Problem(1, 4096, 4096), M1)[1]
    assert one == pytest.approx(6e-6 + 4096**2 * (0.5 + 2 / 128) / 60.06e9, rel=0.1)


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks(Path(geometry.__file__).parents[1] / "README.md", "python")
    exec(example, {})
    assert "fused" in capsys.readouterr().out


def test_what_no_kernel_computes_is_named() -> None:
    with pytest.raises(ValueError, match=r"variant: expected one that has a kernel for .*lut4.*, got 'tensor'"):
        model.best(model.Problem(64, 64, 64, "lut4"), M5, "tensor")
    with pytest.raises(ValueError, match=r"expected all, auto or one of gemv, .*, got 'fast'"):
        model.candidates(model.Problem(1, 64, 64), M1, "fast")
    with pytest.raises(ValueError, match="expected all, auto or one of gemv, fused, tensor, got 'striped'"):
        model.candidates(model.ExpertsProblem.of_tokens(1, 1, 4, 64, 64), M1, "striped")
    unknown = model.Tiling("gemv", "gemv", (9, 128, 16), simdgroups=1, k_per_slice=64)
    with pytest.raises(counts.NotCounted, match="got gemv of gemv:9x128x16 with 9 rows, uint4b8 weights"):
        model.predict(model.Problem(9, 128, 64), unknown, M1)


def test_a_format_with_the_same_codes_uses_the_counted_ones_row() -> None:
    row = model.candidates(model.Problem(1, 128, 64), M1, "gemv")[0]

    def found(gpu: AppleSiliconGPU, activations: str) -> list[tuple[str, str]]:
        problems = [model.Problem(1, 128, 64, name, activations=activations) for name in ("uint4", "uint8", "mxfp8")]
        rows = [counts.counts_of(row, 1, problem, gpu) for problem in problems]
        return [(entry.weight_format, entry.activations) for entry in rows]

    own = [(name, "float16") for name in ("uint4", "uint8", "mxfp8")]
    assert found(M1, "float16") == found(M5, "bfloat16") == own
    assert found(M1, "bfloat16") == [(name, "bfloat16") for name in ("uint4", "uint8b128", "float8_e4m3")]


def test_scales_of_two_levels_take_the_bits_of_their_codes() -> None:
    """In Q4_K and IQ4_XS, the code of a scale takes a byte, and 256 k share an fp16 scale."""
    for fmt, scales, bits in (("uint4_bias", "uint8", 4.625), ("lut4", "int8", 4.3125), ("uint4b8", None, 4.5)):
        problem = model.Problem(1, 4096, 14336, fmt, 32, scales=scales)
        assert problem.weight_bytes * 8 / (4096 * 14336) == bits, fmt
        one = tmm.profiling.plan(
            1, 4096, 14336, weight_format=fmt, group_size=32, scales_dtype=getattr(torch, str(scales), None), gpu="M1"
        ).chosen.seconds
        assert one == pytest.approx(6e-6 + problem.weight_bytes / 60.06e9, rel=0.03), fmt


def test_a_row_of_two_levels_and_of_bytes_is_its_own() -> None:
    tiling = model.Tiling("fused", "gemm_fused", (8, 32, 64))
    two_levels = model.Problem(8, 128, 256, "uint4_bias", 32, scales="uint8")
    found = counts.counts_of(tiling, 8, two_levels, M1)
    assert (found.weight_format, found.group_size, found.levels) == ("uint4_bias", 32, 2)
    for fmt in ("uint8_bias", "mxfp8", "float8_e4m3"):
        found = counts.counts_of(tiling, 8, model.Problem(8, 128, 256, fmt, 32), M1)
        assert (found.weight_format, found.levels) == (fmt, 1)


def test_constants_are_those_of_the_kernels() -> None:
    texts = [(Path(geometry.__file__).parents[2] / f"kernels/{name}").read_text()
             for name in ("gemm/geometry.h", "experts/params.h", "shared/types.h")]  # fmt: skip
    header = "\n".join(texts)
    for ours, theirs in (
        ("GEMV_K", "kGemvK"), ("GEMV_MAX_ROWS", "kGemvMaxRows"), ("GEMV_MAX_SIMDGROUPS", "kGemvMaxSimdgroups"),
        ("GEMV_MAX_LOADS_FIRST_ROWS", "kGemvMaxLoadsFirstRows"), ("FUSED_COLUMNS", "kFusedColumns"),
        ("FUSED_MAX_ROWS", "kFusedMaxRows"), ("FUSED_K", "kFusedK"), ("FUSED_MAX_SIMDGROUPS", "kFusedMaxSimdgroups"),
        ("TENSOR_ROWS", "kTensorRows"), ("TENSOR_COLUMNS", "kTensorColumns"), ("TENSOR_K", "kTensorK"),
        ("MIN_GROUP_SIZE", "kMinGroupSize"), ("CHAIN_LENGTH", "kChainLength"), ("MOE_GEMV_ROWS", "kMoeGemvRows"),
        ("MOE_REDUCE_MAX_SIMDGROUPS", "kMoeReduceMaxSimdgroups"), ("MOE_SORT_THREADS", "kMoeSortThreads"),
        ("CODES_PER_WORD", "kBlockK"), ("SIMD_WIDTH", "kSimdWidth"), ("ELEMENTWISE_WIDTH", "kElementwiseWidth"),
        ("ELEMENTWISE_HEIGHT", "kElementwiseHeight"),
    ):  # fmt: skip
        value = re.search(rf"\b{theirs} = (\d+)", header)
        assert value is not None and getattr(geometry, ours) == int(value[1]), theirs


def test_of_equal_times_the_one_with_more_simdgroups_in_flight_is_taken_if_few_are() -> None:
    def taken(seconds: list[float], in_flight: list[float]) -> int:
        row = model.Tiling("gemv", "gemv", (1, 128, 16), simdgroups=np.arange(1, 4), k_per_slice=64, splits=np.ones(3))
        cost = model.DispatchCost(seconds=np.array(seconds), in_flight=np.array(in_flight))
        return int(tilings.cheapest(row, model.PlanCost([cost]))[0].simdgroups) - 1

    assert taken([1.00, 1.01, 1.03], [4, 8, 16]) == 1
    assert taken([1.00, 1.01, 1.02], [4, 8, 16]) == 2
    assert taken([1.00, 1.01, 1.02], [12, 30, 40]) == 0
    assert taken([1.00, 0.99, 1.00], [4, 6, 5]) == 1
