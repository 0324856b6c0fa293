"""Products on several of PyTorch's streams at once, on the software Metal device."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support import reference
from tests.support.dispatches import dispatches_of
from torch_marlin_metal import tuning

OPS = torch.ops.torch_marlin_metal

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="takes streams from the software Metal device")
VARIANTS = ("single_stage", "striped", "double_buffered")  # need workspaces, because N is small and K is large
Product = Callable[[], torch.Tensor]


@pytest.fixture(autouse=True)
def no_commits(mps):
    """Prevents commits, so that all kernels run at the end. Two streams that share a workspace would overwrite it."""
    interval = tuning.commit_interval()
    tuning.set_commit_interval(0)
    yield
    tuning.set_commit_interval(interval)


def product(seed: int, variant: str) -> tuple[Product, Callable[[torch.Tensor], object]]:
    """Returns two functions: one computes the product of this seed, the other compares its result with fp64."""
    weight = reference.make_weight("uint4b8", 1024, 32, 64, seed=seed)
    a = reference.random(12, 1024, dtype=torch.float16, seed=seed)
    exact, bound = reference.gemm(a, weight)
    a_mps, moved = a.to("mps"), weight.to("mps")

    def run() -> torch.Tensor:
        return OPS.gemm(a_mps, moved.b_packed, moved.scales, variant=variant, **moved.arguments)

    return run, lambda result: reference.check_gemm(result, exact, bound)


def test_two_streams_in_turn():
    import softmetal

    products = [product(i, VARIANTS[i % 3]) for i in range(6)]
    assert [len(dispatches_of(run)) for run, _ in products[:3]] == [2, 2, 2], "a workspace is written and read"
    torch.mps.synchronize()
    before = softmetal.stream_counts()
    results = []
    for i, (run, _) in enumerate(products):
        with softmetal.stream(5 + i % 2):
            results.append(run())
    counts = softmetal.stream_counts()
    assert (counts.encoders - before.encoders, counts.uncommitted) == (2, 12), "one encoder of each stream"
    torch.mps.synchronize()
    for (_, check), result in zip(products, results, strict=True):
        check(result.cpu())


def test_two_threads_with_a_stream_each():
    import softmetal

    products = [[product(10 * thread + i, VARIANTS[i % 3]) for i in range(3)] for thread in range(2)]
    for run, _ in products[0]:
        run()  # compiles now, so that the threads only encode
    torch.mps.synchronize()
    before = softmetal.stream_counts()
    together = threading.Barrier(2, timeout=120)

    def work(thread: int) -> list[torch.Tensor]:
        results = []
        with softmetal.stream(7 + thread):
            for run, _ in products[thread]:
                together.wait()
                results.append(run())
        return results

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(work, range(2)))
    assert softmetal.stream_counts().encoders - before.encoders == 2
    torch.mps.synchronize()
    for thread in range(2):
        for (_, check), result in zip(products[thread], results[thread], strict=True):
            check(result.cpu())
