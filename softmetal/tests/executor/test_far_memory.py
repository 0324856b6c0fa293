"""Tests buffers that a kernel reaches through addresses, and buffers larger than the machine's memory."""

from __future__ import annotations

import numpy as np
import pytest

from softmetal import device
from softmetal.device import Buffer, FaultKind, KernelFault

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
TABLE = HEAD + (
    "struct Table { device float* x; device float* y; };\n"
    "kernel void f(device const Table& t [[buffer(0)]], device float* z [[buffer(1)]],\n"
    "              uint i [[thread_position_in_grid]]) {\n"
    "  t.y[i] = t.x[i] + 1;\n"
    "  z[i] = t.y[i];\n}"
)
FAR = 2**32 + 7  # elements
BYTES = HEAD + (
    "kernel void f(device const uchar* x [[buffer(0)]], device uchar* y [[buffer(1)]],\n"
    "              uint i [[thread_position_in_grid]]) {\n"
    "  ulong at = (1ul << 32) + i / SHARED;\n"
    "  y[at] = x[at + BEYOND] + i;\n}"
)


def addresses(*arrays: np.ndarray) -> np.ndarray:
    return np.array([a.ctypes.data for a in arrays], np.uint64)


def test_a_table_of_addresses(checked: bool) -> None:
    x, y, z = np.arange(32, dtype=np.float32), np.zeros(32, np.float32), np.zeros(32, np.float32)
    kernel = device.compile(TABLE, checked=checked).kernel("f")
    kernel.launch(threads=32, group=32, buffers=[addresses(x, y), z], resident=[x, y])
    assert (y == x + 1).all()
    assert (z == y).all()
    # y is bound to a slot and is also in the table of addresses. Both refer to the same memory.
    kernel.launch(threads=32, group=32, buffers=[addresses(x, y), y], resident=[x, y])
    assert (y == x + 1).all()


def test_an_address_of_a_buffer_that_is_not_resident() -> None:
    x, y, z = (np.zeros(32, np.float32) for _ in range(3))
    kernel = device.compile(TABLE, checked=True).kernel("f")
    with pytest.raises(KernelFault, match=r"read of 4 bytes: an address in no buffer that is bound or resident"):
        kernel.launch(threads=32, group=32, buffers=[addresses(x, y), z], resident=[y])


def test_resident_memory_is_checked() -> None:
    x, y, z = Buffer.empty(32, np.float32), np.zeros(32, np.float32), np.zeros(32, np.float32)
    kernel = device.compile(TABLE, checked=True).kernel("f")
    with pytest.raises(KernelFault, match=r"device memory never written: a resident buffer \+ \d+ \(128 bytes\)"):
        kernel.launch(threads=32, group=32, buffers=[addresses(x.array, y), z], resident=[x, y])
    full, y = np.ones(32, np.float32), Buffer.empty(32, np.float32)
    kernel.launch(threads=32, group=32, buffers=[addresses(full, y.array), z], resident=[full, y])
    assert y.written is not None
    assert y.written[: y.array.nbytes].all()


def far(beyond: str = "0", shared: str = "1") -> device.Kernel:
    source = BYTES.replace("BEYOND", beyond).replace("SHARED", shared)
    return device.compile(source, checked=True, file_name="far.metal").kernel("f")


def test_checked_mode_of_a_sparse_buffer() -> None:
    x, y = (Buffer.sparse(FAR + 57, np.uint8) for _ in range(2))
    x.array[2**32 :] = 3
    counters = far().launch(threads=64, group=32, buffers=[x, y])
    assert (y.array[2**32 :] == 3 + np.arange(64)).all()
    assert not y.array[:64].any()
    assert counters.buffers is not None
    assert counters.buffers[0]["distinct_read"] == counters.buffers[1]["distinct_written"] == 64


@pytest.mark.parametrize(
    ("beyond", "shared", "kind"),
    [("4096", "1", FaultKind.OUT_OF_BOUNDS), ("0", "2", FaultKind.RACE), ("0", "32", FaultKind.RACE_GROUPS)],
)
def test_faults_in_a_sparse_buffer(beyond: str, shared: str, kind: FaultKind) -> None:
    x, y = (Buffer.sparse(FAR + 57, np.uint8) for _ in range(2))
    kernel = far(beyond, shared)
    # Threads i and i + 32, in different threadgroups, store different values at the same place.
    kernel.launch(threads=64, group=32 if shared == "2" else 16, buffers=[x, y], raise_faults=False, seed=1)
    assert kind in {fault.kind for fault in kernel.last_faults}


def test_a_sparse_output_that_was_never_written() -> None:
    x = Buffer.sparse(FAR + 57, np.uint8)
    x.written = Buffer.sparse(FAR + 57, np.uint8).array
    x.written[2**32 + 1 :] = 1
    kernel = far()
    with pytest.raises(KernelFault, match=r"device memory never written: buffer 0 \+ 4294967296 "):
        kernel.launch(threads=64, group=32, buffers=[x, Buffer.sparse(FAR + 57, np.uint8)])
