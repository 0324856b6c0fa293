"""The report of a launch: faults and counts."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .executor import bindings as api


class FaultKind(enum.IntEnum):
    """Kinds of faults, as in executor.h."""

    OUT_OF_BOUNDS = 1
    MISALIGNED = 2
    UNINITIALISED = 3
    RACE = 4
    RACE_GROUPS = 5
    WRONG_FLAG = 6
    WEAK_BARRIER = 7
    BARRIER = 8
    SIMD = 9
    INACTIVE_LANE = 10
    CONST_STORE = 11
    CONSTANT_VALUE = 12
    RESOURCE = 13
    SIGNAL = 14
    ENDLESS = 15
    DIVISION = 16
    SHIFT = 17
    EQUAL_WRITE = 18

    @property
    def is_warning(self) -> bool:
        """Whether the operation is only suspicious: Metal allows it, but it is usually a mistake."""
        return self >= FaultKind.DIVISION


@dataclass(frozen=True)
class Fault:
    """One report. `message` is the full report in one line; the other attributes are its parts."""

    kind: FaultKind
    message: str
    file: str
    line: int
    thread: tuple[int, int, int]
    simdgroup: int
    threadgroup: tuple[int, int, int]
    buffer: int
    offset: int


class KernelFault(Exception):
    """A launch broke a rule of Metal."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("\n".join(f.message for f in faults))
        self.faults = list(faults)


class KernelWarning(UserWarning):
    """Issued for legal operations that are usually a mistake, such as a division by zero."""


@dataclass(frozen=True)
class Counters:
    """The counts of one launch. In fast mode the byte counts are None. `buffers` maps a slot to its byte counts."""

    threads: int
    threadgroups: int
    threadgroup_barriers: int
    simdgroup_barriers: int
    simd_operations: int
    mmas: int
    atomics: int
    device_bytes_read: int | None
    device_bytes_written: int | None
    distinct_bytes_read: int | None
    distinct_bytes_written: int | None
    threadgroup_bytes_read: int | None
    threadgroup_bytes_written: int | None
    buffers: dict[int, dict[str, int]] | None


def _fault(f: Any) -> Fault:
    return Fault(
        FaultKind(f.kind),
        f.message.decode(),
        f.file.decode(),
        f.line,
        (f.thread.x, f.thread.y, f.thread.z),
        f.simdgroup,
        (f.threadgroup.x, f.threadgroup.y, f.threadgroup.z),
        f.buffer,
        f.offset,
    )


def read_faults(result: Any) -> list[Fault]:
    """Converts the faults of a sm_result (executor.h)."""
    return [_fault(result.faults[i]) for i in range(result.fault_count)]


def _buffer_counts(counters: Any) -> dict[int, dict[str, int]] | None:
    """Converts the counts by slot to the form of `Counters.buffers`."""
    if not counters.has_bytes:
        return None
    names = ("bytes_read", "bytes_written", "distinct_read", "distinct_written")
    slots = {s: {n: getattr(counters, f"buffer_{n}")[s] for n in names} for s in range(api.SLOTS)}
    return {s: counts for s, counts in slots.items() if any(counts.values())}


def read_counters(counters: Any) -> Counters:
    """Converts a sm_counters (executor.h)."""
    plain = [name for name in Counters.__dataclass_fields__ if name != "buffers"]
    values = {n: getattr(counters, n) if counters.has_bytes or "bytes" not in n else None for n in plain}
    fields: dict[str, Any] = {**values, "buffers": _buffer_counts(counters)}
    return Counters(**fields)
