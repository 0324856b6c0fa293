"""A failing call leaves no autorelease pool. The objects in such a pool would stay until the thread ends."""

import sys

import pytest

from tests.support.programs import run_python

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="counts the software Metal device's pools")

# A separate process, because a kernel whose compile failed stays broken in its process.
SCRIPT = """
import softmetal
import torch
import torch_marlin_metal as tmm

weight = tmm.quantize_weight(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), "uint4b8", group_size=32)
packed = weight.to("mps")
ids = torch.zeros(1, dtype=torch.int64, device="mps")
assert softmetal.autorelease_pools() == 0
for kind, dtype in (("library", torch.float32), ("pipeline", torch.bfloat16)):
    with softmetal.compiles(lambda c: "broken" if c.kind == kind else None):
        try:
            torch.ops.torch_marlin_metal.embedding(
                ids, packed.b_packed, packed.scales, weight_format="uint4b8", group_size=32, dtype=dtype
            )
        except RuntimeError as error:
            print(kind, "broken" in str(error), softmetal.autorelease_pools())
"""


def test_a_failing_compile(mps):
    done = run_python("-c", SCRIPT, mps=True)
    assert done.stdout.splitlines() == ["library True 0", "pipeline True 0"], done.stderr


# If PyTorch's profiler runs with wait_until_completed, it waits for the GPU at the end of each kernel.
WAITING_PROFILER = """
import softmetal
import torch
import torch_marlin_metal as tmm

weight = tmm.quantize_weight(torch.randn(32, 64), "uint4b8", group_size=32).to("mps")
a = torch.randn(1, 64, dtype=torch.float16, device="mps")
expected = tmm.gemm(a, weight).cpu()
source = "kernel void f(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i + 1000] = 1; }"
shader = torch.mps.compile_shader(source)
y = torch.zeros(4, device="mps")
torch.mps.synchronize()
torch.mps.profiler.start("interval", True)
with softmetal.checked():
    shader.f(y)
    try:
        tmm.gemm(a, weight)
    except RuntimeError as error:
        print("out-of-bounds" in str(error), softmetal.autorelease_pools())
torch.mps.profiler.stop()
print(torch.equal(tmm.gemm(a, weight).cpu(), expected))
"""


def test_an_error_that_the_profilers_wait_raises(mps):
    done = run_python("-c", WAITING_PROFILER, mps=True)
    assert done.stdout.splitlines() == ["True 0", "True"], done.stderr
