"""Computes how many threadgroups of a kernel are resident on a core of an Apple GPU at the same time."""

from __future__ import annotations

from dataclasses import dataclass

from torch_marlin_metal.gpu.device import AppleSiliconGPU

SIMD_WIDTH = 32


@dataclass(frozen=True)
class Occupancy:
    """The threadgroups of a kernel that are resident on a core at the same time.

    Attributes:
        threadgroups: the number of resident threadgroups.
        simdgroups: the number of simdgroups in all resident threadgroups.
        limit: the resource that runs out first: "threads", "registers" or "threadgroup memory".
    """

    threadgroups: int
    simdgroups: int
    limit: str


def occupancy_of(threads: int, half_registers: int, threadgroup_bytes: int, gpu: AppleSiliconGPU) -> Occupancy:
    """Returns the number of threadgroups that are resident on a core at the same time, at least one.

    Args:
        threads: threads per threadgroup.
        half_registers: 16-bit registers per thread.
        threadgroup_bytes: bytes of threadgroup memory per threadgroup.
        gpu: supplies the resources of a core.
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
