"""Timing on an asynchronous device: chains of dependent products, timed in turn and compared by medians of ratios."""

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
CHAIN_SECONDS = 0.01  # a chain takes at least this long, because a synchronisation costs tens of microseconds
MOST_CALLS = 256


@dataclass(frozen=True)
class Chain:
    """Repeated calls, each of which depends on the result of the one before.

    Attributes:
        first: the argument of the first call.
        step: one call: takes the state and the number of the call, and returns the next state.
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
        product: takes activations and the number of the call, and returns `[M, N]`; the number selects the weight.
    """

    def step(state: object, index: int) -> object:
        assert isinstance(state, Tensor)
        # Adds zero times the result: the values do not change, but the GPU must wait for the result.
        return torch.add(state, product(state, index)[:, :1], alpha=0)

    return Chain(a, step, lambda state: synchronize(a.device))


def synchronize(device: torch.device) -> None:
    """Waits until a device has finished all its work."""
    if device.type == "mps":
        torch.mps.synchronize()


def cold_copies(tensors: Sequence[Tensor], cold_bytes: int = COLD_BYTES) -> list[list[Tensor]]:
    """Returns copies of a weight's tensors, enough that none is still in a cache when it is used again."""
    size = sum(tensor.nbytes for tensor in tensors)
    copies = max(2, -(-cold_bytes // max(size, 1)))
    return [[tensor.clone() for tensor in tensors] for _ in range(copies)]


def rotating(weight: PackedWeight, cold_bytes: int = COLD_BYTES) -> Callable[[int], dict[str, object]]:
    """Returns a function that maps the number of a call to `gemm`'s arguments; each call gets another copy."""
    tensors = weight.tensors()
    copies = cold_copies(list(tensors.values()), cold_bytes)
    fixed = {"weight_format": weight.weight_format, "group_size": weight.group_size}
    arguments: list[dict[str, object]] = [{**fixed, **dict(zip(tensors, copy, strict=True))} for copy in copies]
    return lambda index: arguments[index % len(arguments)]


def interleave(chains: Mapping[str, Chain], rounds: int = 9) -> dict[str, list[float]]:
    """Times all chains once per round, in rotating order. Returns the seconds per call of each chain, by round.

    A disturbance of the machine then affects all chains alike. Compare them by the median of their ratios per round.
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
