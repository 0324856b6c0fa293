"""Behavior of the mps backend only: variants, plans, tensor lifetimes, bindings, threads, odd offsets and perm."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_marlin_metal as tmm
from tests.support import reference
from tests.support.dispatches import dispatches_of
from tests.support.programs import run_python

OPS = torch.ops.torch_marlin_metal

pytestmark = pytest.mark.usefixtures("mps")

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = ("gemv", "fused", "double_buffered", "single_stage", "striped")
software = pytest.mark.skipif(sys.platform == "darwin", reason="reads the software Metal device's counters")


activations = partial(reference.random, dtype=torch.float16)


def run(a, weight, **extra) -> torch.Tensor:
    return OPS.gemm(a, weight.b_packed, weight.scales, **{**weight.arguments, **extra})


def kernels_of(call) -> list[str]:
    return [record.kernel for record in dispatches_of(call, may_wait=True)]  # two_pass waits


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("weight_format", reference.FORMATS)
def test_each_variant_on_the_same_inputs(weight_format, variant, everything):
    K, N, M = 200, 70, 67
    weight = reference.make_weight(weight_format, K, N, 16)
    moved = weight.to("mps")
    turn = reference.FORMATS.index(weight_format) + VARIANTS.index(variant)
    for dtype in reference.dtypes_in_turn(turn, everything):
        a, bias = activations(M, K, dtype=dtype), activations(N, dtype=dtype, seed=1)
        exact, bound = reference.gemm(a, weight, bias, raw_codes=variant == "gemv")
        for rows in (1, 9, M):
            result = run(a[:rows].to("mps"), moved, bias=bias.to("mps"), variant=variant)
            reference.check_gemm(result, exact[:rows], bound[:rows])
            again = run(a[:rows].to("mps"), moved, bias=bias.to("mps"), variant=variant)
            assert torch.equal(result.cpu(), again.cpu())


@pytest.mark.parametrize("variant", VARIANTS)
def test_split_k_matches_and_repeats_bit_for_bit(variant):
    """With few columns and a long K, the planner splits K, so results pass through the workspace and the reduction."""
    K, N, M = 4096, 40, 3
    weight = reference.make_weight("uint4", K, N, 64)
    a, bias = activations(M, K), activations(N, seed=1)
    exact, bound = reference.gemm(a, weight, bias, raw_codes=variant == "gemv")
    moved = weight.to("mps")
    results = [run(a.to("mps"), moved, bias=bias.to("mps"), variant=variant).cpu() for _ in range(2)]
    reference.check_gemm(results[0], exact, bound)
    assert torch.equal(*results)


@software
def test_split_k_dispatches_the_product_and_then_the_reduction():
    weight = reference.make_weight("uint4", 4096, 40, 64).to("mps")
    a = activations(3, 4096).to("mps")
    assert kernels_of(lambda: run(a, weight, variant="single_stage")) == [
        "gemm_single_stage_64x64x32_uint4_float16",
        "reduce_float16",
    ]


TILES = [
    "double_buffered:64x64x32", "double_buffered:32x128x32", "double_buffered:128x64x16", "double_buffered:128x128x16",
    "single_stage:128x128x16", "striped:64x64x32", "striped:32x128x32",
]  # fmt: skip


@software
@pytest.mark.parametrize(
    "variant", [pytest.param(tile, marks=pytest.mark.whole if i % 2 else ()) for i, tile in enumerate(TILES)]
)
def test_a_variant_can_be_named_with_its_tile(variant):
    K, N, M = 640, 140, 131
    weight = reference.make_weight("uint4", K, N, 64)
    a, bias = activations(M, K), activations(N, seed=1)
    exact, bound = reference.gemm(a, weight, bias)
    moved = weight.to("mps")
    results = []
    names = kernels_of(lambda: results.append(run(a.to("mps"), moved, bias=bias.to("mps"), variant=variant)))
    name, tile = variant.split(":")
    assert names == [
        f"gemm_{name}_{tile}_uint4_float16",
        "reduce_striped_float16" if name == "striped" else "reduce_float16",
    ]
    reference.check_gemm(results[0], exact, bound)


@pytest.mark.parametrize(
    ("weight_format", "dtype"),
    [*((f, torch.float16) for f in reference.FORMATS), ("uint4", torch.bfloat16), ("uint4", torch.float32)],
    ids=str,
)
def test_two_pass(weight_format, dtype):
    """two_pass rounds the weights to the activations' dtype, so its error bound is larger. Includes perm and bias."""
    K, N = 200, 70
    weight = reference.make_weight(weight_format, K, N, 16)
    perm = np.random.default_rng(0).permutation(K).astype(np.int32)
    a, bias = activations(2, 33, K, dtype=dtype), activations(N, dtype=torch.float32, seed=1)
    moved = weight.to("mps")
    for extra, order in (({}, None), ({"bias": bias}, None), ({"bias": bias, "perm": torch.from_numpy(perm)}, perm)):
        exact, bound = reference.gemm(a, weight, extra.get("bias"), perm=order)
        rows = np.abs(reference.to_numpy(a))
        rows = rows if order is None else rows[..., order]
        bound += reference.UNIT_ROUNDOFF[dtype] * (rows @ np.abs(weight.exact))
        result = run(a.to("mps"), moved, variant="two_pass", **{k: v.to("mps") for k, v in extra.items()})
        assert result.dtype == dtype
        reference.check_gemm(result, exact, bound)


@software
def test_rounded_takes_two_pass_where_it_is_faster_in_layers_that_round_weights():
    K, N, M = 512, 512, 1024
    weight = reference.make_weight("nvfp4", K, N, 16)
    moved, a = weight.to("mps"), activations(M, K).to("mps")
    layer = tmm.MarlinLinear.from_packed(
        tmm.PackedWeight(b_packed=moved.b_packed, scales=moved.scales, **moved.arguments)
    )
    layer.rounds_weights = True
    results: list[torch.Tensor] = []
    assert kernels_of(lambda: results.append(layer(a))) == ["dequantize_nvfp4_float16"]
    assert not any("dequantize" in name for name in kernels_of(lambda: layer(a[:16])))
    exact, bound = reference.gemm(a.cpu(), weight)
    bound += reference.UNIT_ROUNDOFF[torch.float16] * (np.abs(reference.to_numpy(a)) @ np.abs(weight.exact))
    reference.check_gemm(results[0], exact, bound)


@software
def test_two_pass_dequantizes_and_is_never_chosen_by_auto():
    weight = reference.make_weight("uint4b8", 64, 24, 32).to("mps")
    a = activations(600, 64).to("mps")
    assert kernels_of(lambda: run(a, weight, variant="two_pass"))[0] == "dequantize_uint4b8_float16"
    assert not any("dequantize" in name for name in kernels_of(lambda: run(a, weight)))


@software
@pytest.mark.parametrize("M", [1, 7, 40, 300])
def test_auto_dispatches_what_the_plan_says(M):
    weight = reference.make_weight("uint4b8", 256, 96, 32)
    a = activations(M, 256).to("mps")
    moved = weight.to("mps")
    expected = [dispatch.function for dispatch in reference.planned(M, weight, a.dtype).chosen.dispatches]
    assert kernels_of(lambda: run(a, moved)) == expected


@software
@pytest.mark.parametrize("shape", [(0, 32), (4, 0, 32)])
def test_empty_results_dispatch_nothing(shape):
    weight = reference.make_weight("uint4b8", 32, 24, 32).to("mps")
    a = torch.empty(shape, device="mps")
    assert kernels_of(lambda: run(a, weight)) == []
    assert kernels_of(lambda: tmm.ops.gptq_repack(torch.empty(0, 4, dtype=torch.int32, device="mps"))) == []


@pytest.mark.parametrize("variant", ["fastest", "double_buffered:96x64x32", "gemv:64x64x32", "striped:"])
@pytest.mark.parametrize("device", ["mps", "meta"])
def test_a_variant_or_tile_that_no_kernel_has_is_refused(device, variant):
    """The fake kernel also refuses a wrong variant, so that tracing and export fail, and not only the first call."""
    weight = reference.make_weight("uint4b8", 32, 24, 32).to(device)
    with pytest.raises(ValueError, match=f"torch_marlin_metal::gemm: variant: expected one of auto, .*got '{variant}'"):
        run(torch.ones(1, 32, device=device), weight, variant=variant)


def test_a_tile_of_more_rows_than_the_problem_has_is_refused():
    weight = reference.make_weight("uint4b8", 32, 24, 32).to("mps")
    expected = "torch_marlin_metal::gemm: variant: expected one that has a kernel for M=5 N=24 K=32 .*'fused:32x32x64'"
    with pytest.raises(ValueError, match=expected):
        run(torch.ones(5, 32, device="mps"), weight, variant="fused:32x32x64")


def test_optionals_of_an_earlier_call_are_not_read_by_a_later_one():
    """The encoder keeps its bindings from one kernel to the next, so a kernel could read a stale tensor."""
    K, N = 64, 24
    weight = reference.make_weight("nvfp4", K, N, 16, global_scale_shape=(-1,))
    a, bias = activations(3, K), activations(N, seed=1)
    perm = torch.from_numpy(np.random.default_rng(0).permutation(K).astype(np.int32))
    plain = dict(weight.arguments, global_scale=None)
    moved = weight.to("mps")
    first = run(a.to("mps"), moved, bias=bias.to("mps"), perm=perm.to("mps"))
    second = OPS.gemm(a.to("mps"), moved.b_packed, moved.scales, **plain)
    assert torch.equal(second.cpu(), OPS.gemm(a, weight.b_packed, weight.scales, **plain))
    exact, bound = reference.gemm(a, weight, bias, perm=perm.numpy(), raw_codes=True)
    reference.check_gemm(first, exact, bound)


def test_inputs_may_die_before_the_work_runs():
    """A call only encodes the work, which runs later; its inputs must be kept until then."""
    K, N = 64, 24
    weight = reference.make_weight("uint4b8", K, N, 16)
    a = activations(3, K)
    exact, bound = reference.gemm(a, weight, raw_codes=True)
    results = []
    for _ in range(20):
        moved = weight.to("mps")
        results.append(run(a.to("mps").t().contiguous().t(), moved))
        del moved
        torch.full((4096,), float("nan"), device="mps")
    for result in results:
        reference.check_gemm(result, exact, bound)


def test_two_threads_can_multiply_at_the_same_time():
    K, N = 64, 24
    weight = reference.make_weight("uint4", K, N, 16)
    a = activations(5, K)
    exact, bound = reference.gemm(a, weight, raw_codes=True)
    moved, a_mps = weight.to("mps"), a.to("mps")
    with ThreadPoolExecutor(2) as threads:
        for results in threads.map(lambda _: [run(a_mps, moved) for _ in range(20)], range(2)):
            for result in results:
                reference.check_gemm(result, exact, bound)


@pytest.mark.parametrize("value", [-1, 64, 2**31 - 1, -(2**31)])
def test_a_perm_out_of_range_reads_and_writes_nothing(value):
    """On mps the host cannot check the values of perm, so kernels skip rows whose index is out of range."""
    K, N, j = 64, 24, 5
    weight = reference.make_weight("uint4b8", K, N, 16)
    codes = np.random.default_rng(0).permutation(K).astype(np.int32)
    a = activations(3, K)
    without = a.clone()
    without[:, codes[j]] = 0
    damaged = torch.from_numpy(codes.copy())
    damaged[j] = value
    moved = weight.to("mps")
    for variant in VARIANTS:
        exact, bound = reference.gemm(without, weight, perm=codes, raw_codes=variant == "gemv")
        reference.check_gemm(run(a.to("mps"), moved, perm=damaged.to("mps"), variant=variant), exact, bound)
    words = tmm.ops.gptq_repack(weight.b_packed.to("mps"), perm=damaged.to("mps")).cpu()
    whole = tmm.ops.gptq_repack(weight.b_packed, perm=torch.from_numpy(codes))
    cleared = whole.clone()
    cleared[j // 8] &= ~(15 << (4 * (j % 8)))
    assert torch.equal(words, cleared)
    dense = OPS.dequantize(moved.b_packed, moved.scales, **weight.to("mps").arguments, perm=damaged.to("mps")).cpu()
    expected = OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments, perm=torch.from_numpy(codes))
    rows = [k for k in range(K) if k != codes[j]]
    assert torch.equal(dense[rows], expected[rows])


def run_process(script: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs a script in a separate process in which torch, the package and the device are already imported."""
    program = f"import torch, torch_marlin_metal as tmm\n{script}"
    done = run_python("-c", program, cwd=ROOT, env={**os.environ, **environment}, mps=True)
    assert done.returncode == 0, done.stderr
    return done


def test_plans_are_printed_once_on_request():
    script = (
        "w = torch.zeros(8, 24, dtype=torch.int32, device='mps')\n"
        "s = torch.ones(4, 24, device='mps')\n"
        "weight = tmm.PackedWeight(w, s, 'uint4b8', 16)\n"
        "for _ in range(3): tmm.gemm(torch.ones(1, 64, device='mps'), weight)\n"
    )
    done = run_process(script, TORCH_MARLIN_METAL_PRINT_PLAN="1")
    lines = [line for line in done.stderr.splitlines() if line.startswith("torch_marlin_metal plan: ")]
    assert [line.split(": ")[1] for line in lines] == ["probe_half_subnormals", "gemm_fused_uint4b8_float32"]
    assert "M=1 N=24 K=64 group_size=16" in lines[1]


@software
def test_a_kernel_that_does_not_compile_is_named_with_metals_message(tmp_path):
    script = (
        "import os\n"
        f"os.environ.update(SOFTMETAL_CXX={str(tmp_path / 'compiler')!r}, SOFTMETAL_CACHE={str(tmp_path)!r})\n"
        "w = torch.zeros(8, 1, dtype=torch.int32, device='mps')\n"
        "try: tmm.ops.awq_repack(w)\n"
        "except RuntimeError as error: print(error)\n"
    )
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho the compiler is broken >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = run_process(script)
    assert "torch_marlin_metal: kernel awq_repack (weights/repack.metal) does not compile: " in done.stdout
    assert "the compiler is broken" in done.stdout


@software
def test_a_pipeline_that_allows_too_few_threads_raises_and_dispatches_nothing():
    """A GPU limits the threadgroup size of a kernel that uses many registers; the plan may need more threads."""
    import softmetal

    weight = reference.make_weight("uint4b8", 64, 64, 32).to("mps")
    a = activations(59, 64, dtype=torch.float32).to("mps")
    expected = run(a[:31], weight, variant="single_stage")
    torch.mps.synchronize()
    softmetal.faults()
    # The limit is compared once per new plan, because a real pipeline's limit never changes. M = 59 needs a new plan.
    with softmetal.thread_limit(64), pytest.raises(RuntimeError) as caught:
        run(a, weight, variant="single_stage")
    assert re.search(
        r"kernel gemm_single_stage_\w+ needs \d+ threads per threadgroup, but this GPU can run at most 64",
        str(caught.value),
    )
    assert softmetal.counters() == []
    assert torch.equal(run(a, weight, variant="single_stage")[:31], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("magnitude", [1e-33, 1e30])
@pytest.mark.parametrize("weight_format", reference.FORMATS)
def test_activations_far_from_one(weight_format, magnitude, dtype):
    """The decode must not scale an intermediate product out of fp32's range."""
    weight = reference.make_weight(weight_format, 64, 40, 32)
    for M in (1, 4, 33):
        a = (torch.rand(M, 64, generator=torch.Generator().manual_seed(M)) * magnitude).to(dtype)
        exact, bound = reference.gemm(a, weight, raw_codes=True)
        reference.check_gemm(run(a.to("mps"), weight.to("mps")), exact, bound)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_table_entry_that_no_code_names_reaches_nothing(variant, value):
    """K is 40, so the last tile is padded along K. The padding must not be decoded through the table."""
    codes = np.random.default_rng(0).integers(1, 16, (40, 40), dtype=np.uint8)
    weight = reference.make_weight("lut4", 40, 40, 32, codes=codes)
    a = activations(3, 40, dtype=torch.float32)
    exact, bound = reference.gemm(a, weight)
    weight.arguments["lut"][0] = value
    reference.check_gemm(run(a.to("mps"), weight.to("mps"), variant=variant), exact, bound)


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
@pytest.mark.parametrize("weight_format", reference.FORMATS)
def test_dequantize_has_the_bits_of_the_cpu(weight_format, dtype):
    weight = reference.make_weight(weight_format, 72, 40, 32, scales_dtype=torch.float32)
    moved = weight.to("mps")
    got = OPS.dequantize(moved.b_packed, moved.scales, **moved.arguments, dtype=dtype)
    assert torch.equal(got.cpu(), OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments, dtype=dtype))


@pytest.mark.parametrize("wait", [False, True], ids=["marks", "waits"])
def test_products_of_several_dispatches_while_pytorch_profiles(mps, wait):
    """PyTorch's profiler ends the encoder after each kernel that it records, so each dispatch needs a new encoder."""
    weight = tmm.quantize_weight(torch.randn(64, 4096), "uint4b8", group_size=64).to("mps")
    x = torch.randn(40, 4096, dtype=torch.float16, device="mps")

    def products():
        options = {"weight_format": "uint4b8", "group_size": 64}
        return [
            OPS.gemm(x[:rows], weight.b_packed, weight.scales, variant=variant, **options).cpu()
            for rows, variant in ((1, "gemv"), (40, "fused"), (40, "striped"))
        ]

    expected = products()
    torch.mps.profiler.start("interval", wait)
    try:
        found = products()
    finally:
        torch.mps.profiler.stop()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_products_on_a_stream_of_pytorchs_pool(mps):
    """Since torch 2.14 the current stream of a thread need not be the default stream."""
    if sys.platform == "darwin":
        pytest.skip("torch 2.13 has one stream")
    import softmetal

    weight = tmm.quantize_weight(torch.randn(64, 512), "uint4b8", group_size=64).to("mps")
    x = torch.randn(40, 512, dtype=torch.float16, device="mps")
    options = {"weight_format": "uint4b8", "group_size": 64}
    expected = OPS.gemm(x, weight.b_packed, weight.scales, **options).cpu()
    before = softmetal.stream_counts()
    with softmetal.stream(1):
        found = OPS.gemm(x, weight.b_packed, weight.scales, **options)
        assert softmetal.stream_counts().encoders == before.encoders + 1
    assert torch.equal(found.cpu(), expected)
