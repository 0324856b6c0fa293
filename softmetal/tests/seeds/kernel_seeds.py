"""Kernels with one fault each. In /*bad|good*/, `bad` is the text with the fault and `good` the correct text.

The name of each kernel is `f`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

XY = "device const float* x [[buffer(0)]], device float* y [[buffer(1)]]"
WORDS = "device const uint* x [[buffer(0)]], device uint* y [[buffer(1)]]"
INDEX = "uint i [[thread_index_in_threadgroup]]"
G = "uint g [[threadgroup_position_in_grid]]"
LANE = "ushort lane [[thread_index_in_simdgroup]]"
SYNC = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def _floats(count: int = 64) -> list[np.ndarray]:
    return [np.linspace(1, 2, count, dtype=np.float32), np.zeros(count, np.float32)]


def _words(count: int = 64) -> list[np.ndarray]:
    return [np.arange(count, dtype=np.uint32) % 29, np.zeros(count, np.uint32)]


@dataclass(frozen=True)
class Seed:
    group: str
    name: str
    source: str
    buffers: list[Any] = field(default_factory=_floats)
    launch: dict[str, Any] = field(default_factory=lambda: {"groups": 1, "group": 64})
    same_memory: bool = False  # if True, the first buffer is bound to both slots


ONE = {"groups": 1, "group": 32}
GROUPS = {"groups": 4, "group": 32}
ENDLESS = {"watchdog": 0.2}
SEEDS = [
    # ---- order of threads
    Seed("races and barriers", "tile read while it is transposed",
         f"kernel void f({XY}, {INDEX}) {{ threadgroup float t[8][8]; t[i / 8][i % 8] = x[i]; /*|{SYNC}*/ y[i] = t[i % 8][i / 8]; }}"),
    Seed("races and barriers", "stage overwritten in the next step",
         f"kernel void f({XY}, {INDEX}) {{ threadgroup float t[64]; float s = 0; for (uint k = 0; k < 3; ++k) {{ t[i] = x[i] + k; {SYNC} "
         f"s += t[63 - i]; /*|{SYNC}*/ }} y[i] = s; }}"),
    Seed("races and barriers", "two stages and one index that stays",
         f"kernel void f({XY}, {INDEX}) {{ threadgroup float t[2][64]; float s = 0; for (uint k = 0; k < 4; ++k) {{ "
         f"t[/*0|k % 2*/][i] = x[i] + k; {SYNC} s += t[/*0|k % 2*/][63 - i]; }} y[i] = s; }}"),
    Seed("races and barriers", "barrier of a simdgroup for data of all",
         f"kernel void f({XY}, {INDEX}) {{ threadgroup float t[64]; t[i] = x[i]; /*simdgroup|threadgroup*/_barrier(mem_flags::mem_threadgroup); y[i] = t[(i + 40) % 64]; }}"),
    Seed("races and barriers", "device scratch with the threadgroup flag",
         f"kernel void f({XY}, device float* z [[buffer(2)]], {INDEX}) {{ z[i] = x[i]; threadgroup_barrier(mem_flags::mem_/*threadgroup|device*/); y[i] = z[63 - i]; }}",
         [*_floats(), np.zeros(64, np.float32)]),
    Seed("races and barriers", "barrier for the first rows only",
         f"kernel void f({XY}, {INDEX}) {{ threadgroup float t[64]; t[i] = x[i]; /*if (i < 40)|*/ {SYNC} y[i] = t[i ^ 1]; }}"),
    Seed("races and barriers", "break before the barrier",
         f"kernel void f({XY}, {INDEX}) {{ threadgroup float t[64]; for (uint k = 0; k < 3; ++k) {{ t[i] = x[i]; /*if (i + k > 64) break;|*/ {SYNC} }} y[i] = t[i]; }}"),
    Seed("races and barriers", "trip count from the data",
         f"kernel void f({WORDS}, {INDEX}) {{ uint n = 0; for (uint k = 0; k < /*x[i]|3*/ + 1; ++k) {{ n += k; {SYNC} }} y[i] = n; }}", _words()),
    Seed("races and barriers", "sum of all threadgroups without an atomic",
         f"kernel void f({WORDS}, device atomic_uint* n [[buffer(2)]], {G}, {INDEX}) {{ if (i == 0) {{ /*y[0] += g;|atomic_fetch_add_explicit(n, g, memory_order_relaxed);*/ }} }}",
         [*_words(), np.zeros(1, np.uint32)], GROUPS),
    Seed("races and barriers", "partial sums read by the last threadgroup",
         f"kernel void f({XY}, device atomic_uint* n [[buffer(2)]], {G}, {INDEX}) {{ y[g] = x[g]; "
         "/*uint before = atomic_fetch_add_explicit(n, 1u, memory_order_relaxed); if (before == 3) { float s = 0; for (uint k = 0; k < 4; ++k) s += y[k]; y[4] = s; }"
         "|atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);*/ }", [*_floats(), np.zeros(1, np.uint32)], {"groups": 4, "group": 1}),
    Seed("races and barriers", "rows that overlap by a column",
         f"kernel void f({XY}, {G}, {INDEX}) {{ y[g * /*31|32*/ + i] = x[i]; }}", _floats(128), GROUPS),
    Seed("races and barriers", "matrices stored over each other",
         f"kernel void f({XY}, uint s [[simdgroup_index_in_threadgroup]]) {{ simdgroup_float8x8 m; simdgroup_load(m, x, 8); simdgroup_store(m, y + s * /*32|64*/, 8); }}",
         _floats(128)),
    Seed("races and barriers", "in place from the same memory in two slots",
         f"kernel void f({XY}, {INDEX}) {{ y[i] = x[/*63 - i|i*/] + 1; }}", same_memory=True),
    Seed("races and barriers", "maximum of the neighbours in place",
         f"kernel void f({XY}, {INDEX}) {{ threadgroup float t[64]; t[i] = x[i]; {SYNC} float m = max(t[i], t[(i + 1) % 64]); /*|{SYNC}*/ t[i] = m; {SYNC} y[i] = t[i]; }}"),
    # ---- progress
    Seed("progress", "lock inside a simdgroup",
         f"kernel void f(device atomic_uint* n [[buffer(0)]], device uint* y [[buffer(1)]], {INDEX}) {{ "
         "/*while (atomic_exchange_explicit(n, 1u, memory_order_relaxed)) {} y[0] = i; threadgroup_barrier(mem_flags::mem_none); atomic_store_explicit(n, 0u, memory_order_relaxed);"
         "|atomic_fetch_max_explicit(n, i, memory_order_relaxed);*/ }", [np.zeros(1, np.uint32), np.zeros(4, np.uint32)], ONE | ENDLESS),
    Seed("progress", "wait for a later threadgroup",
         f"kernel void f(device atomic_uint* n [[buffer(0)]], device uint* y [[buffer(1)]], {G}) {{ atomic_fetch_add_explicit(n, 1u, memory_order_relaxed); "
         "/*while (atomic_load_explicit(n, memory_order_relaxed) < 16u) {}|*/ y[g] = 1; }", [np.zeros(1, np.uint32), np.zeros(16, np.uint32)],
         {"groups": 16, "group": 1} | ENDLESS),
    Seed("progress", "loop whose end is stepped over",
         f"kernel void f({WORDS}, {INDEX}) {{ uint n = 1; for (uint k = i; k != /*63|i + 6*/; k += 2) n = n * 3 + k; y[i] = n; }}", _words(), ONE | ENDLESS),
    Seed("progress", "countdown below zero",
         f"kernel void f({XY}, {INDEX}) {{ float s = 0; for (/*uint|int*/ k = 3; k >= 0; --k) s += x[k]; y[i] = s; }}", launch=ONE | ENDLESS),
    # ---- places in memory
    Seed("places in memory", "rows counted in bytes", f"kernel void f({XY}, {INDEX}) {{ simdgroup_float8x8 m; simdgroup_load(m, x, /*32|8*/); simdgroup_store(m, y, 8); }}", launch=ONE),
    Seed("places in memory", "remainder of a negative number", f"kernel void f({XY}, {INDEX}) {{ y[i] = x[(int(i) - 5/*|+ 64*/) % 64]; }}"),
    Seed("places in memory", "ring with one slot too few", f"kernel void f({XY}, {INDEX}) {{ threadgroup float t[3][64]; for (uint k = 0; k < 4; ++k) t[k % /*4|3*/][i] = x[i]; y[i] = t[2][i]; }}"),
    Seed("places in memory", "rows of three floats as float3", "kernel void f(device const /*float3|packed_float3*/* x [[buffer(0)]], device float* y [[buffer(1)]], "
         f"{INDEX}) {{ y[i] = x[i][1]; }}", _floats(192)),
    Seed("places in memory", "half2 at an odd half", f"kernel void f({XY}, {INDEX}) {{ device const half* h = (device const half*)x; y[i] = float(((device const half2*)(h + /*1|2*/))->x); }}"),
    Seed("places in memory", "uint from a byte", f"kernel void f({XY}, {INDEX}) {{ device const uchar* b = (device const uchar*)x; y[i] = float(*(device const uint*)(b + /*i|4 * (i / 4)*/)); }}"),
    Seed("places in memory", "last element of a vector that is not aligned", f"kernel void f({XY}, {INDEX}) {{ y[i] = ((device const float4*)(x + /*1|0*/))->w; }}"),
    Seed("places in memory", "tail of a row from the next row", f"kernel void f({XY}, {G}, {INDEX}) {{ float s = 0; for (uint k = 0; k < /*16|13*/; ++k) s += x[g * 13 + k]; if (i == 0) y[g] = s; }}", launch=GROUPS),
    Seed("places in memory", "private row of four and five columns", f"kernel void f({XY}, {INDEX}) {{ float r[4] = {{}}; for (uint k = 0; k < 4u/* + i / 32|*/; ++k) r[k] = x[k]; y[i] = r[i % 4]; }}"),
    Seed("places in memory", "table of sixteen for a byte", f"constant float table_NAME[16] = {{1, 2, 3}}; kernel void f({WORDS}, {INDEX}) {{ y[i] = uint(table_NAME[x[i]/*| & 15*/]); }}", _words()),
    Seed("places in memory", "index of 16 bits", f"kernel void f({XY}, uint j [[thread_position_in_grid]]) {{ /*ushort|uint*/ k = j; y[k] = x[k] + k; }}", _floats(70016), {"groups": 1094, "group": 64}),
    Seed("places in memory", "columns past the last", f"kernel void f({XY}, {G}, {INDEX}) {{ uint n = g * 32 + i; if (n /*<=|<*/ 100) y[n] = x[n]; }}", _floats(100), GROUPS),
    # ---- values that were never written
    Seed("values never set", "tail of a tile", f"kernel void f({XY}, {INDEX}) {{ threadgroup float t[64]; if (i < 60) t[i] = x[i]; /*|else t[i] = 0;*/ {SYNC} y[i] = t[i] * 0.0f + t[63 - i]; }}"),
    Seed("values never set", "sum that starts nowhere", f"kernel void f({XY}, {INDEX}) {{ float s/*| = 0*/; for (uint k = 0; k < 4; ++k) s += x[k]; y[i] = s; }}"),
    Seed("values never set", "smallest of none", f"kernel void f({XY}, {INDEX}) {{ float m/*| = INFINITY*/; if (x[i] > 1.5f) m = x[i]; y[i] = m; }}"),
    Seed("values never set", "second element of a pair", f"kernel void f({XY}, {INDEX}) {{ float2 p/*| = 0*/; p.x = x[i]; y[i] = p.x + p.y; }}"),
    Seed("values never set", "count", f"kernel void f({WORDS}, {INDEX}) {{ uint n/*| = 0*/; if (x[i] > 8) n = 3; y[i] = n; }}", _words()),
    Seed("values never set", "flag", f"kernel void f({WORDS}, {INDEX}) {{ bool b/*| = false*/; if (x[i] > 8) b = true; y[i] = b ? 3 : 5; }}", _words()),
    Seed("values never set", "counter of a histogram", f"kernel void f({WORDS}, {INDEX}) {{ threadgroup atomic_uint n[4]; /*|if (i < 4) atomic_store_explicit(&n[i], 0u, memory_order_relaxed);*/ {SYNC} "
         f"atomic_fetch_add_explicit(&n[x[i] % 4], 1u, memory_order_relaxed); {SYNC} if (i < 4) y[i] = atomic_load_explicit(&n[i], memory_order_relaxed); }}", _words()),
    # ---- lanes
    Seed("lanes", "exchange with lane 32 and more", f"kernel void f({XY}, {INDEX}, {LANE}) {{ y[i] = simd_shuffle(x[i], ushort(lane + /*4|0*/)); }}", launch=ONE),
    Seed("lanes", "xor by 32", f"kernel void f({XY}, {INDEX}) {{ y[i] = simd_shuffle_xor(x[i], /*32|16*/); }}", launch=ONE),
    Seed("lanes", "broadcast from a lane that has left", f"kernel void f({XY}, {INDEX}, {LANE}) {{ if (lane > 20) {{ y[i] = simd_broadcast(x[i], /*3|25*/); }} }}", launch=ONE),
    Seed("lanes", "product of a simdgroup cut in two", f"kernel void f({XY}, {INDEX}, {LANE}) {{ simdgroup_float8x8 a(1), b(2), c(0); /*if (lane < 16)|*/ simdgroup_multiply_accumulate(c, a, b, c); simdgroup_store(c, y, 8); }}", launch=ONE),
    Seed("lanes", "sum after the tail has returned", f"kernel void f({XY}, {INDEX}, {LANE}) {{ float v = x[i]; /*if (i >= 60) return;|if (i >= 60) v = 0;*/ y[i] = simd_sum(v) + simd_shuffle(v, 31); }}"),
    Seed("lanes", "neighbour of the last lane", f"kernel void f({XY}, {INDEX}, {LANE}) {{ y[i] = x[i] + /*simd_shuffle_down(x[i], 1)|x[(i + 1) % 32]*/; }}", launch=ONE),
    # ---- arithmetic
    Seed("arithmetic", "group of no rows", f"kernel void f({WORDS}, {INDEX}) {{ y[i] = i / (x[i] / /*16|1*/ /*|+ 1*/); }}", _words()),
    Seed("arithmetic", "mask of a whole word", f"kernel void f({WORDS}, {INDEX}) {{ y[i] = 0xFFFFFFFFu >> (32 - /*(i & 31)|(1 + (i & 31))*/); }}", _words()),
    Seed("arithmetic", "eighth nibble of a half word", f"kernel void f({WORDS}, {INDEX}) {{ /*uint|ulong*/ w = x[i]; y[i] = uint(w >> (4 * (i % 9))); }}", _words()),
    Seed("arithmetic", "sign of a byte", f"kernel void f({WORDS}, {INDEX}) {{ /*char|uchar*/ c = x[i] * 11; y[i] = uint(int(c)); }}", _words()),
    Seed("arithmetic", "sums in half", f"kernel void f({XY}, {INDEX}) {{ /*half|float*/ s = 0; for (uint k = 0; k < 64; ++k) s += x[k]; y[i] = s; }}"),
    Seed("arithmetic", "softmax without its maximum", f"kernel void f({XY}, {INDEX}) {{ float m = /*0|1000*/; float v = x[i] + 999; y[i] = exp(v - m) / simd_sum(exp(v - m)); }}"),
    Seed("arithmetic", "largest of bits that have a sign", f"kernel void f(device const float* x [[buffer(0)]], device atomic_uint* y [[buffer(1)]], {INDEX}) {{ float v = /*-|*/x[i]; "
         "atomic_fetch_max_explicit(y, as_type<uint>(v), memory_order_relaxed); }"),
    Seed("arithmetic", "scale of the next group", f"kernel void f({XY}, {INDEX}) {{ y[i] = x[i] * x[(i /*+ 1|*/) / 16]; }}"),
]  # fmt: skip
