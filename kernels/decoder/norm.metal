// Divides each row by its root mean square and multiplies it by a weight, in fp32. If there is a residual, the kernel
// first adds it to the row, and rounds and stores the sum. The norm is then computed from the rounded sum. One
// threadgroup computes one row.
#include "kernels/shared/kernel_list.h"

#include "kernels/decoder/params.h"
#include "kernels/gemm/function_constants.h"

using namespace metal;
using namespace marlin;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kNormMaxThreads)]] void rms_norm(
    const device T* x [[buffer(kSlotX)]], const device T* residual [[buffer(kSlotResidual)]],
    const device uchar* weight [[buffer(kSlotNormWeight)]], device T* out [[buffer(kSlotNorm)]],
    device T* sums [[buffer(kSlotSum)]], constant NormParams& params [[buffer(kSlotParams)]],
    threadgroup float* shared [[threadgroup(0)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const device T* values = x + long(row) * params.x_stride;
  const device T* added = residual + long(row) * params.residual_stride;
  const ulong first = ulong(row) * params.columns;
  float squares = 0.0f;
  for (uint i = thread_index; i < params.columns; i += threads) {
    T value = values[i];
    if (params.has_residual != 0) {
      value = T(float(value) + float(added[i]));
      sums[first + i] = value;
    }
    squares = fma(float(value), float(value), squares);
  }
  squares = simd_sum(squares);
  if (lane == 0) shared[simdgroup] = squares;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
  for (uint i = 0; i < simdgroups; ++i)
    total += shared[i];
  const float factor = 1.0f / sqrt(total / float(params.columns) + params.eps);
  // No barrier is needed here, because each thread reads only the sums that it has written itself.
  for (uint i = thread_index; i < params.columns; i += threads) {
    const float value = float(params.has_residual != 0 ? sums[first + i] : values[i]);
    out[first + i] = T(value * factor * (load_element(weight, i, params.weight_type) + params.weight_offset));
  }
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_NORM(MARLIN_INSTANTIATE))
