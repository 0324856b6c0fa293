"""Timing on a device that works behind the caller's back: dependent chains, rivals in turn, medians of ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_marlin_metal.packed_weight import PackedWeight

# More than twice the largest system-level cache of an Apple GPU (96 MB, M1 Ultra), so that weights come from memory.
COLD_BYTES = 256 * 2**20
CHAIN_SECONDS = 0.01  # of one chain, at least: a synchronisation costs tens of microseconds
MOST_CALLS = 256


@dataclass(frozen=True)
class Chain:
    """Repeated calls, each of which takes the result of the one before.

    Attributes:
        first: the argument of the first call.
        step: one call: the state and the number of the call to the next state.
        finish: waits until the last state is ready.
    """

    first: object
    step: Callable[[object, int], object]
    finish: Callable[[object], None]

    def seconds(self, calls: int) -> float:
        """Returns the wall time of a chain, divided by its number of calls."""
        state = self.first
        self.finish(state)
        begin = time.perf_counter()
        for index in range(calls):
            state = self.step(state, index)
        self.finish(state)
        return (time.perf_counter() - begin) / calls


def product_chain(a: Tensor, product: Callable[[Tensor, int], Tensor]) -> Chain:
    """Makes a chain of products: the activations of each depend on the result of the one before.

    Args:
        a: activations of the first product, `[M, K]`.
        product: activations and the number of the call to `[M, N]`; it chooses its weight by the number.
    """

    def step(state: object, index: int) -> object:
        assert isinstance(state, Tensor)
        # Times zero: the values stay, but the GPU must have the result first.
        return torch.add(state, product(state, index)[:, :1], alpha=0)

    return Chain(a, step, lambda state: synchronize(a.device))


def synchronize(device: torch.device) -> None:
    """Waits until a device has done all its work."""
    if device.type == "mps":
        torch.mps.synchronize()


def cold_copies(tensors: Sequence[Tensor], cold_bytes: int = COLD_BYTES) -> list[list[Tensor]]:
    """Returns enough copies of a weight's tensors that each has left the caches when its turn comes again."""
    size = sum(tensor.nbytes for tensor in tensors)
    copies = max(2, -(-cold_bytes // max(size, 1)))
    return [[tensor.clone() for tensor in tensors] for _ in range(copies)]


def rotating(weight: PackedWeight, cold_bytes: int = COLD_BYTES) -> Callable[[int], dict[str, object]]:
    """Returns a function from a call's number to `gemm`'s arguments for the weight; each call takes a cold copy."""
    tensors = weight.tensors()
    copies = cold_copies(list(tensors.values()), cold_bytes)
    fixed = {"weight_format": weight.weight_format, "group_size": weight.group_size}
    arguments: list[dict[str, object]] = [{**fixed, **dict(zip(tensors, copy, strict=True))} for copy in copies]
    return lambda index: arguments[index % len(arguments)]


def interleave(chains: Mapping[str, Chain], rounds: int = 9) -> dict[str, list[float]]:
    """Times all chains once per round, starting with another one each round; returns seconds per call, by round.

    A disturbance of the machine then hits all of them alike: compare by the medians of the rounds' ratios.
    """
    calls = {name: _calls(chain) for name, chain in chains.items()}
    names = list(chains)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in (*names[first:], *names[:first]):
            times[name].append(chains[name].seconds(calls[name]))
    return times


def median_ratio(times: Iterable[float], others: Iterable[float]) -> float:
    """Returns the median over rounds of the ratio of two times."""
    return statistics.median(time / other for time, other in zip(times, others, strict=True))


def _calls(chain: Chain) -> int:
    chain.seconds(1)  # compiles the kernels
    return max(2, min(MOST_CALLS, round(CHAIN_SECONDS / max(chain.seconds(2), 1e-7))))
