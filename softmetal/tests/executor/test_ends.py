"""Tests that a kernel never ends the process: signals and endless loops become reports, in fast and in checked mode."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from softmetal import device
from softmetal.device import FaultKind, KernelFault, KernelWarning

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
FIRST = "kernel void f(device const int* x, device int* y, uint i [[thread_index_in_threadgroup]]) {\n"


def run(body: str, checked: bool, **options: Any) -> np.ndarray:
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    kernel = device.compile(HEAD + FIRST + body + "\n}", checked=checked, file_name="end.metal").kernel("f")
    kernel.launch(**({"groups": 1, "group": 64, "buffers": [x, y], "seed": 1} | options))
    return y


def report(body: str, checked: bool, line: int = 5, **options: Any) -> device.Fault:
    with pytest.raises(KernelFault) as raised:
        run(body, checked, **options)
    (fault,) = raised.value.faults
    assert re.search(r", at end\.metal:\d+; thread \(\d+,0,0\), .*kernel 'f'", fault.message), fault.message
    assert fault.line == line
    return fault


def test_stray_store_in_fast_mode() -> None:
    fault = report("  ulong far = 1ul << 44;\n  y[far + i] = 1;", False)
    assert fault.kind == FaultKind.SIGNAL
    assert "stopped the kernel with SIGSEGV" in fault.message and "run it in checked mode" in fault.message
    assert report("  ulong far = 1ul << 44;\n  y[far + i] = 1;", True).kind == FaultKind.OUT_OF_BOUNDS


def test_misaligned_vector_in_fast_mode() -> None:
    body = "\n  *(device int4*)(y + 1) = *(device const int4*)(x + 4 * i / 4 * 4);"
    data = np.zeros(1024, np.int32)
    assert report(body, False, group=1, buffers=[data, data.copy()]).kind == FaultKind.SIGNAL


def test_stack_that_overflows(checked: bool) -> None:
    body = "  float far[60000]; for (int k = 0; k < 60000; ++k)\n  far[k] = x[(k + i) & 63];\n  y[i] = int(far[x[i] * 900]);"
    fault = report(body, checked, 7, group=1)
    assert fault.kind == FaultKind.SIGNAL and "stack overflowed" in fault.message


@pytest.mark.parametrize(
    "loop",
    [
        "for (;;) if (x[0] == 5) break;",
        "for (uint k = 1; k != 0; k = (k * 3 + i) | 1) y[i] = int(k);",
        "for (;;) if (simd_sum(x[0]) == 5) break;",
        "for (uint end = i - 65; end != 0; end = end | 1) {}",
        "while (atomic_load_explicit((device atomic_int*)y, memory_order_relaxed) == 0) {}",
    ],
)
def test_endless_loop(loop: str, checked: bool) -> None:
    fault = report(f"\n  {loop}\n  y[i] = 1;", checked, watchdog=0.1)
    assert fault.kind == FaultKind.ENDLESS and "not ended after 0.1 seconds" in fault.message


def test_the_device_works_after_a_fault(checked: bool) -> None:
    for body in ("\n  ((device int*)64)[i] = 1;", "\n  for (;;) if (x[0] == 5) break;"):
        report(body, checked, watchdog=0.1)
        np.testing.assert_array_equal(run("  y[i] = simd_sum(x[i]);", checked)[[0, 63]], [496, 1520])


def test_watchdog_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTMETAL_WATCHDOG", "0.1")
    assert report("\n  for (;;) if (x[0] == 5) break;", False).kind == FaultKind.ENDLESS


def test_dropped_quotient_by_zero(checked: bool) -> None:
    body = "  int q = 100 / x[i], r = int(x[0]) % (x[i] & 1);\n  int least = -2147483647 - 1 + x[0];\n"
    body += "  y[i] = (x[i] == 0 ? 7 : q) + ((x[i] & 1) == 0 ? 1000 : r) + (least / -(x[i] | 1)) % 2;"
    if checked:
        with pytest.warns(KernelWarning, match=r"^software Metal device: integer division by zero.* at end\.metal:4;"):
            got = run(body, checked)
    else:
        got = run(body, checked)
    n = np.arange(64)
    expected = np.where(n == 0, 7, 100 // np.maximum(n, 1)) + np.where(n % 2 == 0, 1000, 0)
    odd = np.maximum(n | 1, 1)
    quotient = np.where(odd == 1, 0, np.trunc(2147483648 / odd))
    np.testing.assert_array_equal(got, expected + quotient % 2)


def test_shift_takes_the_low_bits_of_its_count(checked: bool) -> None:
    body = "  uint4 v = uint4(1) << (uint4(x[i]) + uint4(0, 32, 64, 31));\n"
    body += "  y[i] = int(v.x ^ v.y ^ v.z ^ v.w) ^ int(ulong(3) >> (x[i] + 64)) ^ (-8 >> (x[i] + 32));"
    if checked:
        with pytest.warns(KernelWarning, match="only the low bits of the count are used"):
            got = run(body, checked)
    else:
        got = run(body, checked)
    n = np.arange(64)
    one = np.int64(1) << (n % 32)
    value = one ^ (np.int64(1) << ((n + 31) % 32)) ^ (np.int64(3) >> n) ^ (np.int64(-8) >> (n % 32))
    np.testing.assert_array_equal(got, value.astype(np.int32))
