"""Checks which functions the Metal host code compiles and when, and what happens if a compile fails.

The scenarios run one after another in a new process, because a process never compiles a function twice.
"""

import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import torch_marlin_metal as tmm
from tests.support.programs import run_python
from torch_marlin_metal.layers.experts import silu_gate

OPS = torch.ops.torch_marlin_metal

ROOT = Path(__file__).resolve().parents[2]
WAIT = 120  # after this many seconds, an expected thread is reported as missing
pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="watches the software Metal device compile")


def instances(compiles) -> list[str]:
    """Returns the functions in each compiled library, or the file of a library without templates."""
    texts = [c.text for c in compiles if c.kind == "library"]
    return [
        found[1] if (found := re.match(r'#define MARLIN_ONLY .*\n#define MARLIN_ONLY_NAME "(\w+)"\n', text)) else
        re.match(r'#line 1 "kernels/(.*)\.metal"', text)[1]
        for text in texts
    ]  # fmt: skip


def pipelines(compiles) -> list[str]:
    return [c.text for c in compiles if c.kind == "pipeline"]


def weight_of(weight_format: str, N: int = 64) -> tmm.PackedWeight:
    generator = torch.Generator().manual_seed(0)
    return tmm.quantize_weight(torch.randn(N, 256, generator=generator), weight_format).to("mps")


def dequantize(weight_format: str, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Runs one small kernel. Each format and dtype has a different kernel."""
    return weight_of(weight_format).dequantize(dtype).cpu()


def first_product() -> None:
    """The first product compiles the probe and one function; the second product compiles nothing.

    Before the first compile, the host asks Metal to run as many compiles in parallel as it can.
    """
    import softmetal

    def too_early(compile) -> str | None:
        return None if softmetal.compiles_concurrently() else "shouldMaximizeConcurrentCompilation is not set"

    weight = weight_of("uint4b8")
    a = torch.randn(1, 256, dtype=torch.float16).to("mps")
    with softmetal.compiles(too_early) as seen:
        first = OPS.gemm(a, weight.b_packed, weight.scales, weight_format="uint4b8", group_size=128, variant="gemv")
    assert instances(seen) == ["gemm/probe", "gemv_uint4b8_float16"], instances(seen)
    assert pipelines(seen) == ["probe_half_subnormals", "gemv_uint4b8_float16"], pipelines(seen)
    for compiled in seen:
        if compiled.kind == "library":
            names = re.findall(r"^\[\[kernel.*?\bvoid (\w+)\(", compiled.text, re.MULTILINE)
            assert len(names) == 1, f"text with the kernels {names}"
    with softmetal.compiles() as seen:
        again = OPS.gemm(a, weight.b_packed, weight.scales, weight_format="uint4b8", group_size=128, variant="gemv")
    assert seen == [] and torch.equal(first.cpu(), again.cpu())


def failure_is_remembered_and_alone() -> None:
    import softmetal

    with softmetal.compiles(lambda c: "no such type" if "dequantize_uint4_float16" in c.text else None) as seen:
        messages = []
        for _ in range(3):
            with pytest.raises(RuntimeError) as raised:
                dequantize("uint4")
            messages.append(str(raised.value).splitlines()[0])
        assert len(seen) == 1, [c.kind for c in seen]
        expected = "torch_marlin_metal: kernel dequantize_uint4_float16 (weights/dequantize.metal) does not compile: no such type"
        assert messages == [expected] * 3, messages
        assert dequantize("uint4", torch.bfloat16).isfinite().all(), "the next function of the file"
    # the host remembers the failure, although a new compile would succeed
    with pytest.raises(RuntimeError, match="no such type"):
        dequantize("uint4")


def failing_pipeline_is_remembered() -> None:
    import softmetal

    def answer(compile) -> str | None:
        return "too many registers" if compile.kind == "pipeline" else None

    with softmetal.compiles(answer) as seen:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"dequantize_uint4_bias_float32 .* too many registers"):
                dequantize("uint4_bias", torch.float32)
    assert [c.kind for c in seen] == ["library", "pipeline"]


def interruptions() -> None:
    """An interrupted compile is repeated once. A second interruption is an error, and the next call compiles again."""
    import softmetal

    interrupted = "Compiler encountered XPC_ERROR_CONNECTION_INTERRUPTED (is the OS shutting down?)"
    for kind in ("library", "pipeline"):
        dtype = torch.float16 if kind == "library" else torch.bfloat16
        left = [interrupted]
        with softmetal.compiles(lambda c, k=kind, left=left: left.pop() if c.kind == k and left else None) as seen:
            dequantize("mxfp4", dtype)
        assert [c.kind for c in seen].count(kind) == 2, f"{kind}: {[c.kind for c in seen]}"
        dtype = torch.float32 if kind == "library" else torch.float16
        weight_format = "mxfp4" if kind == "library" else "float4_e2m1"
        with (
            softmetal.compiles(lambda c, k=kind: interrupted if c.kind == k else None) as seen,
            pytest.raises(RuntimeError, match="XPC_ERROR_CONNECTION_INTERRUPTED"),
        ):
            dequantize(weight_format, dtype)
        assert [c.kind for c in seen].count(kind) == 2
        assert dequantize(weight_format, dtype).isfinite().all()


def crash_of_the_compiler() -> None:
    """A compile that crashes is repeated once. A second crash is remembered, because the source may always crash it."""
    import softmetal

    with softmetal.compiles(lambda c: "Compiler encountered an internal error") as seen:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="internal error"):
                dequantize("float4_e2m1", torch.float32)
    assert len(seen) == 2


def threads_compile_side_by_side() -> None:
    """Four threads need three functions: three compiles run in parallel, and no function is compiled twice."""
    import softmetal

    weights = [weight_of(name) for name in ("nvfp4", "nf4", "nvfp4", "nf4")]
    dtypes = [torch.float16, torch.float16, torch.bfloat16, torch.float16]
    together = threading.Barrier(3)

    def answer(compile) -> None:
        if compile.kind == "library":
            together.wait(WAIT)

    with softmetal.compiles(answer) as seen, ThreadPoolExecutor(4) as threads:
        results = [threads.submit(w.dequantize, dtype) for w, dtype in zip(weights, dtypes, strict=True)]
        values = [result.result() for result in results]
    assert not together.broken, "the three compiles did not meet"  # an exception in a compile's callback would be lost
    functions = ["dequantize_lut4_float16", "dequantize_nvfp4_bfloat16", "dequantize_nvfp4_float16"]
    assert sorted(instances(seen)) == functions and sorted(pipelines(seen)) == functions, seen
    assert torch.equal(values[1].cpu(), values[3].cpu())


def others_go_on_while_one_compiles() -> None:
    """While one thread's compile hangs, other threads use compiled kernels and compile new ones."""
    import softmetal

    entered, released = threading.Event(), threading.Event()
    slow = weight_of("uint4b8")

    def answer(compile) -> None:
        if "dequantize_uint4b8_float32" in compile.text and compile.kind == "library":
            entered.set()
            assert released.wait(WAIT), "nobody went on"

    with softmetal.compiles(answer), ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(slow.dequantize, torch.float32)
        assert entered.wait(WAIT)
        dequantize("nvfp4")
        dequantize("uint4b8")
        assert not hanging.done()
        released.set()
        assert hanging.result(WAIT).isfinite().all()


def prepare_leaves_nothing_to_compile() -> None:
    import softmetal

    def layer(N: int, K: int, **options) -> tmm.MarlinLinear:
        linear = torch.nn.Linear(K, N, bias=bool(options.pop("bias", False)))
        return tmm.MarlinLinear.from_linear(linear.half(), **options)

    layers = [layer(64, 128), layer(64, 128), layer(64, 128, bias=True), layer(48, 256, weight_format="nvfp4")]
    model = torch.nn.Sequential(*layers).to("mps")
    with softmetal.compiles() as seen:
        # two layers are equal, so they need the same kernels
        assert tmm.prepare(model, [1, 9, 9, 40], progress=False) == 9
    assert len(set(instances(seen))) == len(instances(seen)) >= 2  # one for each format
    with softmetal.compiles() as seen:
        for linear in model:
            for M in (1, 9, 40):
                linear(torch.randn(M, linear.in_features, dtype=torch.float16).to("mps"))
        assert seen == [], [c.text[:100] for c in seen]
    assert tmm.prepare(torch.nn.Sequential(layer(64, 128)), progress=False) == 0, "a layer on the CPU"
    for rows, got in (([0, 1], r"\[0, 1\]"), ([], r"\[\]"), (4, "4"), ([1.5], r"\[1\.5\]")):
        with pytest.raises(ValueError, match=f"prepare: rows: expected numbers of at least 1, got {got}$"):
            tmm.prepare(model, rows)
    with softmetal.compiles(lambda c: "broken" if "_nvfp4_" in c.text and c.kind == "library" else None):
        other = torch.nn.Sequential(layer(48, 256, weight_format="nvfp4"), layer(48, 256)).bfloat16().to("mps")
        with pytest.raises(RuntimeError, match=r"_nvfp4_bfloat16 .* does not compile: broken"):
            tmm.prepare(other, [1], progress=False)
    with softmetal.compiles() as seen:
        other[1](torch.randn(1, 256, dtype=torch.bfloat16).to("mps"))
        assert seen == [], "the layer after the failure is prepared"


def prepare_compiles_experts() -> None:
    import softmetal

    def stack(K: int, N: int, **options) -> tmm.layers.ExpertWeights:
        weights = [[tmm.quantize_weight(torch.randn(N, K), "uint4b8", 32)] for _ in range(3)]
        return tmm.layers.ExpertWeights.from_packed(weights, **options)

    def experts(top_k: int | None) -> tmm.MarlinExperts:
        both = stack(64, 80, dtype=torch.float16), stack(40, 64, dtype=torch.float16)
        return tmm.MarlinExperts(*both, silu_gate, top_k).to("mps")

    model = torch.nn.Sequential(experts(2), experts(2), experts(None))  # two layers are equal
    with softmetal.compiles() as seen:
        assert tmm.prepare(model, [1, 40], progress=False) == 4
    assert {"moe_gemv_uint4b8_float16", "moe_gemv_reduce_uint4b8_float16"} <= set(instances(seen)), instances(seen)
    with softmetal.compiles() as seen:
        for M in (1, 40):
            a, ids = torch.randn(M, 64, dtype=torch.float16).to("mps"), torch.zeros(M, 2, dtype=torch.int64).to("mps")
            for dtype in (torch.float16, torch.float32):
                model[0](a, ids, torch.ones(M, 2, dtype=dtype).to("mps"))
        assert seen == [], [c.text[:100] for c in seen]


SCENARIOS: tuple[Callable[[], None], ...] = (
    first_product,
    failure_is_remembered_and_alone,
    failing_pipeline_is_remembered,
    interruptions,
    crash_of_the_compiler,
    threads_compile_side_by_side,
    others_go_on_while_one_compiles,
    prepare_leaves_nothing_to_compile,
    prepare_compiles_experts,
)


def run_all() -> None:
    failures = {}
    for scenario in SCENARIOS:
        try:
            scenario()
        except BaseException:
            failures[scenario.__name__] = traceback.format_exc()
    print(json.dumps(failures))


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """Runs the scenarios. Returns the tracebacks of the scenarios that failed, by name."""
    if not torch.backends.mps.is_available():
        pytest.skip("needs the software Metal device")
    script = "from tests.ops import test_compiles\ntest_compiles.run_all()"
    done = run_python("-c", script, cwd=ROOT, env={**os.environ, "SOFTMETAL_CHECKED": "0"}, mps=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_scenario(mps, failures, name):
    assert name not in failures, failures[name]
