"""Calls operators from several Python threads while PyTorch's number of threads changes. Each result must be right."""

import random
import threading
from pathlib import Path

import torch

import torch_marlin_metal as tmm
from tests.support import reference

OPS = torch.ops.torch_marlin_metal

THREADS, CALLS = 5, 20


def case(rng: random.Random, work: Path) -> str:
    del work
    products, expected = [], []
    torch.set_num_threads(1)
    for _ in range(THREADS):
        name = rng.choice(reference.ANY_FORMAT)
        group = tmm.WEIGHT_FORMATS[name].fixed_group_size or rng.choice((16, 32, 128))
        weight = reference.make_weight(name, 256, rng.choice((40, 300)), group, seed=rng.randrange(99))
        a = torch.randn(rng.choice((1, 4, 20)), 256, generator=torch.Generator().manual_seed(3)).to(
            rng.choice(reference.DTYPES)
        )
        products.append((a, weight))
        expected.append(reference.gemm(a, weight))
    wrong: list[str] = []

    def work_on(number: int) -> None:
        a, weight = products[number]
        exact, bound = expected[number]
        bound = bound + 16 * 2.0**-24 * float(a.float().abs().max()) * weight.magnitude.sum(0)
        try:
            for turn in range(CALLS):
                if number == 0:
                    torch.set_num_threads(1 + turn % 3)
                result = OPS.gemm(a, weight.b_packed, weight.scales, **weight.arguments)
                reference.check_gemm(result, exact, bound)
                OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments)
        except Exception as error:
            wrong.append(f"{weight.arguments['weight_format']}: {type(error).__name__} {error}")

    threads = [threading.Thread(target=work_on, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    return "right"
