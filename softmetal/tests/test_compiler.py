"""Tests the compiler of kernels: the language, function constants, and refused source."""

from __future__ import annotations

import struct
import uuid
from typing import Any

import numpy as np
import pytest

from softmetal import device
from softmetal.device import KernelFault
from softmetal.msl import compiler

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def build(source: str, checked: bool = False, **options: Any) -> device.Library:
    return device.compile(HEAD + source, checked=checked, file_name="test.metal", **options)


SPECIALISED = """
constant bool has_bias [[function_constant(0)]];
constant int shift [[function_constant(1)]];
constant float2 scale [[function_constant(2)]];
constant bool wants_bias = is_function_constant_defined(has_bias) ? has_bias : false;
kernel void f(device const int* x [[buffer(0)]], device float* y [[buffer(1)]],
              device const float* bias [[buffer(2), function_constant(wants_bias)]],
              uint i [[thread_position_in_grid]]) {
  y[i] = float(x[i] + shift) * scale.y + (wants_bias ? bias[i] : scale.x);
}
"""


def test_function_constants(checked: bool) -> None:
    x, bias = np.arange(8, dtype=np.int32), np.linspace(0, 1, 8, dtype=np.float32)
    y = np.zeros(8, np.float32)
    plain = build(SPECIALISED, checked, constants={"shift": -3, 2: (0.5, 1.5)})
    assert plain.constants == {"has_bias": (0, "bool", False), "shift": (1, "int", True), "scale": (2, "float2", True)}
    assert [a.kind for a in plain.kernel("f").arguments] == [0, 0, 2]
    plain.kernel("f").launch(threads=8, group=8, buffers=[x, y])
    np.testing.assert_array_equal(y, (x - 3) * 1.5 + 0.5)
    biased = build(SPECIALISED, checked, constants={"has_bias": True, "shift": 2, "scale": (0.5, 0.25)})
    assert [a.kind for a in biased.kernel("f").arguments] == [0, 0, 0]
    biased.kernel("f").launch(threads=8, group=8, buffers=[x, y, bias])
    np.testing.assert_array_equal(y, ((x + 2) * 0.25 + bias).astype(np.float32))


INTEGERS = {"bool": (0, 1), "char": (-128, 127), "uchar": (0, 255), "short": (-32768, 32767), "ushort": (0, 65535),
            "int": (-(2**31), 2**31 - 1), "uint": (0, 2**32 - 1), "long": (-(2**63), 2**63 - 1), "ulong": (0, 2**64 - 1)}  # fmt: skip


def test_other_values_of_integer_constants_do_not_run_the_front_end_again(
    checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    front_end = compiler._to_llvm
    monkeypatch.setattr(compiler, "_to_llvm", lambda *a: runs.append(a) or front_end(*a))
    lines = [f"constant {t} c_{t} [[function_constant({i})]];" for i, t in enumerate(INTEGERS)]
    body = " ".join(f"out[{i}] = ulong(c_{t});" for i, t in enumerate(INTEGERS))
    # a new name in each run, so that no cache contains this source
    new = f"constant int unused_{uuid.uuid4().hex} = 0;"
    source = "\n".join([new, *lines, f"kernel void f(device ulong* out) {{ {body} }}"])
    for side in (0, 1, 0):
        values = {f"c_{t}": bool(limits[side]) if t == "bool" else limits[side] for t, limits in INTEGERS.items()}
        out = np.zeros(len(INTEGERS), np.uint64)
        build(source, checked, constants=values, kernel="f").kernel("f").launch(threads=1, group=1, buffers=[out])
        assert out.tolist() == [limits[side] % 2**64 for limits in INTEGERS.values()]
    assert len(runs) == 1


def test_only_the_requested_kernel_is_compiled_to_machine_code() -> None:
    library = build(SPECIALISED + "kernel void g(device int* x) { *x = shift; }", constants={1: 4}, kernel="g")
    assert library.names == ["f", "g"]
    x = np.zeros(1, np.int32)
    library.kernel("g").launch(threads=1, group=1, buffers=[x])
    assert x[0] == 4
    with pytest.raises(KernelFault, match="compiled for another kernel"):
        library.kernel("f").launch(threads=1, group=1, buffers=[x, x])


LANGUAGE = """
enum Slot { kOut = 2, kIn = 0 };
struct Pair { int a; float b; float sum() const thread { return a + b; } float sum() const constant { return a + b; } };
struct Params { uint n; Pair pair; ushort3 odd; };
constant float table[] = {0.5, 1.0, 1.5, 2.0};
constant constexpr int kTwo = 2;
namespace inner {
template <typename T, int N = 3>
struct Accumulate {
  T value = 0;
  METAL_FUNC void operator()(threadgroup const T* x) { for (int i = 0; i < N; ++i) value += x[i]; }
  METAL_FUNC void operator()(device const T* x) { for (int i = 0; i < N; ++i) value += x[i]; }
};
template <typename T>
[[kernel, max_total_threads_per_threadgroup(32 * sizeof(T))]] void work(
    const device T* x [[buffer(kIn)]], constant Params& p [[buffer(1)]], device T* y [[buffer(kOut)]],
    threadgroup T* dynamic [[threadgroup(1)]], uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup T fixed_[kTwo * 16 + 2], other[3][2];
  threadgroup int single;
  if (t == 0) single = kTwo;
  if (t < 6) other[t % 3][t / 3] = T(t);
  fixed_[t] = x[i];
  if (t < 2) fixed_[32 + t] = 0;
  dynamic[t] = fixed_[t] * T(2);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Accumulate<T> sum;
  sum((threadgroup const T*)fixed_ + t);
  auto twice = [&](T v) { return v * T(single); };
  T r = twice(sum.value) + dynamic[31 - t] + other[2][1] + T(table[i & 3]) + T(p.pair.sum());
  #pragma unroll
  for (int k = 0; k < 4; ++k) r += T(p.odd.z);
  if (i < p.n) y[i] = r;
}
#define INSTANCE(type) template [[host_name("work_" #type)]] kernel void work<type>( \\
    const device type* x [[buffer(kIn)]], constant Params& p [[buffer(1)]], device type* y [[buffer(kOut)]], \\
    threadgroup type* dynamic [[threadgroup(1)]], uint i [[thread_position_in_grid]], \\
    uint t [[thread_index_in_threadgroup]]);
INSTANCE(float)
INSTANCE(half)
}
"""


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_language(dtype: Any, checked: bool) -> None:
    library = build(LANGUAGE, checked)
    assert library.names == ["work_float", "work_half"]
    kernel = library.kernel("work_float" if dtype == np.float32 else "work_half")
    size = np.dtype(dtype).itemsize
    assert kernel.max_total_threads == 32 * size
    assert kernel.static_threadgroup_bytes == -(-34 * size // 16) * 16 + -(-6 * size // 16) * 16 + 4
    x = (np.arange(64) % 7).astype(dtype)
    y = np.full(64, -1, dtype)
    params = struct.pack("IifxxxxHHH2x", 60, 3, 0.5, 1, 2, 5)
    kernel.launch(groups=2, group=32, buffers=[x, params, y], threadgroup_memory={1: 32 * size})
    expected = np.full(64, -1.0)
    for i in range(60):
        g, t = divmod(i, 32)
        part = np.concatenate([x[32 * g : 32 * g + 32].astype(float), [0, 0]])
        expected[i] = 2 * part[t : t + 3].sum() + 2 * part[31 - t] + 5 + (0.5 + (i & 3) * 0.5) + 3.5 + 20
    np.testing.assert_array_equal(y.astype(float), expected)


def test_arguments_without_an_index_take_the_free_indices() -> None:
    source = "kernel void f(device int* a, device int* b [[buffer(0)]], constant int& c, device int* d [[buffer(2)]]){}"
    arguments = build(source).kernel("f").arguments
    assert [(a.name.decode(), a.index) for a in arguments] == [("a", 1), ("b", 0), ("c", 3), ("d", 2)]
    assert [a.is_const for a in arguments] == [0, 0, 1, 0]
    assert [a.is_reference for a in arguments] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("kernel void f(device int* a) { a[0] = missing; }", r"test\.metal:3:\d+: error: .*missing"),
        ("\n\nkernel void f(float4 v [[stage_in]]) {}", r"test\.metal:5: error: .*stage_in"),
        ("kernel void f(texture2d<float> t [[texture(0)]]) {}", r"test\.metal:3: error: .*no textures"),
        ("kernel void f(uint i) {}", r"test\.metal:3: error: .*neither attribute nor address space"),
        ("kernel void f(device int* a [[buffer(1)]], device int* b [[buffer(1)]]) {}", "the same buffer index"),
        ("kernel void f(device int* a [[buffer(31)]]) {}", "the last index is 30"),
        ("kernel void f(device int* a [[colour(1)]]) {}", "'colour' is not one of a compute kernel"),
        ("kernel void f(device int* a) { threadgroup int x = 3; a[0] = x; }", "cannot be initialised"),
        ('template [[host_name("g")]] [[kernel]] decltype(g<int>) g<int>;', "'g' is not a kernel defined above"),
        ("constant int n [[function_constant(0)]];\nkernel void f(device int* a) { int x[n]; a[0] = x[0]; }", "error"),
        ("kernel void f(device int* a) { constant int* p = 0; *p = 1; }", "const"),
        ('#include "nowhere.h"\n', r"test\.metal:3:\d+: fatal error: 'nowhere.h' file not found"),
    ],
)
def test_compile_errors(source: str, message: str) -> None:
    with pytest.raises(device.CompileError, match=message):
        build(source)


CONSTANTS = """
constant bool wide [[function_constant(0)]];
constant int rows [[function_constant(1)]];
constant uint2 tile [[function_constant(2)]];
constant int other [[function_constant(3)]];
constant int twice = rows * 2;
static int area() { return int(tile.x * tile.y); }
kernel void branch(device int* a [[buffer(0)]]) { if (wide) a[0] = rows; }
kernel void derived(device int* a [[buffer(0)]]) { a[0] = twice; }
kernel void vectors(device int* a [[buffer(0)]]) { if (wide) a[0] = area(); }
kernel void gated(device int* a [[buffer(0)]], device int* b [[buffer(1), function_constant(wide)]]) { a[0] = 1; }
kernel void optional(device int* a [[buffer(0)]]) { a[0] = is_function_constant_defined(rows) ? rows : 3; }
kernel void none(device int* a [[buffer(0)]]) { a[0] = 1; }
"""


@pytest.mark.parametrize(
    ("kernel", "values", "missing"),
    [
        ("branch", {}, "'wide' (0), 'rows' (1)"),
        ("branch", {"wide": False}, "'rows' (1)"),
        ("derived", {"wide": False}, "'rows' (1)"),
        ("vectors", {"wide": False}, "'tile' (2)"),
        ("gated", {}, "'wide' (0)"),
    ],
)
def test_a_kernel_needs_its_function_constants(kernel: str, values: dict[str, bool], missing: str) -> None:
    with pytest.raises(device.CompileError) as error:
        device.compile(CONSTANTS, kernel=kernel, constants=values)
    assert str(error.value) == f"kernel '{kernel}': function constants without a value: {missing}"


@pytest.mark.parametrize(("kernel", "wanted"), [("optional", 3), ("none", 1)])
def test_a_kernel_does_not_need_the_function_constants_of_others(kernel: str, wanted: int) -> None:
    y = np.zeros(1, np.int32)
    device.compile(CONSTANTS, kernel=kernel).kernel(kernel).launch(threads=1, group=1, buffers=[y])
    assert y[0] == wanted
