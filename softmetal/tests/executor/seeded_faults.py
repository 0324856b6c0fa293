"""Faulty kernels for test_checked_mode.py: mistakes that programmers make in real kernels."""

from __future__ import annotations

import numpy as np
from fault_case import ARGUMENTS, INDEX, LANE, Case, floats

from softmetal.device import FaultKind

GROUP = "uint g [[threadgroup_position_in_grid]]"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

CASES = [
    Case(
        "halo of a stencil past the row",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  float s = 0;\n  for (int d = -1; d <= 1; ++d) s += x[/*int(i) + d|(i + 64 + d) % 64*/];\n  y[i] = s;\n}}",
        2,
        r"out-of-bounds read of 4 bytes: buffer 0",
    ),
    Case(
        "tree reduction that reads the first half's end too early",
        FaultKind.RACE,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  threadgroup float s[64];\n  s[i] = x[i];\n  {BARRIER}\n"
        f"  for (uint n = 32; n > 0; n /= 2) {{\n    if (i < n) s[i] += s[i + n];\n    /*|{BARRIER}*/\n  }}\n  if (i == 0) y[0] = s[0];\n}}",
        5,
        r"race: .*threadgroup variable 0",
    ),
    Case(
        "scan in place",
        FaultKind.RACE,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  threadgroup float s[64];\n  s[i] = x[i];\n  {BARRIER}\n"
        f"  for (uint n = 1; n < 64; n *= 2) {{\n    float v = i >= n ? s[i - n] : 0;\n    /*|{BARRIER}*/\n    s[i] += v;\n    {BARRIER}\n  }}\n  y[i] = s[i];\n}}",
        7,
        r"race: .*threadgroup variable 0",
    ),
    Case(
        "histogram without atomics",
        FaultKind.RACE,
        f"kernel void f(device const uint* x, device uint* y, device atomic_uint* z, {INDEX}) {{\n  uint bin = x[i] % 4;\n"
        "  /*y[bin] += 1;|atomic_fetch_add_explicit(z + bin, 1u, memory_order_relaxed);*/\n}",
        2,
        r"race: .*buffer 1",
        buffers=[np.arange(64, dtype=np.uint32), np.zeros(4, np.uint32), np.zeros(4, np.uint32)],
    ),
    Case(
        "threadgroups that overlap by one row",
        FaultKind.RACE_GROUPS,
        f"kernel void f({ARGUMENTS}, {INDEX}, {GROUP}) {{\n  y[g * /*63|64*/ + i] = x[i] + g;\n}}",
        1,
        r"race: write of what another thread wrote, in another threadgroup",
        buffers=[floats(64), floats(256)],
        launch={"groups": 4, "group": 64},
    ),
    Case(
        "ragged tail written by the full group",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({ARGUMENTS}, {INDEX}, {GROUP}) {{\n  uint k = g * 64 + i;\n  if (/*k <= 100|k < 100*/) y[k] = x[i];\n}}",
        2,
        r"out-of-bounds write of 4 bytes: buffer 1 \+ 400",
        buffers=[floats(64), floats(100)],
        launch={"groups": 2, "group": 64},
    ),
    Case(
        "lane count of a partial simdgroup",
        FaultKind.INACTIVE_LANE,
        f"kernel void f({ARGUMENTS}, {INDEX}, {LANE}) {{\n  y[i] = simd_shuffle(x[i], /*ushort(31 - lane)|lane*/);\n}}",
        1,
        r"value of lane \d+, which takes no part",
        launch={"groups": 1, "group": 48},
    ),
    Case(
        "softmax whose sum starts in one simdgroup only",
        FaultKind.UNINITIALISED,
        f"kernel void f({ARGUMENTS}, {INDEX}, {LANE}) {{\n  threadgroup float part[4];\n  float s = simd_sum(x[i]);\n"
        f"  if (lane == 0 /*&& i == 0|*/) part[i / 32] = s;\n  {BARRIER}\n  y[i] = x[i] / (part[0] + part[1]);\n}}",
        5,
        r"read of threadgroup memory never written: threadgroup variable 0 \+ 4",
    ),
    Case(
        "group count that is zero",
        FaultKind.DIVISION,
        f"kernel void f({ARGUMENTS}, constant uint& size [[buffer(2)]], {INDEX}) {{\n  y[i] = x[i / /*(size / 64)|size*/];\n}}",
        1,
        r"integer division by zero",
        buffers=[floats(64), floats(64), np.array([32], np.uint32).tobytes()],
    ),
    Case(
        "mask of the last nibble",
        FaultKind.SHIFT,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  uint mask = 0xFFFFFFFFu >> (32 - 4 * (i % 8 /*|+ 1*/));\n  y[i] = x[i] * mask;\n}}",
        1,
        r"shift of .* by 32",
    ),
    Case(
        "fragment of five words in four",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  float words[4] = {{}};\n  for (uint k = 0; k < /*5|4*/ + i / 64; ++k) words[k] = x[k];\n"
        "  y[i] = words[i % 4];\n}",
        2,
        r"index 4 of an array 'float\[4\]'",
    ),
    Case(
        "accumulators of the last column",
        FaultKind.UNINITIALISED,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  float sums[3];\n  for (uint n = 0; n < /*2|3*/; ++n) sums[n] = 0;\n"
        "  for (uint k = 0; k < 4; ++k) for (uint n = 0; n < 3; ++n) sums[n] += x[k + n];\n  y[i] = sums[i % 3];\n}",
        4,
        r"variable that was never set: buffer 1",
    ),
    Case(
        "atomic counter read plainly while others count",
        FaultKind.RACE,
        f"kernel void f(device atomic_uint* n, device uint* y, {INDEX}) {{\n  atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);\n"
        "  y[i] = /**(device uint*)n|atomic_load_explicit(n, memory_order_relaxed)*/;\n}",
        2,
        r"race: .*buffer 0",
        buffers=[np.zeros(1, np.uint32), np.zeros(64, np.uint32)],
    ),
]
