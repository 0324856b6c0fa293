"""Faulty kernels for test_checked_mode.py: bad divisions, shifts and array indices, and unset variables."""

from __future__ import annotations

import numpy as np
from fault_case import INDEX, Case, floats

from softmetal.device import FaultKind

WORDS = "device const uint* x [[buffer(0)]], device uint* y [[buffer(1)]]"
REALS = "device const float* x [[buffer(0)]], device float* y [[buffer(1)]]"
ONE_SIMDGROUP = {"groups": 1, "group": 32}


def words(count: int = 64) -> list[np.ndarray]:
    return [np.arange(count, dtype=np.uint32), np.zeros(count, np.uint32)]


CASES = [
    Case(
        "division by zero",
        FaultKind.DIVISION,
        f"kernel void f({WORDS}, {INDEX}) {{\n  y[i] = 100 / /*x[i]|(x[i] + 1)*/;\n}}",
        1,
        r"integer division by zero: its result is unspecified",
        buffers=words(),
    ),
    Case(
        "remainder of a signed division by zero",
        FaultKind.DIVISION,
        f"kernel void f({WORDS}, {INDEX}) {{\n  int n = int(x[i]) - /*3|100*/;\n  y[i] = uint(100 % n);\n}}",
        2,
        r"integer division by zero",
        buffers=words(),
    ),
    Case(
        "division by a vector with a zero",
        FaultKind.DIVISION,
        f"kernel void f({WORDS}, {INDEX}) {{\n  uint4 q = uint4(9) / uint4(1, 2, /*0|4*/, x[i] + 1);\n  y[i] = q.x + q.w;\n"
        "  y[i] += q.z;\n}",
        1,
        r"integer division by zero",
        buffers=words(),
    ),
    Case(
        "shift count that wraps below zero",
        FaultKind.SHIFT,
        f"kernel void f({WORDS}, {INDEX}) {{\n  uint n = x[i] % 8;\n  y[i] = 1u << (n /*- 1|+ 1*/);\n}}",
        2,
        r"shift of .* by 4294967295: only the low bits of the count are used",
        buffers=words(),
    ),
    Case(
        "constant shift beyond the width",
        FaultKind.SHIFT,
        f"kernel void f({WORDS}, {INDEX}) {{\n  y[i] = x[i] >> /*33|1*/;\n}}",
        1,
        r"shift of 'uint' .*by 33",
        buffers=words(),
    ),
    Case(
        "shift of an int that was meant as a ulong",
        FaultKind.SHIFT,
        f"kernel void f({WORDS}, {INDEX}) {{\n  ulong m = /*1|ulong(1)*/ << x[i];\n  y[i] = uint(m >> 32);\n}}",
        1,
        r"shift of 'int' by (3[2-9]|[456]\d)",
        buffers=words(),
    ),
    Case(
        "write past a private array, index known at run time",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({WORDS}, {INDEX}) {{\n  uint a[4] = {{}};\n  for (uint k = 0; k < x[/*5|4*/]; ++k) a[k] = k;\n"
        "  y[i] = a[i % 4];\n}",
        2,
        r"out-of-bounds index 4 of an array 'uint\[4\]' \(aka 'unsigned int\[4\]'\)|index 4 of an array 'uint\[4\]'",
        buffers=words(),
    ),
    Case(
        "write past a private array, constant index",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({WORDS}, {INDEX}) {{\n  uint a[4] = {{}};\n  a[/*4|3*/] = x[i];\n  y[i] = a[i % 4];\n}}",
        2,
        r"index 4 of an array 'uint\[4\]'",
        buffers=words(),
    ),
    Case(
        "read before a private array",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({WORDS}, {INDEX}) {{\n  uint a[4] = {{1, 2, 3, 4}};\n  y[i] = a[int(i % 4) - /*1|0*/];\n}}",
        2,
        r"index -1 of an array 'uint\[4\]'",
        buffers=words(),
    ),
    Case(
        "private array through a pointer",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({WORDS}, {INDEX}) {{\n  uint a[4] = {{1, 2, 3, 4}};\n  thread uint* p = a;\n"
        "  p[x[/*4|3*/]] = i;\n  y[i] = a[i % 4];\n}",
        3,
        r"out-of-bounds access of a private array",
        buffers=words(),
    ),
    Case(
        "array member that is not the last",
        FaultKind.OUT_OF_BOUNDS,
        f"struct Tile {{ float part[3]; float sum; }};\nkernel void f({REALS}, {INDEX}) {{\n  Tile t = {{}};\n"
        "  t.part[i % /*4|3*/] = x[i];\n  y[i] = t.sum + t.part[2];\n}",
        3,
        r"index 3 of an array 'float\[3\]'",
    ),
    Case(
        "table of constants",
        FaultKind.OUT_OF_BOUNDS,
        f"constant float table[4] = {{1, 2, 3, 4}};\nkernel void f({REALS}, {INDEX}) {{\n  y[i] = x[i] * table[i / /*8|16*/];\n}}",
        2,
        r"index \d of an array 'const float\[4\]'",
    ),
    Case(
        "scalar that was never set",
        FaultKind.UNINITIALISED,
        f"kernel void f({REALS}, {INDEX}) {{\n  float sum /*|= 0*/;\n  for (uint k = 0; k < 4; ++k) sum += x[k];\n  y[i] = sum;\n}}",
        3,
        r"store of the value of a variable that was never set: buffer 1 \+ \d+ \(y",
    ),
    Case(
        "scalar that is set in one branch",
        FaultKind.UNINITIALISED,
        f"kernel void f({REALS}, {INDEX}) {{\n  float v /*|= 1*/;\n  if (x[i] == 7.0f) v = 3;\n  y[i] = v;\n}}",
        3,
        r"variable that was never set: buffer 1",
    ),
    Case(
        "maximum that starts from nothing",
        FaultKind.UNINITIALISED,
        f"kernel void f({REALS}, {INDEX}) {{\n  float most /*|= -INFINITY*/;\n"
        "  for (uint k = 0; k < 4; ++k) most = max(most, x[k]);\n  y[i] = most;\n}",
        3,
        r"variable that was never set: buffer 1",
    ),
    Case(
        "element of a private array",
        FaultKind.UNINITIALISED,
        f"kernel void f({REALS}, {INDEX}) {{\n  float a[4];\n  for (uint k = 0; k < /*3|4*/; ++k) a[k] = x[k];\n"
        "  float sum = 0;\n  for (uint k = 0; k < 4; ++k) sum += a[k];\n  y[i] = simd_sum(sum);\n}",
        5,
        r"variable that was never set: buffer 1",
    ),
    Case(
        "element of a half vector",
        FaultKind.UNINITIALISED,
        f"kernel void f({REALS}, {INDEX}) {{\n  half4 v /*|= 0*/;\n  v.x = half(x[i]);\n  y[i] = float(v.x + v.w);\n}}",
        3,
        r"variable that was never set: buffer 1",
    ),
    Case(
        "accumulator of a matrix product",
        FaultKind.UNINITIALISED,
        f"kernel void f({REALS}, {INDEX}) {{\n  simdgroup_float8x8 b(x[0]), sum /*|(0)*/;\n"
        "  simdgroup_multiply_accumulate(sum, b, b, sum);\n  simdgroup_store(sum, y, 8);\n}",
        3,
        r"variable that was never set: buffer 1",
        launch=ONE_SIMDGROUP,
        buffers=[floats(64), floats(64)],
    ),
    Case(
        "integer that was never set",
        FaultKind.UNINITIALISED,
        f"kernel void f({WORDS}, {INDEX}) {{\n  uint place /*|= 0*/;\n  if (x[i] == 100u) place = i;\n  y[i] = place;\n}}",
        3,
        r"variable that was never set: buffer 1",
        buffers=words(),
    ),
]
