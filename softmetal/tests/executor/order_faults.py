"""Faulty kernels for test_checked_mode.py: races, wrong barriers and wrong simd operations."""

from __future__ import annotations

import numpy as np
from fault_case import ARGUMENTS, INDEX, LANE, Case, floats

from softmetal.device import FaultKind

CASES = [
    Case(
        "missing barrier, write then read",
        FaultKind.RACE,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  threadgroup float s[64];\n  s[i] = x[i];\n"
        "  /*|threadgroup_barrier(mem_flags::mem_threadgroup);*/\n  y[i] = s[63 - i];\n}",
        4,
        r"race: (read of what another thread wrote|write over what another thread read), no barrier between: "
        r"threadgroup variable 0 \+ \d+ \(256 bytes\) \(thread \d+ of simdgroup \d\), at fault.metal:\d+, "
        r"other access at fault.metal:\d+",
    ),
    Case(
        "missing barrier between the read and the next write",
        FaultKind.RACE,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  threadgroup float s[64];\n  float sum = 0;\n"
        "  for (uint k = 0; k < 4; ++k) {\n    s[i] = x[i] + k;\n    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "    sum += s[63 - i];\n    /*|threadgroup_barrier(mem_flags::mem_threadgroup);*/\n  }\n  y[i] = sum;\n}",
        4,
        r"race: write over what another thread read, no barrier between: threadgroup variable 0",
    ),
    Case(
        "two threads write the same element",
        FaultKind.RACE,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  y[i / /*2|1*/] = x[i];\n}}",
        1,
        r"race: write of what another thread wrote, no barrier between: buffer 1",
        buffers=[np.arange(64, dtype=np.float32), floats(64)],
    ),
    Case(
        "two threads write the same value",
        FaultKind.EQUAL_WRITE,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  y[i / /*2|1*/] = x[i];\n}}",
        1,
        r"the value was there before: race: write of what another thread wrote, no barrier between: buffer 1",
    ),
    Case(
        "two simdgroups fill one table",
        FaultKind.EQUAL_WRITE,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  threadgroup float s[32];\n  /*|if (i < 32)*/ s[i % 32] = 3 * (i % 32);\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  y[i] = x[i] + s[i / 2];\n}",
        2,
        r"the value was there before: race: write of what another thread wrote, no barrier between: threadgroup var",
    ),
    Case(
        "lanes of one simdgroup without a barrier",
        FaultKind.RACE,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  threadgroup float s[64];\n  s[i] = x[i];\n"
        "  /*|simdgroup_barrier(mem_flags::mem_threadgroup);*/\n  y[i] = s[i ^ 1];\n}",
        4,
        r"race: .* no barrier between: threadgroup variable 0",
    ),
    Case(
        "barrier with the flag of the other memory",
        FaultKind.WRONG_FLAG,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  threadgroup float s[64];\n  s[i] = x[i];\n"
        "  threadgroup_barrier(mem_flags::/*mem_device|mem_threadgroup*/);\n  y[i] = s[63 - i];\n}",
        4,
        r"race: read of what another thread wrote, the threadgroup_barrier between them lacks "
        r"mem_flags::mem_threadgroup: threadgroup variable 0",
    ),
    Case(
        "barrier without the flag of device memory",
        FaultKind.WRONG_FLAG,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  y[i] = x[i];\n"
        "  threadgroup_barrier(mem_flags::/*mem_threadgroup|mem_device*/);\n"
        "  float v = y[63 - i];\n  threadgroup_barrier(mem_flags::mem_device);\n  y[i] = v;\n}",
        3,
        r"lacks mem_flags::mem_device: buffer 1",
    ),
    Case(
        "simdgroup barrier without the flag",
        FaultKind.WRONG_FLAG,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  threadgroup float s[64];\n  s[i] = x[i];\n"
        "  simdgroup_barrier(mem_flags::/*mem_none|mem_threadgroup*/);\n  y[i] = s[i ^ 1];\n}",
        4,
        r"the simdgroup_barrier between them lacks mem_flags::mem_threadgroup: threadgroup variable 0",
    ),
    Case(
        "simdgroup barrier where threads of other simdgroups wrote",
        FaultKind.WEAK_BARRIER,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  threadgroup float s[64];\n  s[i] = x[i];\n"
        "  /*simdgroup_barrier|threadgroup_barrier*/(mem_flags::mem_threadgroup);\n  y[i] = s[63 - i];\n}",
        4,
        r"race: read of what another thread wrote of another simdgroup, a simdgroup_barrier is no threadgroup_barrier",
    ),
    Case(
        "two threadgroups write the same element",
        FaultKind.RACE_GROUPS,
        "kernel void f(device const float* x, device float* y, uint i [[thread_position_in_grid]]) {\n"
        "  y[i % /*64|256*/] = x[i % 64] + i;\n}",
        1,
        r"race: write of what another thread wrote, in another threadgroup: buffer 1",
        buffers=[floats(64), floats(256)],
        launch={"groups": 4, "group": 64},
    ),
    Case(
        "a threadgroup reads what another one wrote",
        FaultKind.RACE_GROUPS,
        "kernel void f(device const float* x, device float* y, uint i [[thread_position_in_grid]]) {\n"
        "  y[i] = x[i % 64];\n  threadgroup_barrier(mem_flags::mem_device);\n  y[i] += y[(i + /*64|0*/) % 256];\n}",
        3,
        r"race: .*, in another threadgroup: buffer 1",
        buffers=[floats(64), floats(256)],
        launch={"groups": 4, "group": 64},
    ),
    Case(
        "write over what another simdgroup read long before",
        FaultKind.WEAK_BARRIER,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  threadgroup float s[64];\n  s[i] = x[i];\n"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  float sum = 0;\n"
        "  if (i < 32) for (uint k = 0; k < 300; ++k) sum += x[(k + i) % 64];\n  sum += s[0];\n"
        "  /*simdgroup_barrier|threadgroup_barrier*/(mem_flags::mem_threadgroup);\n"
        "  if (i == 0) s[0] = 2;\n  y[i] = sum;\n}",
        8,
        r"race: write over what another thread read of another simdgroup, a simdgroup_barrier is no threadgroup_barrier"
        r": threadgroup variable 0 \+ 0 ",
    ),
    Case(
        "write over what another threadgroup read long before",
        FaultKind.RACE_GROUPS,
        "kernel void f(device float* x, device float* y, uint g [[threadgroup_position_in_grid]], "
        f"{INDEX}) {{\n  float sum = 0;\n  if (g == 0) for (uint k = 0; k < 1000; ++k) sum += x[1 + (k + i) % 63];\n"
        "  sum += x[/*0|g * 0 + 1*/];\n  threadgroup_barrier(mem_flags::mem_device);\n"
        "  if (g == 0 && i == 0) x[0] = sum;\n  y[g * 64 + i] = sum;\n}",
        5,
        r"race: (write over what another thread read|read of what another thread wrote), in another threadgroup: buffer 0 \+ 0 ",
        buffers=[floats(64), floats(128)],
        launch={"groups": 2, "group": 64},
    ),
    Case(
        "plain initialisation beside the atomics of other threadgroups",
        FaultKind.RACE_GROUPS,
        f"kernel void f(device atomic_uint* n, uint g [[threadgroup_position_in_grid]], {INDEX}) {{\n"
        "  if (/*g == 0 && i == 0|false*/) *((device uint*)n) = 0;\n  threadgroup_barrier(mem_flags::mem_device);\n"
        "  if (i == 0) atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);\n}",
        1,
        r"race: write .*, in another threadgroup: buffer 0",
        buffers=[np.zeros(1, np.uint32)],
        launch={"groups": 2, "group": 32},
        seeds=40,
    ),
    Case(
        "plain read of what another threadgroup counts, after an own atomic load",
        FaultKind.RACE_GROUPS,
        f"kernel void f(device atomic_uint* n, device uint* y, uint g [[threadgroup_position_in_grid]], {INDEX}) {{\n"
        "  uint seen = /**(device uint*)n|0*/;\n  seen += atomic_load_explicit(n, memory_order_relaxed);\n"
        "  if (g == 1) atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);\n  y[g] = seen;\n}",
        1,
        r"race: .*, in another threadgroup: buffer 0",
        buffers=[np.zeros(1, np.uint32), np.zeros(2, np.uint32)],
        launch={"groups": 2, "group": 1},
        seeds=40,
    ),
    Case(
        "plain addition beside atomics",
        FaultKind.RACE_GROUPS,
        "kernel void f(device atomic_uint* n, uint i [[thread_index_in_threadgroup]]) {\n"
        "  /*if (i == 0) *((device uint*)n) += 1;|*/\n"
        "  atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);\n}",
        1,
        r"race: .*, in another threadgroup: buffer 0",
        buffers=[np.zeros(1, np.uint32)],
        launch={"groups": 4, "group": 32},
    ),
    Case(
        "atomic counter read plainly while others count",
        FaultKind.RACE,
        f"kernel void f(device atomic_uint* n, device uint* y, {INDEX}) {{\n"
        "  atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);\n"
        "  y[i] = /**(device uint*)n|atomic_load_explicit(n, memory_order_relaxed)*/;\n}",
        2,
        r"race: .*buffer 0",
        buffers=[np.zeros(1, np.uint32), np.zeros(64, np.uint32)],
    ),
    Case(
        "barrier in divergent flow",
        FaultKind.BARRIER,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  if (i < /*40|64*/) {{\n"
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n  }\n  y[i] = x[i];\n}",
        2,
        r"threadgroup_barrier reached by 40 of 64 threads: thread \(40,0,0\) has returned",
    ),
    Case(
        "two barriers where all need one",
        FaultKind.BARRIER,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  y[i] = x[i];\n"
        "  /*if (i < 32) threadgroup_barrier(mem_flags::mem_device);\n"
        "  else |*/threadgroup_barrier(mem_flags::mem_device);\n}",
        2,
        r"threadgroup_barrier reached by 32 of 64 threads: thread \(32,0,0\) waits in a threadgroup_barrier at "
        r"fault.metal:6",
    ),
    Case(
        "early return before a barrier",
        FaultKind.BARRIER,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  if (i >= /*60|64*/) return;\n"
        "  threadgroup_barrier(mem_flags::mem_device);\n  y[i] = x[i];\n}",
        2,
        r"threadgroup_barrier reached by 60 of 64 threads: thread \(60,0,0\) has returned",
    ),
    Case(
        "simdgroup barrier in divergent flow",
        FaultKind.BARRIER,
        f"kernel void f({ARGUMENTS}, {INDEX}, {LANE}) {{\n"
        "  if (lane < /*8|32*/) simdgroup_barrier(mem_flags::mem_none);\n  y[i] = x[i];\n}",
        1,
        r"simdgroup_barrier reached by 8 of 32 threads: thread \(\d+,0,0\) has returned",
    ),
    Case(
        "matrix product in divergent flow",
        FaultKind.SIMD,
        f"kernel void f({ARGUMENTS}, {INDEX}, {LANE}) {{\n  simdgroup_float8x8 a, b, c(0);\n"
        "  simdgroup_load(a, x, 8);\n  simdgroup_load(b, x, 8);\n"
        "  if (lane < /*16|32*/) simdgroup_multiply_accumulate(c, a, b, c);\n"
        "  if (i < 32) simdgroup_store(c, y, 8);\n}",
        4,
        r"simdgroup matrix operation reached by 16 of 32 threads: thread \(16,0,0\) has returned",
    ),
    Case(
        "matrix product in two branches",
        FaultKind.SIMD,
        f"kernel void f({ARGUMENTS}, {INDEX}, {LANE}) {{\n  simdgroup_float8x8 a, b, c(0);\n"
        "  simdgroup_load(a, x, 8);\n  simdgroup_load(b, x, 8);\n"
        "  if (/*lane|i*/ < 32 / /*2|1*/) simdgroup_multiply_accumulate(c, a, b, c);\n"
        "  else simdgroup_multiply_accumulate(c, b, a, c);\n  if (i < 32) simdgroup_store(c, y, 8);\n}",
        4,
        r"simdgroup matrix operation at different calls in one simdgroup",
    ),
    Case(
        "matrix product in a simdgroup that is not full",
        FaultKind.SIMD,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  simdgroup_float8x8 a, b, c(0);\n  if (i >= 32 /*+ 32|*/) return;\n"
        "  simdgroup_load(a, x, 8);\n  simdgroup_load(b, x, 8);\n  simdgroup_multiply_accumulate(c, a, b, c);\n"
        "  if (i < 32) simdgroup_store(c, y, 8);\n}",
        5,
        r"simdgroup matrix operation reached by 8 of 32 threads: the simdgroup is not full",
        launch={"groups": 1, "group": 40},
    ),
    Case(
        "matrix load that some lanes do not reach",
        FaultKind.SIMD,
        f"kernel void f({ARGUMENTS}, {INDEX}, {LANE}) {{\n  simdgroup_float8x8 a(0);\n"
        "  if (lane < /*30|32*/) simdgroup_load(a, x, 8);\n  y[i] = a.thread_elements()[0];\n}",
        2,
        r"simdgroup matrix load or store reached by 30 of 32 threads",
    ),
    Case(
        "matrix store in two branches",
        FaultKind.SIMD,
        f"kernel void f({ARGUMENTS}, {INDEX}, {LANE}) {{\n  simdgroup_float8x8 a(x[0]);\n  if (i > 31) return;\n"
        "  if (/*lane|i*/ < 32 / /*2|1*/) simdgroup_store(a, y, 8);\n  else simdgroup_store(a, y, 8);\n}",
        3,
        r"simdgroup matrix load or store at different calls in one simdgroup",
    ),
    Case(
        "shuffle from a lane that takes no part",
        FaultKind.INACTIVE_LANE,
        f"kernel void f({ARGUMENTS}, {INDEX}, {LANE}) {{\n  float v = 0;\n"
        "  if (lane < 16) v = simd_shuffle(x[i], lane ^ /*16|8*/);\n  y[i] = v;\n}",
        2,
        r"value of lane \d+, which takes no part in this simd operation",
    ),
    Case(
        "shuffle from a lane that a partial simdgroup lacks",
        FaultKind.INACTIVE_LANE,
        f"kernel void f({ARGUMENTS}, {INDEX}, {LANE}) {{\n  y[i] = simd_shuffle(x[i], /*ushort(31 - lane)|lane*/);\n}}",
        1,
        r"value of lane \d+, which takes no part in this simd operation",
        launch={"groups": 1, "group": 48},
    ),
    Case(
        "broadcast from a lane that has returned",
        FaultKind.INACTIVE_LANE,
        f"kernel void f({ARGUMENTS}, {INDEX}, {LANE}) {{\n  if (lane > 20) return;\n"
        "  y[i] = simd_broadcast(x[i], ushort(/*25|20*/));\n}",
        2,
        r"value of lane 25, which takes no part in this simd operation",
    ),
    Case(
        "store into const device memory through a cast",
        FaultKind.CONST_STORE,
        f"kernel void f({ARGUMENTS}, {INDEX}) {{\n  device float* out = /*(device float*)x|y*/;\n  out[i] = 1;\n}}",
        2,
        r"store into a const buffer: buffer 0 \+ \d+ \(x, 256 bytes\)",
    ),
    Case(
        "store into constant memory through a cast",
        FaultKind.CONST_STORE,
        f"kernel void f({ARGUMENTS}, constant float* c [[buffer(2)]], {INDEX}) {{\n"
        "  if (i == 0) /**(device float*)(ulong)c|*y*/ = 1;\n}",
        1,
        r"store into a const buffer: buffer 2 \+ 0 \(c, 16 bytes\)",
        buffers=[floats(64), floats(64), floats(4).tobytes()],
    ),
    Case(
        "function constant without a value",
        FaultKind.CONSTANT_VALUE,
        f"constant float factor [[function_constant(0)]];\nkernel void f({ARGUMENTS}, {INDEX}) {{\n"
        "  y[i] = x[i] * /*factor|(is_function_constant_defined(factor) ? factor : 2.0)*/;\n}",
        2,
        r"function constant 'factor' has no value in this specialisation",
    ),
]
