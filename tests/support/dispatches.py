"""Watches calls on mps: their dispatches on the software Metal device, their memory, and a limit for their plans."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_marlin_metal.extension import native


def dispatches_of(call: Callable[[], object], *, may_wait: bool = False) -> list[Any]:
    """Returns the counters of a call's dispatches. The call runs twice, because the first run may compile kernels."""
    import softmetal

    call()
    torch.mps.synchronize()
    softmetal.faults()  # clears the list of dispatches
    waits = softmetal.stream_counts().waits
    call()
    assert may_wait or softmetal.stream_counts().waits == waits, "the call waits for the GPU"
    return softmetal.counters()


def peak_bytes(call: Callable[[], object]) -> int:
    """Returns how many bytes of mps memory a call needs at most, in addition to those that were allocated before."""
    torch.mps.synchronize()
    before = torch.mps.current_allocated_memory()
    torch.accelerator.reset_peak_memory_stats()
    call()
    return torch.accelerator.memory_stats()["allocated_bytes.all.peak"] - before


@contextmanager
def longest_plan(seconds: float) -> Iterator[None]:
    """Divides products whose plan takes longer than `seconds`."""
    before = native.longest_plan_seconds()
    native.set_longest_plan_seconds(seconds)
    try:
        yield
    finally:
        native.set_longest_plan_seconds(before)
