"""An analytic model of the time that a kernel takes on a GPU.

The model divides counted instructions and bytes by the chip's rates. It does not depend on this package's kernels, so
`lab/published/` can compare it with published times of other kernels. Every number of a load may be an array. The model
then computes an array of times.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np

from lab.model.geometry import SIMD_WIDTH, ceil_divide
from torch_marlin_metal.gpu.occupancy import Occupancy, occupancy_of
from torch_marlin_metal.profiling import AppleSiliconGPU

# The time from the end of one small dispatch to the end of the next, if the next one depends on the first. Sources:
# - pytorch issue 82707 measured 3 us (M1 Max).
# - ds4 pull request 846 measured 10 us (M1 Ultra).
# - llama.cpp discussion 4167 lists times per token. Without the time to read the weights, and divided by the 768
#   dispatches of a token, they are 4 us (M5 Max) to 10 us (M1).
DISPATCH_SECONDS = 6e-6
# Memory time and compute time overlap. The model assumes that this fraction of the shorter time is not hidden.
OVERLAP_LOSS = 0.05
# If a tensor fills at most this fraction of the system-level cache, a second read finds it there.
CACHED_FRACTION = 0.5
# The cost of reading a byte from the system-level cache, as a fraction of the cost of reading the byte from memory.
CACHE_COST = 0.5
# If the busiest core takes more than WAITING times as long as evenly spread instructions would take, the bound is
# "occupancy".
WAITING = 1.25
# The latency in clocks of a load that the core's cache serves. The value is assumed: published figures are 60 to 80.
CACHE_LATENCY = 64
# Weights with fewer bytes are read at a lower rate: the rate of larger weights times the chip's figure
# small_read_share.
SMALL_READ = 50e6


@dataclass
class KernelLoad:
    """The work of one dispatch, from which the model computes its time.

    Attributes:
        threadgroups: threadgroups of the dispatch.
        threads: threads per threadgroup.
        half_registers: 16-bit registers per thread.
        threadgroup_bytes: bytes of threadgroup memory per threadgroup.
        loads_ahead: whether a simdgroup issues the loads of a step before the products of the previous step.
        issue: issue slots that one simdgroup takes in the whole dispatch.
        complex: clocks that one simdgroup takes of the unit for slow integer and complex instructions.
        matrix_operations: 8x8x8 products that one simdgroup computes.
        matrix_clocks: clocks that a scheduler takes for one 8x8x8 product.
        dram_waits: how often one simdgroup waits for memory, if it does not load ahead.
        cache_waits: how often one simdgroup waits for a cache, if it does not load ahead.
        weight_bytes: bytes of the weight.
        dram_bytes: bytes that all simdgroups read from and write to memory. If a weight leaves the caches between two
            row blocks, its bytes count again.
        l2_bytes: bytes that all simdgroups load and store. All of them pass through the L2 cache.
    """

    threadgroups: Any = 1
    threads: Any = 0
    half_registers: int = 1
    threadgroup_bytes: Any = 0
    loads_ahead: bool = False
    issue: Any = 0.0
    complex: Any = 0.0
    matrix_operations: Any = 0.0
    matrix_clocks: float = 0.0
    dram_waits: Any = 0.0
    cache_waits: Any = 0.0
    weight_bytes: float = 0.0
    dram_bytes: Any = 0.0
    l2_bytes: Any = 0.0


@dataclass
class DispatchCost:
    """The figures of one dispatch.

    Attributes:
        kernel: the kernel's name, or "torch.matmul".
        occupancy: how many threadgroups a core holds at once; None if the costs are arrays.
        waves: the number of threadgroups, divided by the number that the GPU holds at once.
        in_flight: the simdgroups that a core holds on average, at most as many as fit on it.
        dram_bytes: as in `KernelLoad`.
        l2_bytes: as in `KernelLoad`.
        matrix_operations: number of 8x8x8 products.
        launch_seconds: time of the launch itself.
        dram_seconds: time of `dram_bytes`.
        l2_seconds: time of `l2_bytes`.
        issue_seconds: time to issue all instructions except matrix products, spread evenly over all schedulers.
        complex_seconds: time of the unit for slow integer and complex instructions, which runs in parallel with the
            schedulers.
        matrix_seconds: time of the matrix products, spread evenly over all schedulers.
        compute_seconds: time of the core with the most threadgroups, including load latency that is not hidden.
        seconds: launch + max(dram, l2, compute) + a twentieth of min(dram, compute).
        bound: what takes longest: "launch", "dram", "l2", "issue", "complex", "matrix" or "dense" (a dense product).
            "occupancy" means that simdgroups wait or cores are idle for more than a fifth of the time. "" if the costs
            are arrays.
    """

    kernel: str = ""
    occupancy: Occupancy | None = None
    waves: Any = 0.0
    in_flight: Any = 0.0
    dram_bytes: Any = 0.0
    l2_bytes: Any = 0.0
    matrix_operations: Any = 0.0
    launch_seconds: Any = 0.0
    dram_seconds: Any = 0.0
    l2_seconds: Any = 0.0
    issue_seconds: Any = 0.0
    complex_seconds: Any = 0.0
    matrix_seconds: Any = 0.0
    compute_seconds: Any = 0.0
    seconds: Any = 0.0
    bound: str = ""

    def scalar(self, gpu: AppleSiliconGPU, held: Occupancy | None) -> DispatchCost:
        """Returns the same cost with plain numbers, its occupancy and its bound."""
        found = DispatchCost(self.kernel, held)
        for field in fields(self)[2:-1]:
            setattr(found, field.name, float(np.ravel(getattr(self, field.name))[0]))
        found.bound = self.bound or _bound(found, gpu)
        return found


def figure(gpu: AppleSiliconGPU, name: str) -> float:
    """Returns a figure of the GPU, or 0 if the GPU does not have the unit."""
    found = gpu.figures.get(name)
    return 0.0 if found is None else found.value


def kernel_cost(load: KernelLoad, gpu: AppleSiliconGPU, kernel: str = "") -> DispatchCost:
    threadgroups = np.asarray(load.threadgroups, dtype=np.float64)
    most, most_simdgroups = _held(load.threads, load.half_registers, load.threadgroup_bytes, gpu)
    simdgroups = ceil_divide(np.asarray(load.threads), SIMD_WIDTH)
    hertz = gpu.clock_hz
    schedulers = figure(gpu, "schedulers")
    cost = DispatchCost(
        kernel,
        launch_seconds=DISPATCH_SECONDS,
        waves=threadgroups / (gpu.cores * most),
        in_flight=most_simdgroups / most * np.minimum(most, threadgroups / gpu.cores),
        dram_bytes=load.dram_bytes,
        l2_bytes=load.l2_bytes,
    )

    # `issue`, `complex` and `matrix` are clocks of one simdgroup. Below, they become the time of all simdgroups on all
    # schedulers.
    matrix = load.matrix_operations * load.matrix_clocks
    everywhere = threadgroups * simdgroups
    rate = schedulers * gpu.cores * hertz
    cost.matrix_operations = load.matrix_operations * everywhere
    cost.issue_seconds = load.issue * everywhere / rate
    cost.complex_seconds = load.complex * everywhere / rate
    cost.matrix_seconds = matrix * everywhere / rate

    busy = np.maximum(_together(load.issue, matrix, gpu), load.complex)
    latency = figure(gpu, "dram_latency_ns") * figure(gpu, "clock_ghz")
    waits = load.dram_waits * latency + load.cache_waits * CACHE_LATENCY
    # A simdgroup always waits for its first loads, even if it loads ahead.
    alone = np.maximum(busy + latency, waits) if load.loads_ahead else busy + latency + waits

    def wave(held: Any) -> Any:
        return np.where(held == 0, 0.0, np.maximum(held * simdgroups / schedulers * busy, alone))

    on_a_core = ceil_divide(threadgroups, gpu.cores)
    cost.compute_seconds = (on_a_core // most * wave(most) + wave(on_a_core % most)) / hertz
    finish(cost, threadgroups, load.weight_bytes, gpu)
    return cost


def occupancy(load: KernelLoad, gpu: AppleSiliconGPU) -> Occupancy:
    """Returns how many threadgroups a core holds at once. The fields of the load must be numbers, not arrays."""
    return _occupancy(int(load.threads), load.half_registers, int(load.threadgroup_bytes), gpu.name)


def finish(cost: DispatchCost, threadgroups: Any, weight_bytes: float, gpu: AppleSiliconGPU) -> None:
    """Sets the times of memory and L2, and the total time, from the other figures of a cost."""
    busy_cores = np.minimum(gpu.cores, threadgroups)
    cost.l2_seconds = cost.l2_bytes / (figure(gpu, "l2_bytes_per_clock") * busy_cores * gpu.clock_hz)
    share = figure(gpu, "small_read_share") if weight_bytes < SMALL_READ else 1.0
    cost.dram_seconds = cost.dram_bytes / (gpu.reachable_dram_bytes_per_second * share)
    longest = np.maximum(np.maximum(cost.dram_seconds, cost.l2_seconds), cost.compute_seconds)
    lost = OVERLAP_LOSS * np.minimum(cost.dram_seconds, cost.compute_seconds)
    cost.seconds = cost.launch_seconds + longest + lost


def stays(size: float, gpu: AppleSiliconGPU) -> Any:
    """Returns whether `size` bytes that were read or written once are still in the system-level cache."""
    return size <= CACHED_FRACTION * figure(gpu, "slc_mb") * 2**20


def reads(size: float, times: Any, gpu: AppleSiliconGPU) -> Any:
    """Returns the cost of reading a tensor `times` times, in bytes read from memory.

    A byte that is read again from the system-level cache counts as half a byte.
    """
    return size * (1 + (times - 1) * np.where(stays(size, gpu), CACHE_COST, 1.0))


def traffic_seconds(size: float, gpu: AppleSiliconGPU) -> float:
    """Returns the time of a kernel that only moves `size` bytes from and to memory."""
    cost = DispatchCost(dram_bytes=size, l2_bytes=size, launch_seconds=DISPATCH_SECONDS)
    finish(cost, gpu.cores, size, gpu)
    return float(cost.seconds)


def _together(issue: Any, matrix: Any, gpu: AppleSiliconGPU) -> Any:
    """Returns the time of instructions and matrix products together, because they overlap in part.

    `issue` is the time of the instructions alone, and `matrix` that of the matrix products alone.
    """
    return issue + matrix - figure(gpu, "matrix_overlap") * np.minimum(issue, matrix)


def _bound(cost: DispatchCost, gpu: AppleSiliconGPU) -> str:
    longest = max(cost.dram_seconds, cost.l2_seconds, cost.compute_seconds)
    if cost.launch_seconds >= longest:
        return "launch"
    if cost.dram_seconds == longest:
        return "dram"
    if cost.l2_seconds == longest:
        return "l2"
    alu = _together(cost.issue_seconds, cost.matrix_seconds, gpu)
    if cost.compute_seconds > WAITING * max(alu, cost.complex_seconds):
        return "occupancy"
    if cost.complex_seconds > alu:
        return "complex"
    return "matrix" if cost.matrix_seconds > cost.issue_seconds else "issue"


@cache
def _occupancy(threads: int, half_registers: int, threadgroup_bytes: int, chip: str) -> Occupancy:
    return occupancy_of(threads, half_registers, threadgroup_bytes, AppleSiliconGPU.from_name(chip))


def _held(threads: Any, half_registers: int, threadgroup_bytes: Any, gpu: AppleSiliconGPU) -> tuple[Any, Any]:
    """Returns how many threadgroups and how many simdgroups a core holds."""
    if np.ndim(threads) == 0 and np.ndim(threadgroup_bytes) == 0:
        held = _occupancy(int(threads), half_registers, int(threadgroup_bytes), gpu.name)
        return held.threadgroups, held.simdgroups
    pairs = np.broadcast_arrays(threads, threadgroup_bytes)
    found = [_occupancy(t, half_registers, b, gpu.name) for t, b in zip(*(x.tolist() for x in pairs), strict=True)]
    return np.array([x.threadgroups for x in found]), np.array([x.simdgroups for x in found])
