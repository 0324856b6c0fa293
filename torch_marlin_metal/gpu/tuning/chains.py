"""Times calls on an asynchronous device. Chains of dependent calls take turns and are compared by medians of ratios."""

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
CHAIN_SECONDS = 0.01  # the least work of a chain, because a synchronisation costs tens of microseconds
WARM_SECONDS = 0.2  # work before measuring, because an idle GPU needs tens of milliseconds to reach its full clock
MOST_CALLS = 256
# A measured chain is one command buffer, and macOS may kill one that takes some tenths of a second. If a call takes
# longer than this, each measurement has only one.
LONG_SECONDS = 0.05
# The factor of a product's result in the activations of the next product. It is so small that the sum rounds to the
# activations. It is not 0: with 0, PyTorch before 2.15 copies the activations on mps instead of reading the result.
LINK = 1e-30


@dataclass(frozen=True)
class Measured:
    """The time of one call of a chain.

    Attributes:
        seconds: time on the device.
        host_seconds: time until the call returned; on a GPU, the work of the call may not have begun by then.
        has_gaps: whether the device's time may include waits for the host.
    """

    seconds: float
    host_seconds: float
    has_gaps: bool = False


@dataclass(frozen=True)
class Chain:
    """Repeated calls; each depends on the previous result.

    Attributes:
        first: the argument of the first call.
        step: one call: takes the state and the number of the call, and returns the next state.
        finish: waits until the last state is ready.
        clock: the function that measures a number of calls, such as `wall_clock` or `gpu_clock`.
    """

    first: object
    step: Callable[[object, int], object]
    finish: Callable[[object], None]
    clock: Callable[[Chain, int], Measured]

    def run(self, calls: int, state: object) -> object:
        """Makes calls without waiting for them; returns the last state."""
        for index in range(calls):
            state = self.step(state, index)
        return state

    def measure(self, calls: int) -> Measured:
        """Returns the mean time of a call, from this number of calls."""
        return self.clock(self, calls)


def wall_clock(chain: Chain, calls: int) -> Measured:
    """Measures calls by the host's clock, from the first call until the device has done the work of all calls."""
    chain.finish(chain.first)
    begin = time.perf_counter()
    state = chain.run(calls, chain.first)
    returned = time.perf_counter()
    chain.finish(state)
    return Measured((time.perf_counter() - begin) / calls, (returned - begin) / calls)


def gpu_clock(chain: Chain, calls: int) -> Measured:
    """Measures calls of PyTorch on mps by the start and the end of their command buffer, as the GPU reports them.

    Encoding a call takes PyTorch longer than a small product takes the GPU, so the host's clock would measure the host.
    A chain that is not measured therefore runs first: the GPU works on it while the host encodes the measured chain. If
    PyTorch commits inside the measured chain, as its graphs and copies may, the GPU may wait for the host. `has_gaps`
    is then true.
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
    """Makes a chain of products: the activations of each depend on the result of the one before.

    The values of the activations do not change, but the device must wait for each result.

    Args:
        a: activations of the first product, `[M, K]`.
        product: takes activations and the number of the call, and returns `[M, N]`; the number selects the weight.
    """

    def step(state: object, index: int) -> object:
        assert isinstance(state, Tensor)
        return torch.add(state, product(state, index)[:, :1], alpha=LINK)

    clock = gpu_clock if a.device.type == "mps" else wall_clock
    return Chain(a, step, lambda state: synchronize(a.device), clock)


def synchronize(device: torch.device) -> None:
    """Waits until a device has finished all its work."""
    if device.type == "mps":
        torch.mps.synchronize()


def cold_copies(tensors: Sequence[Tensor], cold_bytes: int = COLD_BYTES) -> list[list[Tensor]]:
    """Clones the tensors often enough that cycling through the clones always misses the caches."""
    size = sum(tensor.nbytes for tensor in tensors)
    copies = max(2, -(-cold_bytes // max(size, 1)))
    return [[tensor.clone() for tensor in tensors] for _ in range(copies)]


def rotating(weight: PackedWeight, cold_bytes: int = COLD_BYTES) -> Callable[[int], PackedWeight]:
    """Returns a function that maps the number of a call to a weight; each call gets another copy of the tensors."""
    tensors = weight.tensors()
    copies = cold_copies(list(tensors.values()), cold_bytes)
    weights = [replace(weight, **dict(zip(tensors, copy, strict=True))) for copy in copies]  # type: ignore[arg-type]
    return lambda index: weights[index % len(weights)]


def gemm_chain(a: Tensor, weights: Callable[[int], PackedWeight], variant: str = "auto") -> Chain:
    """Makes a chain of calls of `gemm` with the weights that `rotating` returns."""

    def product(state: Tensor, index: int) -> Tensor:
        return gemm(state, weights(index), variant=variant)

    return product_chain(a, product)


def measure(chains: Mapping[str, Chain], rounds: int = 9) -> dict[str, list[Measured]]:
    """Times all chains once per round, in rotating order. Returns the times of a call of each chain, by round.

    Because the chains take turns, a disturbance of the machine affects all of them alike. Compare two chains by the
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
    """Times the chains in turn, in several rounds. Returns each chain's GPU seconds per call, by round."""
    return {name: [found.seconds for found in times] for name, times in measure(chains, rounds).items()}


def median_ratio(times: Iterable[float], others: Iterable[float]) -> float:
    """Returns the median over rounds of the ratio of two times."""
    return statistics.median(time / other for time, other in zip(times, others, strict=True))


def _calls(chain: Chain) -> int:
    chain.measure(1)  # compiles the kernels
    least = 1 if chain.measure(1).seconds > LONG_SECONDS else 2
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_SECONDS:
        seconds = chain.measure(least).seconds
    return max(least, min(MOST_CALLS, round(CHAIN_SECONDS / max(seconds, 1e-7))))
