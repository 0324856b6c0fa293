"""The mps backend under stress on the software device: threads multiply and call empty_cache. Memory must not grow."""

import random
import threading
from pathlib import Path

import torch

import softmetal  # noqa: F401  makes mps ready
import torch_marlin_metal as tmm
from tests.support import reference

CALLS = 40


def case(rng: random.Random, work: Path) -> str:
    """Multiplies on mps from one or more threads. Afterwards, as much device memory is allocated as before."""
    del work
    name = rng.choice(reference.FORMATS)
    group = tmm.WEIGHT_FORMATS[name].fixed_group_size or 32
    host = reference.make_weight(name, 64, 40, group, seed=rng.randrange(9))
    a = torch.randn(rng.choice((1, 5)), 64, generator=torch.Generator().manual_seed(4)).half()
    exact, bound = reference.gemm(a, host, raw_codes=True)
    torch.mps.synchronize()
    before = torch.mps.current_allocated_memory()
    weight, moved = host.to("mps"), a.to("mps")
    wrong: list[str] = []

    def multiply(moved: torch.Tensor = moved, weight: reference.Weight = weight) -> None:
        try:
            for turn in range(CALLS):
                result = tmm.gemm(moved, weight.b_packed, weight.scales, **weight.arguments)
                if turn % 10 == 9:
                    reference.check_gemm(result, exact, bound)
                    torch.mps.empty_cache()
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__} {error}")

    count = rng.choice((1, 3))
    threads = [threading.Thread(target=multiply) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    del weight, moved, multiply, threads
    torch.mps.synchronize()
    torch.mps.empty_cache()
    assert torch.mps.current_allocated_memory() <= before, f"{torch.mps.current_allocated_memory() - before} bytes more"
    return f"{count} threads of {CALLS} calls"
