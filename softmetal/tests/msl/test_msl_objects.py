"""Tests objects that convert to numbers, and kernel templates with the same name. MLX's kernels use both."""

from __future__ import annotations

import numpy as np
import pytest

from softmetal import device

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
OBJECTS = f"""{HEAD}
struct None {{
  char x;
  constexpr operator bool() const thread {{ return x != 0; }}
  constexpr operator bool() const device {{ return x != 0; }}
}};
template <int N>
struct Int {{
  constexpr operator int() const thread {{ return N; }}
}};
template <class S>
device const float* advanced(device const float* p, S step) {{
  p += step;
  p = p + step;
  p -= Int<1>();
  return p;
}}
kernel void f(device const None* mask [[buffer(0)]], device bfloat* y [[buffer(1)]], device const float* x [[buffer(2)]]) {{
  y[0] = mask[0];
  y[1] = bfloat(mask[1]) * bfloat(3.0f);
  y[2] = bfloat(*advanced(x, Int<2>()));
}}"""
OVERLOADS = f"""{HEAD}
template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(N)]] void f(device T* y [[buffer(0)]]) {{ y[0] = T(N); }}
template <typename T, typename U, int N>
[[kernel, max_total_threads_per_threadgroup(2 * N)]] void f(device T* y [[buffer(0)]]) {{ y[0] = T(U(N) / 2); }}
template [[host_name("one")]] [[kernel]] decltype(f<float, 64>) f<float, 64>;
template [[host_name("two")]] [[kernel]] decltype(f<float, float, 33>) f<float, float, 33>;
"""


def test_objects_convert_to_bfloat_and_move_pointers(checked: bool) -> None:
    y = np.zeros(3, np.uint16)
    buffers = [np.array([1, 1], np.int8), y, np.arange(4, dtype=np.float32)]
    device.compile(OBJECTS, checked=checked).kernel("f").launch(threads=1, group=1, buffers=buffers)
    np.testing.assert_array_equal((y.astype(np.uint32) << 16).view(np.float32), [1, 3, 3])


def test_templates_of_kernels_share_a_name() -> None:
    library = device.compile(OVERLOADS)
    y = np.zeros(1, np.float32)
    for name, value, limit in (("one", 64, 64), ("two", 16.5, 66)):
        kernel = library.kernel(name)
        kernel.launch(threads=1, group=1, buffers=[y])
        assert (y[0], kernel.max_total_threads) == (value, limit)


def test_their_arguments_must_be_the_same() -> None:
    source = OVERLOADS.replace("2 * N)]] void f(device T* y [[buffer(0)]]", "2 * N)]] void f(device T* y [[buffer(1)]]")
    with pytest.raises(device.CompileError, match="kernels called 'f' have different arguments"):
        device.compile(source)
