"""Times calls on an asynchronous device. Chains of dependent calls run in turn and are compared by median ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.ops.gemm import gemm
from torch_marlin_metal.packed_weight import PackedWeight

# More than twice the largest system-level cache of an Apple GPU (96 MB, M1 Ultra), so that weights come from memory.
COLD_BYTES = 256 * 2**20
CHAIN_SECONDS = 0.01  # minimum time of a chain, because a synchronization costs tens of microseconds
WARM_SECONDS = 0.2  # time of work before measuring: an idle GPU reaches its full clock after tens of milliseconds
MOST_CALLS = 256
# A measured chain is one command buffer, and macOS may kill a command buffer that runs for some tenths of a second. If
# a call takes longer than this, a measurement consists of one call.
LONG_SECONDS = 0.05
# A product's result is multiplied by this factor and added to the next product's activations. The factor is so small
# that the sum rounds to the activations. It is not 0: with 0, PyTorch before 2.15 copies the activations on mps instead
# of reading the result.
LINK = 1e-30


@dataclass(frozen=True)
class Measured:
    """The time of one call in a chain.

    Attributes:
        seconds: time on the device.
        host_seconds: time until the call returned. On a GPU, the call's work may not have started by then.
        has_gaps: True if the device's time may include waits for the host.
    """

    seconds: float
    host_seconds: float
    has_gaps: bool = False


@dataclass(frozen=True)
class Chain:
    """Repeated calls, in which each call depends on the result of the previous call.

    Attributes:
        first: the state before the first call.
        step: makes one call. Its arguments are the state and the index of the call, its result is the next state.
        finish: waits until the last state is ready.
        clock: measures a number of calls, for example `wall_clock` or `gpu_clock`.
    """

    first: object
    step: Callable[[object, int], object]
    finish: Callable[[object], None]
    clock: Callable[[Chain, int], Measured]

    def run(self, calls: int, state: object) -> object:
        """Makes calls without waiting for them. Returns the last state."""
        for index in range(calls):
            state = self.step(state, index)
        return state

    def measure(self, calls: int) -> Measured:
        """Measures this number of calls and returns the mean time of a call."""
        return self.clock(self, calls)


def wall_clock(chain: Chain, calls: int) -> Measured:
    """Measures calls with the host's clock, from the first call until the device has finished all calls."""
    chain.finish(chain.first)
    begin = time.perf_counter()
    state = chain.run(calls, chain.first)
    returned = time.perf_counter()
    chain.finish(state)
    return Measured((time.perf_counter() - begin) / calls, (returned - begin) / calls)


def gpu_clock(chain: Chain, calls: int) -> Measured:
    """Measures calls of PyTorch on mps by the start and end times that the GPU reports for their command buffer.

    PyTorch takes longer to encode a call than the GPU takes for a small product, so the host's clock would measure the
    host. An unmeasured chain therefore runs first, and the GPU works on it while the host encodes the measured chain.
    PyTorch's graphs and copies may commit inside the measured chain. Then the GPU may wait for the host, and `has_gaps`
    is True.
    """
    timer: Any = torch.ops.torch_marlin_metal
    state = chain.run(calls, chain.first)
    timer._begin_gpu_time()
    try:
        begin = time.perf_counter()
        chain.run(calls, state)
        returned = time.perf_counter()
    finally:
        seconds, is_whole = timer._end_gpu_time()
    return Measured(seconds / calls, (returned - begin) / calls, has_gaps=not is_whole)


def product_chain(a: Tensor, product: Callable[[Tensor, int], Tensor]) -> Chain:
    """Makes a chain of products. The activations of each product depend on the previous product's result.

    The values of the activations do not change, but the device must wait for each result.

    Args:
        a: activations of the first product, `[M, K]`.
        product: computes `[M, N]` from activations and the index of the call. The index selects the weight.
    """

    def step(state: object, index: int) -> object:
        assert isinstance(state, Tensor)
        return torch.add(state, product(state, index)[:, :1], alpha=LINK)

    clock = gpu_clock if a.device.type == "mps" else wall_clock
    return Chain(a, step, lambda state: synchronize(a.device), clock)


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all its work."""
    if device.type == "mps":
        torch.mps.synchronize()


def cold_copies(tensors: Sequence[Tensor], cold_bytes: int = COLD_BYTES) -> list[list[Tensor]]:
    """Clones the tensors so many times that a cycle through the clones always misses the caches."""
    size = sum(tensor.nbytes for tensor in tensors)
    copies = max(2, -(-cold_bytes // max(size, 1)))
    return [[tensor.clone() for tensor in tensors] for _ in range(copies)]


def rotating(weight: PackedWeight, cold_bytes: int = COLD_BYTES) -> Callable[[int], PackedWeight]:
    """Returns a function from the index of a call to a clone of the weight. Consecutive calls get different clones."""
    tensors = weight.tensors()
    copies = cold_copies(list(tensors.values()), cold_bytes)
    weights = [replace(weight, **dict(zip(tensors, copy, strict=True))) for copy in copies]  # type: ignore[arg-type]
    return lambda index: weights[index % len(weights)]


def gemm_chain(a: Tensor, weights: Callable[[int], PackedWeight], variant: str = "auto") -> Chain:
    """Makes a chain of `gemm` calls with the weights from `rotating`."""

    def product(state: Tensor, index: int) -> Tensor:
        return gemm(state, weights(index), variant=variant)

    return product_chain(a, product)


def measure(chains: Mapping[str, Chain], rounds: int = 9) -> dict[str, list[Measured]]:
    """Times all chains once per round, in rotating order. Returns the time of a call for each chain and round.

    The chains run in turn, so a disturbance of the machine affects all of them equally. Compare two chains by the
    median of their ratios per round.
    """
    calls = {name: _calls(chain) for name, chain in chains.items()}
    names = list(chains)
    times: dict[str, list[Measured]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in (*names[first:], *names[:first]):
            times[name].append(chains[name].measure(calls[name]))
    return times


def interleave(chains: Mapping[str, Chain], rounds: int = 9) -> dict[str, list[float]]:
    """Times the chains in turn for several rounds. Returns the GPU seconds of a call for each chain and round."""
    return {name: [found.seconds for found in times] for name, times in measure(chains, rounds).items()}


def median_ratio(times: Iterable[float], others: Iterable[float]) -> float:
    """Returns the median, over the rounds, of the ratio of two times."""
    return statistics.median(time / other for time, other in zip(times, others, strict=True))


def _calls(chain: Chain) -> int:
    chain.measure(1)  # compiles the kernels
    least = 1 if chain.measure(1).seconds > LONG_SECONDS else 2
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_SECONDS:
        seconds = chain.measure(least).seconds
    return max(least, min(MOST_CALLS, round(CHAIN_SECONDS / max(seconds, 1e-7))))
