"""How many threadgroups of a kernel a core of an Apple GPU holds at once."""

from __future__ import annotations

from dataclasses import dataclass

from torch_marlin_metal.gpu.device import AppleSiliconGPU

SIMD_WIDTH = 32


@dataclass(frozen=True)
class Occupancy:
    """How many threadgroups of a kernel a core holds at once.

    Attributes:
        threadgroups: threadgroups that are resident on a core.
        simdgroups: simdgroups of all these threadgroups.
        limit: the resource that runs out first: "threads", "registers" or "threadgroup memory".
    """

    threadgroups: int
    simdgroups: int
    limit: str


def occupancy_of(threads: int, half_registers: int, threadgroup_bytes: int, gpu: AppleSiliconGPU) -> Occupancy:
    """Returns how many threadgroups a core holds at once, at least one.

    Args:
        threads: threads of a threadgroup.
        half_registers: 16-bit registers of a thread.
        threadgroup_bytes: bytes of threadgroup memory.
        gpu: the GPU.
    """
    limits = {
        "threads": gpu.figures["most_threads"].value / threads,
        "registers": gpu.figures["half_registers"].value / (half_registers * threads),
    }
    if threadgroup_bytes > 0:
        limits["threadgroup memory"] = gpu.figures["threadgroup_bytes"].value / threadgroup_bytes
    limit = min(limits, key=lambda resource: limits[resource])
    held = max(int(limits[limit]), 1)
    return Occupancy(held, held * -(-threads // SIMD_WIDTH), limit)
