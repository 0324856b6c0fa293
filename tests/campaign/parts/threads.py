"""Calls operators from several Python threads while PyTorch's number of threads changes. Each result must be right."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import torch_marlin_metal  # noqa: F401  registers the operators
from tests.support import reference

OPS = torch.ops.torch_marlin_metal

THREADS, CALLS = 5, 20


def case(rng: random.Random, work: Path) -> str:
    del work
    products, expected = [], []
    torch.set_num_threads(1)
    for _ in range(THREADS):
        name = rng.choice(reference.ANY_FORMAT)
        group, N = rng.choice((16, 32, 128)), rng.choice((40, 300))
        weight = reference.make_weight(name, 256, N, group, seed=rng.randrange(99))
        a = reference.random(rng.choice((1, 4, 20)), 256, dtype=rng.choice(reference.DTYPES))
        products.append((a, weight))
        expected.append(reference.gemm(a, weight))

    def work_on(number: int) -> None:
        a, weight = products[number]
        exact, bound = expected[number]
        bound = bound + 16 * 2.0**-24 * float(a.float().abs().max()) * weight.magnitude.sum(0)
        for turn in range(CALLS):
            if number == 0:
                torch.set_num_threads(1 + turn % 3)
            result = OPS.gemm(a, weight.b_packed, weight.scales, **weight.arguments)
            reference.check_gemm(result, exact, bound)
            OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work_on, range(THREADS)))
    return "right"
