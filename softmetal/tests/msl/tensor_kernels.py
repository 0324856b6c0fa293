"""Kernels and operands for tests of Metal 4's tensors: products of operands in registers and in memory."""

from __future__ import annotations

import functools

import numpy as np
from msl_kernels import Library

from softmetal import device

HEADER = """#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
"""
TYPES = {"half": np.float16, "bfloat": np.uint16, "float": np.float32}

REGISTERS = """
template <typename T, int M, int N, int K, bool TA, bool TB>
void product(device const T* a, device const T* b, device float* c) {
  constexpr auto desc = matmul2d_descriptor(M, N, K, TA, TB, false, matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<desc, execution_simdgroup> op;
  auto left = op.template get_left_input_cooperative_tensor<T, T, float>();
  auto right = op.template get_right_input_cooperative_tensor<T, T, float>();
  auto sum = op.template get_destination_cooperative_tensor<decltype(left), remove_addrspace_t<decltype(right)>, float>();
  for (ushort i = 0; i < left.get_capacity(); ++i) {
    const auto at = left.get_multidimensional_index(i);
    left[i] = left.is_valid_element(i) ? a[at[1] * (TA ? M : K) + at[0]] : T(0);
  }
  for (ushort i = 0; i < right.get_capacity(); ++i) {
    const auto at = right.get_multidimensional_index(i);
    right[i] = right.is_valid_element(i) ? b[at[1] * (TB ? K : N) + at[0]] : T(0);
  }
  for (ushort i = 0; i < sum.get_capacity(); ++i) sum[i] = 1.0f;
  op.run(left, right, sum);
  for (ushort i = 0; i < sum.get_capacity(); ++i) {
    const auto at = sum.get_multidimensional_index(i);
    if (sum.get_mask(i)) c[at[1] * N + at[0]] = sum[i];
  }
}
#define PRODUCT(name, ...) \\
  kernel void name(device const A* a, device const A* b, device float* c) { product<A, __VA_ARGS__>(a, b, c); }
PRODUCT(nn, 16, 32, 16, false, false)
PRODUCT(nt, 16, 32, 16, false, true)
PRODUCT(tn, 16, 32, 16, true, false)
PRODUCT(tt, 32, 32, 32, true, true)
PRODUCT(odd, 20, 40, 24, false, true)
"""
SHAPES = {"nn": (16, 32, 16), "nt": (16, 32, 16), "tn": (16, 32, 16), "tt": (32, 32, 32), "odd": (20, 40, 24)}

TENSORS = """
kernel void f(device A* a, device A* b, device float* c, constant int3& shape, uint3 group [[threadgroup_position_in_grid]],
              uint i [[thread_index_in_threadgroup]]) {
  const int m = shape.x, n = shape.y, k = shape.z;
  tensor<device A, dextents<int, 2>, tensor_inline> left(a, dextents<int, 2>(k, m));
  tensor<device A, dextents<int, 2>, tensor_inline> right(b, dextents<int, 2>{k, n}, array<int, 2>{1, k});
  tensor<device float, dextents<int, 2>, tensor_inline> result(c, dextents<int, 2>(n, m));
  threadgroup A tile[32 * 40];
  tensor<threadgroup A, extents<int, 32, 32>, tensor_inline> staged(tile, extents<int, 32, 32>(), array<int, 2>{1, 40});
  constexpr auto desc = matmul2d_descriptor(64, 32, 32, false, true, false, matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<desc, execution_simdgroups<4>> op;
  auto rows = left.slice(0, group.y * 64);
  auto sum = op.get_destination_cooperative_tensor<decltype(rows), decltype(staged), float>();
  for (ushort e = 0; e < sum.get_capacity(); ++e) sum[e] = 0.0f;
  for (int step = 0; step < k; step += 32) {
    for (uint e = i; e < 32 * 32; e += 128) {
      const int x = step + int(e % 32), y = int(group.x * 32 + e / 32);
      tile[e / 32 * 40 + e % 32] = x < k && y < n ? b[y * k + x] : A(0);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    auto columns = rows.slice(step, 0);
    op.run(columns, staged, sum);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  auto target = result.slice(group.x * 32, group.y * 64);
  sum.store(target);
}
kernel void memory(device A* a, device A* b, device float* c, constant int3& shape) {
  tensor<device A, dextents<int, 2>, tensor_inline> left(a, dextents<int, 2>(shape.z, shape.x));
  tensor<device A, dextents<int, 2>, tensor_inline> right(b, dextents<int, 2>(shape.z, shape.y));
  tensor<device float, dextents<int, 2>, tensor_inline> result(c, dextents<int, 2>(shape.y, shape.x));
  constexpr auto desc = matmul2d_descriptor(80, 48, static_cast<int>(dynamic_extent), false, true);
  matmul2d<desc, execution_simdgroup> op;
  op.run(left, right, result);
}
"""


@functools.cache
def library(source: str, element: str, checked: bool) -> Library:
    return device.compile(f"{HEADER}typedef {element} A;\n{source}", checked=checked, version=400)


def operand(rng: np.random.Generator, shape: tuple[int, int], element: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns random elements in the form that the kernel reads, and their values."""
    values = rng.standard_normal(shape).astype(np.float32)
    if element == "bfloat":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    values = values.astype(TYPES[element])
    return values, values.astype(np.float64)


def bound(a: np.ndarray, b: np.ndarray, k: int) -> np.ndarray:
    """Returns the error bound of an fp32 sum of k products and one more addend, in any order."""
    return np.asarray((k + 2) * 2.0**-24 * (np.abs(a) @ np.abs(b) + 1))
