"""Faulty kernels for test_checked_mode.py: bad addresses, reads before a write, and stores to constant memory."""

from __future__ import annotations

from fault_case import ARGUMENTS, INDEX, Case, floats

from softmetal.device import FaultKind

CASES = [
    Case(
        "device read past the end",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  y[i] = x[i + /*1|0*/];\n}}",
        1,
        r"out-of-bounds read of 4 bytes: buffer 0 \+ 256 \(x, 256 bytes\)",
    ),
    Case(
        "device read before the start",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  int k = int(i) - /*3|0*/;\n  y[i] = x[k];\n}}",
        2,
        r"out-of-bounds read of 4 bytes: buffer 0 - (4|8|12) \(x, 256 bytes\)",
    ),
    Case(
        "device write far away, where another buffer could be",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  y[i + /*1000000|0*/u] = x[i];\n}}",
        1,
        r"out-of-bounds write of 4 bytes: buffer 1 \+ 4000\d\d\d \(y, 256 bytes\)",
    ),
    Case(
        "unsigned index below zero",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  y[i] = x[i /*- 1u|*/];\n}}",
        1,
        r"out-of-bounds read of 4 bytes: buffer 0 \+ 17179869180 \(x",
    ),
    Case(
        "constant buffer",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({ARGUMENTS}, constant float* c [[buffer(2)]], {INDEX}) {{\n"
        "  y[i] = x[i] + c[i / /*8|16*/];\n}",
        1,
        r"out-of-bounds read of 4 bytes: buffer 2 \+ \d+ \(c, 16 bytes\)",
        buffers=[floats(64), floats(64), floats(4).tobytes()],
    ),
    Case(
        "pointer moved before the binding's offset",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  y[i] = (x - /*1|0*/)[i];\n}}",
        1,
        r"out-of-bounds read of 4 bytes: buffer 0 - 4 \(x, 256 bytes\)",
        buffers=[(floats(80), 64), floats(64)],
    ),
    Case(
        "buffer that is not bound",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({ARGUMENTS}, device const float* z [[buffer(2)]], {INDEX}) {{\n  y[i] = /*z|x*/[i];\n}}",
        1,
        r"out-of-bounds read of 4 bytes: null pointer \+ \d+",
        buffers=[floats(64), floats(64), None],
    ),
    Case(
        "threadgroup argument",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({ARGUMENTS}, threadgroup float* s [[threadgroup(0)]], {INDEX}) {{\n"
        "  s[i + /*1|0*/] = x[i];\n  y[i] = s[i + /*1|0*/];\n}",
        1,
        r"out-of-bounds write of 4 bytes: threadgroup\(0\) \+ 256 \(s, 256 bytes\)",
        launch={"groups": 1, "group": 64, "threadgroup_memory": {0: 256}},
    ),
    Case(
        "threadgroup variable, negative",
        FaultKind.OUT_OF_BOUNDS,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  threadgroup float before[64];\n  threadgroup float s[64];\n"
        "  before[i] = 0;\n  (s + int(i))[/*-1|0*/] = x[i] + before[i];\n  y[i] = s[i];\n}",
        4,
        r"out-of-bounds write of 4 bytes: threadgroup variable 1 - 4 \(256 bytes\)",
    ),
    Case(
        "vector load that is not aligned",
        FaultKind.MISALIGNED,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n"
        "  float4 v = *reinterpret_cast<device const float4*>(x + /*1|0*/);\n  y[i] = v.x + v.w;\n}",
        1,
        r"misaligned access, 16-byte alignment is needed: buffer 0 \+ 4 \(x",
    ),
    Case(
        "vector store that is not aligned",
        FaultKind.MISALIGNED,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n"
        "  if (i == 0) *reinterpret_cast<device uint2*>(y + /*1|2*/) = uint2(as_type<uint>(x[0]), 1u);\n}",
        1,
        r"misaligned access, 8-byte alignment is needed: buffer 1 \+ 4 \(y",
    ),
    Case(
        "vector in threadgroup memory that is not aligned",
        FaultKind.MISALIGNED,
        f"kernel void f({ARGUMENTS}, threadgroup half* s [[threadgroup(0)]], {INDEX}) {{\n"
        "  for (uint k = 0; k < 8; ++k) if (i == 0) s[k] = half(x[k]);\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "  half4 v = *(threadgroup half4*)(s + /*2|4*/);\n  y[i] = float(v.x + v.y);\n}",
        3,
        r"misaligned access, 8-byte alignment is needed: threadgroup\(0\) \+ 4 \(s",
        launch={"groups": 1, "group": 64, "threadgroup_memory": {0: 32}},
    ),
    Case(
        "device memory never written",
        FaultKind.UNINITIALISED,
        f"kernel void f({ARGUMENTS}, device float* t [[buffer(2)]], {INDEX}) {{\n"
        "  if (i < /*63|64*/) t[i] = x[i];\n  y[i] = t[i] * 2;\n}",
        2,
        r"read of device memory never written: buffer 2 \+ 252 \(t, 256 bytes\)",
        buffers=[floats(64), floats(64), "uninitialised"],
    ),
    Case(
        "device memory never written, updated in place",
        FaultKind.UNINITIALISED,
        f"kernel void f({ARGUMENTS}, device float* t [[buffer(2)]], {INDEX}) {{\n  t[i] /*+=|=*/ x[i];\n}}",
        1,
        r"read of device memory never written: buffer 2 \+ \d+ \(t",
        buffers=[floats(64), floats(64), "uninitialised"],
    ),
    Case(
        "threadgroup memory never written",
        FaultKind.UNINITIALISED,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  threadgroup float s[64];\n  if (/*i > 0|true*/) s[i] = x[i];\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  y[i] = s[63 - i];\n}",
        4,
        r"read of threadgroup memory never written: threadgroup variable 0 \+ 0 \(256 bytes\)",
    ),
    Case(
        "threadgroup memory of the threadgroup before",
        FaultKind.UNINITIALISED,
        "kernel void f(device const float* x, device float* y, uint g [[threadgroup_position_in_grid]], "
        f"{INDEX}) {{\n  threadgroup float s[64];\n  if (/*g % 2 == 0|true*/) s[i] = x[i];\n"
        "  y[g * 64 + i] = s[i];\n}",
        3,
        r"read of threadgroup memory never written",
        buffers=[floats(64), floats(512)],
        launch={"groups": 8, "group": 64},
    ),
]
