"""Counts the operators' commits on the software Metal device, and tests products that are divided by rows."""

import math
import os
import sys
from subprocess import CompletedProcess

import pytest
import torch

import torch_marlin_metal as tmm
from tests.support import reference
from tests.support.dispatches import longest_plan
from tests.support.programs import run_python
from torch_marlin_metal import tuning

OPS = torch.ops.torch_marlin_metal

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="reads the software Metal device's counts")
OPTIONS = {"weight_format": "uint4b8", "group_size": 64}


@pytest.fixture(autouse=True)
def settings():
    interval = tuning.commit_interval()
    yield
    tuning.set_commit_interval(interval)


@pytest.fixture
def product(mps):
    """Returns a small product that has run once, and its predicted seconds, after the device has become idle."""
    weight = tmm.quantize_weight(torch.randn(64, 512), "uint4b8", group_size=64).to("mps")
    x = torch.randn(2, 512, dtype=torch.float16, device="mps")

    def run(**options):
        return OPS.gemm(x, weight.b_packed, weight.scales, **OPTIONS, **options)

    run()
    tuning.set_commit_interval(1e-9)
    run()  # commits the work of earlier tests
    torch.mps.synchronize()
    chip = tmm.profiling.plan(2, 64, 512, group_size=64, gpu="M1").chosen
    return run, chip.seconds


def commits(run, times: int) -> int:
    import softmetal

    before = softmetal.stream_counts().commits
    for _ in range(times):
        run()
    return softmetal.stream_counts().commits - before


@pytest.mark.parametrize("products", [1, 3])
def test_a_commit_follows_each_interval_of_predicted_work(product, products):
    run, seconds = product
    tuning.set_commit_interval((products - 0.5) * seconds)
    assert commits(run, 6) == 6 // products


def test_little_work_and_no_interval_commit_nothing(product):
    import softmetal

    run, seconds = product
    tuning.set_commit_interval(3e-3)
    assert math.ceil(3e-3 / seconds) > 12
    assert commits(run, 12) == 0
    assert softmetal.stream_counts().uncommitted >= 12
    torch.mps.synchronize()
    tuning.set_commit_interval(0)
    assert commits(run, 12) == 0
    tuning.set_commit_interval(1e-9)
    assert commits(run, 2) == 2


def test_results_do_not_depend_on_commits(product):
    run, _ = product
    variants = ("auto", "fused", "striped")
    tuning.set_commit_interval(0)
    expected = [run(variant=variant).cpu() for variant in variants]
    tuning.set_commit_interval(1e-9)
    assert all(torch.equal(run(variant=name).cpu(), y) for name, y in zip(variants, expected, strict=True))


def test_no_commits_while_pytorch_profiles(product):
    import softmetal

    run, _ = product
    tuning.set_commit_interval(1e-9)
    torch.mps.profiler.start("interval", False)
    try:
        assert commits(run, 3) == 0
        assert softmetal.stream_counts().uncommitted >= 3
    finally:
        torch.mps.profiler.stop()
    assert commits(run, 1) == 1


def test_each_stream_counts_its_own_work(product):
    import softmetal

    run, seconds = product
    tuning.set_commit_interval(0.5 * seconds)
    with softmetal.stream(1):
        assert commits(run, 1) == 1  # one commit, which includes work of other tests on the stream
    tuning.set_commit_interval(1.5 * seconds)
    assert commits(run, 1) == 0
    with softmetal.stream(1):
        assert commits(run, 1) == 0
    assert commits(run, 1) == 1


@pytest.mark.parametrize(("K", "M"), [(128, 65), (1024, 200)])
@pytest.mark.parametrize("variant", ["auto", "fused", "single_stage"])
def test_a_long_product_is_divided_by_rows(mps, variant, K, M):
    import softmetal

    weight = reference.make_weight("uint4b8", K, 32, 64)
    a = reference.random(M, K, dtype=torch.float16, seed=M)
    bias = torch.randn(32, dtype=torch.float16)
    exact, bound = reference.gemm(a, weight, bias, raw_codes=True)
    moved, x, bias = weight.to("mps"), a.to("mps"), bias.to("mps")

    def run(rows=x):
        softmetal.faults()
        y = OPS.gemm(rows, moved.b_packed, moved.scales, bias=bias, variant=variant, **moved.arguments).cpu()
        return y, sum("reduce" not in record.kernel for record in softmetal.counters())

    parts, start = [], 0
    while start < M:  # like ops_mps.mm, divides by two, in multiples of 64 rows
        rows = M - start
        while rows > 64:
            rows = (rows // 2 + 63) // 64 * 64
        parts.append(run(x[start : start + rows])[0])
        start += rows
    _, few = run()
    with longest_plan(1e-9):
        divided, many = run()
    assert many >= math.ceil(M / 64) > few
    reference.check_gemm(divided, exact, bound)
    assert torch.equal(divided, torch.cat(parts)), "each part is planned like a product of its own"


def test_every_operator_counts_its_work(mps):
    """If the interval is shorter than the time of any kernel, each dispatch commits."""
    weight = reference.make_weight("uint4b8", 128, 32, 64).to(mps)
    x = torch.randn(3, 64, dtype=torch.float16, device=mps)
    heads = torch.randn(1, 2, 4, 16, dtype=torch.float16, device=mps)
    table = torch.randn(1, 4, 16, dtype=torch.float16, device=mps)
    caches = torch.zeros(2, 1, 2, 8, 16, dtype=torch.float16, device=mps).unbind()
    start, ids = torch.zeros(1, dtype=torch.int64, device=mps), torch.zeros(3, dtype=torch.int64, device=mps)
    ones, row, gates = x[0].contiguous(), heads[:, :, 0].contiguous(), heads[:, :, 0, 0].contiguous()
    states = [torch.zeros(size, device=mps) for size in ((1, 2, 16, 16), (1, 2, 16), (1, 2))]
    words = torch.zeros(16, 32, dtype=torch.int32, device=mps)
    runs = {
        "rms_norm": lambda: OPS.rms_norm(x, ones, eps=1e-6),
        "rotary": lambda: OPS.rotary(heads, heads, table, table),
        "gated_activation": lambda: OPS.gated_activation(x, x),
        "write_cache": lambda: OPS.write_cache(*caches, heads, heads, start),
        "dequantize": lambda: OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments),
        "embedding": lambda: OPS.embedding(ids, weight.b_packed, weight.scales, **weight.arguments),
        "gptq_repack": lambda: OPS.gptq_repack(words),
        "mlstm_step": lambda: OPS.mlstm_step(row, row, row, gates, gates, *states),
    }
    for run in runs.values():
        run()
    tuning.set_commit_interval(1e-9)
    commits(runs["rms_norm"], 1)  # commits the work of the calls above
    assert {name: commits(run, 2) for name, run in runs.items()} == dict.fromkeys(runs, 2)


def test_a_long_mlstm_is_divided_by_chunks(mps):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 100, 16, generator=generator) for _ in range(3))
    i, f = (torch.randn(1, 2, 100, generator=generator) for _ in range(2))
    expected = OPS.mlstm(q, k, v, i, f, chunk_size=32)[0]
    moved = [tensor.to(mps) for tensor in (q, k, v, i, f)]
    with longest_plan(1e-9):
        found = OPS.mlstm(*moved, chunk_size=32)[0].cpu()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        tuning.set_commit_interval(1e-9)
        # One dispatch for the gates of all tokens, and two for each of the four chunks: states and output.
        assert commits(lambda: OPS.mlstm(*moved, chunk_size=32), 1) == 1 + 2 * 4


def test_bad_intervals():
    for seconds in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="commit interval: expected seconds of at least 0"):
            tuning.set_commit_interval(seconds)
    program = "from torch_marlin_metal import tuning\nprint(tuning.commit_interval())"
    for text, expected in (("0", "0.0"), ("2.5", "0.0025"), ("", "0.003")):
        done = run_with(program, text)
        assert done.stdout.strip() == expected, done.stderr
    done = run_with(program, "fast")
    assert "TORCH_MARLIN_METAL_COMMIT_MS: expected milliseconds, 0 for never, got 'fast'" in done.stderr


def run_with(program: str, text: str) -> CompletedProcess[str]:
    return run_python("-c", program, env={**os.environ, "TORCH_MARLIN_METAL_COMMIT_MS": text})
