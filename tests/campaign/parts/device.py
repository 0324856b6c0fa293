"""Stresses the mps backend on the software device: threads multiply and call empty_cache, and memory must not grow."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

import softmetal

softmetal.install()  # before the package
import torch_marlin_metal  # noqa: E402, F401  registers the operators
from tests.support import reference  # noqa: E402

OPS = torch.ops.torch_marlin_metal

CALLS = 20


def case(rng: random.Random, work: Path) -> str:
    """Multiplies on mps in one or more threads. Afterwards, no more device memory may be allocated than before."""
    del work
    name = rng.choice(reference.ANY_FORMAT)
    host = reference.make_weight(name, 64, 40, 32, seed=rng.randrange(9))
    a = reference.random(rng.choice((1, 5)), 64, dtype=torch.float16)
    exact, bound = reference.gemm(a, host, raw_codes=True)
    multiply_in_threads(1, a, host, exact, bound)  # the first product allocates a buffer that the process keeps
    torch.mps.synchronize()
    torch.mps.empty_cache()
    before = torch.mps.current_allocated_memory()
    count = rng.choice((1, 3))
    multiply_in_threads(count, a, host, exact, bound)
    torch.mps.synchronize()
    torch.mps.empty_cache()
    assert torch.mps.current_allocated_memory() <= before, f"{torch.mps.current_allocated_memory() - before} bytes more"
    return f"{count} threads of {CALLS} calls"


def multiply_in_threads(
    count: int, a: torch.Tensor, host: reference.Weight, exact: np.ndarray, bound: np.ndarray
) -> None:
    """Copies the operands to mps and multiplies them in threads. Raises if a result is wrong."""
    weight, moved = host.to("mps"), a.to("mps")

    def multiply(_: int) -> None:
        for turn in range(CALLS):
            result = OPS.gemm(moved, weight.b_packed, weight.scales, **weight.arguments)
            if turn % 10 == 9:
                reference.check_gemm(result, exact, bound)
                torch.mps.empty_cache()

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(multiply, range(count)))
